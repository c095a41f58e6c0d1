"""Define the settings of a backend, and rewrite and compile the graphs of prompts and steps by them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.fx as fx

from kvpass.errors import KVPassWarning
from kvpass.lowering import graph_passes, layer_dedup
from kvpass.lowering.formats import KVDtype
from kvpass.lowering.graph_passes import check_table_indices, look_up_unchecked, materialize_sums
from kvpass.lowering.row_products import Processor, convert_operands, decompose_products
from kvpass.policies.base import Policy
from kvpass.rewrite.context import PassRecord, StepContext
from kvpass.rewrite.pipeline import StepRewrite, rewrite_step
from kvpass.rewrite.step_graph import StepRewriteInput
from kvpass.rewrite.validation.lockstep import Validation
from kvpass.runtime.kv_store import KVStore
from kvpass.runtime.recorder import PASSES, Recorder, log_graph
from kvpass.torch_private import dynamo, fx_nodes, inductor, symbolic_shapes

Positions = Literal["absolute", "cache"]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Inner = str | Compile

CACHE_SETTINGS = ("policy", "budget", "positions", "kv_dtype", "crop")
GraphChange = Callable[[fx.Graph], None]
"""A function that changes the operators of a graph in place before they are lowered."""


@dataclasses.dataclass(frozen=True)
class BackendBase:
    """The settings and services of a backend that its runners share; `kvpass.Backend` adds the call by Dynamo.

    Attributes:
        policy: the eviction policy.
        budget, positions, inner, mode, options, strict, validate, kv_dtype, crop: see `kvpass.backend`, with
            `options` as sorted pairs.
        recorder: collects facts for a report; None outside of `kvpass.explain`.
        kv_store: the storage of cached tokens.
    """

    policy: Policy
    budget: int | float | None
    positions: Positions | None
    inner: Inner
    mode: str | None
    options: tuple[tuple[str, Any], ...]
    strict: bool
    validate: bool = True
    kv_dtype: KVDtype | None = None
    crop: int = 0
    recorder: Recorder | None = dataclasses.field(default=None, compare=False, repr=False)
    cache_numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count, compare=False, repr=False)
    """A counter that numbers the layer caches in the order in which they are made."""
    refused_before: int = dataclasses.field(default_factory=lambda: BackendBase.refused_loops, repr=False)
    """The `refused_loops` when the backend was made.

    torch reuses the graphs of a backend for equal backends, including graphs that broke for a reason that no longer
    holds.  A backend that is made after a refused call is therefore unequal to earlier ones.
    """
    kv_store: ClassVar[KVStore] = KVStore()
    refused_loops: ClassVar[int] = 0
    """The number of calls of loops that kvpass refused, because of the model or of torch's graphs of it."""

    @property
    def cache_settings(self) -> tuple[Any, ...]:
        """The values of `CACHE_SETTINGS`, which two backends must share for one to continue the other's caches."""
        return tuple(getattr(self, name) for name in CACHE_SETTINGS)

    @property
    def prefers_cache_positions(self) -> bool:
        """True if cached tokens are to be numbered 0..n-1, where the model allows it."""
        return (self.positions or self.policy.positions) == "cache"

    def keeps_operands(self, policies: Sequence[Policy]) -> bool:
        """Return whether prompt graphs output the operands of their statistics, which a crop needs."""
        return self.crop > 0 and any(policy.statistics for policy in policies)

    def time_section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context whose running time is added to a name in the report's `Timings`."""
        return self.recorder.stopwatch.time_section(name) if self.recorder else contextlib.nullcontext()

    def note_validation(self, graph: Literal["prompt", "step"], validation: Validation) -> None:
        """Record the result of the validation of a rewritten graph, and warn if there is none."""
        if validation.skipped is not None:
            message = (
                f"the rewritten {graph} of this model could not be compared with the model's own: "
                f"{validation.skipped}. Pass validate=False if you have compared them"
            )
            warnings.warn(message, KVPassWarning, stacklevel=2)
        if self.recorder is not None:
            self.recorder.stopwatch.add("validation", validation.seconds)
            result = "passed" if validation.skipped is None else f"not possible: {validation.skipped}"
            if validation.left_out:
                calls = "1 call" if len(validation.left_out) == 1 else f"{len(validation.left_out)} calls"
                result += f"; {calls} skipped (first: {validation.left_out[0]})"
            self.recorder.notes.append(f"validation of the {graph}, {validation.seconds:.2f} s: {result}")

    def compile_prompt(
        self, rewritten_gm: fx.GraphModule, examples: Sequence[Any], layers: Sequence[fx.Node] = ()
    ) -> Callable[..., Any]:
        """Compile a prompt graph; `layers` has one node of each layer, or none to compile the graph as a whole."""
        with self.time_section("compiler"):
            return self._compile_inner(rewritten_gm, examples, {}, _prepare_prompt_graph, layers)

    def compile_step(
        self,
        rewritten_gm: fx.GraphModule,
        examples: Sequence[Any],
        layers: Sequence[fx.Node],
        stores_unrotated_keys: bool,
        sizes: symbolic_shapes.SymbolicSizes | None,
    ) -> Callable[..., Any]:
        """Compile a step graph; `layers` as in `compile_prompt`, `sizes` are its dynamic sizes, None without them."""
        exchangeable = sizes.exchangeable if sizes else frozenset()
        settings = self._step_settings(stores_unrotated_keys) | ({} if sizes else inductor.NO_SIZE_CHECKS)
        if self.inner == "inductor" and inductor.on_cpu(examples):
            _ = Processor.here().has_row_kernel  # may compile a product, which is impossible while Inductor compiles
        with self.time_section("compiler"):
            return self._compile_inner(rewritten_gm, examples, settings, _prepare_step_graph, layers, exchangeable)

    @property
    def compiles_at_once(self) -> bool:
        """True if every graph is compiled at its first run, so that a report can describe the compilation."""
        return self.recorder is not None

    def has_dynamic_sizes(self, device: torch.device) -> bool:
        """Return whether the inner compiler supports dynamic sizes for a device; they are untested on GPUs."""
        return self.inner in ("inductor", "eager") and device.type == "cpu"

    def _step_settings(self, stores_unrotated_keys: bool) -> dict[str, Any]:
        in_order = inductor.KEEP_THE_ORDER if self.policy.merges else {}
        return inductor.FEWER_LAUNCHES | in_order | (inductor.FUSE_INTO_REDUCTIONS if stores_unrotated_keys else {})

    def rewrite(self, rewrite_input: StepRewriteInput) -> tuple[StepContext, StepRewrite]:
        """Rewrite a step graph onto slots."""
        with self.time_section("kvpass"):
            context = StepContext(rewrite_input)
            return context, rewrite_step(context, watch=self.record_pass)

    def record_pass(self, record: PassRecord, graph: fx.Graph) -> None:
        """Record a pass that has run, and the graph after it."""
        PASSES.info("%s", record)
        if self.recorder is not None:
            self.recorder.passes.append(record)
        log_graph(f"after {record.name}", graph, self.recorder)

    def _compile_inner(
        self,
        rewritten_gm: fx.GraphModule,
        examples: Sequence[Any],
        patches: dict[str, Any],
        prepare: GraphChange,
        layers: Sequence[fx.Node],
        exchangeable: Collection[Any] = (),
    ) -> Callable[..., Any]:
        if callable(self.inner):
            return self.inner(rewritten_gm, examples)
        if self.inner == "eager":
            return fx_nodes.code_of(rewritten_gm)
        if self.inner != "inductor":
            return dynamo.registered_backend(self.inner)(rewritten_gm, examples)
        if layers:
            deduplicated = layer_dedup.compile_deduplicated(
                rewritten_gm, examples, layers, lambda part: self._patches(patches, prepare, part), exchangeable
            )
            if deduplicated is not None:
                return deduplicated
        return inductor.inductor(rewritten_gm, examples, self._patches(patches, prepare, rewritten_gm))

    def _patches(self, patches: dict[str, Any], prepare: GraphChange, gm: fx.GraphModule | None) -> dict[str, Any]:
        modes = inductor.inductor_mode(self.mode) if self.mode else {}
        stamp = inductor.graph_pass(graph_passes.pass_digest(prepare, gm), prepare)
        return inductor.vector_move_flags() | patches | modes | dict(self.options) | {inductor.GRAPH_PASS: stamp}


def _prepare_prompt_graph(graph: fx.Graph) -> None:
    """Change the operators of a prompt graph in place before they are lowered."""
    look_up_unchecked(graph)
    check_table_indices(graph)
    convert_operands(graph)


def _prepare_step_graph(graph: fx.Graph) -> None:
    """Change the operators of a step graph in place before they are lowered."""
    decompose_products(graph)
    materialize_sums(graph)
    _prepare_prompt_graph(graph)
