"""Compiled loops on disk: `export` writes what another process needs to decode without compiling, `load` reads it.

An artifact is a folder:

    manifest.json        settings, versions, processor and model; for each graph how its arguments are found; digests
    *.so                 Inductor's kernels, one library each, and kvpass's own C++
    *.py                 the Python around the kernels of one segment
    tensors.safetensors  constants of the graphs, if there are any

Nothing is unpickled.  Code is machine code all the same, so an artifact must come from where programs come from.  Every
file is compared with its digest before any is loaded, and the manifest with its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpass import versions
from kvpass.arguments import Positive, checked, require
from kvpass.cache.handle import Handle, caches_in, usable_caches_in
from kvpass.decoding.cache_files import CacheObjectReader, FilePath, policy_of, settings_entry
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.made_up import made_up_tokens, visit_graphs
from kvpass.decoding.recording import graph_entries, recorded, tensor_names
from kvpass.decoding.stepping import refreshed
from kvpass.errors import ArtifactError, BudgetError, KVPassError, PolicyError
from kvpass.lowering import exported_run
from kvpass.policies.base import Policy
from kvpass.runtime.caches import given_pins
from kvpass.runtime.exported_graphs import ExportedPrompt, ExportedStep
from kvpass.runtime.model_identity import differences, digest, settings_of
from kvpass.torch_private import exported_code, generated_code

VERSION = 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
_LOOP_SETTINGS = ("prefill_chunk", "rows", "every")
PINS = "the artifact was exported without code for pinned tokens: use a DecodeLoop that is not loaded"


@checked
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

    The loop of these settings is compiled and run on made-up conversations; then a loop is loaded from the artifact and
    must make equal tokens and equal slots.

    >>> kvpass.export(model, "smollm2-h2o", policy="h2o", budget=1024)
    >>> loop = kvpass.load("smollm2-h2o", model, stop=[tokenizer.eos_token_id])   # in another process

    Args:
        model: on a CPU, as of `DecodeLoop`.
        path: of the artifact, a folder; an artifact that is there is replaced.
        policy: the eviction policy, as of `kvpass.backend`.
        batch: the rows of prompts (`DecodeLoop.prompt`).
        rows: the number of requests that are decoded together, as of `DecodeLoop`; None for a loop of prompts.
        prefill_chunk: as of `DecodeLoop`.
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
    loop = DecodeLoop(model, policy, rows=rows, prefill_chunk=prefill_chunk, **settings)
    device = loop.device.type
    require(device == "cpu", "model", device, "only code for a CPU can be exported")
    require(loop.chosen.inner == "inductor", "inner", loop.chosen.inner, "only Inductor's code can be exported")
    if not isinstance(loop.chosen.budget, int):
        raise BudgetError(f"budget={loop.chosen.budget}: an artifact has code for fixed slots; give their number")
    with recorded(loop) as made:
        visit_graphs(loop, batch, prefixes=True)
    target = Path(path)
    with _Writing(target) as files:
        graphs = graph_entries(model, made.calls, files)
        libraries = {name: files.add_library(file) for name, file in generated_code.built_libraries().items()}
        manifest = dict(
            version=VERSION,
            made_by=_versions(),
            processor=_processor(),
            settings=settings_entry(loop.chosen),
            loop=dict(rows=rows, prefill_chunk=prefill_chunk, batch=batch),
            model=_model_entry(model),
            graphs=graphs,
            libraries=libraries,
        )
        found = files.finish(manifest)
        _check_equal(loop, load(files.folder, model, digest=found), batch)
    return found


@checked
def load(path: FilePath, model: torch.nn.Module, *, digest: str | None = None, **how: Any) -> DecodeLoop:
    """Return a `DecodeLoop` that runs the code of an artifact of `export`.

    An artifact contains machine code, which runs with the rights of the process: load only what you would run.

    Args:
        path: of the artifact.
        model: with the weights for which the artifact was made, on a CPU.
        digest: the digest that `export` returned, kept elsewhere; None to trust the folder.
        how: the arguments of `DecodeLoop` that need no compiled code: `temperature`, `top_k`, `top_p`, `seed`, `stop`,
            `every` and `pad`.

    Returns:
        The loop.  It gives equal tokens to a loop that compiles; calls for which the artifact has no code, such as
        prompts with pins, raise an error.

    Raises:
        ArtifactError: a missing, damaged or changed file, or an artifact for other versions, another processor, another
            number of threads, another model or other settings; the message says what differs.
        PolicyError: an argument that an artifact fixes.
    """
    fixed = {"temperature", "top_k", "top_p", "seed", "stop", "every", "pad"}
    for name in how.keys() - fixed:
        raise PolicyError(f"{name}: an artifact has its own: load takes {', '.join(sorted(fixed))}")
    folder = Path(path)
    try:
        manifest = _checked_manifest(folder, digest)
        _check_same(manifest["made_by"], _versions(), "was exported with", "this process has")
        _check_processor(manifest["processor"])
        _check_model(manifest["model"], model)
        return LoadedLoop(model, manifest, folder, how)
    except ArtifactError as error:
        raise ArtifactError(f"{os.fspath(path)}: {error}") from error.__cause__
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, KVPassError):
            raise
        raise ArtifactError(
            f"{os.fspath(path)}: its manifest cannot be read ({type(error).__name__}: {error})"
        ) from error


class LoadedLoop(DecodeLoop):
    """A `DecodeLoop` on the code of an artifact."""

    def __init__(
        self, model: torch.nn.Module, manifest: Mapping[str, Any], folder: Path, how: Mapping[str, Any]
    ) -> None:
        """
        Args:
            manifest: of the artifact, which has been checked.
            how: the further arguments of `DecodeLoop`.
        """
        self._manifest, self._folder = manifest, folder
        settings = dict(manifest["settings"])
        policy, crop = policy_of(settings.pop("policy")), settings.pop("crop")
        require(crop == 0, "crop", crop, "cannot be")
        sizes = {name: manifest["loop"][name] for name in ("rows", "prefill_chunk")}
        super().__init__(model, policy, **sizes, **settings, **how)

    def _compiled(self) -> Callable[..., Any]:
        return ExportedCall(self.model, self.chosen, self._manifest, self._folder)


class ExportedCall:
    """What a loaded loop calls as its model: the code of an artifact for each kind of call."""

    def __init__(self, model: torch.nn.Module, chosen: Any, manifest: Mapping[str, Any], folder: Path) -> None:
        self.model, self.chosen = model, chosen
        tensors = _tensors(folder) if TENSORS in manifest["files"] else {}
        generated_code.use_libraries({name: str(folder / file) for name, file in manifest["libraries"].items()})
        self.shapes = manifest["model"]["tensors"]
        self.graphs = [ExportedGraph(chosen, entry, folder, tensors) for entry in manifest["graphs"]]

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
        """Run tokens ids [B, q] as the model does; see `Caller`."""
        if given_pins() is not None:
            raise PolicyError(f"pin: {PINS}")
        ((name, before),) = cache.items()
        layers = usable_caches_in(before, self.chosen)
        rows, new = ids.shape
        kind = "prompt" if not layers else "step" if new == 1 else "chunk"
        graph = self._graph(kind, rows, attention_mask is not None, new)
        inputs = {"ids": ids, "mask": attention_mask, "positions": position_ids}
        counts = {"seen": layers[0].seen if layers else 0, "new": new, "rows": rows}
        arguments = graph.arguments(inputs, counts | {"total": counts["seen"] + new}, self._module_tensors())
        if isinstance(graph.runner, ExportedStep):
            ran = graph.runner.call(layers, arguments)
            return types.SimpleNamespace(logits=ran.results[graph.logits], **{name: refreshed(before, new)})
        results = graph.runner(*arguments)
        made = graph.cache_object(results, new, self.model)
        return types.SimpleNamespace(logits=results[graph.logits], **{name: made})

    def _graph(self, kind: str, rows: int, masked: bool, new: int) -> ExportedGraph:
        """Return the code for a kind of call of `new` tokens in each row."""
        alike = [
            x for x in self.graphs if (x.entry["kind"], x.entry["rows"], x.entry["masked"]) == (kind, rows, masked)
        ]
        found = next((x for x in alike if x.entry["lengths"][0] <= new <= x.entry["lengths"][1]), None)
        if found is not None:
            return found
        call = f"a {kind} of {rows} row(s){', with a mask' if masked and kind == 'prompt' else ''}"
        if alike:
            known = " or ".join("{} to {}".format(*x.entry["lengths"]) for x in alike)
            raise ArtifactError(f"{call} and {new} token(s): the artifact has code for {known} tokens")
        known = ", ".join(sorted({str(x.entry["rows"]) for x in self.graphs if x.entry["kind"] == kind}))
        raise ArtifactError(
            f"{call}: the artifact has code for {known or 'no'} row(s): export with another `batch` or `rows`"
        )

    def _module_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model by name, which the user may have replaced."""
        found = dict(_named_tensors(self.model))
        _check_tensors(self.shapes, found)
        return found


