"""Record which compiled graphs a `DecodeLoop` runs and what their arguments are, for `kvpass.export`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import model_access, versions
from kvpass.cache.handle import Handle
from kvpass.cache.model_cache import caches_in
from kvpass.decoding import artifact_folder
from kvpass.decoding.artifact_folder import ExportFiles
from kvpass.decoding.cache_files import CacheObjectWriter
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.model_call import find_logits, name_parts
from kvpass.decoding.stepping import index_of_tensor
from kvpass.errors import UnsupportedGraph
from kvpass.lowering.layer_dedup.link import LinkedSegments
from kvpass.runtime import exported_graphs, prompts, step_execution, steps
from kvpass.runtime.call_context import collect_runs, publish_run

UNUSED_IDS = (
    "this model cannot be exported: its token ids are not read in its graph; read the ids that its forward is passed"
)
ONE_LENGTH = "this model cannot be exported: its budget holds prompts of one length alone; raise the budget"
OUTSIDE_LOGITS = "this model cannot be exported: its logits are not computed in its graph; return them unchanged"


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """One call of the model in one graph.

    Attributes:
        inputs: the tensors of the call by name: ids [B, q] and, if the model takes them, mask and positions.
        before: the tokens seen before.
        result: the prompt or step that ran.
        logits: [B, 1, vocabulary].
        cache: the model's cache object after a prompt, see `CacheObjectWriter`.
    """

    inputs: dict[str, Tensor]
    before: int
    result: prompts.PromptResult | step_execution.StepResult
    logits: Tensor | None
    cache: Any

    @property
    def kind(self) -> tuple[str, int, bool]:
        """The kind of graph, the rows, and whether the call passed a mask or positions."""
        rows, new = self.inputs["ids"].shape
        what = "prompt" if isinstance(self.result, prompts.PromptResult) else "step" if new == 1 else "chunk"
        return what, rows, len(self.inputs) > 1

    @property
    def counts(self) -> dict[str, int]:
        """The counts that an argument may be, by name."""
        return token_counts(self.before, *self.inputs["ids"].shape)


def token_counts(length: int, rows: int, new: int) -> dict[str, int]:
    """Return the counts of a call of `new` tokens in each row, by their names in an artifact."""
    return {"seen": length, "new": new, "total": length + new, "rows": rows}


class RecordedModel:
    """The model as a loop calls it, which records each call, oldest first."""

    def __init__(self, call: Callable[..., Any], backend: Any) -> None:
        self.call, self.backend = call, backend
        self.calls: list[RecordedCall] = []

    def __call__(self, ids: Tensor, **named: Any) -> Any:
        cache = next(named[name] for name in (model_access.OLD_KEYWORD, model_access.NEW_KEYWORD) if name in named)
        before = caches_in(cache)[0].length if caches_in(cache) else 0
        with collect_runs() as ran:
            out = name_parts(self.call(ids, **named))
        publish_run(*ran)
        exported_graphs.check_layouts(caches_in(model_access.cache_of_output(out)))  # before steps are compiled
        if len(ran) != 1:
            raise UnsupportedGraph(
                f"this model cannot be exported: a call ran {len(ran)} graphs of kvpass instead of one; see what "
                "breaks the graph with TORCH_LOGS=graph_breaks"
            )
        names = {"attention_mask": "mask", "position_ids": "positions"}
        inputs = {"ids": ids} | {names[name]: value for name, value in named.items() if name in names}
        is_prompt = isinstance(ran[0], prompts.PromptResult)
        result = self._encode_cache(model_access.cache_of_output(out)) if is_prompt else None
        self.calls.append(RecordedCall(inputs, before, ran[0], find_logits(out), result))
        return out

    def _encode_cache(self, cache: Any) -> Any:
        tensors: dict[str, Tensor] = {}
        encoded = CacheObjectWriter(caches_in(cache), self.backend, tensors).encode(cache, "cache")
        if tensors:
            raise UnsupportedGraph(f"this model cannot be exported: its cache holds tensors: {', '.join(tensors)}")
        return encoded


@contextlib.contextmanager
def recording_calls(loop: DecodeLoop) -> Iterator[RecordedModel]:
    """Record all calls that the loop makes inside."""
    before = loop.model_call
    result = RecordedModel(before.call, loop.backend)
    loop.model_call = dataclasses.replace(before, call=result)
    try:
        yield result
    finally:
        loop.model_call = before


# -- manifests of graphs -----------------------------------------------------------------------------------------------


def graph_manifests(model: torch.nn.Module, calls: Sequence[RecordedCall], files: ExportFiles) -> list[dict[str, Any]]:
    """Return the manifests of the graphs of each kind of call."""
    by_kind: dict[Any, list[RecordedCall]] = {}
    for call in calls:
        by_kind.setdefault(call.kind, []).append(call)
    writer = _GraphWriter(tensor_names(model), files)
    return [each for kind, alike in by_kind.items() for each in writer.manifests(kind, alike)]


def tensor_names(model: torch.nn.Module) -> dict[int, str]:
    """Return the names of a model's parameters and buffers by their ids."""
    # reversed, so that the first of a tied tensor's names is kept
    return {id(tensor): name for name, tensor in reversed([*named_tensors(model)])}


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model, a shared one under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class _GraphWriter:
    def __init__(self, names: Mapping[int, str], files: ExportFiles) -> None:
        self.names, self.files = names, files

    def manifests(self, kind: tuple[str, int, bool], calls: Sequence[RecordedCall]) -> list[dict[str, Any]]:
        """Return the manifests of one kind of call, for the graph of the last call.

        If the policy's code for a chunk depends on its length, there is one for each length.
        """
        alike = [call for call in calls if call.result.executor is calls[-1].result.executor]
        by_code = {id(code): call for call in alike if (code := _code_of_chunk(call)) is not None}
        return [self._manifest(kind, last, alike) for last in by_code.values() or alike[-1:]]

    def _manifest(
        self, kind: tuple[str, int, bool], last: RecordedCall, alike: Sequence[RecordedCall]
    ) -> dict[str, Any]:
        ids = next((i for i, x in enumerate(last.result.arguments) if x is last.inputs["ids"]), None)
        if ids is None:
            raise UnsupportedGraph(UNUSED_IDS)
        if kind[0] == "prompt" and len({call.counts["new"] for call in alike}) == 1:
            raise UnsupportedGraph(ONE_LENGTH)
        manifest, read = self._prompt(last, ids) if kind[0] == "prompt" else self._step(last, alike, ids)
        logits = None if last.logits is None else index_of_tensor(_results(last.result), last.logits)
        if logits is None:
            raise UnsupportedGraph(OUTSIDE_LOGITS)
        arguments = {str(index): self._argument(index, alike) for index in sorted(read)}
        common = dict(kind=kind[0], rows=kind[1], masked=kind[2], logits=logits, arguments=arguments)
        return {**common, "count": len(last.result.arguments), **manifest}

    def _prompt(self, last: RecordedCall, ids: int) -> tuple[dict[str, Any], set[int]]:
        result = last.result
        assert isinstance(result, prompts.PromptResult)
        runner = result.executor
        assert isinstance(runner, prompts.PromptRunner)
        manifest, code = exported_graphs.prompt_manifest(runner), runner.code.compiled
        most = exported_graphs.longest_prompt(runner, result.arguments, ids)
        needed = set(code.reads if isinstance(code, LinkedSegments) else range(len(result.arguments)))
        needed |= {*manifest["module_inputs"], *(index for indices in manifest["key_projections"] for index in indices)}
        of_object = {"object": last.cache, "tokens": last.inputs["ids"].shape[1]}
        return {**manifest, "code": self._code(code), "lengths": [2, most], "cache": of_object}, needed

    def _step(self, last: RecordedCall, alike: Sequence[RecordedCall], ids: int) -> tuple[dict[str, Any], set[int]]:
        result, variants = last.result, {}
        assert isinstance(result, step_execution.StepResult)
        runner = result.executor
        assert isinstance(runner, steps.StepRunner)
        manifest = exported_graphs.step_manifest(runner, result, ids)
        chunk = result.signature.query_len > 1
        lengths = exported_graphs.chunk_length_range(runner, result, ids) if chunk else (1, 1)
        for each in [result] if chunk else [call.result for call in alike]:
            assert isinstance(each, step_execution.StepResult)
            assert each.variant is not None
            if each.inputs.compact not in variants:
                code = self._code(each.variant.code.compiled)
                variants[each.inputs.compact] = {**exported_graphs.variant_manifest(each.signature), "code": code}
        read = {ids, *manifest["counters"], *(index for indices in manifest["padding_inputs"] for index in indices)}
        read |= {index for each in variants.values() for index in (*each["inputs"], *each["columns"])}
        return {
            **manifest,
            "lengths": lengths,
            "variants": [[compact, each] for compact, each in variants.items()],
        }, read

    def _code(self, run: Any) -> dict[str, Any]:
        manifest = artifact_folder.code_manifest(run, self.files)
        if manifest is None:
            newer = versions.untested_version("torch")
            raise UnsupportedGraph(
                "this model cannot be exported: Inductor's code for it needs more than its kernels; pass "
                "inner='inductor' without a mode and without options"
                + (f" (or torch {newer}, which is newer than the tested versions, writes other code)" if newer else "")
            )
        return manifest

    def _argument(self, index: int, calls: Sequence[RecordedCall]) -> dict[str, Any]:
        """Return where a later call finds one of Dynamo's arguments; the rule must hold for all recorded calls."""
        values = [call.result.arguments[index] for call in calls]
        first = values[0]
        if isinstance(first, Handle):
            return {"value": None}
        if isinstance(first, Tensor):
            return self._tensor(index, values, calls)
        if all(type(value) is type(first) and value == first for value in values):  # 1 == 1.0 == True
            return {"value": first}
        values_by_call = [*zip(values, calls, strict=True)]
        for name in calls[0].counts:
            if all(call.counts[name] == value for value, call in values_by_call):
                return {"count": name}
        return self._unknown(index, values)

    def _tensor(self, index: int, values: Sequence[Tensor], calls: Sequence[RecordedCall]) -> dict[str, Any]:
        first = values[0]
        if all(value is first for value in values) and id(first) in self.names:
            return {"tensor": self.names[id(first)]}
        values_by_call = [*zip(values, calls, strict=True)]
        for name in calls[0].inputs:
            if all(value is call.inputs[name] for value, call in values_by_call):
                return {"input": name}
        if all(value.dtype == first.dtype and torch.equal(value, first) for value in values):
            return {"saved": self.files.add_tensor(first)}
        return self._unknown(index, values)

    def _unknown(self, index: int, values: Iterable[Any]) -> dict[str, Any]:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise UnsupportedGraph(
            f"this model cannot be exported: argument {index} of its graph, {kinds}, is neither a tensor of the model, "
            "nor passed to it, nor a constant; make it a buffer of the model"
        )


def _results(result: prompts.PromptResult | step_execution.StepResult) -> Sequence[Any]:
    """Return the results of the code that an artifact has: of a prompt Dynamo's, of a step the rewritten graph's."""
    return result.dynamo_results if isinstance(result, prompts.PromptResult) else result.graph_results


def _code_of_chunk(call: RecordedCall) -> Any:
    """Return the compiled code of a chunk; None for other calls, and for a chunk that ran uncompiled."""
    result = call.result
    if not isinstance(result, step_execution.StepResult) or result.signature.query_len == 1 or result.variant is None:
        return None
    return result.variant.code.compiled
