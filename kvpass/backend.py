"""Define the backend for torch.compile, its settings, and `kvpass.compile`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.fx as fx

from kvpass import budget as budgets
from kvpass import policies, versions
from kvpass.arguments import Natural, checked
from kvpass.cache.handle import Handle
from kvpass.cache.row_picking import Row, refuse
from kvpass.capture import cross_attention, decomposed_attention, rotary
from kvpass.capture.caches import CallReading
from kvpass.capture.capture import Capture, capture
from kvpass.capture.head_sharding import with_spreads
from kvpass.capture.sites import AttentionSite
from kvpass.errors import KVPassError, PolicyError, UnreadableGraph, UnsupportedGraph
from kvpass.fx import shapes, walk
from kvpass.lowering import cache_key, layer_dedup
from kvpass.lowering.checked_lookup import check_rows
from kvpass.lowering.formats import KVDtype
from kvpass.lowering.fused_add import write_out_sums
from kvpass.lowering.replay import Replayed
from kvpass.lowering.row_products import spell_out
from kvpass.lowering.unchecked_index import look_up_unchecked
from kvpass.policies.base import Policy
from kvpass.rewrite import logs
from kvpass.rewrite.call import StepCall
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.pipeline import rewrite_step
from kvpass.rewrite.record import Record
from kvpass.rewrite.result import StepRewrite
from kvpass.rewrite.validation.lockstep import Validation
from kvpass.runtime import entries
from kvpass.runtime.compiled_call import compile_module, unwatch, watch_module
from kvpass.runtime.kv_store import KVStore
from kvpass.runtime.model_identity import PlansByModel, SeenTensors
from kvpass.runtime.prompts import PromptRunner
from kvpass.runtime.recorder import Recorder, SiteReport
from kvpass.runtime.slot_store import SlotStore
from kvpass.runtime.steps import StepRunner
from kvpass.torch_private import compiled_parts, dynamo, fx_nodes, inductor, symbolic_shapes

Positions = Literal["absolute", "cache"]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Inner = str | Compile
LAST_GRAPH = (
    "this is the last graph that torch.compile makes of this function: called in yet another way it is refused, or "
    "with strict=False runs uncompiled, where the cache of a new prompt grows without bound. See with "
    "TORCH_LOGS=recompiles what changes from call to call, or raise torch._dynamo.config.recompile_limit"
)
M = TypeVar("M", bound=torch.nn.Module)

Reshape = Callable[[fx.Graph], None]
"""What is done to the operators of a graph before they are lowered, in place."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """A torch.compile backend; made by `backend`, equal to another with equal settings."""

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
    deduplicates: bool = dataclasses.field(default=True, repr=False)
    """Whether equal layers share one compilation (`kvpass.lowering.layer_dedup`); turn off for comparisons only."""
    replays: bool = dataclasses.field(default=True, repr=False)
    """Whether CPU steps run without Inductor's Python (`kvpass.lowering.replay`); turn off for comparisons only."""
    recorder: Recorder | None = dataclasses.field(default=None, compare=False, repr=False)
    plans: PlansByModel = dataclasses.field(default_factory=PlansByModel, compare=False, repr=False)
    stepped: SeenTensors = dataclasses.field(default_factory=SeenTensors, compare=False, repr=False)
    """The tensors of which layers that have taken steps make their keys."""
    layers: Iterator[int] = dataclasses.field(default_factory=itertools.count, compare=False, repr=False)
    """A number for every layer's cache that is made."""

    def __post_init__(self) -> None:
        dynamo.set_up_compilations()

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self  # a copied model goes on with the same plans and numbers of layers

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.compare}
        return functools.partial(type(self), **settings), ()

    def __call__(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's.

        A refusal is raised when the graph is run and not here, where Dynamo would wrap it.

        Args:
            mode, options: as given to torch.compile itself, for Inductor; the backend's own come first.
        """
        try:
            with self._spending("kvpass"):
                return self._with(mode, options)._compile(gm, examples)
        except KVPassError as error:
            return _refusal(error)

    def _with(self, mode: str | None, options: dict[str, Any] | None) -> Backend:
        """The backend with Inductor's settings where it has none of its own."""
        _check_settings(self.inner, mode, options)
        merged = {**(options or {}), **dict(self.options)}
        return dataclasses.replace(self, mode=self.mode or mode, options=tuple(sorted(merged.items())))

    def _compile(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        carried = any(isinstance(example, Handle) for example in examples)
        if any(isinstance(example, Row) for example in examples):
            refuse("attention")
        copy, _ = fx_nodes.copy_graph_module(gm)  # finding attention calls adds nodes
        try:
            runner = self._runner(copy, examples)
        except UnreadableGraph as failure:
            if self.strict or carried:
                raise
            warnings.warn(f"kvpass leaves a graph as it was, and its caches grow: {failure}", stacklevel=2)
            runner, (copy, _) = None, fx_nodes.copy_graph_module(gm)
        if runner is not None and dynamo.is_last_graph():
            warnings.warn(LAST_GRAPH, stacklevel=2)
        if isinstance(runner, PromptRunner):
            runner.compile(examples)
        return runner or self.compile_prompt(copy, examples)

    def _runner(self, gm: fx.GraphModule, examples: Sequence[Any]) -> PromptRunner | StepRunner | None:
        """What is to run in place of a graph, None if it stays as it is."""
        with walk.reading(node for node in gm.graph.nodes if decomposed_attention.is_boundary(node)):
            if any(decomposed_attention.is_boundary(node) for node in gm.graph.nodes):
                shapes.fix_floats(gm.graph)
            carried = [isinstance(example, Handle) for example in examples]
            self._note_program("dynamo's graph", gm.graph)
            captured = capture(gm, carried)
            self._record(captured, any(carried))
            if captured.sites:
                self._note_program("canonical", captured.gm.graph)
            if self._left_alone(captured.refused, any(carried)) or not captured.sites:
                return None
            self._check_inference(captured.sites, examples)
            known = with_spreads(captured.sites, self.policy, self.kv_store.spreads)
            captured = dataclasses.replace(captured, sites=known)
            if any(carried):
                return StepRunner(self, gm, captured)
            return PromptRunner(self, gm, captured, examples, self._ranked(captured))

    def _record(self, captured: Capture, carried: bool) -> None:
        if self.recorder is None:
            return
        self.recorder.graphs.append("prompt" if captured.sites and not carried else "step" if carried else "no cache")
        for f in captured.found:
            verdict = "rewritten" if f.reading else "refused" if f.refusal else "left alone"
            reason = f.refusal or (
                "" if f.reading else cross_attention.DOES_NOT_GROW if f.fixed else "it updates no cache"
            )
            where = (len(self.recorder.graphs), walk.module_of(f.node), walk.source_line(f.node))
            self.recorder.sites.append(SiteReport(*where, verdict, reason))

    def _left_alone(self, refused: list[CallReading], carried: bool) -> bool:
        """Refuse what cannot be rewritten, or with strict=False warn and leave the whole graph as it was.

        A graph in which some caches grow and others do not could not be static, so there are no halves.
        """
        if not refused:
            return False
        lines = "\n".join(f"  {walk.source_line(f.node)}\n    {f.refusal}" for f in refused)
        message = f"{len(refused)} cache-updating operation(s) cannot be rewritten:\n{lines}"
        if carried:
            raise UnsupportedGraph(f"{message}\nThe cache was rewritten before, so the graph cannot be left as it was.")
        if self.strict:
            raise UnsupportedGraph(f"{message}\nPass strict=False to leave such graphs as they are.")
        warnings.warn(f"kvpass leaves a graph as it was, and its caches grow: {message}", stacklevel=2)
        return True

    def _check_inference(self, sites: list[AttentionSite], examples: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples):
            raise UnsupportedGraph(
                f"{walk.source_line(sites[0].call)}: the graph needs gradients, and a bounded cache has none; "
                "call model.eval() and decode under torch.no_grad() or torch.inference_mode(); to train, pass "
                "use_cache=False"
            )

    @property
    def family(self) -> tuple[Any, ...]:
        """What two backends must share for one to go on with the other's caches."""
        return (self.policy, self.budget, self.positions, self.kv_dtype, self.crop, self.kv_store)

    @property
    def kv_store(self) -> KVStore:
        """What the tokens of layers are held in."""
        if self.inner != "reference":
            return SlotStore()
        from kvpass.runtime.reference_store import ReferenceStore  # the compiled path knows nothing of references

        return ReferenceStore()

    @property
    def validates(self) -> bool:
        """Whether the first rewrite of a graph is validated."""
        return self.validate and self.kv_store.validates

    @property
    def prefers_ranks(self) -> bool:
        """Whether held tokens are to be numbered 0..n-1, where the model allows it."""
        return (self.positions or self.policy.positions) == "cache"

    def _ranked(self, captured: Capture) -> bool:
        """Whether keys are stored before their rotary embedding, which must then be found in every layer."""
        if not self.prefers_ranks:
            return False
        sites = captured.sites
        if any(site.past_key is not None for site in sites):
            return self._absolute(
                sites[0], "the prompt ran uncompiled, so its keys are rotated to absolute positions already"
            )
        sliding = [site for site in sites if site.window is not None]
        if sliding:
            return self._absolute(
                sliding[0], "the layer has a sliding window of its own, so layers differ in how many tokens they hold"
            )
        computed = [site for site in sites if site.computed]
        if computed:
            why = "the keys are computed from what is cached, which holds rotated ones already"
            return self._absolute(computed[0], why)
        for site in sites:
            found = rotary.find_rotary(captured.gm, site)
            if found is None:
                return self._absolute(site, "the keys carry no rotary embedding that can be told apart")
            if not found.counts_tokens(site):
                return self._absolute(site, "a token has several positions at once")
            if not rotary.positions_of(found, site):
                return self._absolute(site, rotary.ROTATED_APART)
            if not rotary.turns_each_token_alone(found, site):
                return self._absolute(site, rotary.BY_OTHER_TOKENS)
            if found.counts_rows_alike(site):
                return self._absolute(site, rotary.ALIKE_IN_ALL_ROWS)
        return True

    def _absolute(self, site: AttentionSite, why: str) -> bool:
        """Stay with absolute positions, unless the user asked for others."""
        if self.positions == "cache":
            line = walk.source_line(site.call)
            raise UnsupportedGraph(f"{line}: positions='cache' is not possible: {why}; use positions='absolute'")
        if self.recorder is not None:
            self.recorder.notes.append(f"{why}: positions are absolute")
        return False

    def _spending(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What runs inside counts for a name in the report's `Timings`."""
        return self.recorder.watch.spending(name) if self.recorder else contextlib.nullcontext()

    def note_validation(self, graph: Literal["prompt", "step"], done: Validation) -> None:
        """Report the result of the validation of a rewritten graph."""
        if self.recorder is not None:
            self.recorder.watch.add("validation", done.seconds)
            came = "equal" if done.skipped is None else f"left out, as {done.skipped}"
            came += f", but for {len(done.left_out)} left out, the first as {done.left_out[0]}" if done.left_out else ""
            compared = {"prompt": "prompt against the model's", "step": "step beside the model's own"}[graph]
            self.recorder.notes.append(f"the rewritten {compared}: {came} ({done.seconds:.2f} s)")

    def compile_prompt(
        self, gm: fx.GraphModule, examples: Sequence[Any], layers: Sequence[fx.Node] = ()
    ) -> Callable[..., Any]:
        """Compile a prompt graph.

        Args:
            layers: one node of each layer, if there are any.
        """
        with self._spending("compiler"):
            return self._compile_inner(gm, examples, {}, _reshape_prompt, layers)

    def compile_step(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        ranked: bool,
        chunk: bool,
        sizes: symbolic_shapes.SymbolicSizes | None,
    ) -> Callable[..., Any]:
        """Compile a rewritten step graph, of which some sizes may be open."""
        layers, alike = layer_dedup.readers_of_slots(gm), sizes.alike if sizes else frozenset()
        with self._spending("compiler"):
            run = self._compile_inner(gm, examples, self._for_steps(ranked), _reshape, layers, alike)
        repeats = self.replays and self.inner == "inductor" and not chunk and compiled_parts.on_cpu(examples)
        return Replayed(run) if repeats else run

    @property
    def compiles_at_once(self) -> bool:
        """Whether the graph of a chunk is compiled at its first run, and not at its second."""
        return False

    @property
    def compiles_prompts_at_once(self) -> bool:
        """The same of the graph of a prompt whose sizes are numbers, on a CPU.

        What is no work is done at once, and so is what a report is to tell of.
        """
        return self.inner != "inductor" or self.compiles_at_once or self.recorder is not None

    def has_dynamic_sizes(self, device: torch.device) -> bool:
        """Whether what compiles for a device can do with sizes that are no numbers; on GPUs that was not tried."""
        return self.inner in ("inductor", "eager") and device.type == "cpu"

    def step_patches(self, ranked: bool) -> dict[str, Any]:
        """What Inductor is configured with for a rewritten step graph."""
        return self._patches(self._for_steps(ranked), _reshape, None)

    def _for_steps(self, ranked: bool) -> dict[str, Any]:
        in_order = inductor.KEEP_THE_ORDER if self.policy.merges else {}
        return inductor.FEWER_LAUNCHES | in_order | (inductor.FUSE_INTO_REDUCTIONS if ranked else {})

    def rewrite(self, call: StepCall) -> tuple[StepContext, StepRewrite]:
        """Rewrite a step graph: onto slots, or onto the eager reference.

        Raises:
            UnsupportedGraph: something in it cannot be said on slots.
        """
        with self._spending("kvpass"):
            context = StepContext(call, whole=self.kv_store.whole)
            return context, rewrite_step(context, self.kv_store.passes, self.watch)

    def watch(self, record: Record, graph: fx.Graph) -> None:
        """A pass has run."""
        logs.after_pass(record, graph)
        if self.recorder is not None:
            self.recorder.passes.append(record)
            self.recorder.note_program(f"after {record.name}", graph)

    def _note_program(self, title: str, graph: fx.Graph) -> None:
        """A graph as it stands now, for logs and reports."""
        logs.note_program(title, graph)
        if self.recorder is not None:
            self.recorder.note_program(title, graph)

    def _compile_inner(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        patches: dict[str, Any],
        reshape: Reshape,
        layers: Sequence[fx.Node],
        alike: Collection[Any] = (),
    ) -> Callable[..., Any]:
        if callable(self.inner):
            return self.inner(gm, examples)
        if self.inner in ("eager", "reference"):
            return fx_nodes.code_of(gm)
        if self.inner != "inductor":
            return dynamo.registered_backend(self.inner)(gm, examples)
        if self.deduplicates and layers:
            shared = layer_dedup.compile_deduplicated(
                gm, examples, layers, lambda part: self._patches(patches, reshape, part), alike
            )
            if shared is not None:
                return shared
        return inductor.inductor(gm, examples, self._patches(patches, reshape, gm))

    def _patches(self, patches: dict[str, Any], reshape: Reshape, gm: fx.GraphModule | None) -> dict[str, Any]:
        modes = inductor.inductor_mode(self.mode) if self.mode else {}
        stamp = inductor.graph_pass(reshape.__name__.encode() + cache_key.digest(gm), reshape)
        return inductor.whole_vectors() | patches | modes | dict(self.options) | {"post_grad_custom_pre_pass": stamp}


def _reshape_prompt(graph: fx.Graph) -> None:
    """Change the operators of a prompt before they are lowered."""
    look_up_unchecked(graph)
    check_rows(graph)


def _reshape(graph: fx.Graph) -> None:
    """What is done to the operators of a step before they are lowered."""
    _reshape_prompt(graph)
    spell_out(graph)
    write_out_sums(graph)


def _refusal(error: KVPassError) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error

    return refuse


@checked
def backend(
    policy: str | Policy = "full",
    *,
    budget: budgets.Budget = None,
    positions: Positions | None = None,
    inner: Inner = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    strict: bool = True,
    validate: bool = True,
    kv_dtype: KVDtype | None = None,
    crop: Natural = 0,
    **policy_options: Any,
) -> Backend:
    """A backend for torch.compile(model, backend=...) that bounds the model's KV cache.

    Args:
        policy: what stays: a name of `kvpass.policies.names()`, or a policy object.
        budget: slots kept per layer and KV head between steps, sinks and recent tokens included; a float
            in (0, 1] is that share of the prompt. None is for policies that keep everything.
        positions: "absolute" leaves tokens the positions that they came with; "cache" numbers the held
            ones 0..n-1 and applies the rotary embedding at read. By default the policy decides.
        inner: what compiles the rewritten graphs: "inductor", "aot_eager", "eager" (nothing does),
            "reference" (the policy's eager reference), another backend's name, or a backend.
        mode, options: as of torch.compile, for Inductor.
        strict: raise UnsupportedGraph for a cache update that cannot be rewritten; with False it is left as
            it was and warned about.
        validate: run each rewritten graph once, uncompiled and on made-up conversations, beside the model's own, and
            refuse it if they differ; see `kvpass.rewrite.validation.lockstep`.
        kv_dtype: how keys and values are stored: "int8", "int4", or either with "-hadamard" behind it, see
            `kvpass.lowering.formats`; None for the model's dtype.
        crop: how many of the last tokens of a cache can be taken back (`DynamicCache.crop`), as assisted decoding and
            prompt lookup do; 0 for none, which costs nothing.
        policy_options: the policy's own, by name.

    Raises:
        PolicyError: an unknown policy or option, or a value that cannot be.
        BudgetError: a budget that the policy cannot work with.
    """
    chosen = policies.resolve(policy, policy_options)
    budgets.check(chosen, budget)
    policies.base.require(
        positions != "cache" or not chosen.renumbers, "positions", positions, f"{chosen.name} numbers tokens itself"
    )
    _check_settings(inner, mode, options)
    _check_enabled(strict)
    logs.configure()
    versions.warn_of_untested()
    _check_crop(crop, chosen)
    settings = tuple(sorted((options or {}).items()))
    return Backend(chosen, budget, positions, inner, mode, settings, strict, validate, kv_dtype, crop)


def _check_enabled(strict: bool) -> None:
    """Where torch.compile is off, no backend is ever asked."""
    if not dynamo.is_disabled():
        return
    message = "torch.compile is disabled (TORCH_COMPILE_DISABLE=1), so nothing bounds a cache: unset that"
    if strict:
        raise UnsupportedGraph(f"{message}, or pass strict=False")
    warnings.warn(message, stacklevel=3)


def _check_crop(crop: int, policy: Policy) -> None:
    """A token must be what it is whatever comes with it, or it is another one once that has been taken back."""
    if not crop:
        return
    why = "so none can be taken back from a call without a change to the others"
    policies.base.require(
        not policy.renumbers, "crop", crop, f"{policy.name} numbers the tokens of a call by how many they are, {why}"
    )
    with_logit_scale = policy.logit_scale(torch.ones(1, 1, dtype=torch.int64)) is not None
    policies.base.require(
        not with_logit_scale, "crop", crop, f"{policy} weighs the tokens of a call by how many they are, {why}"
    )


def _check_settings(inner: Inner, mode: str | None, options: dict[str, Any] | None) -> None:
    if isinstance(inner, str) and inner not in ("inductor", "eager", "reference"):
        known = ["eager", "reference", *torch.compiler.list_backends(exclude_tags=())]
        policies.base.require(inner in known, "inner", inner, f"is one of {', '.join(known)}")
    if mode is not None:
        try:
            inductor.inductor_mode(mode)
        except (RuntimeError, KeyError) as error:
            raise PolicyError(f"mode={mode!r}: {error}") from error
    for name in options or {}:
        policies.base.require(name in inductor.inductor_options(), "options", name, "is no setting of Inductor's")


@checked
def compile(model: M, policy: str | Policy = "full", **settings: Any) -> M:
    """Compile a model in place, so that `model.generate` runs compiled too; returns the model.

    So is every module inside of it that `generate` or a wrapper may call in its place; see `kvpass.runtime.entries`.
    Copies of the model (copy.deepcopy, pickle, torch.save) are compiled in the same way at their first call.

    Takes what `backend` takes.  If strict, an ordinary cache that grows in a call is an UnsupportedGraph.
    """
    chosen = backend(policy, **settings)
    compile_in_place(model, chosen, chosen.strict)
    return model


def compile_in_place(model: torch.nn.Module, chosen: Compile, strict: bool) -> None:
    """Compile what users of a model call with a backend, of kvpass or around one."""
    unwatch(model)
    compiled = entries.set_up_compiled(model)
    for called in compiled:
        compile_module(called, chosen, strict)
    for inner in entries.set_up_watched(model, compiled) if strict else ():
        watch_module(inner, model)


def by_name(
    gm: fx.GraphModule, examples: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """What torch.compile(model, backend="kvpass", options={...}) calls; the options are `backend`'s."""
    settings: dict[str, Any] = {"mode": mode, **(options or {})} if mode else dict(options or {})
    try:
        chosen = backend(**settings)
    except KVPassError as error:
        return _refusal(error)
    return chosen(gm, examples)
