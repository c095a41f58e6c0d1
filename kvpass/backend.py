"""Define the torch.compile backend of kvpass, and the functions that make it and apply it to a model."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.fx as fx

from kvpass import policies, versions
from kvpass.arguments import Natural, check_arguments, require
from kvpass.cache.handle import DetachedRow, Handle, refuse_row_operation
from kvpass.capture import cross_attention, decomposed_attention, rotary
from kvpass.capture.cache_search import SearchResult
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.capture import Capture, capture
from kvpass.capture.head_sharding import with_head_sharding
from kvpass.errors import KVPassError, KVPassWarning, PolicyError, UnreadableGraph, UnsupportedGraph
from kvpass.fx import alias, shapes, walk
from kvpass.lowering import attention_tiles
from kvpass.lowering.formats import KVDtype
from kvpass.policies.base import Policy
from kvpass.runtime.backend_base import BackendBase, Inner, Positions
from kvpass.runtime.calling.in_place import compile_in_place
from kvpass.runtime.outside_keys import GrowthCheck
from kvpass.runtime.prompts import PromptRunner
from kvpass.runtime.recorder import AttentionReport, configure_logs, log_graph
from kvpass.runtime.steps import StepRunner
from kvpass.torch_private import dynamo, inductor, regions
from kvpass.user_budget import Budget, check_user_budget

LAST_GRAPH = (
    "this is the last graph that torch.compile makes of this function: calls that need another graph are refused, or "
    "with strict=False run uncompiled, with an unbounded cache after a prompt. See with TORCH_LOGS=recompiles what "
    "changes from call to call, or raise torch._dynamo.config.recompile_limit"
)
M = TypeVar("M", bound=torch.nn.Module)


@dataclasses.dataclass(frozen=True)
class Backend(BackendBase):
    """A torch.compile backend, made by `backend`; backends with equal settings are equal."""

    def __post_init__(self) -> None:
        dynamo.register_settings()

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self  # a copy of the model continues the same count of caches

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
        """Compile one graph of Dynamo.

        A refusal is raised when the graph runs, because Dynamo would wrap an error that is raised here.

        Args:
            gm: the graph.
            examples: example inputs of the graph.
            mode, options: as given to torch.compile itself, for Inductor; the backend's own settings take precedence.

        Returns:
            The callable that Dynamo runs instead of the graph.
        """
        try:
            with self.time_section("kvpass"):
                if regions.are_traced():
                    regions.check_weights(gm)
                return self._with_options(mode, options)._compile(gm, examples)
        except (KVPassError, regions.RegionMismatch) as error:
            return raise_when_run(error)
        finally:
            dynamo.release_source_lines()

    def _with_options(self, mode: str | None, options: dict[str, Any] | None) -> Backend:
        """Return the backend with these Inductor settings, where it sets none itself."""
        if not mode and not options:
            return self
        _check_settings(self.inner, mode, options)
        merged = {**(options or {}), **dict(self.options)}
        return dataclasses.replace(self, mode=self.mode or mode, options=tuple(sorted(merged.items())))

    def _compile(self, dynamo_gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        is_step = any(isinstance(example, Handle) for example in examples)
        if any(isinstance(example, DetachedRow) for example in examples):
            refuse_row_operation("attention")
        copy = regions.inline_regions(dynamo_gm)
        check: GrowthCheck | None = None
        try:
            runner, check = self._runner(copy, examples)
        except UnreadableGraph as failure:
            if self._refuses or is_step:
                raise
            warnings.warn(
                f"kvpass leaves a graph unchanged, and its caches grow: {failure}", KVPassWarning, stacklevel=2
            )
            runner, copy = None, regions.inline_regions(dynamo_gm)
        if runner is not None and dynamo.is_at_recompile_limit():
            warnings.warn(LAST_GRAPH, KVPassWarning, stacklevel=2)
        if isinstance(runner, PromptRunner):
            runner.compile(examples)
        # Dynamo copies the attributes of a callable object, and would keep objects that the runner drops.
        run = _noting_runs(self.compile_prompt(copy, examples)) if runner is None else runner.__call__
        return check.around(run) if check else run

    def _runner(
        self, dynamo_gm: fx.GraphModule, examples: Sequence[Any]
    ) -> tuple[PromptRunner | StepRunner | None, GrowthCheck | None]:
        """Return the runner that replaces a graph, None if the graph stays unchanged, and the check of its calls."""
        dynamo.check_notes(dynamo_gm.graph, examples)
        with walk.converting_errors(node for node in dynamo_gm.graph.nodes if decomposed_attention.is_boundary(node)):
            if any(decomposed_attention.is_boundary(node) for node in dynamo_gm.graph.nodes):
                shapes.fix_floats(dynamo_gm.graph)
            are_handles = [isinstance(example, Handle) for example in examples]
            is_step = any(are_handles)
            log_graph("dynamo's graph", dynamo_gm.graph, self.recorder)
            captured = capture(dynamo_gm, are_handles)
            self._record(captured, is_step)
            if captured.sites:
                log_graph("canonical", captured.canonical_gm.graph, self.recorder)
            if self._left_alone(captured.refusals, is_step):
                return None, None
            outside = [each for result in captured.search_results for each in result.outside]
            check = GrowthCheck(dynamo_gm.graph, outside, self.strict)
            if not captured.sites:
                return None, check
            self._check_inference(captured.sites, examples)
            self._check_attention_is_whole(captured.sites)
            known = with_head_sharding(captured.sites, self.policy)
            captured = dataclasses.replace(captured, sites=known)
            if is_step:
                return StepRunner(self, captured), check
            return PromptRunner(self, captured, examples, self._stores_unrotated_keys(captured)), check

    def _record(self, captured: Capture, is_step: bool) -> None:
        if self.recorder is None:
            return
        self.recorder.graphs.append("prompt" if captured.sites and not is_step else "step" if is_step else "no cache")
        for result in captured.search_results:
            outcome = "rewritten" if result.cached_call else "refused" if result.refusal else "left alone"
            other = cross_attention.DOES_NOT_GROW if result.cross_cache else "it updates no cache"
            reason = result.refusal or ("" if result.cached_call else other)
            where = (len(self.recorder.graphs), walk.module_of(result.node), walk.source_line(result.node))
            self.recorder.sites.append(AttentionReport(*where, outcome, reason))

    def _left_alone(self, refused: list[SearchResult], is_step: bool) -> bool:
        """Return whether a graph stays unchanged, with a warning, or raise an error for refused cache updates.

        The graph is never rewritten in part, because a graph in which one cache grows cannot be static.
        """
        if not refused:
            return False
        lines = "\n".join(f"  {walk.source_line(f.node)}\n    {f.refusal}" for f in refused)
        message = f"{len(refused)} cache-updating operation(s) cannot be rewritten:\n{lines}"
        if is_step or self._refuses:
            advice = "Pass strict=False to leave such graphs unchanged."
            advice = "The cache was rewritten before, so the graph cannot stay unchanged." if is_step else advice
            reason, line = str(refused[0].refusal), walk.known_line(refused[0].node)
            raise UnsupportedGraph(reason, line=line, message=f"{message}\n{advice}")
        warnings.warn(f"kvpass leaves a graph unchanged, and its caches grow: {message}", KVPassWarning, stacklevel=2)
        return True

    @property
    def _refuses(self) -> bool:
        """True if a graph that cannot be rewritten is an error, as always with regions, before a retry without."""
        return self.strict or regions.may_run_again()

    def _check_inference(self, sites: list[AttentionSite], examples: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples):
            why = "the graph needs gradients, and a bounded cache has none; call model.eval() and decode under"
            to_train = "to train, pass use_cache=False"
            walk.refuse(sites[0].call, f"{why} torch.no_grad() or torch.inference_mode(); {to_train}")

    def _check_attention_is_whole(self, sites: list[AttentionSite]) -> None:
        """Refuse a layer that attends in several calls, such as one for each head, if the policy reads attention.

        The policy sees a cache's first call alone.  In layers that share a cache the later query follows from it.
        """
        for first in sites if self.policy.statistics else ():
            for later in first.shared_by:
                same = (later.query, later.attended[0]) == (first.query, first.attended[0])
                if not same and walk.ancestors(later.query).isdisjoint(first.results):
                    why = "reads the attention to cached tokens, and this layer attends in several calls"
                    advice = "attend in one call, or use a policy that reads only positions, such as 'streaming'"
                    walk.refuse(later.call, f"{self.policy.name!r} {why}: it would see the first alone; {advice}")

    def start_builds(self, model: torch.nn.Module) -> None:
        """Start building the kernels that a model on a CPU needs, while Dynamo traces its first call."""
        weight = next(model.parameters(), None)
        if self.inner == "inductor" and weight is not None and weight.device.type == "cpu":
            attention_tiles.start_builds(weight.dtype)

    def _stores_unrotated_keys(self, captured: Capture) -> bool:
        """Return whether keys are stored before their rotary embedding, which must be found in every layer."""
        if not self.prefers_cache_positions:
            return False
        obstacle = rotary.find_obstacle(captured.sites, alias.AliasSets(captured.canonical_gm.graph))
        if obstacle is None:
            return True
        site, why = obstacle
        if self.positions == "cache":
            walk.refuse(site.call, f"positions='cache' is not possible: {why}; use positions='absolute'")
        if self.recorder is not None:
            self.recorder.notes.append(f"{why}: positions are absolute")
        return False


def _noting_runs(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a graph without a cache to note that it ran, which rules out a second run of the call."""

    def noted(*arguments: Any) -> Any:
        regions.note_run()
        return run(*arguments)

    return noted


