"""Runner of prompt graphs: it computes the model's own attention and then admits the prompt to slots."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import budget as budgets
from kvpass.cache import history
from kvpass.cache.handle import LayerCache
from kvpass.cache.slots import Chunk, Layout
from kvpass.cache.statistics import StatisticsSpec, as_attention
from kvpass.capture import sparse_index
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.capture import Capture
from kvpass.errors import BudgetError, PolicyError, UnsupportedGraph
from kvpass.fx import shapes, splicing, walk
from kvpass.fx.shapes import Sizes
from kvpass.policies.base import Policy
from kvpass.policies.budgets import Plan, by_rows
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Attention
from kvpass.policies.window import Window
from kvpass.rewrite.computed_keys import join_heads
from kvpass.rewrite.prompt import rewrite_prompt
from kvpass.rewrite.rotary_slice import probe_rotaries
from kvpass.rewrite.validation.prompts import PromptCase, validate_prompt
from kvpass.runtime import model_identity
from kvpass.runtime.caches import by_head, given_pins, lengthened, room_on_top
from kvpass.runtime.checks import PositionCheck
from kvpass.runtime.compiler import Compiler
from kvpass.runtime.padding import indices_of, inputs_of_sites
from kvpass.torch_private import dynamo, fx_nodes, regions, symbolic_shapes, tensors
from kvpass.torch_private.tensors import UnwrappedSubclasses

ADOPTED = "adopted: the prompt ran uncompiled, so nothing is known of its attention"

RENUMBERED = (
    "a policy that renumbers tokens makes windows of a share of the prompt, from `minimum_budget` up to "
    "`last_position`, and its `fitting_budget` gives other budgets: give a number of slots"
)
MIXED = (
    "budget={budget!r} gives rows {shares} tokens, and the model has a layer that stores its last {window}: that is "
    "within the budget of some rows, which then need no policy there, and not of others; give a number of slots, or "
    "rows of one length"
)


@dataclasses.dataclass(frozen=True)
class PromptLayer:
    """What a prompt leaves of one layer.

    Attributes:
        policy: the policy of the layer.
        heads: the KV heads of the model's cache.
        window: how many of the last tokens the model stores, None for all.
        chunk: all tokens of the prompt.
        spec: the query, the attended keys, the mask and the sink logit, if the reference or a later crop needs them.
        first: see `LayerCache`.
    """

    policy: Policy
    heads: int
    window: int | None
    chunk: Chunk
    spec: StatisticsSpec | None
    first: Tensor | None = None

    def without(self, gone: int, budget: budgets.Budget) -> PromptLayer:
        """Return the layer of the prompt without its last `gone` tokens; `budget` is as the user gave it."""
        chunk, spec = self.chunk.first(self.chunk.valid.shape[1] - gone), None
        if self.spec is not None:
            new = self.spec.query.shape[2] - gone
            spec = self.spec.first(new)
            probs = spec.attention(self.policy, chunk.valid[:, chunk.valid.shape[1] - new :], budget)
            chunk = dataclasses.replace(chunk, attention=probs)
        return dataclasses.replace(self, chunk=chunk, spec=spec)


def _is_fixed(example: Any) -> bool:
    """Return whether a value has only static sizes and is on a CPU, where running a graph uncompiled costs little."""
    if isinstance(example, Tensor):
        return example.device.type == "cpu" and not symbolic_shapes.symbols(example)
    return not isinstance(example, torch.SymInt)


class _DeferredPrompt:
    """A graph that runs uncompiled at its first call and is compiled at its second."""

    def __init__(self, run: Callable[..., Any], compile: Callable[[Sequence[Any]], Callable[..., Any]]) -> None:
        self._run, self._came = run, False
        self._compile: Callable[[Sequence[Any]], Callable[..., Any]] | None = compile

    def __call__(self, *arguments: Any) -> Any:
        if self._came and self._compile is not None:
            self._run, self._compile = self._compile(arguments), None
        self._came = True
        return self._run(*arguments)


class PromptRunner:
    """Runner of a prompt graph, which computes the model's own attention and then admits the prompt to slots."""

    def __init__(
        self, backend: Compiler, model: fx.GraphModule, captured: Capture, examples: Sequence[Any], ranked: bool
    ) -> None:
        gm, sites = captured.gm, captured.sites
        self.backend, self.sites, self.ranked = backend, [site.without_graph for site in sites], ranked
        self.policies = [backend.policy.for_layer(i, len(sites)) for i in range(len(sites))]
        self.adopts = any(site.past_key is not None for site in sites)
        if self.adopts and any("scan" in policy.statistics for policy in self.policies):
            raise UnsupportedGraph(
                f"{walk.source_line(sites[0].call)}: {backend.policy} replays the attention of the prompt, and this "
                "prompt ran uncompiled; run it through the compiled model"
            )
        if self.adopts and any(site.window is not None for site in sites):
            raise UnsupportedGraph(
                f"{walk.source_line(sites[0].call)}: the prompt ran uncompiled and this layer stored only the end "
                "of it; run the prompt through the compiled model"
            )
        if self.adopts and backend.policy.renumbers:
            raise UnsupportedGraph(
                f"{walk.source_line(sites[0].call)}: {backend.policy.name} numbers the tokens of a prompt, and this "
                "prompt ran uncompiled; run it through the compiled model"
            )
        sliding = [site for site in sites if site.window is not None]
        if sliding and backend.policy.renumbers:
            raise UnsupportedGraph(
                f"{walk.source_line(sliding[0].call)}: {backend.policy.name} numbers the tokens of all layers alike, "
                "and this layer has a sliding window of its own"
            )
        scored = any(policy.statistics for policy in self.policies)
        extras = backend.kv_store.is_reference or (backend.crop > 0 and scored)
        told = inputs_of_sites(gm, sites, step=False)
        common = (backend.budget, ranked, extras, examples, told)
        self.rewrite = rewrite_prompt(gm, sites, self.policies, *common)
        holders = walk.placeholders(gm.graph)
        self.past = holders.index(sites[0].past_key) if sites[0].past_key else None
        self.positions = PositionCheck(gm, sites) if ranked else None
        self.inputs = splicing.computing(gm, []).graph
        self._probe = functools.partial(probe_rotaries, gm, sites) if ranked else None
        self.angles: Tensor | None = None
        self.told = [holders.index(node) for node in told[0]]
        self.unchecked: PromptCase | None = None
        if backend.validates:
            plain = [policy.with_plain_logits() if policy.scales_logits else policy for policy in self.policies]
            rewritten = functools.partial(rewrite_prompt, gm, sites, plain, *common)
            self.unchecked = PromptCase(model, gm, sites, None if backend.policy.renumbers else rewritten, self.told)
        self.sparse_indices = [each for site in sites for each in sparse_index.find(site.mask)]
        outputs = walk.results(gm.graph)
        grown = [pair for each in self.sparse_indices for pair in sparse_index.cached_scoring_keys(each, outputs)]
        self.scored_by = [(outputs.index(node), dim) for node, dim in grown]
        self.owned, self.constants = model_identity.owned(gm), model_identity.constants(gm)
        self.projecting = [model_identity.projecting(site) for site in sites]
        self.projected_by = [self._projection(site, policy) for site, policy in zip(sites, self.policies, strict=True)]
        self.as_traced = UnwrappedSubclasses()
        self.outputs = len(walk.results(gm.graph))

    def _projection(self, site: AttentionSite, policy: Policy) -> int | None:
        """Return the argument index of the weight that projects a site's output, for a policy that reads it.

        Raises:
            UnsupportedGraph: it cannot be proven which weight that is.
        """
        found = model_identity.output_projection(site) if policy.projects else None
        if policy.projects and found is None:
            raise UnsupportedGraph(
                f"{walk.source_line(site.call)}: {policy.name!r} weighs tokens by the projection of the output, and "
                "attention's output is not seen to enter one linear layer, head after head: use policy='ada_kv'"
            )
        return found

    def compile(self, examples: Sequence[Any]) -> None:
        """Compile the rewritten graph by the inner compiler, whose errors are passed on.

        A prompt of static length may be the only one, and compiling takes longer than the prompt itself.  So the
        rewritten graph runs uncompiled, and is compiled when another prompt of that length arrives.  A prompt of
        another length gets a graph of its own, for all lengths.
        """
        may_come_once = all(_is_fixed(example) for example in examples)
        if may_come_once and not self.backend.compiles_prompts_at_once:
            assert self.rewrite.gm is not None
            self.inner: Callable[..., Any] = _DeferredPrompt(fx_nodes.code_of(self.rewrite.gm), self._compiled)
        else:
            self.inner = self._compiled(examples)

    def _compiled(self, examples: Sequence[Any]) -> Callable[..., Any]:
        gm = self.rewrite.gm
        assert gm is not None
        returned = walk.results(gm.graph)
        layers = [returned[site.keys_out] for site in self.sites]
        with dynamo.one_at_a_time():
            run = self.backend.compile_prompt(gm, examples, layers)
        self.rewrite = dataclasses.replace(self.rewrite, gm=None, calls={})  # nothing reads them once it is compiled
        return run

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        with tensors.with_torch_function():
            return self._run(arguments, self.as_traced(arguments))

    def _run(self, arguments: tuple[Any, ...], traced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run the graph; `arguments` are Dynamo's, `traced` are the same with tensor subclasses unwrapped."""
        self._validate(traced)
        regions.note_run()
        results = list(self.inner(*traced))
        adopted = 0 if self.past is None else traced[self.past].shape[2]
        first, pins = self._first(results, traced), self._pins(results, adopted)
        layers = [self._layer(results, i, adopted, first, pins, traced) for i in range(len(self.sites))]
        del results[self.outputs :]
        prompt = layers[0].chunk.valid.shape[1]
        for each in self.sparse_indices:
            each.check(prompt)
        for index, dim in self.scored_by:
            results[index] = lengthened(results[index], dim, 0)
        weights = [model_identity.held_weakly(arguments[index] for index in indices) for indices in self.projecting]
        outputs = [None if index is None else weakref.ref(arguments[index]) for index in self.projected_by]
        taken = TakenPrompt(self, layers, self._model(arguments), weights, outputs, prompt - adopted)
        del layers  # so that the rows of each layer are freed once they are stored
        for site, cache in zip(self.sites, taken.caches(), strict=True):
            results[site.keys_out], results[site.values_out] = cache.handles()
        listener = _LISTENER.get()
        if listener is not None:
            listener.append(PromptResult(self, arguments, tuple(results)))
        return tuple(results)

    def _validate(self, arguments: tuple[Any, ...]) -> None:
        """Validate the rewritten graph against the model's own on the first call, before it runs."""
        if self.unchecked is not None:
            done = validate_prompt(self.unchecked, arguments)
            self.unchecked = None
            self.backend.note_validation("prompt", done)

    def stored(self, layers: list[PromptLayer], model: list[Any]) -> Iterator[LayerCache]:
        """Yield the cache of each layer of a prompt; the rows of a layer are released once they are stored."""
        valid = layers[0].chunk.valid
        prompt, shares = valid.shape[1], budgets.slots_of_rows(self.backend.policy, self.backend.budget, valid)
        budget, policy = max(shares), self.backend.policy
        if policy.renumbers and isinstance(self.backend.budget, float):
            windows = torch.as_tensor(budgets.window_for(policy, self.backend.budget, prompt, valid))
            if windows.flatten().tolist() != shares:
                raise BudgetError(RENUMBERED)
        self._check_windows(layers, shares)
        layers[:] = [_within_window(layer, budget) for layer in layers]
        plans = self._plans(layers, shares, prompt, model)
        by_row = any(
            plan.differs(budget) for layer, (_, plan) in zip(layers, plans, strict=True) if layer.policy is policy
        )
        for i, plan in enumerate(plans):
            yield self._store(i, layers[i], plan, by_row)
            layers[i] = None  # type: ignore[call-overload]

    def _first(self, results: list[Any], arguments: tuple[Any, ...]) -> Tensor | None:
        """Return the position id of each row's first real token if positions are by cache, else None."""
        if self.positions is None:
            return None
        key = results[self.rewrite.outputs[0].key]
        if self._probe is not None:
            sizes = Sizes((), shapes.measured(self.inputs, arguments), key.shape[2])
            self.angles, self._probe = self._probe(sizes, arguments, key.device), None
        return self.positions.first(arguments, self._valid(results, 0, key))

    def _layer(
        self,
        results: list[Any],
        i: int,
        adopted: int,
        first: Tensor | None,
        pins: Pins | None,
        arguments: tuple[Any, ...],
    ) -> PromptLayer:
        site, outputs = self.sites[i], self.rewrite.outputs[i]
        key, value = results[outputs.key], results[outputs.value]
        valid = self._valid(results, i, key)
        sums = [results[index] for index in outputs.statistics]
        attention = as_attention(self.policies[i], sums, valid[:, adopted:], site.spread) if sums else Attention()
        heads = key.shape[1]
        if site.computed:
            key, value = join_heads(key), join_heads(value)
        spec = None
        if outputs.operands:
            query, attended, *others = outputs.operands
            mask, sink_logit = (None if index is None else results[index] for index in others)
            common = (site.causal, site.scale, site.cap, key.shape[1], site.spread)
            spec = StatisticsSpec(results[query], results[attended], mask, sink_logit, *common)
        index = self.projected_by[i]
        output = None if index is None else by_head(arguments[index], key.shape[1], value.shape[3])
        chunk = Chunk(key, value, valid, attention, pins, output)
        return PromptLayer(self.policies[i], heads, site.window, chunk, spec, first)

    def _pins(self, results: list[Any], adopted: int) -> Pins | None:
        """Return the pins of the call that is running, if any, for all tokens of the prompt."""
        pins, key = given_pins(), results[self.rewrite.outputs[0].key]
        if pins is None:
            return None
        pins.check(self.backend.policy, key.shape[0], key.shape[2] - adopted)
        return pins.after(adopted)

    def _valid(self, results: list[Any], i: int, key: Tensor) -> Tensor:
        """Return bool [B, S], False for padding."""
        rows, _, count, _ = key.shape
        index = self.rewrite.outputs[i].valid
        if index is None:
            return torch.ones(rows, count, dtype=torch.bool, device=key.device)
        valid: Tensor = results[index].expand(rows, -1)
        return valid

    def _model(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Return the objects that identify the model of a call: its tensors, or the runner if it has none."""
        return [arguments[index] for index in self.owned] or list(self.constants) or [self]

    def _plans(
        self, layers: list[PromptLayer], shares: list[int], prompt: int, model: list[Any]
    ) -> list[tuple[int, Plan]]:
        """Return for each layer the budget that the user gave, of the row with the largest, and the policy's plan."""
        governed, budget = [layer for layer in layers if layer.policy is self.backend.policy], max(shares)
        if not self.backend.policy.evicts and prompt > budget:
            raise BudgetError(
                f"policy {self.backend.policy.name!r} keeps every token: "
                f"a prompt of {prompt} exceeds its budget of {budget}"
            )
        rows, heads = layers[0].chunk.key.shape[:2]
        made = self._governed(governed, shares, model, (len(layers), heads))
        if self.ranked and (len(governed) < len(layers) or len({plan.budgets_of_rows(rows) for plan in made}) > 1):
            raise PolicyError(
                f"positions='cache': {self.backend.policy} gives the layers different budgets, and a query has one "
                "place among the held tokens; use positions='absolute'"
            )
        mine = iter(made)
        whole = budgets.slots_for(self.backend.policy, None, prompt)
        planned = []
        for layer in layers:
            if layer.policy is self.backend.policy:
                planned.append((budget, next(mine)))
            else:  # it holds its window, or every token
                held = whole if layer.window is None else layer.window
                planned.append((held, Plan(held, layer.policy.capacity(held))))
        return planned

    def _governed(self, layers: list[PromptLayer], shares: list[int], model: list[Any], shape: Any) -> list[Plan]:
        """Return the plans of the layers that the backend's policy governs; see `model_identity.PlansByModel`."""
        if not layers:
            return []
        attention = [layer.chunk.attention for layer in layers if isinstance(layer.chunk.attention, Attention)]
        first, valid = self.backend.plans.of(model, shape), layers[0].chunk.valid
        plans = {share: self.backend.policy.plan(attention, valid, share, first) for share in sorted(set(shares))}
        made = [by_rows(dict(zip(plans, each, strict=True)), shares) for each in zip(*plans.values(), strict=True)]
        if first is None:
            self.backend.plans.keep(model, shape, made)
        opens = self.backend.has_dynamic_sizes(layers[0].chunk.key.device)
        return made if opens else [plan.with_max_capacity for plan in made]

    def _check_windows(self, layers: list[PromptLayer], shares: list[int]) -> None:
        """Raise BudgetError if a layer's own window is within the budget of some rows only; see `_within_window`."""
        for window in {layer.window for layer in layers if layer.window is not None and layer.policy.evicts}:
            if min(shares) < window <= max(shares):
                raise BudgetError(MIXED.format(budget=self.backend.budget, shares=shares, window=window))

    def _store(self, number: int, layer: PromptLayer, planned: tuple[int, Plan], by_row: bool) -> LayerCache:
        budget, plan = planned
        chunk, governed = layer.chunk, layer.policy is self.backend.policy
        if not governed:
            chunk = dataclasses.replace(chunk, pins=None)
        on_top = max(chunk.raised(layer.policy, (0,) * len(chunk.valid)))
        rows, heads, count, dim = chunk.key.shape
        shown = layer.heads
        layout = Layout(
            policy=layer.policy,
            budget=budget,
            capacity=plan.capacity + room_on_top(on_top),
            batch=rows,
            heads=heads,
            key_dim=dim,
            value_dim=chunk.value.shape[-1],
            dtype=chunk.key.dtype,
            device=chunk.key.device,
            ranked=self.ranked,
            layer=number if layer.policy.reads_layer else 0,
            kv_dtype=self.backend.kv_dtype,
            spread=self.sites[number].spread,
            crops=self.backend.crop > 0,
            exact_capacity=plan.max_capacity > 0 and self.backend.has_dynamic_sizes(chunk.key.device),
            row_budgets=by_row and governed,
        )
        layout = layout.with_head_classes()
        if chunk.pins is not None:
            layout = layout.with_pins(chunk.pins.on_top)
        notes = (ADOPTED,) if self.adopts else ()
        absent = indices_of(~chunk.valid)
        mine = (self.backend, next(self.backend.layers), layout)
        kv_store = self.backend.kv_store
        slots, budgets_of_rows, clocks = kv_store.admitted(layout, chunk, layer.spec, self.sites[number], plan)
        given: dict[str, Any] = dict(notes=notes, absent=absent, first=layer.first, angles=self.angles)
        return LayerCache(*mine, slots, count, shown, layer.window, budgets_of_rows, clocks, **given)


@dataclasses.dataclass(frozen=True)
class TakenPrompt:
    """A prompt that has run.

    Attributes:
        runner: the runner of the prompt.
        layers: what the prompt left of each layer; the list is emptied as they are stored, unless the cache can be
            cropped.
        model: the objects that identify the model, see `model_identity.PlansByModel`.
        weights: for each layer, weak references to the tensors that project its keys.
        outputs: for each layer, `LayerCache.output`.
        new: the number of tokens, without those of an adopted past.
    """

    runner: PromptRunner
    layers: list[PromptLayer]
    model: list[Any]
    weights: list[model_identity.Weights]
    outputs: list[weakref.ref[Any] | None]
    new: int
    _shorter: dict[int, list[LayerCache]] = dataclasses.field(default_factory=dict, init=False)

    def caches(self) -> Iterator[LayerCache]:
        """Yield a cache for each layer."""
        crop = self.runner.backend.crop
        layers = list(self.layers) if crop else self.layers
        model = model_identity.held_weakly(each for each in self.model if isinstance(each, Tensor))
        for index, cache in enumerate(self.runner.stored(layers, self.model)):
            cache.weights, cache.output, cache.model = self.weights[index], self.outputs[index], model
            if crop:
                was = (cache.layout, cache.seen, cache.clocks, cache.absent, cache.limits)
                cache.calls = (history.PastCall(self.new, None, functools.partial(self._repeat, index), *was),)
            yield cache

    @torch.no_grad()
    def _repeat(self, layer: int, _: LayerCache, count: int) -> LayerCache:
        """Return a layer's cache of the first `count` tokens: a `history.Repeat` for each layer.

        All layers are shortened at once, because a policy may plan them together.
        """
        if count not in self._shorter:
            layers = [each.without(self.new - count, self.runner.backend.budget) for each in self.layers]
            self._shorter[count] = list(dataclasses.replace(self, layers=layers, new=count).caches())
        return self._shorter[count][layer]


def _within_window(layer: PromptLayer, budget: int) -> PromptLayer:
    """Return the layer with the policy `Window` if the budget holds its own window, which then needs no eviction."""
    if layer.window is None or (layer.policy.evicts and budget < layer.window):
        return layer
    return dataclasses.replace(layer, policy=Window())


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """One run of a prompt graph: its runner, Dynamo's arguments, and the results for Dynamo."""

    runner: PromptRunner
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]


_LISTENER: contextvars.ContextVar[list[PromptResult] | None] = contextvars.ContextVar("kvpass_prompts", default=None)


@contextlib.contextmanager
def listening() -> Iterator[list[PromptResult]]:
    """Return a context that collects the prompts that run inside it."""
    ran: list[PromptResult] = []
    token = _LISTENER.set(ran)
    try:
        yield ran
    finally:
        _LISTENER.reset(token)
