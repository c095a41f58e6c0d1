"""Export compiled loops to disk, and load them where nothing is compiled: `export`, `load`.

An artifact is a folder:

    manifest.json        settings, versions, processor and model; for each graph how its arguments are found; digests
    *.so                 Inductor's kernels, one library each, and kvpass's own C++
    *.py                 the Python around the kernels of one segment
    tensors.safetensors  constants of the graphs, if there are any

Nothing is unpickled.  But it contains machine code, so load only artifacts from trusted sources.  Every
file is compared with its digest before any is loaded, and the manifest with its own digest.
"""

from __future__ import annotations

import os
import platform
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpass import policies, tensor_files, versions
from kvpass.arguments import Positive, check_arguments, require
from kvpass.backend import Backend
from kvpass.cache.handle import Handle
from kvpass.cache.model_cache import caches_in, refresh_handles, usable_caches_in
from kvpass.decoding import artifact_folder, export_recording
from kvpass.decoding.artifact_folder import TENSORS, ExportFiles, code_from_manifest, read_manifest, write_folder
from kvpass.decoding.cache_files import CacheObjectReader, FilePath, policy_of, settings_json
from kvpass.decoding.export_recording import RecordedCall, named_tensors
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.synthetic_conversation import failure, synthetic_tokens, visit_graphs
from kvpass.errors import ArtifactError, BudgetError, KVPassError, PolicyError, UnsupportedGraph
from kvpass.policies.base import Policy
from kvpass.runtime import model_identity
from kvpass.runtime.call_context import call_pins
from kvpass.runtime.exported_graphs import ExportedPrompt, ExportedStep
from kvpass.torch_private import generated_code, processor
from kvpass.torch_private.tensors import is_wrapper

PINS = "the artifact was exported without code for pinned tokens: use a DecodeLoop that compiles"


@check_arguments
def export(
    model: torch.nn.Module,
    path: FilePath,
    policy: str | Policy = "full",
    *,
    batch: Positive = 1,
    rows: Positive | None = None,
    prefill_chunk: Positive | None = None,
    **settings: Any,
) -> str:
    """Write an artifact with which `load` makes a `DecodeLoop` in another process, without compiling anything.

    A loop of these settings is compiled and run on synthetic conversations.  Then a loop is loaded from the artifact,
    and must generate equal tokens and leave equal slots.

    >>> kvpass.export(model, "smollm2-h2o", policy="h2o", budget=1024)
    >>> loop = kvpass.load("smollm2-h2o", model, stop=[tokenizer.eos_token_id])   # in another process

    Args:
        model: on a CPU, see `DecodeLoop`.
        path: the folder of the artifact; an existing artifact is replaced.
        policy: the eviction policy, see `kvpass.backend`.
        batch: the rows of prompts (`DecodeLoop.prompt`).
        rows: the number of requests that are decoded together, see `DecodeLoop`; None for a loop of prompts.
        prefill_chunk: see `DecodeLoop`.
        settings: the other arguments of `kvpass.backend`; the budget must be a number of slots.

    Returns:
        The digest of the artifact, 64 hexadecimal digits, which `load` can compare.

    Raises:
        PolicyError: an invalid setting, or a model that is not on a CPU.
        BudgetError: a budget that is not a number of slots, or that the policy cannot work with.
        UnsupportedGraph: the model or the policy needs more than compiled code and fixed slots.
        ArtifactError: the artifact cannot be written, or a loop that is loaded from it differs.
    """
    require(rows is None or batch == 1, "batch", batch, "requests (`rows`) have prompts of one row")
    return export_loop(DecodeLoop(model, policy, rows=rows, prefill_chunk=prefill_chunk, **settings), path, batch)


def export_loop(loop: DecodeLoop, path: FilePath, batch: int = 1) -> str:
    """Write the artifact of a new loop; afterwards the loop has compiled its graphs, as by `DecodeLoop.warm`.

    Args:
        path, batch: see `export`, also for what is returned and raised.
    """
    model, target = loop.model, Path(path)
    check_exportable(loop, target)
    before = _code_settings(model)
    with export_recording.recording_calls(loop) as result:
        visit_graphs(loop, batch, prefixes=True)
    after = _code_settings(model)
    constant = {name: value for name, value in before.items() if after.get(name) == value}  # it may count its calls
    with write_folder(target) as files:
        found = artifact_folder.write_manifest(files, _manifest(loop, result.calls, batch, constant, files))
        _check_equal(loop, load(files.folder, model, digest=found), batch)
    loop.reset()
    return found


