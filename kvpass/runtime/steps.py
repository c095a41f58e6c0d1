"""Run step graphs: check the caches of a call, choose the compiled variant, and return Dynamo's outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvpass.cache.handle import check_order_and_lengths, current_cache, handles_of, with_heads_first
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.capture import Capture
from kvpass.capture.padding_analysis import padding_inputs_of_sites
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.fx import walk
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.pipeline import StepRewrite, rewrite_step
from kvpass.rewrite.step_graph import StepRewriteInput
from kvpass.rewrite.validation.conversation import StepCase
from kvpass.rewrite.validation.lockstep import Validation
from kvpass.rewrite.validation.steps import validate
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.cache_changes import grow_for, longer_placeholder
from kvpass.runtime.call_context import publish_run
from kvpass.runtime.checks import StepVerifier, describe_wrong_mask
from kvpass.runtime.padding_tracker import PaddingTracker
from kvpass.runtime.sizes import CallSizes, SizeInterpretation, StepSizeReader
from kvpass.runtime.step_execution import PreparedStep, StepExecutor, StepInputs, StepResult
from kvpass.runtime.variants import CompiledVariant, DynamicDims, ShapeKey, VariantCache
from kvpass.torch_private import dynamo, symbolic_shapes, tensors
from kvpass.torch_private.tensors import UnwrappedSubclasses

CONSTANT_COUNT = (
    "A layer stores only the last tokens of its window, and no input of this graph counts the tokens before them: if "
    "the model made its cache while torch traced the prompt, torch takes that count for a constant in the first step. "
    "Pass DynamicCache(config=model.config) to the prompt, or compile the model by kvpass.compile"
)


class StepRunner(StepExecutor):
    """Runner of a step graph on slots, for a decode step of one token or a chunk.

    The graph is rewritten at its first run, when the layouts are known.  It is compiled then or later, see
    `CompiledVariant`.

    Attributes:
        dynamo_gm: Dynamo's graph until the first rewrite is validated, then None.
        canonical_gm, placeholders, sites: the canonical graph, its inputs and its attention sites.
        tokens_first: see `Capture`; these arguments are transposed to [B, H, S, D] before they are used.
        pasts: for each site the argument indices of the past keys and values.
        sizes, verifier: read sizes from a call's arguments, and check the call.
        variants: the rewrites of the graph.
        validation: the result of validating the first rewrite.
    """

    sites: list[AttentionSite]

    def __init__(self, backend: BackendBase, captured: Capture) -> None:
        canonical_gm, sites = captured.canonical_gm, captured.sites
        self.sizes = StepSizeReader(canonical_gm, sites)
        self.placeholders = placeholders = walk.placeholders(canonical_gm.graph)
        padding_inputs = padding_inputs_of_sites(canonical_gm, sites, step=True)
        padding = PaddingTracker([tuple(map(placeholders.index, nodes)) for nodes in padding_inputs])
        super().__init__(backend, sites, [*self.sizes.counters.values()], padding)
        self.canonical_gm, self.dynamo_gm = canonical_gm, captured.dynamo_gm if backend.validate else None
        self.tokens_first = captured.tokens_first
        self.pasts = [(placeholders.index(s.past_key), placeholders.index(s.past_value)) for s in self.sites]  # type: ignore[arg-type]
        self.as_traced = UnwrappedSubclasses(index for pair in self.pasts for index in pair)
        self.verifier = StepVerifier(self.canonical_gm, self.sites)
        values = map(walk.example_value, self.canonical_gm.graph.nodes)
        self.variants = VariantCache({str(symbol) for each in values for symbol in symbolic_shapes.symbols(each)})
        self.validation: Validation | None = None

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        with tensors.with_torch_function():
            arguments = with_heads_first(arguments, self.tokens_first)
            try:
                return self._run(arguments)
            except UnsupportedGraph as refusal:
                tokens = arguments[self.pasts[0][0]].length + self.query_len(arguments)
                handles = [arguments[key] for key, _ in self.pasts]
                if wrong := describe_wrong_mask(self.canonical_gm, self.sites, arguments, tokens):
                    refusal.reason = f"{wrong}. With this mask: {refusal.reason}"
                elif not self.sizes.counters and any(x.cache.stored_tokens < x.length for x in handles):
                    refusal.reason += f". {CONSTANT_COUNT}"
                raise

    def _run(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        caches = [self._cache_of_layer(arguments, indices) for indices in self.pasts]
        check_order_and_lengths(caches)
        self.verifier.check_caches_match_layers(caches, arguments)
        self.padding.check_hidden(caches, self.sites)
        arguments = self.as_traced(arguments)
        query_len = self.query_len(arguments)
        if not query_len:
            walk.refuse(self.sites[0].call, "a call without new tokens on a cache")
        grow_for(caches, query_len)
        for cache, pins in self._caches_with_pins(caches):
            pins.check(cache.layout.policy, cache.layout.batch, query_len)
            self.backend.kv_store.make_room_for_pins(cache, pins)
        first_layer, ones_for_cached = caches[0], self.padding.ones_for_cached(caches, arguments, query_len)
        interpretation = self._choose_interpretation(caches, arguments, ones_for_cached)
        self.verifier.check_positions(
            first_layer, arguments, lambda: self.padding.valid_tokens(0, first_layer, arguments, query_len)
        )
        self.verifier.check_rotation(
            first_layer, arguments, lambda: self.sizes.resolve(self.sizes.call_sizes(caches, arguments), interpretation)
        )
        result = self.advance(StepInputs(caches, arguments, interpretation, ones_for_cached))
        self.padding.record_padding(caches, arguments, result.length_before, query_len)
        publish_run(result)
        return self._dynamo_outputs(result)

    def _cache_of_layer(self, arguments: tuple[Any, ...], indices: tuple[int, int]) -> LayerCache:
        cache = current_cache(arguments[indices[0]], "keys", self.backend)
        if current_cache(arguments[indices[1]], "values", self.backend) is not cache:
            raise CacheHandleError(
                "the keys and the values of a layer come from different layers or different conversations"
            )
        if any(arguments[index].token_dim != 2 for index in indices):
            raise CacheHandleError(
                "the cache of a layer has its tokens in another dimension than the one along which they are appended "
                "here: keep [B, H, S, D] or [B, S, H, D]"
            )
        return cache

    def query_len(self, arguments: tuple[Any, ...]) -> int:
        return self.sizes.query_len(arguments)

    def holds_after(self, result: StepResult) -> Callable[[int], bool]:
        """Return a predicate of n: whether the graph's guards are true n tokens after a step that ran."""
        return self.sizes.holds_after(result.inputs.other_sizes, result.arguments, result.length_before)

    # -- variants ---------------------------------------------------------------------------------------------------

    def _prepare_step(self, inputs: StepInputs) -> PreparedStep:
        caches, arguments = inputs.caches, inputs.arguments
        key = ShapeKey.of(caches, self.sizes.numbers(arguments))
        variant = self._find_variant(inputs, key)
        signature = variant.signature(key)
        host_values = signature.run_host_graph(arguments)
        flat = signature.flat_arguments([cache.slots for cache in caches], arguments, host_values, caches[0].length)
        run = variant.code_for(self.backend, flat, caches[0].layout.stores_unrotated_keys, signature.query_len > 1)
        if variant.serves(key):
            return PreparedStep(signature, host_values, flat, run, variant)
        # Compiling has added guards that this call does not meet.
        return self._prepare_step(inputs)

    def _find_variant(self, inputs: StepInputs, key: ShapeKey) -> CompiledVariant:
        """Return a variant of the graph for inputs with this key."""
        caches, other_sizes = inputs.caches, inputs.other_sizes
        sizes = self.sizes.call_sizes(caches, inputs.arguments)
        kind = (sizes.counters, sizes.windows, inputs.ones_for_cached, inputs.compact)
        call_key = (*kind, other_sizes, sizes.numbers, tuple((cache.layout, cache.slots.capacity) for cache in caches))
        variant = self.variants.find(call_key, key)
        if variant is not None:
            return variant
        shared = None
        if self.backend.has_dynamic_sizes(caches[0].layout.device):
            shared_sizes = self.sizes.share_symbols(other_sizes, sizes.numbers)
            headroom = tuple((key.shared_layout(x.layout), x.slots.capacity - x.layout.capacity) for x in caches)
            shared = (*kind, shared_sizes, headroom)

        def rewrite(dynamic: DynamicDims | None) -> StepRewrite:
            return self._rewrite(self._rewrite_input(inputs, key, sizes, dynamic))

        with dynamo.compile_lock():
            variant = self.variants.find(call_key, key)
            if variant is not None:  # another thread has rewritten it meanwhile
                return variant
            variant = self.variants.make(call_key, shared, key, self.query_len(inputs.arguments) == 1, rewrite)
            self.sizes.rewritten_interpretations.put(other_sizes, True)
        return variant

    def _rewrite_input(
        self, inputs: StepInputs, key: ShapeKey, sizes: CallSizes, dynamic: DynamicDims | None
    ) -> StepRewriteInput:
        """Return the input of a rewrite that serves these inputs, and others that differ in the dynamic sizes."""
        caches, other_sizes, dynamic_layouts = inputs.caches, inputs.other_sizes, list[Layout]()
        if dynamic is not None:
            other_sizes = self.sizes.share_symbols(other_sizes, sizes.numbers)
            dynamic_layouts = [key.dynamic_layout(i, x.layout, dynamic.by_index) for i, x in enumerate(caches)]
        return StepRewriteInput(
            canonical_gm=self.canonical_gm,
            sites=self.sites,
            layouts=[cache.layout for cache in caches],
            slots=[cache.slots for cache in caches],
            arguments=inputs.arguments,
            sizes=self.sizes.resolve(sizes, other_sizes, dynamic),
            length=caches[0].length,
            windows=sizes.windows,
            padding_inputs=self.padding.as_padding_inputs(inputs.ones_for_cached, self.placeholders),
            compact=inputs.compact,
            dynamic_layouts=dynamic_layouts,
        )

    def _choose_interpretation(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], ones_for_cached: frozenset[int]
    ) -> SizeInterpretation:
        """Return the first interpretation of the sizes of other inputs for which the graph can be rewritten."""
        interpretations = self.sizes.size_interpretations(caches, arguments)
        if len(interpretations) == 1:
            return interpretations[0]
        compact, _ = self.next_clocks(caches, arguments) if self.query_len(arguments) == 1 else (False, [])
        refusals = []
        for interpretation in interpretations:
            try:
                key = ShapeKey.of(caches, self.sizes.numbers(arguments))
                self._find_variant(StepInputs(caches, arguments, interpretation, ones_for_cached, compact), key)
            except UnsupportedGraph as refusal:
                refusals.append(refusal)
            else:
                return interpretation
        raise refusals[0]

    def _rewrite(self, rewrite_input: StepRewriteInput) -> StepRewrite:
        """Rewrite the graph for a call, and validate the first rewrite.

        Later rewrites differ in sizes, in whether the step compacts, and in how they read the mask of cached tokens;
        tests cover them.
        """
        with walk.converting_errors(site.call for site in self.sites):
            context, rewrite = self.backend.rewrite(rewrite_input)
            if self.backend.validate and self.validation is None:
                self._validate(context, rewrite)
        return rewrite

    def _validate(self, context: StepContext, rewrite: StepRewrite) -> None:
        policy = context.layouts[0].policy
        if policy.scales_logits or policy.biases:
            plain = context.given.with_layouts(lambda x: dataclasses.replace(x, policy=x.policy.with_plain_logits()))
            context = StepContext(plain)
            rewrite = rewrite_step(context)
        assert self.dynamo_gm is not None
        self.validation = validate(StepCase(self.dynamo_gm, context, rewrite, self.pasts))
        self.backend.note_validation("step", self.validation)
        self.dynamo_gm = None

    def _dynamo_outputs(self, result: StepResult) -> tuple[Any, ...]:
        """Return the outputs of Dynamo's graph from the results of the rewritten one."""
        caches, outputs_spec, query_len = result.caches, result.signature.dynamo_outputs, result.signature.query_len
        outputs = [None if index is None else result.graph_results[index] for index in outputs_spec.indices]
        for index, value in zip(outputs_spec.grown, result.host_values.outputs, strict=True):
            outputs[index] = value
        for index, beyond in outputs_spec.lengths.items():
            outputs[index] = result.length_before + beyond
        for index, (past, dim) in outputs_spec.dropped.items():
            outputs[index] = longer_placeholder(result.arguments[past], dim, query_len)
        for site, cache in zip(self.sites, caches, strict=True):
            outputs[site.keys_out], outputs[site.values_out] = handles_of(cache, site.token_dims)
        return tuple(outputs)
