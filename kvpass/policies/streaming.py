"""Keep attention sinks and a recent window.

StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention Sinks"). https://arxiv.org/abs/2309.17453

The first `sinks` real tokens of a row and its most recent ones are kept.  Keys are stored before their rotary embedding
and numbered 0..n-1 at read (`positions="cache"`), so a stream may be longer than the trained range;
`positions="absolute"` keeps the original numbers.  A chunk attends to all cached tokens and causally to itself, and
then leaves sinks and its most recent tokens.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpass.arguments import Natural
from kvpass.policies.base import Policy
from kvpass.policies.ranking import INT64_MAX
from kvpass.policies.types import Tokens


@dataclasses.dataclass(frozen=True)
class Streaming(Policy):
    """The StreamingLLM policy.

    Attributes:
        sinks: the number of first tokens that always stay (4, as in the paper).
    """

    sinks: Natural = 4
    name = "streaming"
    shardable = "always"
    positions: ClassVar[Literal["absolute", "cache"]] = "cache"

    def minimum_budget(self) -> int:
        return self.sinks + 1

    def score(self, tokens: Tokens) -> Tensor:
        return torch.where(tokens.position < self.sinks, INT64_MAX, tokens.position)