def check_exportable(loop: DecodeLoop, target: Path) -> None:
    """Raise an error of `export` that is known before anything is compiled, for a loop and the folder to write."""
    artifact_folder.check_target(target)
    device = loop.device.type
    require(device == "cpu", "model", device, "only code for a CPU can be exported")
    named = "an artifact names its policy: give its class a `name` and decorate it with @kvpass.policies.register"
    require(policies.has_registered_class(loop.backend.policy), "policy", loop.backend.policy, named)
    require(loop.backend.inner == "inductor", "inner", loop.backend.inner, "only Inductor's code can be exported")
    if any(map(is_wrapper, (*loop.model.parameters(), *loop.model.buffers()))):
        raise UnsupportedGraph("this model cannot be exported: weights of it wrap other tensors, as quantised ones do")
    if not isinstance(loop.backend.budget, int):
        raise BudgetError(f"budget={loop.backend.budget}: an artifact has code for fixed slots; give their number")


def _manifest(
    loop: DecodeLoop, calls: Sequence[RecordedCall], batch: int, code_settings: dict[str, Any], files: ExportFiles
) -> dict[str, Any]:
    """Return the manifest of a loop's graphs, and add their code and constants to the files."""
    graphs = export_recording.graph_manifests(loop.model, calls, files)
    libraries = {name: files.add_library(file) for name, file in generated_code.built_libraries().items()}
    files.write_tensors()
    return dict(
        made_by=_versions_here(),
        processor=_processor_here(),
        settings=settings_json(loop.backend),
        loop=dict(rows=loop.rows, prefill_chunk=loop.prefill_chunk, batch=batch),
        model={**_model_manifest(loop.model), "code": code_settings},
        graphs=graphs,
        libraries=libraries,
    )


@check_arguments
def load(path: FilePath, model: torch.nn.Module, *, digest: str | None = None, **options: Any) -> DecodeLoop:
    """Return a `DecodeLoop` that runs the code of an artifact of `export`.

    An artifact contains machine code, which runs with the rights of the process: load only what you would run.

    Args:
        path: the folder of the artifact.
        model: the model with the weights for which the artifact was made, on a CPU.
        digest: the digest that `export` returned and that was kept elsewhere; None to trust the folder.
        options: the arguments of `DecodeLoop` that need no compiled code: `temperature`, `top_k`, `top_p`, `seed`,
            `stop`, `read_interval` and `pad`.

    Returns:
        The loop.  It gives equal tokens to a loop that compiles; calls for which the artifact has no code, such as
        prompts with pins, raise an error.

    Raises:
        ArtifactError: a missing, damaged or changed file, or an artifact for other versions, another processor, another
            number of threads, another model or other settings; the message says what differs.
        PolicyError: an argument that an artifact fixes.
    """
    fixed = {"temperature", "top_k", "top_p", "seed", "stop", "read_interval", "pad"}
    for name in options.keys() - fixed:
        raise PolicyError(f"{name}: the artifact has this setting: load takes {', '.join(sorted(fixed))}")
    folder = Path(path)
    try:
        manifest = read_manifest(folder, digest)
        _check_same(manifest["made_by"], _versions_here(), "was exported with", "this process has")
        _check_processor(manifest["processor"])
        _check_model(manifest["model"], model)
        return LoadedLoop(model, manifest, folder, options)
    except KVPassError as error:
        error.reword(f"{os.fspath(path)}: {error}")
        raise
    except Exception as error:  # whatever a manifest makes of the code that reads it
        raise ArtifactError(
            f"{os.fspath(path)}: its manifest cannot be read ({type(error).__name__}: {error})"
        ) from error


