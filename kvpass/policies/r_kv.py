"""Keep tokens of high attention whose keys are not repeated by others.

R-KV ("R-KV: Redundancy-aware KV Cache Compression for Training-Free Reasoning Models Acceleration"), as in its
public code. https://arxiv.org/abs/2505.24133

A row is compacted every `interval` tokens to B tokens.  The last `window` tokens stay, and the older tokens of
highest

    Z = weight * I - (1 - weight) * R        for each KV head

I, importance: of each of the last `window` queries the highest logit over the G query heads, softmax over the older
tokens, mean over the queries, maximum over `kernel` neighbours in the text.  R, redundancy: softmax_j of the mean over
i of c_ij.  c_ij is the cosine of the stored keys of two cached tokens, zero for i = j.  It is also zero where j is the
last of the tokens that are similar to i (c_ij > 0.5): the latest of several repetitions is forgiven.

`plain` is the variant that later papers compare with.  Nothing is forgiven.  Importance is the softmax of each query
head, averaged over the queries, the heads and `kernel` neighbours (zero beyond either end).

A chunk is compacted like a prompt: its own queries vote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.arguments import Odd, Positive, Share
from kvpass.policies import voting
from kvpass.policies.base import Policy
from kvpass.policies.keydiff import unit_keys
from kvpass.policies.ranking import slots_by_position
from kvpass.policies.types import Attention, State, Tokens

SIMILAR = 0.5
BLOCKS, LARGEST = 4, 1024  # blocks of keys, and the most keys of a block


@dataclasses.dataclass(frozen=True)
class RKV(Policy):
    """The R-KV policy.

    Attributes:
        window: the number of queries that vote, and of last tokens that stay.
        kernel: the width of the pooling.
        weight: the weight of importance against redundancy.
        plain: the variant of later papers, which take window=64, kernel=5 and weight=0.5.
        official: a token without similar ones forgives the first token, as in the public code.
    """

    interval: Positive = dataclasses.field(default=128, kw_only=True)
    window: Positive = 8
    kernel: Odd = 7
    weight: Share = 0.1
    plain: bool = False
    official: bool = False
    name = "r_kv"
    shardable = "heads"
    heads = "kv"
    statistics = frozenset({"logits", "older_peak"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plain:
            object.__setattr__(self, "statistics", frozenset({"last", "older"}))

    @property
    def observation_window(self) -> int:
        return self.window

    def minimum_budget(self) -> int:
        return self.window + 1

    def state(self) -> dict[str, torch.dtype]:
        return {voting.VOTE: torch.float32}

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        older = voting.candidates(tokens, self.window)
        if self.plain:
            vote = voting.renormalize(attention.last, older).mean(2)
        else:
            vote = voting.masked_softmax(attention.logits.amax(2), older)
        return {voting.VOTE: voting.add_vote(tokens, attention, vote, self.window, self.interval)}

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        vote = attention.older.mean(2) if self.plain else attention.older_peak[:, :, 0]
        return {voting.VOTE: voting.votes_of_chunk(tokens, attention, vote)}

    def rescore(self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor]) -> State:
        order = slots_by_position(tokens.position)  # "last" is meant in the text
        ordered = key.gather(2, order[..., None].expand_as(key))
        live = tokens.live.gather(-1, order)
        redundancy = self._redundancy(unit_keys(ordered, live), live, key.dtype)
        return {"redundancy": torch.empty_like(redundancy).scatter(-1, order, redundancy)}

    def _redundancy(self, unit: Tensor, live: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the redundancy R [B, Hkv, N] of unit keys [B, Hkv, N, D], whose stored keys are of `dtype`.

        The sum of cosines with all keys is one product with the sum of keys, minus the forgiven ones.
        """
        total = ((unit.sum(2, keepdim=True) - unit) * unit).sum(-1)
        if not self.plain:
            # Keys stored in bfloat16 are rounded like the products of all pairs, at a third of their time.
            last = last_similar(unit.to(dtype) if dtype == torch.bfloat16 else unit)
            forgiven = last.clamp(min=0)
            cosine = (unit * unit.gather(2, forgiven[..., None].expand_as(unit))).sum(-1)
            rank = torch.arange(unit.shape[2], device=unit.device)
            # Without a similar one the official code takes 0.
            counts = forgiven != rank if self.official else last >= 0
            total = total.scatter_add(-1, forgiven, torch.where(counts, -cosine, 0.0))
        mean = total / live.sum(-1, keepdim=True).clamp(min=1)
        return voting.masked_softmax(mean, live)

    def score(self, tokens: Tokens) -> Tensor:
        recent = tokens.newest(self.window)
        older = tokens.live & ~recent
        votes = tokens.state[voting.VOTE]
        mean = votes / votes.sum(-1, keepdim=True).clamp(min=voting.TINY)  # each query's votes have the sum 1
        importance = voting.pool_votes(mean, tokens, older, self.kernel, "mean" if self.plain else "max")
        score = self.weight * importance - (1 - self.weight) * tokens.state["redundancy"]
        return torch.where(recent, torch.inf, score)


def last_similar(unit: Tensor) -> Tensor:
    """Return the rank of each unit key's last similar key: int64 [B, Hkv, N], -1 for none.

    Args:
        unit: [B, Hkv, N, D], in the order of the text.
    """
    count = unit.shape[2]
    # Cosines are symmetric: half of the pairs of blocks serve both.  A symbolic number of keys is one block.
    size = -(-count // max(BLOCKS, -(-count // LARGEST))) if isinstance(count, int) else count
    parts = torch.split(unit, size, 2) if isinstance(count, int) else (unit,)
    index = torch.arange(1, count + 1, device=unit.device, dtype=torch.float32)  # float32: maxima are vectorised
    numbers = torch.split(index, size) if isinstance(count, int) else (index,)
    last = [torch.zeros_like(part[..., 0]) for part in parts]
    for a, rows in enumerate(parts):
        for b in range(a, len(parts)):
            similar = rows @ parts[b].transpose(2, 3) > SIMILAR  # [B, Hkv, n, m]
            if a == b:
                similar = similar & (numbers[a][:, None] != numbers[b])
            last[a] = torch.maximum(last[a], torch.where(similar, numbers[b], 0.0).amax(-1))
            if a < b:
                last[b] = torch.maximum(last[b], torch.where(similar, numbers[a][:, None], 0.0).amax(-2))
    return torch.cat(last, -1).long() - 1