class ExportedGraph:
    """The code of an artifact for one kind of call.

    Attributes:
        runner: of the code.
        logits: the index of the logits among its results.
    """

    def __init__(self, chosen: Any, entry: Mapping[str, Any], folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self.entry, self.tensors, self.logits = entry, tensors, entry["logits"]
        self.runner: ExportedPrompt | ExportedStep
        try:
            if entry["kind"] == "prompt":
                self.runner = ExportedPrompt(
                    chosen, entry, exported_run.run_of(entry["code"], folder, tensors, repeats=False)
                )
            else:
                repeats = entry["kind"] == "step"
                runs = {
                    compact: (each, exported_run.run_of(each["code"], folder, tensors, repeats))
                    for compact, each in entry["variants"]
                }
                self.runner = ExportedStep(chosen, entry, runs)
        except (ImportError, OSError) as error:
            raise ArtifactError(f"a library cannot be loaded: {error}") from error

    def arguments(
        self, inputs: Mapping[str, Tensor | None], counts: Mapping[str, int], module: Mapping[str, Tensor]
    ) -> tuple[Any, ...]:
        """Return the arguments of the graph; None for those that nothing reads."""
        made: list[Any] = [None] * self.entry["count"]
        sources: dict[str, Mapping[str, Any]] = {
            "tensor": module, "input": inputs, "count": counts, "saved": self.tensors,
        }  # fmt: skip
        for index, argument in self.entry["arguments"].items():
            ((kind, value),) = argument.items()
            made[int(index)] = value if kind == "value" else sources[kind][value]
        return tuple(made)

    def cache_object(self, results: tuple[Any, ...], new: int, model: torch.nn.Module) -> Any:
        """Return the model's cache object after a prompt."""
        assert isinstance(self.runner, ExportedPrompt)
        handles = [results[site.keys_out] for site in self.runner.sites]
        layers = [handle.cache for handle in handles if isinstance(handle, Handle)]
        saved = self.entry["cache"]
        made = CacheObjectReader(layers, {}, model).decoded(saved["object"])
        return refreshed(made, new - saved["tokens"])


# -- the folder --------------------------------------------------------------------------------------------------------


class _Writing:
    """The folder of an artifact while it is written, under another name until it is complete."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.tensors: dict[str, Tensor] = {}
        self.files: dict[str, str] = {}

    def __enter__(self) -> _Writing:
        if self.target.exists() and not (self.target / MANIFEST).is_file():
            raise ArtifactError(f"{self.target}: is there, and is no artifact: give another path")
        try:
            parent = self.target.absolute().parent
            self.folder = Path(tempfile.mkdtemp(prefix=f"{self.target.name}.", suffix=".unfinished", dir=parent))
        except OSError as error:
            raise ArtifactError(f"{self.target}: cannot be written: {error}") from error
        return self

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if kind is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        os.chmod(self.folder, 0o755)
        if self.target.exists():
            shutil.rmtree(self.target)
        os.replace(self.folder, self.target)

    def add_library(self, path: str) -> str:
        return self._add(Path(path).read_bytes(), ".so")

    def add_text(self, text: str) -> str:
        return self._add(text.encode(), ".py")

    def add_tensor(self, tensor: Tensor) -> str:
        for name, known in self.tensors.items():
            if known is tensor:
                return name
        name = f"constant.{len(self.tensors)}"
        self.tensors[name] = tensor
        return name

    def _add(self, content: bytes, suffix: str) -> str:
        found = exported_run.digest(content)
        name = found[:32] + suffix
        if name not in self.files:
            (self.folder / name).write_bytes(content)
            self.files[name] = found
        return name

    def finish(self, manifest: Mapping[str, Any]) -> str:
        """Write constants and manifest, and return the digest."""
        if self.tensors:
            import safetensors.torch

            apart = {name: tensor.detach().clone().contiguous() for name, tensor in self.tensors.items()}
            content = safetensors.torch.save(apart)
            (self.folder / TENSORS).write_bytes(content)
            self.files[TENSORS] = exported_run.digest(content)
        whole = {**manifest, "files": self.files}
        found = _digest_of(whole)
        (self.folder / MANIFEST).write_text(json.dumps({**whole, "digest": found}, indent=1), encoding="utf-8")
        return found


def _digest_of(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "digest"}
    return exported_run.digest(json.dumps(content, sort_keys=True).encode())


def _checked_manifest(folder: Path, wanted: str | None) -> dict[str, Any]:
    """Return the manifest of an artifact whose files are as they were written."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, said, files = manifest["version"], manifest["digest"], manifest["files"]
    except OSError as error:
        raise ArtifactError(f"is no artifact: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"its manifest is damaged ({type(error).__name__}: {error})") from error
    if version != VERSION:
        raise ArtifactError(f"is of format {version!r}, and this kvpass reads format {VERSION}: export it again")
    found = _digest_of(manifest)
    if found != said:
        raise ArtifactError("its manifest was changed after it was written")
    if wanted is not None and found != wanted:
        raise ArtifactError(f"its digest is {found}, not {wanted}: it is another artifact")
    for name, expected in files.items():
        if Path(name).name != name:
            raise ArtifactError(f"its manifest names a file outside of it: {name!r}")
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise ArtifactError(f"a file is missing: {error}") from error
        if exported_run.digest(content) != expected:
            raise ArtifactError(f"{name} is damaged or was changed after it was written")
    return manifest


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise KVPassError("constants are stored as safetensors: pip install 'kvpass[save]'") from error
    return dict(safetensors.torch.load_file(folder / TENSORS))


# -- what must be equal ------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    return {
        "torch": torch.__version__,
        "transformers": versions.installed("transformers"),
        "kvpass": f"{versions.installed('kvpass')} ({_sources()[:12]})",
        "python": f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}",
    }


