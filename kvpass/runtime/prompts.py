"""Run prompt graphs: compute the model's own attention, and then admit the prompt to slots."""

from __future__ import annotations

import abc
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.admission import TokensToAdmit
from kvpass.cache.handle import handles_of, with_heads_first
from kvpass.capture import projections, sparse_index
from kvpass.capture.canonical import AttentionSite, SiteFacts
from kvpass.capture.capture import Capture
from kvpass.capture.padding_analysis import padding_inputs_of_sites
from kvpass.errors import KVPassWarning, PolicyError
from kvpass.fx import shapes, splicing, walk
from kvpass.fx.shapes import SizeResolver
from kvpass.lowering.attention_statistics import StatisticsOperands, as_attention
from kvpass.policies.base import Policy
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Attention
from kvpass.rewrite.computed_keys import join_heads
from kvpass.rewrite.prompt import LayerOutputs, PromptRewriteInput, rewrite_prompt
from kvpass.rewrite.validation.prompts import PromptCase, validate_prompt
from kvpass.runtime import model_identity
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.cache_changes import longer_placeholder
from kvpass.runtime.call_context import call_pins, publish_run
from kvpass.runtime.checks import PositionCheck, RotationCheck
from kvpass.runtime.deferred_code import DeferredCode, UncompiledCode
from kvpass.runtime.kv_store import output_weight_by_head
from kvpass.runtime.prompt_admission import PendingPrompt, PromptLayer
from kvpass.torch_private import dynamo, inductor, regions, symbolic_shapes, tensors
from kvpass.torch_private.tensors import UnwrappedSubclasses

ADOPTED = "adopted: the prompt ran uncompiled, so its attention statistics are unknown"
UNSEEN_PROMPT = (
    "{0} knows no attention of this prompt, and scores its tokens by later attention alone: their cache comes from a "
    "call that ran uncompiled, or from a graph in which kvpass found no attention. Run the prompt through the compiled "
    "model; kvpass.explain shows the attention that kvpass found"
)


@dataclasses.dataclass(frozen=True)
class PromptGraphFacts:
    """The facts about a prompt graph that runs read; an artifact stores them in its manifest.

    Attributes:
        sites: the attention calls on caches.
        policies: the policy of each layer.
        stores_unrotated_keys: whether keys are stored before their rotary embedding.
        layers: the outputs of the rewritten graph for each layer.
        outputs: the number of outputs of Dynamo's graph.
        module_inputs: the argument indices of module tensors.
        key_projections: for each site the argument indices of the tensors that project its new keys.
        output_projections: for each site the argument index of the weight that projects its output, if the policy
            reads it.
        adopted_past: the argument index of the first layer's past keys, if the graph adopts an uncompiled prompt.
        constants: module tensors that are attributes of the graph, where Dynamo does not make them inputs.
        sparse_indices: the sparse indices of masks.
        scoring_outputs: the output index of each cache of scoring keys, and the dimension along which it grows.
        tokens_first: see `Capture`; these arguments are transposed to [B, H, S, D] before they are used.
    """

    sites: list[SiteFacts]
    policies: list[Policy]
    stores_unrotated_keys: bool
    layers: list[LayerOutputs]
    outputs: int
    module_inputs: list[int]
    key_projections: list[tuple[int, ...]]
    output_projections: list[int | None]
    adopted_past: int | None = None
    constants: list[Tensor] = dataclasses.field(default_factory=list)
    sparse_indices: list[sparse_index.SparseIndex] = dataclasses.field(default_factory=list)
    scoring_outputs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    tokens_first: frozenset[int] = frozenset()


def policies_by_layer(policy: Policy, layers: int) -> list[Policy]:
    """Return the policy of each layer.

    Raises:
        PolicyError: a layer has another policy that evicts; budgets and plans come from one policy.
    """
    chosen = [policy.for_layer(layer, layers) for layer in range(layers)]
    for layer, each in enumerate(chosen):
        if each is not policy and getattr(each, "evicts", True):
            raise PolicyError(
                f"{type(policy).__name__}.for_layer({layer}, {layers}) returned {each}: it must return the policy "
                "itself, or a policy that evicts nothing, such as kvpass.policies.full.Full()"
            )
    return chosen