def raise_when_run(error: Exception) -> Callable[..., Any]:
    """Return a callable that raises an error, instead of a graph: Dynamo would wrap an error of the backend."""

    def refuse(*_: Any) -> Any:
        raise error.with_traceback(None)  # which would hold the frames of the compilation, and of every call

    return refuse


@check_arguments
def backend(
    policy: str | Policy = "full",
    *,
    budget: Budget = None,
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
    """Return a backend for torch.compile that bounds the model's KV cache.

    >>> model = torch.compile(model, backend=kvpass.backend(policy="h2o", budget=1024))

    Args:
        policy: the eviction policy: a name of `kvpass.policies.names()`, or a policy object.
        budget: slots kept per layer and KV head between steps, sinks and recent tokens included; a float
            in (0, 1] is that share of the prompt.  None is for policies that keep every token.
        positions: "absolute" keeps each token's original position; "cache" numbers the cached tokens
            0..n-1 and applies the rotary embedding at read.  By default the policy decides.
        inner: the compiler of the rewritten graphs: "inductor", "aot_eager", "eager" (no compilation),
            another backend's name, or a backend.
        mode, options: as in torch.compile, for Inductor.
        strict: raise UnsupportedGraph for a cache update that cannot be rewritten; with False the graph stays
            unchanged, with a warning.
        validate: before the first rewrite of a graph runs, compare it with the model's own on synthetic conversations,
            uncompiled, and refuse it if they differ; see `kvpass.rewrite.validation.lockstep`.
        kv_dtype: the storage format of keys and values: "int8", "int4", or either followed by "-hadamard", see
            `kvpass.lowering.formats`; None for the model's dtype.
        crop: the number of last tokens that can be removed from a cache again (`DynamicCache.crop`), as assisted
            decoding and prompt lookup do; 0 for none, which costs nothing.
        policy_options: options of the policy, by name.

    Returns:
        The backend.

    Raises:
        PolicyError: an unknown policy or option, or an invalid value.
        BudgetError: a budget that the policy cannot work with.
        UnsupportedGraph: torch.compile is disabled, and `strict` is true.
    """
    chosen = policies.resolve(policy, policy_options)
    check_user_budget(chosen, budget)
    refusal = chosen.cache_positions_refusal
    require(positions != "cache" or not refusal, "positions", positions, refusal)
    _check_settings(inner, mode, options)
    _check_enabled(strict)
    configure_logs()
    versions.warn_of_untested()
    _check_crop(crop, chosen)
    settings = tuple(sorted((options or {}).items()))
    return Backend(chosen, budget, positions, inner, mode, settings, strict, validate, kv_dtype, crop)


def _check_enabled(strict: bool) -> None:
    """Raise UnsupportedGraph, or warn, if torch.compile is disabled: torch then never calls the backend."""
    if not dynamo.is_disabled():
        return
    message = "torch.compile is disabled (TORCH_COMPILE_DISABLE=1), so nothing bounds a cache: unset that"
    if strict:
        raise UnsupportedGraph(f"{message}, or pass strict=False")
    warnings.warn(message, KVPassWarning, stacklevel=3)


def _check_crop(crop: int, policy: Policy) -> None:
    """Raise PolicyError if `crop` is set and the policy makes a token depend on the others of its call."""
    if not crop:
        return
    why = "so none can be removed from a call without a change to the others"
    numbered = f"{policy.name} numbers the tokens of a call by their count, {why}"
    require(not policy.renumbers, "crop", crop, numbered)
    require(not policy.scales_logits, "crop", crop, f"{policy} weighs the tokens of a call by their count, {why}")


def _check_settings(inner: Inner, mode: str | None, options: dict[str, Any] | None) -> None:
    if isinstance(inner, str) and inner not in ("inductor", "eager"):
        known = ["eager", *torch.compiler.list_backends(exclude_tags=())]
        require(inner in known, "inner", inner, f"must be one of {', '.join(known)}")
    if mode is not None:
        try:
            inductor.inductor_mode(mode)
        except (RuntimeError, KeyError) as error:
            raise PolicyError(f"mode={mode!r}: {error}") from error
    for name in options or {}:
        require(name in inductor.inductor_options(), "options", name, "Inductor has no such setting")
        require(name != inductor.GRAPH_PASS, "options", name, "kvpass uses this setting itself: leave it out")


@check_arguments
def compile(model: M, policy: str | Policy = "full", **settings: Any) -> M:
    """Compile a model in place, so that `model.generate` runs compiled too.

    Every inner module that `generate` or a wrapper may call instead of the model is also compiled; see
    `kvpass.runtime.calling.in_place`.  Copies of the model (copy.deepcopy, pickle, torch.save) are compiled in the same
    way at their first call.

    >>> model = kvpass.compile(model, policy="h2o", budget=1024)
    >>> model.generate(ids, max_new_tokens=200)

    Args:
        model: the model, in eval mode.
        policy: the eviction policy, see `kvpass.backend`.
        settings: the other arguments of `kvpass.backend`.  With `strict`, a call in which an ordinary cache grows
            raises UnsupportedGraph.

    Returns:
        The model itself; for a wrapper of torch.compile, the model inside.

    Raises:
        PolicyError: an unknown policy or option, or an invalid value.
        BudgetError: a budget that the policy cannot work with.
        UnsupportedGraph: torch.compile is disabled, and `strict` is true.
    """
    chosen, model = backend(policy, **settings), dynamo.before_compilation(model)
    compile_in_place(model, chosen, chosen.strict)
    chosen.start_builds(model)
    return model


_made_by_name: list[weakref.ref[Backend]] = []
"""The backends of `by_name` that some graph or cache still uses.

torch calls `by_name` for each graph and passes no object that could own the backend, so the module has to find it
again.
"""


def by_name(
    gm: fx.GraphModule, examples: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compile a graph for torch.compile(model, backend="kvpass", options={...}); for the options see `backend`.

    Graphs with equal options share one backend, with its counter of layers, while one of them exists.
    """
    settings: dict[str, Any] = {"mode": mode, **(options or {})} if mode else dict(options or {})
    try:
        chosen = backend(**settings)
    except KVPassError as error:
        return raise_when_run(error)
    used = [each for made in _made_by_name if (each := made()) is not None]
    if chosen not in used:
        used.append(chosen)
    _made_by_name[:] = map(weakref.ref, used)
    return used[used.index(chosen)](gm, examples)