def _sources() -> str:
    """Return a digest of kvpass's own sources: a manifest has the indices that they work with."""
    made, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.cpp"))):
        if path.relative_to(root).parts[0] != "apps":
            made.update(path.read_bytes())
    return made.hexdigest()


def _processor() -> dict[str, Any]:
    return {
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "flags": sorted(exported_code.flags_of_processor()),
        "threads": torch.get_num_threads(),
    }


def _check_same(saved: Mapping[str, Any], here: Mapping[str, Any], was: str, now: str) -> None:
    wrong = [name for name in saved if saved[name] != here.get(name)]
    if wrong:
        listed = "; ".join(f"{name} {saved[name]}, and {now} {here.get(name)}" for name in wrong)
        raise ArtifactError(f"{was} {listed}: export it again")


def _check_processor(saved: Mapping[str, Any]) -> None:
    here = _processor()
    missing = sorted(set(saved["flags"]) - set(here["flags"]))
    if missing:
        raise ArtifactError(f"was exported for a processor with {', '.join(missing[:6])}, which this one has not")
    if saved["threads"] != here["threads"]:
        raise ArtifactError(
            f"was exported for {saved['threads']} thread(s), and this process has {here['threads']}: call "
            f"torch.set_num_threads({saved['threads']}) first"
        )
    _check_same({"vectors": saved["vectors"]}, here, "was exported for a processor with", "this one has")


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _model_entry(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "class": type(model).__name__,
        "config": settings_of(model),
        "weights": {tensor_names(model)[id(x)]: digest(x) for x in model.parameters()},
        "tensors": {name: _shape(tensor) for name, tensor in _named_tensors(model)},
    }


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {list(tensor.stride())} {tensor.device}"


