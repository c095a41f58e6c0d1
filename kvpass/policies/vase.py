"""Keep the values of largest range, and a sample of the other tokens by attention.

VaSE, as in its public code. https://arxiv.org/abs/2606.03928

A row is compacted every `interval` tokens to B tokens.  The last `recent` tokens stay, and K = B - recent of the older
ones, for each KV head separately.  With `variant="attn"`:

    range_j = max_d v_jd - min_d v_jd of the stored value; infinite for the first `sinks` tokens
    a_j     = softmax of the last `recent` queries over the older tokens, averaged over the queries, over `kernel`
              neighbours (zero beyond either end), and over the G query heads of the KV head

The `large` share of B with the largest ranges stays.  The other kept tokens are a sample of the rest without
replacement, in proportion to a_j: the highest a_j / x_j, where x_j is a draw from the exponential distribution.  Tokens
without any attention come last, the newest of them first.

With `variant="dkv"` the K tokens of largest |k_j G|^2 |v_j G|^2 stay, and the sinks.  G [D, 20] is drawn again at each
compaction from the normal distribution of variance 1/20, the same for all heads, for keys and for values.  No attention
is read.

Draws are hashes of `seed`, the number of tokens seen, the position and the head.  A chunk is compacted like a prompt:
its own queries vote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvpass.arguments import Natural, Odd, Positive, Share, between
from kvpass.policies import hashing, voting
from kvpass.policies.base import Policy
from kvpass.policies.budgets import clamp_max, clamp_min, share_of
from kvpass.policies.heads import head_indices
from kvpass.policies.ranking import keep_highest
from kvpass.policies.types import Attention, State, Tokens

RANK = 20  # columns of G


@dataclasses.dataclass(frozen=True)
class Vase(Policy):
    """The VaSE policy.

    Attributes:
        variant: "attn" for ranges of values and attention, "dkv" for a sketch of keys and values.
        sinks, recent: the first and the last tokens that always stay; the last `recent` queries vote.
        large: the share of the kept tokens that stay for the range of their values.
        kernel: the width of the smoothing.
        seed: any integer from 0 to 2**31 - 2.
    """

    interval: Positive = dataclasses.field(default=64, kw_only=True)
    variant: Literal["attn", "dkv"] = "attn"
    sinks: Natural = 4
    recent: Positive = 64
    large: Share = 0.25
    kernel: Odd = 5
    seed: Annotated[int, between(0, hashing.PRIME - 1)] = 0
    name = "vase"
    spans_refusal = "it samples from the whole text"
    shardable = "heads"
    heads = "kv"
    statistics = frozenset({"last", "older"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "dkv":
            object.__setattr__(self, "statistics", frozenset())  # this variant reads no attention

    @property
    def observation_window(self) -> int:
        return self.recent

    @property
    def reads_new_keys(self) -> bool:
        return self.variant == "attn"

    @property
    def rescores(self) -> bool:
        return self.variant == "dkv"

    def minimum_budget(self) -> int:
        return self.sinks + self.recent + 1

    def state(self) -> dict[str, torch.dtype]:
        return {"range": torch.float32, voting.VOTE: torch.float32} if self.variant == "attn" else {}

    def init_token_state(self, key: Tensor, value: Tensor) -> State:
        return {"range": (value.amax(-1) - value.amin(-1)).float()}  # [B, Hkv, n]

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        if self.variant == "dkv":
            return {}
        older = voting.candidates(tokens, self.recent)
        vote = voting.renormalize(attention.last, older).mean(2)
        return {voting.VOTE: voting.add_vote(tokens, attention, vote, self.recent, self.interval)}

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        if self.variant == "dkv":
            return {}
        return {voting.VOTE: voting.votes_of_chunk(tokens, attention, attention.older.mean(2))}

    def rescore(self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor]) -> State:
        seed = hashing.seed_of_round(self.seed, tokens.seen)  # [B, 1, 1]
        sketch = hashing.normal(max(key.shape[-1], value.shape[-1]), RANK, seed[..., 0]) / RANK**0.5  # [B, 1, D, 20]
        parts = (vectors.float() @ sketch[:, :, : vectors.shape[-1]] for vectors in (key, value))
        of_key, of_value = (part.square().sum(-1) for part in parts)
        return {"score": of_key * of_value}

    def score(self, tokens: Tokens) -> Tensor:
        score = tokens.state["score"] if self.variant == "dkv" else self._sampling_scores(tokens)
        stays = tokens.newest(self.recent) | (tokens.position < self.sinks)
        return torch.where(stays, torch.inf, score)

    def _sampling_scores(self, tokens: Tokens) -> Tensor:
        """Return scores [B, Hkv, N] by which the largest ranges come first, and then a sample by attention."""
        older = tokens.live & ~tokens.newest(self.recent)
        span = torch.where(tokens.position < self.sinks, torch.inf, tokens.state["range"])
        count = clamp_max(clamp_min(share_of(tokens.budget, self.large), self.sinks), tokens.budget - self.recent)
        large = keep_highest(span, torch.where(older, tokens.position, -1), count)  # the sinks among them
        votes = voting.pool_votes(tokens.state[voting.VOTE], tokens, older, self.kernel, "mean")
        seed = hashing.seed_of_round(self.seed, tokens.seen)
        number = hashing.draw(tokens.position, head_indices(tokens.position, tokens.sharding), seed)
        sampled = votes / -hashing.to_uniform(number).log()
        age = (tokens.position - tokens.seen).float()  # negative
        return torch.where(large, torch.inf, torch.where(votes > 0, sampled, age))
