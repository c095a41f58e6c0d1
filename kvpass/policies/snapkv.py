"""Select prompt tokens once, by the smoothed attention of the last queries, and keep a ring of recent tokens.

SnapKV (Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation"). https://arxiv.org/abs/2404.14469

Once, at the end of the prompt, the attention of its last `window` queries is averaged over them.  It is smoothed along
the text by an average over `kernel` neighbours (zero beyond either end) and averaged over the G query heads of a KV
head.  The highest scores stay, for each KV head separately, and the window itself.  Then the window becomes a ring:
each new token evicts the oldest unselected one, and nothing is scored.  A prompt that fits is kept whole; all of it but
its window counts as selected.  A chunk is a prompt: the selection is repeated among the cached tokens and the chunk.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.arguments import Odd, Positive
from kvpass.policies import voting
from kvpass.policies.base import Policy
from kvpass.policies.types import Attention, State, Tokens


@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """The SnapKV policy.

    Attributes:
        window: the number of queries that score tokens, and of recent tokens that stay.
        kernel: the width of the smoothing.
    """

    window: Positive = 64
    kernel: Odd = 5
    name = "snapkv"
    keep_prompt_refusal = "it selects among the tokens of a prompt; later tokens are kept as by policy='window'"
    shardable = "heads"
    heads = "kv"
    statistics = frozenset({"window"})

    @property
    def observation_window(self) -> int:
        return self.window

    def minimum_budget(self) -> int:
        return self.window + 1

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32, "selected": torch.bool}

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        scored = (attention.queries > 0) & tokens.live & ~tokens.newest(self.window)
        score = voting.pool_votes(attention.window.mean(2), tokens, scored, self.kernel, "mean")
        return {
            "score": torch.where(scored, score, tokens.state["score"]),
            "selected": scored | tokens.state["selected"],
        }

    def score(self, tokens: Tokens) -> Tensor:
        """Return scores: the window stays, then selected tokens by score, then the others by age, below zero."""
        age = tokens.position - tokens.seen
        score = torch.where(tokens.state["selected"], tokens.state["score"], age)
        return torch.where(tokens.newest(self.window), torch.inf, score)
