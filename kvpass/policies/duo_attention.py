"""Keep the context in heads that retrieve from it, and attention sinks and a recent window in the others.

DuoAttention (Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads").
https://arxiv.org/abs/2410.10819

A gate of each KV head (`kvpass.policies.head_gates`) says which heads retrieve: heads whose gate exceeds a quantile of
the gates of their layer.  A streaming head keeps the first `sinks` and the last `recent` tokens.  The retrieval heads
of a layer share the rest of the layer's budget, Hkv * budget, equally.

The paper takes one quantile of all gates, so that layers have different numbers of retrieval heads.  Here each layer
has the same number, because all layers have the same classes of slots.  The paper's retrieval heads keep every token.
Here they do while the context fits into their budget; after that they keep the first `sinks` and the last tokens.

A chunk leaves the same tokens as its tokens one by one.
"""

from __future__ import annotations

import dataclasses
import math
import os
from fractions import Fraction
from typing import Annotated

from torch import Tensor

from kvpass.arguments import Condition, Natural, Positive
from kvpass.errors import PolicyError
from kvpass.policies.budgets import HeadClass
from kvpass.policies.head_gates import HeadGates
from kvpass.policies.streaming import Streaming
from kvpass.policies.types import Tokens
from kvpass.policies.weights import PolicyWithWeights


@dataclasses.dataclass(frozen=True)
class DuoAttention(PolicyWithWeights[HeadGates], Streaming):
    """The DuoAttention policy.

    Attributes:
        sinks: the number of first tokens that always stay.
        gates: a `HeadGates`, or the path of a saved one.
        quantile: heads whose gate exceeds this quantile of their layer's gates retrieve; at least one head does.
        recent: the number of last tokens that streaming heads keep.
    """

    sinks: Natural = 64
    gates: HeadGates | str | os.PathLike[str] | None = None
    quantile: Annotated[float, Condition("from 0 to below 1", lambda share: 0 <= share < 1)] = 0.5
    recent: Positive = 256
    name = "duo_attention"
    heads = "kv"
    weights_class = HeadGates
    positions = "absolute"
    cache_positions_refusal = "heads keep different numbers of tokens, and a query has one position among them"
    keep_prompt_refusal = "its streaming heads keep the first and the last tokens alone"

    @property
    def reads_layer(self) -> bool:
        return True

    def minimum_budget(self) -> int:
        return self.sinks + self.recent

    def head_classes(self, heads: int, budget: int) -> tuple[HeadClass, ...]:
        if heads == 1:
            raise PolicyError(
                f"{self.name!r} divides the budget of a layer among its KV heads, and this model has one per layer: "
                "use policy='streaming'"
            )
        self.loaded.check(heads=heads)
        below = math.floor((heads - 1) * Fraction(str(self.quantile)))
        retrieving = heads - 1 - below
        streaming, streaming_budget = heads - retrieving, self.fitting_budget(0)
        # a few more tokens, so that the rest is divisible by the number of retrieval heads
        streaming_budget += (budget - streaming_budget) % (retrieving // math.gcd(retrieving, streaming))
        if streaming_budget == budget:
            return ()
        return HeadClass(retrieving, (heads * budget - streaming * streaming_budget) // retrieving), HeadClass(
            streaming, streaming_budget
        )

    def head_counts(self, tokens: Tokens, layer: int) -> Tensor:
        gates = self.loaded.gates[layer].to(tokens.position.device)
        return gates.expand(tokens.position.shape[0], -1)
