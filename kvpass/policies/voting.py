"""Let the last queries before a compaction vote for the tokens that stay.

The compaction is known in advance: it comes when a row has one token more than its budget.  So are its candidates,
the tokens older than the last `window` ones.  A vote is the softmax of a query over the candidates, which is the
query's own attention restricted to them and rescaled.  The votes are summed over the steps, for each slot, and equal
the sum of votes of stored queries at the compaction exactly.

Queries of a prompt or chunk vote at its end (`Attention.older`), and not again at the next compaction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.ranking import rank_of
from kvpass.policies.types import Attention, Tokens

VOTE = "vote"
"""The entry of the state that holds the sum of votes, float32 [B, H', C]."""
TINY = torch.finfo(torch.float32).tiny


def candidates(tokens: Tokens, window: int) -> Tensor:
    """Return bool [B, H', N]: whether the token is older than the last `window` tokens at the next compaction."""
    return tokens.live & (tokens.position < tokens.seen + _steps_left(tokens) - window)


def _steps_left(tokens: Tokens) -> Tensor:
    """Return the number of tokens that come until the next compaction, int64 [B, H', 1]."""
    return tokens.budget + 1 - tokens.live.sum(-1, keepdim=True)


def renormalize(probs: Tensor, among: Tensor) -> Tensor:
    """Return probabilities [B, Hkv, G, N] restricted to `among` [B, Hkv, N] and rescaled to sum 1."""
    probs = torch.where(among[:, :, None], probs, 0.0)
    return probs / probs.sum(-1, keepdim=True).clamp(min=TINY)


def masked_softmax(logits: Tensor, among: Tensor) -> Tensor:
    """Return the softmax of logits [B, Hkv, N] over `among` [B, Hkv, N], and zeros elsewhere."""
    most = torch.where(among, logits, -torch.inf).amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    powers = torch.where(among, (logits - most).exp(), 0.0)
    return powers / powers.sum(-1, keepdim=True).clamp(min=TINY)


def add_vote(tokens: Tokens, attention: Attention, vote: Tensor, window: int, interval: int) -> Tensor:
    """Add one token's vote to votes [B, Hkv, N] if a compaction is near.

    Args:
        vote: [B, Hkv, N].
        window: how many queries vote at most.
        interval: how many tokens come between two compactions.
    """
    voters, left = min(window, interval), _steps_left(tokens)
    earlier = torch.where(left == voters - 1, 0.0, tokens.state[VOTE])  # the first voter finds votes that were counted
    votes = (left < voters) & (attention.queries > 0)
    return torch.where(votes, earlier + vote, tokens.state[VOTE])


def votes_of_chunk(tokens: Tokens, attention: Attention, vote: Tensor) -> Tensor:
    """Return the votes [B, Hkv, N] of a prompt or chunk, zero for rows within their budget."""
    exceeds = tokens.live.sum(-1, keepdim=True) > tokens.budget
    return torch.where(exceeds & (attention.queries > 0), vote, 0.0)


def pool_votes(votes: Tensor, tokens: Tokens, among: Tensor, kernel: int, pool: str) -> Tensor:
    """Pool votes over `kernel` neighbours in the text, of the tokens `among` alone: [B, Hkv, N].

    Args:
        among: bool [B, Hkv, N], tokens that no other live token precedes.
        pool: "mean" counts zeros beyond either end, "max" nothing.
    """
    rank = rank_of(tokens.position)  # the ranks of steps are undefined for free slots
    in_order = torch.full_like(votes, 0.0 if pool == "mean" else -torch.inf)
    in_order = in_order.scatter(-1, rank, torch.where(among, votes, in_order))
    function = torch.nn.functional.avg_pool1d if pool == "mean" else torch.nn.functional.max_pool1d
    return function(in_order, kernel, stride=1, padding=kernel // 2).gather(-1, rank)