def check_loop_settings(loop: DecodeLoop, wanted: Backend, rows: int | None, prefill_chunk: int | None) -> None:
    """Raise ArtifactError unless a loaded loop has the settings of a backend and these arguments of `DecodeLoop`."""
    has = {"rows": loop.rows, "prefill_chunk": loop.prefill_chunk}
    wants = {"rows": rows, "prefill_chunk": prefill_chunk}
    _check_same(settings_json(loop.backend) | has, settings_json(wanted) | wants, "is for", "wanted is")


class LoadedLoop(DecodeLoop):
    """A `DecodeLoop` on the code of an artifact."""

    def __init__(
        self, model: torch.nn.Module, manifest: Mapping[str, Any], folder: Path, options: Mapping[str, Any]
    ) -> None:
        """Take a checked manifest, and other arguments of `DecodeLoop`."""
        self._manifest, self._folder = manifest, folder
        settings = dict(manifest["settings"])
        policy = policy_of(settings.pop("policy"))
        sizes = {name: manifest["loop"][name] for name in ("rows", "prefill_chunk")}
        super().__init__(model, policy, **sizes, **settings, **options)

    def _make_backend(self, policy: str | Policy, settings: dict[str, Any]) -> Backend:
        """Return a backend with the artifact's settings, also where torch.compile is disabled: nothing is compiled."""
        return Backend(policies.resolve(policy, {}), inner="inductor", mode=None, options=(), strict=True, **settings)

    def _compile_model(self) -> Callable[..., Any]:
        return ExportedCall(self.model, self.backend, self._manifest, self._folder)


class ExportedCall:
    """The model of a loaded loop: the code of an artifact for each kind of call."""

    def __init__(self, model: torch.nn.Module, backend: Any, manifest: Mapping[str, Any], folder: Path) -> None:
        self.model, self.backend = model, backend
        tensors = tensor_files.library().torch.load_file(folder / TENSORS) if TENSORS in manifest["files"] else {}
        generated_code.use_libraries({name: str(folder / file) for name, file in manifest["libraries"].items()})
        self.shapes, self.code_settings = manifest["model"]["tensors"], manifest["model"]["code"]
        self.graphs = [ExportedGraph(backend, each, folder, tensors) for each in manifest["graphs"]]

    def __call__(
        self,
        ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 1,
        **cache: Any,
    ) -> Any:
        """Run tokens ids [B, q] as the model does; see `ModelCall`."""
        if call_pins() is not None:
            raise PolicyError(f"pin: {PINS}")
        ((name, before),) = cache.items()
        layers = usable_caches_in(before, self.backend)
        rows, new = ids.shape
        kind = "prompt" if not layers else "step" if new == 1 else "chunk"
        graph = self._graph(kind, rows, attention_mask is not None, new)
        inputs = {"ids": ids, "mask": attention_mask, "positions": position_ids}
        counts = export_recording.token_counts(layers[0].length if layers else 0, rows, new)
        tensors = dict(named_tensors(self.model))  # which the user may have replaced
        _check_tensors(self.shapes, _tensor_manifest(self.model))
        _check_same_model(self.code_settings, _code_settings(self.model))
        arguments = graph.arguments(inputs, counts, tensors)
        if isinstance(graph.executor, ExportedStep):
            ran = graph.executor.call(layers, arguments)
            return types.SimpleNamespace(logits=ran.graph_results[graph.logits], **{name: refresh_handles(before, new)})
        results = graph.executor(*arguments)
        result = graph.cache_object(results, new, self.model)
        return types.SimpleNamespace(logits=results[graph.logits], **{name: result})

    def _graph(self, kind: str, rows: int, masked: bool, new: int) -> ExportedGraph:
        """Return the code for a kind of call of `new` tokens in each row."""
        alike = [
            x for x in self.graphs if [x.manifest[name] for name in ("kind", "rows", "masked")] == [kind, rows, masked]
        ]
        found = next((x for x in alike if x.manifest["lengths"][0] <= new <= x.manifest["lengths"][1]), None)
        if found is not None:
            return found
        call = f"a {kind} of {rows} row(s){', with a mask' if masked and kind == 'prompt' else ''}"
        if alike:
            known = " or ".join("{} to {}".format(*x.manifest["lengths"]) for x in alike)
            raise ArtifactError(f"{call} and {new} token(s): the artifact has code for {known} tokens")
        known = ", ".join(sorted({str(x.manifest["rows"]) for x in self.graphs if x.manifest["kind"] == kind}))
        raise ArtifactError(
            f"{call}: the artifact has code for {known or 'no'} row(s): export with another `batch` or `rows`"
        )


