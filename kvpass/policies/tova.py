"""Keep the tokens to which the last query attends most.

Token omission via attention (Oren et al., "Transformers are Multi-State RNNs"). https://arxiv.org/abs/2401.06104

A token's score is the attention of the last query to it, averaged over all query heads of the layer; nothing is
accumulated.  The lowest score is evicted at every step, for all heads together; the last token always stays.  In a
prompt or chunk only the attention of the last token counts.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.heads import reduce_heads
from kvpass.policies.types import Attention, State, Tokens


@dataclasses.dataclass(frozen=True)
class Tova(Policy):
    name = "tova"
    shardable = "heads"
    statistics = frozenset({"last"})

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32}

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        probs = reduce_heads(attention.last, "mean", attention.sharding)  # [B, 1, N]
        return {"score": torch.where(attention.queries > 0, probs, tokens.state["score"])}

    def score(self, tokens: Tokens) -> Tensor:
        return torch.where(tokens.newest(1), torch.inf, tokens.state["score"])