def _check_model(saved: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise ArtifactError unless the model has the class, the configuration and the weights of the export."""
    if type(model).__name__ != saved["class"]:
        raise ArtifactError(f"is for a {saved['class']}, not for a {type(model).__name__}")
    found = differences(saved["config"], settings_of(model))
    if found:
        raise ArtifactError(f"is for a model of another configuration: {', '.join(found[:5])}")
    tensors = dict(_named_tensors(model))
    _check_tensors(saved["tensors"], tensors)
    others = [name for name, made in saved["weights"].items() if digest(tensors[name]) != made]
    if others:
        raise ArtifactError(f"is for other weights: {', '.join(others[:3])} differ, {len(others)} in all")


def _check_tensors(saved: Mapping[str, str], here: Mapping[str, Tensor]) -> None:
    wrong = [name for name, shape in saved.items() if name not in here or _shape(here[name]) != shape]
    if wrong:
        name = wrong[0]
        has = _shape(here[name]) if name in here else "none"
        raise ArtifactError(f"is for a model whose {name} is {saved[name]}, and here it is {has}")


# -- the proof ---------------------------------------------------------------------------------------------------------


def _check_equal(loop: DecodeLoop, loaded: DecodeLoop, batch: int) -> None:
    """Raise ArtifactError unless a loaded loop makes the tokens and the slots of the loop that was exported."""
    budget = loop.chosen.budget
    assert isinstance(budget, int)
    length = max(2, budget // 2) if loop.prefill_chunk is None else max(2, min(budget // 2, 2 * loop.prefill_chunk))
    made = []
    for each in (loop, loaded):
        if each.requests is not None:
            each.requests = type(each.requests).of(each, each.requests.count)
            done = each.generate_batch(
                list(made_up_tokens(each, length, each.requests.count)), max_new_tokens=6, stop=[]
            )
            made.append((torch.tensor([output.generated_tokens for output in done.values()]), each.cache))
        else:
            each.state = None
            each.prompt(made_up_tokens(each, length, batch))
            made.append((each.generate(6), each.cache))
    (expected, theirs), (found, ours) = made
    pairs = zip(caches_in(theirs), caches_in(ours), strict=True)
    tensors = [(a, b) for x, y in pairs for a, b in zip(x.slots.tensors(), y.slots.tensors(), strict=True)]
    if not torch.equal(expected, found) or not all(torch.equal(a, b) for a, b in tensors):
        raise ArtifactError("a loop that is loaded from it makes other tokens than the loop that was exported")
