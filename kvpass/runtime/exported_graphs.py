"""Run prompts and steps on the code of an artifact: `PromptRunner` and `StepRunner` without their graphs.

A runner reads its graph to find out what its arguments mean.  An artifact stores these facts together with the compiled
code.  Anyone may call a model in any way, so a graph's runner checks each call.  A `DecodeLoop` needs no such check:
its positions count real tokens, and its mask never changes for earlier ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import SiteFacts
from kvpass.errors import ArtifactError, UnsupportedGraph
from kvpass.fx import shapes
from kvpass.rewrite.pipeline import HostValues, StepSignature
from kvpass.rewrite.prompt import LayerOutputs
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.cache_changes import grow_for
from kvpass.runtime.call_context import publish_run
from kvpass.runtime.padding_tracker import PaddingTracker
from kvpass.runtime.prompts import PromptExecutor, PromptGraphFacts, PromptRunner, policies_by_layer
from kvpass.runtime.sizes import guard_predicate
from kvpass.runtime.step_execution import PreparedStep, StepExecutor, StepInputs, StepResult
from kvpass.runtime.steps import StepRunner
from kvpass.torch_private import inductor

MAX_EXPORTED_TOKENS = 1 << 20
"""The largest number of tokens for which an export evaluates the guards of a graph."""
MAX_CHUNK_TOKENS = 1 << 13
"""The largest number of tokens in a chunk for which an export evaluates the guards of a graph."""


class ExportedPrompt(PromptExecutor):
    """A runner of prompts on exported code."""

    def __init__(self, backend: BackendBase, manifest: Mapping[str, Any], run: inductor.Compiled) -> None:
        """Take a manifest of `prompt_manifest`, and its code."""
        count = len(manifest["sites"])
        graph = PromptGraphFacts(
            sites=[SiteFacts(**site) for site in manifest["sites"]],
            policies=policies_by_layer(backend.policy, count),
            stores_unrotated_keys=manifest["stores_unrotated_keys"],
            layers=[LayerOutputs(**each, operands=None) for each in manifest["results"]],
            outputs=manifest["outputs"],
            module_inputs=manifest["module_inputs"],
            key_projections=[tuple(indices) for indices in manifest["key_projections"]],
            output_projections=[None] * count,
        )
        super().__init__(backend, graph)
        self.run = run

    def _code_for(self, arguments: tuple[Any, ...]) -> inductor.Compiled:
        return self.run


def prompt_manifest(runner: PromptRunner) -> dict[str, Any]:
    """Return the manifest of a prompt graph, or refuse a prompt that needs its graph."""
    graph = runner.graph
    _refuse(
        {
            "heads that are sharded over processes": any(site.sharding is not None for site in graph.sites),
            "attention that selects keys by an index": bool(graph.sparse_indices or graph.scoring_outputs),
            "weights that are constants of the graph": bool(graph.constants),
            "a policy that reads the layers' output projections": any(i is not None for i in graph.output_projections),
            "crop above 0, which keeps the tensors of a prompt": any(layer.operands for layer in graph.layers),
        }
    )
    return dict(
        stores_unrotated_keys=graph.stores_unrotated_keys,
        sites=[vars(site) for site in graph.sites],
        results=[
            dict(key=o.key, value=o.value, valid_output=o.valid_output, statistics=o.statistics) for o in graph.layers
        ],
        module_inputs=list(graph.module_inputs),
        key_projections=[list(indices) for indices in graph.key_projections],
        outputs=graph.outputs,
    )


def longest_prompt(runner: PromptRunner, arguments: Sequence[Any], ids_index: int) -> int:
    """Return the largest number of tokens, up to `MAX_EXPORTED_TOKENS`, in a prompt that a graph's guards allow."""
    graph, length = runner.inputs, arguments[ids_index].shape[1]
    now = shapes.measure_symbols(graph, arguments)
    growing = {symbol for symbol, number in now.items() if number == length}
    holds = guard_predicate(shapes.guards(graph), now | dict.fromkeys(growing, 2), growing)
    return _largest(holds, MAX_EXPORTED_TOKENS - 2) + 2


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest n, at most `most`, such that the condition holds for 0..n; -1 if there is none."""
    return next((number - 1 for number in range(most + 1) if not holds(number)), most)


class ExportedStep(StepExecutor):
    """A runner of steps of one token, or of chunks, on exported code for up to `max_length` earlier tokens."""

    def __init__(
        self, backend: BackendBase, manifest: Mapping[str, Any], runs: Mapping[bool, tuple[Mapping[str, Any], Any]]
    ) -> None:
        """Take a manifest of `step_manifest`; `runs` has each variant's manifest and code, by whether it compacts."""
        padding = PaddingTracker([tuple(indices) for indices in manifest["padding_inputs"]])
        super().__init__(backend, [SiteFacts(**site) for site in manifest["sites"]], manifest["counters"], padding)
        self.max_length, self.layouts, self._ids_index = manifest["max_length"], manifest["layouts"], manifest["ids"]
        fields = {compact: {name: variant[name] for name in _VARIANT_FIELDS} for compact, (variant, _) in runs.items()}
        self.variants_by_compact = {compact: (fields[compact], run) for compact, (_, run) in runs.items()}

    def call(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> StepResult:
        """Run new tokens on caches, and publish the result to the `DecodeLoop` that called."""
        query_len = self.query_len(arguments)
        grow_for(caches, query_len)
        layouts = layout_manifests(caches)
        if layouts != self.layouts:
            needed, exported = _describe_difference(layouts, self.layouts), _describe_difference(self.layouts, layouts)
            raise ArtifactError(
                f"this prompt needs slots of {needed}, and the artifact was exported for {exported}: run it by a "
                "DecodeLoop that compiles"
            )
        result = self.advance(StepInputs(caches, arguments))
        self.padding.record_padding(caches, arguments, result.length_before, query_len)
        publish_run(result)
        return result

    def query_len(self, arguments: tuple[Any, ...]) -> int:
        return int(arguments[self._ids_index].shape[1])

    def holds_after(self, result: StepResult) -> Callable[[int], bool]:
        return lambda more: result.length_before + more <= self.max_length

    def _prepare_step(self, inputs: StepInputs) -> PreparedStep:
        variant, length = self.variants_by_compact.get(inputs.compact), inputs.caches[0].length
        if variant is None or length > self.max_length:
            reason = (
                "with a compaction"
                if variant is None
                else f"after {length} tokens instead of at most {self.max_length}"
            )
            raise ArtifactError(
                f"the artifact has no code for a step {reason}: run the conversation by a DecodeLoop that compiles"
            )
        manifest, run = variant
        signature = StepSignature(**manifest, query_len=self.query_len(inputs.arguments))
        flat = signature.flat_arguments(
            [cache.slots for cache in inputs.caches], inputs.arguments, HostValues(), length
        )
        return PreparedStep(signature, HostValues(), flat, run)


_VARIANT_FIELDS = ("inputs", "dynamic_stride_inputs", "columns", "admitted_outputs", "valid_output")
"""The fields of a `StepSignature` that a manifest has; others are refused, or belong to a call."""


def variant_manifest(signature: StepSignature) -> dict[str, Any]:
    """Return the manifest of a step's code, or refuse to export it."""
    _refuse(
        {
            "a policy with trained weights": bool(signature.policy_weights),
            "a mask that is computed from all tokens in every call": not signature.is_repeatable,
        }
    )
    return {name: getattr(signature, name) for name in _VARIANT_FIELDS}


def check_layouts(caches: Sequence[LayerCache]) -> None:
    """Refuse to export steps on caches whose slots depend on the prompt, or differ among heads or layers."""
    _refuse(
        {
            "slots whose number depends on the prompt": any(cache.layout.exact_capacity for cache in caches),
            "heads with different budgets": any(cache.layout.policy.divides_heads for cache in caches),
            "layers with their own sliding window": any(cache.window is not None for cache in caches),
        }
    )


def step_manifest(runner: StepRunner, result: StepResult, ids_index: int) -> dict[str, Any]:
    """Return the manifest of a step graph that has run; `ids_index` is the index of the token ids."""
    before, holds = result.length_before, runner.holds_after(result)
    return dict(
        sites=[vars(site.facts) for site in runner.sites],
        padding_inputs=list(runner.padding.inputs),
        counters=list(runner.counters),
        max_length=before + _largest(holds, MAX_EXPORTED_TOKENS - before),
        ids=ids_index,
        layouts=layout_manifests(result.caches),
    )


def chunk_length_range(runner: StepRunner, result: StepResult, ids_index: int) -> tuple[int, int]:
    """Return the smallest and the largest number of tokens that a chunk's code serves, up to `MAX_CHUNK_TOKENS`."""
    graph, variant, query_len = runner.canonical_gm.graph, result.variant, int(result.signature.query_len)
    assert variant is not None
    counts_new = {symbol: source == (ids_index, 1) for symbol, source in runner.sizes.sources.items()}
    new = {symbol for symbol, counts in counts_new.items() if counts}
    others = zip(runner.sizes.other_sources, result.inputs.other_sizes, strict=True)
    all_tokens = {symbol for symbol, size in others if size is None}
    now = shapes.measure_symbols(graph, result.arguments) | dict.fromkeys(new, 2)
    now |= dict.fromkeys(all_tokens, result.length_before + 2)
    holds = guard_predicate(shapes.guards(graph), now, new | all_tokens)

    def serves(length: int) -> bool:
        sizes = zip(counts_new.values(), variant.key.numbers, strict=True)
        numbers = tuple(length if counts else number for counts, number in sizes)
        return holds(length - 2) and variant.serves(dataclasses.replace(variant.key, numbers=numbers))

    least = query_len - _largest(lambda fewer: serves(query_len - fewer), query_len - 2)
    return least, query_len + _largest(lambda more: serves(query_len + more), MAX_CHUNK_TOKENS - query_len)


def layout_manifests(caches: list[LayerCache]) -> list[dict[str, Any]]:
    """Return the sizes of the layers' slots, one for each kind of layer."""
    names = ("budget", "batch", "heads", "key_dim", "value_dim", "stores_unrotated_keys", "row_budgets", "pins")
    result = [
        {name: getattr(cache.layout, name) for name in names} | {"slots": cache.slots.capacity} for cache in caches
    ]
    return [each for index, each in enumerate(result) if each not in result[:index]]


def _describe_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Describe the fields of the first layer that differ in the other."""
    layout, other_layout = one[0], other[0]
    changed = [f"{name} {value}" for name, value in layout.items() if other_layout.get(name) != value]
    return ", ".join(changed) or "several kinds"


def _refuse(reasons: Mapping[str, bool]) -> None:
    refusals = [reason for reason, holds in reasons.items() if holds]
    if refusals:
        raise UnsupportedGraph(f"this model and policy cannot be exported: {', '.join(refusals)}")