class ExportedGraph:
    """The code of an artifact for one kind of call.

    Attributes:
        executor: runs the code.
        logits: the index of the logits among its results.
    """

    def __init__(self, backend: Any, manifest: Mapping[str, Any], folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self.manifest, self.tensors, self.logits = manifest, tensors, manifest["logits"]
        self.executor: ExportedPrompt | ExportedStep
        try:
            if manifest["kind"] == "prompt":
                self.executor = ExportedPrompt(backend, manifest, code_from_manifest(manifest["code"], folder, tensors))
            else:
                variants = manifest["variants"]
                runs = {
                    compact: (each, code_from_manifest(each["code"], folder, tensors)) for compact, each in variants
                }
                self.executor = ExportedStep(backend, manifest, runs)
        except (ImportError, OSError) as error:
            raise ArtifactError(f"a library cannot be loaded: {error}") from error

    def arguments(
        self, inputs: Mapping[str, Tensor | None], counts: Mapping[str, int], module: Mapping[str, Tensor]
    ) -> tuple[Any, ...]:
        """Return the arguments of the graph; None for arguments that nothing reads."""
        result: list[Any] = [None] * self.manifest["count"]
        sources: dict[str, Mapping[str, Any]] = {
            "tensor": module, "input": inputs, "count": counts, "saved": self.tensors,
        }  # fmt: skip
        for index, argument in self.manifest["arguments"].items():
            ((kind, value),) = argument.items()
            result[int(index)] = value if kind == "value" else sources[kind][value]
        return tuple(result)

    def cache_object(self, results: tuple[Any, ...], new: int, model: torch.nn.Module) -> Any:
        """Return the model's cache object after a prompt."""
        assert isinstance(self.executor, ExportedPrompt)
        handles = [results[site.keys_out] for site in self.executor.graph.sites]
        layers = [handle.cache for handle in handles if isinstance(handle, Handle)]
        saved = self.manifest["cache"]
        result = CacheObjectReader(layers, {}, model).decode(saved["object"])
        return refresh_handles(result, new - saved["tokens"])


def _check_equal(loop: DecodeLoop, loaded: DecodeLoop, batch: int) -> None:
    """Raise ArtifactError unless a loaded loop makes the tokens and the slots of the loop that was exported."""
    budget = loop.backend.budget
    assert isinstance(budget, int)
    length = max(2, budget // 2) if loop.prefill_chunk is None else max(2, min(budget // 2, 2 * loop.prefill_chunk))
    result = []
    for each in (loop, loaded):
        each.reset()
        if each.rows is not None:
            prompts = list(synthetic_tokens(each, length, each.rows))
            done = each.generate_batch(prompts, max_new_tokens=6, stop=[])
            if (cause := failure(done)) is not None:
                raise ArtifactError(f"a loop that is loaded from it fails: {cause}") from cause
            result.append((torch.tensor([output.generated_tokens for output in done.values()]), each.cache))
        else:
            each.prompt(synthetic_tokens(each, length, batch))
            result.append((each.generate(6), each.cache))
    (expected, theirs), (found, ours) = result
    pairs = zip(caches_in(theirs), caches_in(ours), strict=True)
    tensors = [(a, b) for x, y in pairs for a, b in zip(x.slots.tensors(), y.slots.tensors(), strict=True)]
    if not torch.equal(expected, found) or not all(torch.equal(a, b) for a, b in tensors):
        raise ArtifactError("a loop that is loaded from it makes other tokens than the loop that was exported")


# The facts that an export depends on, and whether they are the same here.


def _versions_here() -> dict[str, str | None]:
    """Return the versions that exported code depends on."""
    return {
        "torch": torch.__version__,
        "transformers": versions.installed_version("transformers"),
        # The manifest has indices that the sources work with.
        "kvpass": f"{versions.installed_version('kvpass')} ({versions.digest_of_sources().hex()[:12]})",
        "python": f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}",
    }


def _processor_here() -> dict[str, Any]:
    """Return the facts about the processor and the threads that exported code depends on."""
    return {
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "flags": sorted(processor.flags_of_processor()),
        "threads": torch.get_num_threads(),
    }


def _check_same(saved: Mapping[str, Any], here: Mapping[str, Any], was: str, now: str) -> None:
    """Raise ArtifactError for facts that differ; `was` and `now` begin the two parts of the message."""
    wrong = [name for name in saved if saved[name] != here.get(name)]
    if wrong:
        listed = "; ".join(f"{name} {saved[name]}, and {now} {here.get(name)}" for name in wrong)
        raise ArtifactError(f"{was} {listed}: export it again")


def _check_processor(saved: Mapping[str, Any]) -> None:
    """Raise ArtifactError unless this processor runs the code of the export, with the same number of threads."""
    here = _processor_here()
    missing = sorted(set(saved["flags"]) - set(here["flags"]))
    if missing:
        raise ArtifactError(f"was exported for a processor with {', '.join(missing[:6])}, which this processor lacks")
    if saved["threads"] != here["threads"]:
        raise ArtifactError(
            f"was exported for {saved['threads']} thread(s), and this process has {here['threads']}: call "
            f"torch.set_num_threads({saved['threads']}) first"
        )
    _check_same({"vectors": saved["vectors"]}, here, "was exported for a processor with", "this one has")


def _model_manifest(model: torch.nn.Module) -> dict[str, Any]:
    """Return the model's part of an artifact's manifest."""
    names = export_recording.tensor_names(model)
    return {
        "class": type(model).__name__,
        "config": model_identity.settings_of(model),
        "methods": model_identity.method_digests(model),
        "weights": {names[id(x)]: model_identity.weight_digest(x) for x in model.parameters()},
        "tensors": _tensor_manifest(model),
    }


def _tensor_manifest(model: torch.nn.Module) -> dict[str, str]:
    """Return the properties of each tensor of a model on which compiled code depends, by name."""
    first = export_recording.tensor_names(model)  # a tied tensor is one argument, and found again by its first name
    return {
        name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} {list(x.stride())} {x.device}"
        + ("" if first[id(x)] == name else f", tied to {first[id(x)]}")
        for name, x in named_tensors(model)
    }


