"""What the runtime asks of whoever made it: settings, how graphs are rewritten and compiled, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.fx as fx

from kvpass.lowering.formats import KVDtype
from kvpass.policies.base import Policy
from kvpass.rewrite.call import StepCall
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.result import StepRewrite
from kvpass.rewrite.validation.lockstep import Validation
from kvpass.runtime.kv_store import KVStore
from kvpass.runtime.model_identity import PlansByModel, SeenTensors
from kvpass.torch_private.symbolic_shapes import SymbolicSizes


class Compiler(Protocol):
    """A backend, as the runtime sees it.

    Attributes:
        policy, budget, kv_dtype: settings of caches.
        crop: how many of the last tokens can be taken back.
        validates: whether the first rewrite of a step graph is held against the graph.
        kv_store: what the tokens of layers are held in.
        plans: what the layers of each model were given first; stepped: what makes the keys of layers that have taken
            steps; layers: a number for every cache that is made.
    """

    @property
    def policy(self) -> Policy: ...
    @property
    def budget(self) -> int | float | None: ...
    @property
    def kv_dtype(self) -> KVDtype | None: ...
    @property
    def crop(self) -> int: ...
    @property
    def validates(self) -> bool: ...
    @property
    def kv_store(self) -> KVStore: ...
    @property
    def plans(self) -> PlansByModel: ...
    @property
    def stepped(self) -> SeenTensors: ...
    @property
    def layers(self) -> Iterator[int]: ...

    def rewrite(self, call: StepCall) -> tuple[StepContext, StepRewrite]:
        """Rewrite a step graph."""
        ...

    def compile_prompt(
        self, gm: fx.GraphModule, examples: Sequence[Any], layers: Sequence[fx.Node] = ()
    ) -> Callable[..., Any]:
        """Compile a prompt graph; `layers` has one node of each."""
        ...

    def compile_step(
        self, gm: fx.GraphModule, examples: Sequence[Any], ranked: bool, chunk: bool, sizes: SymbolicSizes | None
    ) -> Callable[..., Any]:
        """Compile a rewritten step graph, of one token or of a chunk, of which some sizes may be open."""
        ...

    @property
    def compiles_at_once(self) -> bool:
        """Whether the graph of a chunk is compiled at its first run, and not at its second."""
        ...

    @property
    def compiles_prompts_at_once(self) -> bool:
        """The same of the graph of a prompt whose sizes are numbers, on a CPU."""
        ...

    def has_dynamic_sizes(self, device: torch.device) -> bool:
        """Whether what compiles for a device can do with sizes that are no numbers."""
        ...

    def note_validation(self, graph: Literal["prompt", "step"], done: Validation) -> None:
        """Hear the result of the validation of a rewritten graph."""
        ...