class PromptExecutor(abc.ABC):
    """Compute the model's own attention for a prompt, and then admit the prompt to slots.

    Attributes:
        graph: the facts about the prompt graph.
    """

    def __init__(self, backend: BackendBase, graph: PromptGraphFacts) -> None:
        self.backend, self.graph, self.as_traced = backend, graph, UnwrappedSubclasses()

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        with tensors.with_torch_function():
            arguments = with_heads_first(arguments, self.graph.tokens_first)
            return self._run(arguments, self.as_traced(arguments))

    def _run(self, arguments: tuple[Any, ...], traced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run the graph; `arguments` are Dynamo's, `traced` are the same with tensor subclasses unwrapped."""
        regions.note_run()
        run = self._code_for(traced)
        graph, results = self.graph, list(run(*traced))
        adopted = 0 if graph.adopted_past is None else traced[graph.adopted_past].shape[2]
        first_ids, rotated_key = self._checked_positions(results, traced)
        pins = self._call_pins(results, adopted)
        layers = [self._prompt_layer(results, i, adopted, pins, arguments, traced) for i in range(len(graph.sites))]
        del results[graph.outputs :]  # Dynamo's code expects its own outputs alone
        prompt = layers[0].tokens.valid.shape[1]
        for each in graph.sparse_indices:
            each.check(prompt)
        for index, dim in graph.scoring_outputs:
            results[index] = longer_placeholder(results[index], dim, 0)
        model_tensors = [arguments[index] for index in graph.module_inputs] or graph.constants
        pending = PendingPrompt(
            backend=self.backend,
            stores_unrotated_keys=graph.stores_unrotated_keys,
            notes=() if graph.adopted_past is None else (ADOPTED,),
            first_ids=first_ids,
            rotated_key=rotated_key,
            model_tensors=model_identity.weak_references(model_tensors),
            layers=layers,
            new=prompt - adopted,
        )
        del layers  # so that the keys and values of each layer are freed once they are stored
        for site, cache in zip(graph.sites, pending.admit_layers(), strict=True):
            results[site.keys_out], results[site.values_out] = handles_of(cache, site.token_dims)
        publish_run(PromptResult(self, arguments, tuple(results)))
        return tuple(results)

    def _prompt_layer(
        self,
        results: list[Any],
        i: int,
        adopted: int,
        pins: Pins | None,
        arguments: tuple[Any, ...],
        traced: tuple[Any, ...],
    ) -> PromptLayer:
        site, outputs, policy = self.graph.sites[i], self.graph.layers[i], self.graph.policies[i]
        key, value = results[outputs.key], results[outputs.value]
        valid = self._valid(results, i, key)
        sums = [results[index] for index in outputs.statistics]
        attention = as_attention(policy, sums, valid[:, adopted:], site.sharding) if sums else Attention()
        heads = key.shape[1]
        if site.computed:
            key, value = join_heads(key), join_heads(value)
        statistics_operands = list[StatisticsOperands]()
        if outputs.operands:
            operands: list[Any] = [None if index is None else results[index] for index in outputs.operands]
            query, attended, mask, sink_logit = operands
            options: dict[str, Any] = dict(heads=key.shape[1], sharding=site.sharding)
            statistics_operands.append(
                StatisticsOperands(query, attended, mask, site.causal, site.scale, site.cap, sink_logit, **options)
            )
        index = self.graph.output_projections[i]
        by_head = None if index is None else output_weight_by_head(traced[index], key.shape[1], value.shape[3])
        return PromptLayer(
            policy=policy,
            heads=heads,
            site=site,
            tokens=TokensToAdmit(key, value, valid, attention, pins, by_head, tuple(statistics_operands)),
            key_projections=model_identity.weak_references(arguments[index] for index in self.graph.key_projections[i]),
            output_projection=None if index is None else weakref.ref(arguments[index]),
        )

    def _call_pins(self, results: list[Any], adopted: int) -> Pins | None:
        """Return the pins of the call that is running, if any, for all tokens of the prompt."""
        pins, key = call_pins(), results[self.graph.layers[0].key]
        if pins is None:
            return None
        pins.check(self.backend.policy, key.shape[0], key.shape[2] - adopted)
        return pins.after(adopted)

    def _valid(self, results: list[Any], i: int, key: Tensor) -> Tensor:
        """Return bool [B, S], False for padding."""
        rows, _, count, _ = key.shape
        index = self.graph.layers[i].valid_output
        if index is None:
            return torch.ones(rows, count, dtype=torch.bool, device=key.device)
        valid: Tensor = results[index].expand(rows, -1)
        return valid

    @abc.abstractmethod
    def _code_for(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the code for a prompt."""

    def _checked_positions(self, results: list[Any], arguments: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None]:
        """Check the position ids, and return `LayerCache.first_ids` and `rotated_key`; None without checks."""
        return None, None


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """One run of a prompt graph: its executor, Dynamo's arguments, and the results for Dynamo."""

    executor: PromptExecutor
    arguments: tuple[Any, ...]
    dynamo_results: tuple[Any, ...]


def _check_policy(policy: Policy, policies: list[Policy], sites: list[AttentionSite]) -> None:
    """Raise UnsupportedGraph if the policy needs more of a prompt than this graph shows, and warn if it reads more."""
    adopts = any(site.past_key is not None for site in sites)
    sliding = next((site for site in sites if site.window is not None), None)
    refusals = {
        f"{policy} replays the attention of the prompt": any("scan" in each.statistics for each in policies),
        "this layer stored only the end of the prompt": sliding is not None,
        f"{policy.name} numbers the tokens of a prompt": policy.renumbers,
    }
    for reason, holds in refusals.items():
        if adopts and holds:
            why = f"{reason}, and this prompt ran uncompiled; run it through the compiled model"
            walk.refuse(sites[0].call, why)
    if sliding is not None and policy.renumbers:
        why = f"{policy.name} numbers the tokens of all layers alike, and this layer has its own sliding window"
        walk.refuse(sliding.call, why)
    if adopts and any(each.statistics for each in policies):
        warnings.warn(UNSEEN_PROMPT.format(policy.name), KVPassWarning, stacklevel=2)


def _graph_facts(captured: Capture, rewrite_input: PromptRewriteInput, layers: list[LayerOutputs]) -> PromptGraphFacts:
    """Return the facts about a graph; `layers` are the outputs of its rewrite."""
    sites, graph = rewrite_input.sites, rewrite_input.canonical_gm.graph
    placeholders, outputs = walk.placeholders(graph), walk.results(graph)
    sparse_indices = [each for site in sites for each in sparse_index.sparse_indices(site.mask)]
    grown = [pair for each in sparse_indices for pair in sparse_index.cached_scoring_keys(each, outputs)]
    return PromptGraphFacts(
        sites=[site.facts for site in sites],
        policies=rewrite_input.policies,
        stores_unrotated_keys=rewrite_input.stores_unrotated_keys,
        layers=layers,
        outputs=len(outputs),
        module_inputs=[index for index, node in enumerate(placeholders) if dynamo.is_of_module(node)],
        key_projections=[projections.key_projection_indices(site) for site in sites],
        output_projections=[
            projections.required_projection_index(site, each)
            for site, each in zip(sites, rewrite_input.policies, strict=True)
        ],
        adopted_past=placeholders.index(sites[0].past_key) if sites[0].past_key else None,
        constants=[*rewrite_input.canonical_gm.parameters(), *rewrite_input.canonical_gm.buffers()],
        sparse_indices=sparse_indices,
        scoring_outputs=[(outputs.index(node), dim) for node, dim in grown],
        tokens_first=captured.tokens_first,
    )


class PromptRunner(PromptExecutor):
    """Runner of a prompt graph.

    Attributes:
        inputs: the inputs of the canonical graph, by which sizes are measured.
        code: the code of the rewritten graph.
        checks: of position ids and of the rotation of keys, if keys are stored before their rotary embedding.
        unchecked: the graphs to compare at the first call; None without validation, or after it.
        rewritten_gm: the rewritten graph; None after it is compiled, unless prompts that fail added guards run it.
        added: the guards that compiling the graph has added to Dynamo's.
    """

    def __init__(
        self, backend: BackendBase, captured: Capture, examples: Sequence[Any], stores_unrotated_keys: bool
    ) -> None:
        canonical_gm, sites = captured.canonical_gm, captured.sites
        policies = policies_by_layer(backend.policy, len(sites))
        _check_policy(backend.policy, policies, sites)
        rewrite_input = PromptRewriteInput(
            canonical_gm=canonical_gm,
            sites=sites,
            policies=policies,
            budget=backend.budget,
            stores_unrotated_keys=stores_unrotated_keys,
            with_operands=backend.keeps_operands(policies),
            examples=with_heads_first(examples, captured.tokens_first),
            padding_by_site=padding_inputs_of_sites(canonical_gm, sites, step=False),
        )
        rewrite = rewrite_prompt(rewrite_input)
        super().__init__(backend, _graph_facts(captured, rewrite_input, rewrite.outputs))
        self.inputs, self.code = splicing.extract(canonical_gm, []).graph, DeferredCode()
        self.checks: tuple[PositionCheck, RotationCheck] | None = None
        if stores_unrotated_keys:
            self.checks = PositionCheck(canonical_gm, sites), RotationCheck(canonical_gm, sites)
        self.unchecked = PromptCase(captured.dynamo_gm, rewrite_input) if backend.validate else None
        self.rewritten_gm: fx.GraphModule | None = rewrite.rewritten_gm
        self.added = symbolic_shapes.AddedGuards()

    def compile(self, examples: Sequence[Any]) -> None:
        """Compile the rewritten graph by the inner compiler, whose errors are passed on.

        A prompt may be the only one, and on a CPU compiling takes longer than the prompt itself.  So the rewritten
        graph runs uncompiled at first, and is compiled when another prompt arrives on it.
        """
        may_come_once = self.backend.inner == "inductor" and inductor.on_cpu(examples)
        if may_come_once and not self.backend.compiles_at_once:
            return
        # A transposed tensor would be new to the compiler, with separate sizes.
        shown = {index: value for index, value in enumerate(self._inputs()) if index in self.graph.tokens_first}
        self.code.compiled = self._compile_graph([shown.get(index, x) for index, x in enumerate(examples)])

    def _inputs(self) -> list[Any]:
        """Return the example values of the rewritten graph's inputs."""
        assert self.rewritten_gm is not None
        return [walk.example_value(node) for node in walk.placeholders(self.rewritten_gm.graph)]

    def _compile_later(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Compile the rewritten graph after Dynamo has set its guards, and note the guards that compiling adds."""
        inputs = self._inputs()
        self.added.begin(inputs)
        return self._compile_graph(inputs if any(map(symbolic_shapes.symbols, inputs)) else arguments)

    def _compile_graph(self, examples: Sequence[Any]) -> Callable[..., Any]:
        assert self.rewritten_gm is not None
        returned = walk.results(self.rewritten_gm.graph)
        layers = [returned[site.keys_out] for site in self.graph.sites]
        with dynamo.compile_lock():
            run = self.backend.compile_prompt(self.rewritten_gm, examples, layers)
        if not self.added.expressions:  # nothing reads the graph any more
            self.rewritten_gm = None
        return run

    def _code_for(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the code for a prompt: the uncompiled graph if the prompt does not fulfil the added guards."""
        run = self.code.for_run(self.rewritten_gm, lambda: self._compile_later(arguments))
        added = self.added.expressions
        if not added or symbolic_shapes.are_true(added, shapes.measure_symbols(self.inputs, arguments)):
            return run
        assert self.rewritten_gm is not None
        return UncompiledCode(self.rewritten_gm)

    def _run(self, arguments: tuple[Any, ...], traced: tuple[Any, ...]) -> tuple[Any, ...]:
        self._validate(traced)
        return super()._run(arguments, traced)

    def _validate(self, arguments: tuple[Any, ...]) -> None:
        """Validate the rewritten graph against the model's own on the first call, before it runs."""
        if self.unchecked is None:
            return
        with dynamo.compile_lock():
            if self.unchecked is not None:  # no other thread has validated it meanwhile
                done = validate_prompt(self.unchecked, arguments)
                self.unchecked = None
                self.backend.note_validation("prompt", done)

    def _checked_positions(self, results: list[Any], arguments: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None]:
        if self.checks is None:
            return None, None
        positions, rotation = self.checks
        key = results[self.graph.layers[0].key]

        def sizes() -> SizeResolver:
            return SizeResolver((), shapes.measure_symbols(self.inputs, arguments), key.shape[2])

        first_ids = positions.first_ids(arguments, self._valid(results, 0, key))
        return first_ids, rotation.rotated_key(arguments, sizes, key.device)