def _check_model(saved: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise ArtifactError unless the model has the class, the configuration and the weights of the export."""
    if type(model).__name__ != saved["class"]:
        raise ArtifactError(f"is for a {saved['class']}, not for a {type(model).__name__}")
    _check_same_model(saved["config"], model_identity.settings_of(model))
    _check_same_model(saved["methods"], model_identity.method_digests(model))
    tensors = dict(named_tensors(model))
    _check_tensors(saved["tensors"], _tensor_manifest(model))
    _check_same_model(saved["code"], _code_settings(model))
    others = [name for name, was in saved["weights"].items() if model_identity.weight_digest(tensors[name]) != was]
    if others:
        raise ArtifactError(f"is for other weights: {', '.join(others[:3])} differ, {len(others)} in all")


def _code_settings(model: torch.nn.Module) -> dict[str, Any]:
    """Return the numbers outside of tensors that may be constants of the model's compiled code."""
    autocast = str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None
    return {**model_identity.module_settings(model), "autocast": autocast}


def _check_same_model(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ArtifactError for settings of the model that differ from the export's."""
    found = model_identity.differences(saved, here)
    if found:
        raise ArtifactError(f"is for a model of another configuration: {', '.join(found[:5])}")


def _check_tensors(saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise ArtifactError unless the model's tensors have the shapes, strides, dtypes and ties of the export."""
    wrong = next((name for name, value in saved.items() if here.get(name) != value), None)
    if wrong is not None:
        has = here.get(wrong, "none")
        raise ArtifactError(f"is for a model whose {wrong} is {saved[wrong]}, and here it is {has}")
