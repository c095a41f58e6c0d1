"""Interface between the runtime and the backend: settings, graph rewriting, compilation and shared records."""

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
    """The backend, as the runtime sees it.

    Attributes:
        policy: the eviction policy.
        budget: the budget, as the user gave it.
        kv_dtype: the storage format of cached rows; None for the model's own dtype.
        crop: the largest number of trailing tokens that `LayerCache.crop` can remove.
        validates: whether the first rewrite of a step graph is compared with the original graph.
        kv_store: the storage of cached tokens: slots or reference lists.
        plans: the first plan of each model's layers.
        stepped: tensors that make the keys of layers which have run a step.
        layers: a counter that numbers the caches in the order in which they are made.
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
        """Rewrite a step graph for a call, and return the context of the rewrite and its result."""
        ...

    def compile_prompt(
        self, gm: fx.GraphModule, examples: Sequence[Any], layers: Sequence[fx.Node] = ()
    ) -> Callable[..., Any]:
        """Compile a prompt graph; `layers` has one node of each layer, in the order of layers."""
        ...

    def compile_step(
        self, gm: fx.GraphModule, examples: Sequence[Any], ranked: bool, chunk: bool, sizes: SymbolicSizes | None
    ) -> Callable[..., Any]:
        """Compile a rewritten step graph for one token or, with `chunk`, for several; `sizes` are the dynamic sizes."""
        ...

    @property
    def compiles_at_once(self) -> bool:
        """True if the graph of a chunk is compiled at its first run, False if at its second."""
        ...

    @property
    def compiles_prompts_at_once(self) -> bool:
        """True if a static prompt graph on a CPU is compiled at its first run, False if at its second."""
        ...

    def has_dynamic_sizes(self, device: torch.device) -> bool:
        """Return whether the inner compiler supports dynamic sizes for a device."""
        ...

    def note_validation(self, graph: Literal["prompt", "step"], done: Validation) -> None:
        """Record the result of the validation of a rewritten graph."""
        ...
