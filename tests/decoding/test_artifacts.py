"""Test exported artifacts: another process decodes equal tokens without compiling; bad artifacts are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvpass
from kvpass import versions
from kvpass.cache.model_cache import caches_in
from kvpass.decoding import artifact_folder, artifacts, export_recording
from kvpass.decoding.artifact_folder import VERSION
from kvpass.decoding.prefill import chunk_lengths
from kvpass.decoding.synthetic_conversation import prompt_lengths, visit_graphs
from kvpass.errors import ArtifactError, BudgetError, PolicyError, UnsupportedGraph
from kvpass.policies import resolve
from kvpass.policies.h2o import H2O as H2OPolicy
from tests.models import build, prompt, sharing_compiled_code

pytest.importorskip("safetensors.torch")
ROOT = Path(__file__).parents[2]
H2O: dict[str, Any] = dict(policy="h2o", budget=16)
STOP = [5, 77]
LAYERS = 3  # enough layers to share code


@pytest.fixture(scope="module", autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Override the fixture of the same name: tests of this file share compiled code."""
    with sharing_compiled_code():
        yield


@pytest.fixture(scope="module")
def model(fresh_dynamo: None) -> Any:
    return build("Llama", layers=LAYERS)


@pytest.fixture(scope="module")
def exported(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("artifact") / "h2o"
    return path, kvpass.export(model, path, **H2O)


class UnregisteredH2O(H2OPolicy):
    """A policy that an artifact would take for another one."""


def talk(loop: kvpass.DecodeLoop, rows: int = 1) -> list[Tensor]:
    """Return the tokens of short and long prompts, each with two further turns, and the final slots."""
    made = []
    for length in (7, 40):
        ids, _ = prompt(rows, length, ())
        loop.reset()
        for turn in (ids, ids[:, :5], ids[:, :6]):
            loop.prompt(turn)
            made.append(loop.generate(20))
        made += [tensor.clone() for cache in caches_in(loop) for tensor in cache.slots.tensors()]
    return made


def compiled(model: Any, batch: int = 1, **settings: Any) -> kvpass.DecodeLoop:
    """Return a loop that has compiled all its graphs; the first chunk on slots runs uncompiled otherwise."""
    loop = kvpass.DecodeLoop(model, **settings)
    visit_graphs(loop, batch, prefixes=True)
    return loop


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


DECODE = """
import shutil, sys, torch, kvpass
from tests.decoding.test_artifacts import LAYERS, STOP, talk
from tests.models import build
path, digest, out, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
def refuse(*_, **__):
    raise AssertionError("torch.compile was called")
torch.compile = refuse
loop = kvpass.load(path, build("Llama", layers=LAYERS), digest=digest, stop=STOP)
shutil.rmtree(path)
torch.save(talk(loop), out)
assert "torch._inductor.compile_fx" not in sys.modules
"""


def test_another_process_decodes_with_equal_tokens_and_no_compiler(
    model: Any, exported: tuple[Path, str], tmp_path: Path
) -> None:
    """Check too that the artifact may be removed once it is loaded, and that torch.compile may be disabled."""
    (path, digest), copy = exported, tmp_path / "copy"
    out, cache = tmp_path / "out.pt", tmp_path / "cache"
    shutil.copytree(path, copy)
    without = {**os.environ, "PATH": "", "CXX": "none", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    without["TORCH_COMPILE_DISABLE"] = "1"
    arguments = [str(copy), digest, str(out), str(torch.get_num_threads())]
    subprocess.run([sys.executable, "-c", DECODE, *arguments], check=True, cwd=ROOT, env=without)
    assert_equal(torch.load(out), talk(compiled(model, **H2O, stop=STOP)))
    assert not [file for file in cache.rglob("*") if file.suffix in (".so", ".cpp")]


def test_it_goes_on_with_saved_caches_samples_and_branches(
    model: Any, exported: tuple[Path, str], tmp_path: Path
) -> None:
    how: dict[str, Any] = dict(temperature=1.0, top_k=20, seed=3, read_interval=4)
    ours, theirs = kvpass.load(exported[0], model, **how), compiled(model, **H2O, **how)
    ids, _ = prompt(1, 11, ())
    for each in (ours, theirs):
        each.prompt(ids)
    assert torch.equal(ours.generate(10), theirs.generate(10))
    kvpass.save_cache(ours, tmp_path / "talk")
    kvpass.load_cache(tmp_path / "talk", theirs)
    assert torch.equal(ours.generate(10), theirs.generate(10))
    prefix = ours.cache
    for each in (ours, theirs):
        each.branch(prefix)
        each.prompt(ids[:, :5])
    assert torch.equal(ours.generate(10), theirs.generate(10))
    assert str(kvpass.inspect(ours)) == str(kvpass.inspect(theirs))


def test_weights_that_are_replaced_are_followed(exported: tuple[Path, str]) -> None:
    model, ids = build("Llama", layers=LAYERS), prompt(1, 11, ())[0]
    loop = kvpass.load(exported[0], model, read_interval=2)
    loop.prompt(ids)
    loop.generate(4)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    assert loop.generate(6)[0, 2:].tolist() == [0] * 4
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(128, 64, dtype=torch.bfloat16))
    with pytest.raises(ArtifactError, match=r"whose lm_head.weight is float32 \[128, 64\].* here it is bfloat16"):
        loop.generate(6)


def test_calls_without_code_are_refused(model: Any, exported: tuple[Path, str]) -> None:
    loop = kvpass.load(exported[0], model)
    ids, mask = prompt(2, 11, (3, 0))
    with pytest.raises(ArtifactError, match=r"a prompt of 2 row\(s\), with a mask: .* has code for 1 row\(s\): export"):
        loop.prompt(ids, mask)
    with pytest.raises(
        ArtifactError, match=r"1 row\(s\) and 1 token\(s\): the artifact has code for 2 to 1048576 tokens"
    ):
        loop.prompt(ids[:1, :1])
    with pytest.raises(PolicyError, match="pin: the artifact was exported without code for pinned tokens"):
        loop.prompt(ids[:1], pin=[(0, 2)])
    with pytest.raises(PolicyError, match="budget: the artifact has this setting: load takes pad, read_interval, seed"):
        kvpass.load(exported[0], model, budget=8)


def test_other_models_are_refused(exported: tuple[Path, str]) -> None:
    path, _ = exported
    other = build("Llama", layers=LAYERS)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    with pytest.raises(ArtifactError, match=r"other weights: model.layers.1.mlp.up_proj.weight differ, 1 in all"):
        kvpass.load(path, other)
    with pytest.raises(ArtifactError, match="is for a LlamaForCausalLM, not for a GPT2LMHeadModel"):
        kvpass.load(path, build("GPT2"))
    with pytest.raises(ArtifactError, match="another configuration: num_hidden_layers is 1, not 3"):
        kvpass.load(path, build("Llama", layers=1))
    with pytest.raises(ArtifactError, match=r"whose .* is float32 .*, and here it is bfloat16"):
        kvpass.load(path, build("Llama", torch.bfloat16, layers=LAYERS))


@pytest.mark.parametrize("loaded_before", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: setattr(layer.self_attn, "scaling", 3.0), r"layers.1.self_attn.scaling is 3.0, not 0.25"),
        (lambda layer: setattr(layer.mlp, "act_fn", torch.nn.Tanh()), "layers.1.mlp.act_fn.class is 'Tanh', not 'SiLU"),
        (lambda layer: layer.train(), "layers.1.training is True, not False"),
    ],
    ids=["number", "class", "training"],
)
def test_a_model_whose_code_has_other_constants_is_refused(
    exported: tuple[Path, str], change: Callable[[Any], object], message: str, loaded_before: bool
) -> None:
    other, ids = build("Llama", layers=LAYERS), prompt(1, 11, ())[0]
    loop = kvpass.load(exported[0], other) if loaded_before else None
    change(other.model.layers[1])
    with pytest.raises(ArtifactError, match=f"another configuration: .*{message}"):
        (loop or kvpass.load(exported[0], other)).prompt(ids)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_tied_tensors_must_stay_tied(name: str) -> None:
    """Check what calls compare: a graph reads a tied tensor once, by its first name."""
    model = build("Llama", layers=2)
    owner, weight = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    model.model.embed_tokens.second = weight
    tied = artifacts._tensor_manifest(model)
    artifacts._check_tensors(tied, artifacts._tensor_manifest(model))
    owner.weight = torch.nn.Parameter(weight.clone())
    with pytest.raises(ArtifactError, match=f"whose {name} is .*, tied to model.embed_tokens.second, and here it is"):
        artifacts._check_tensors(tied, artifacts._tensor_manifest(model))


def test_a_loop_does_not_run_under_another_autocast(exported: tuple[Path, str]) -> None:
    loop = kvpass.load(exported[0], build("Llama", layers=LAYERS))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ArtifactError, match=r"autocast is 'torch\.bfloat16', not"),
    ):
        loop.prompt(prompt(1, 11, ())[0])


Change = Callable[[dict[str, Any]], object]
CHANGES: list[tuple[Change, str]] = [
    (lambda manifest: manifest.update(version=VERSION - 1), f"an older kvpass, .* format {VERSION}: export it again"),
    (lambda manifest: manifest.update(version=VERSION + 1), f"a newer kvpass, .* format {VERSION}: update kvpass"),
    (lambda manifest: manifest.update(version=None), "has the format version None, which no kvpass writes"),
    (lambda manifest: manifest.pop("version"), r"its manifest is damaged \(KeyError: 'version'\)"),
    (lambda manifest: manifest["made_by"].update(torch="2.9.0"), "exported with torch 2.9.0, and this process has 2"),
    (lambda manifest: manifest["made_by"].update(kvpass="0"), r"kvpass 0, and this process has \S+ \([0-9a-f]{12}\)"),
    (lambda manifest: manifest["made_by"].update(python="cpython-37"), "exported with python cpython-37"),
    (lambda manifest: manifest["processor"]["flags"].append("avx9"), "with avx9, which this processor lacks"),
    (lambda manifest: manifest["processor"].update(vectors="VSX"), "a processor with vectors VSX, and this one has A"),
    (lambda manifest: manifest["processor"].update(threads=99), r"for 99 thread.*torch.set_num_threads\(99\) first"),
    (lambda manifest: manifest["model"]["config"].update(rms_norm_eps=1.0), "rms_norm_eps is 1e-06, not 1.0"),
    (lambda manifest: manifest["settings"].update(policy=["tova2", {}]), "unknown policy 'tova2'"),
    (lambda manifest: manifest["graphs"][0].pop("results"), r"its manifest cannot be read \(KeyError: 'results'\)"),
    (lambda manifest: manifest["files"].update({"../x": "0"}), "names a file outside of it: '../x'"),
    (lambda manifest: manifest["files"].update({"x.so": "0"}), "a file is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda value: value[:20] if isinstance(value, str) else "")
def test_other_versions_processors_and_settings_are_refused(
    model: Any, exported: tuple[Path, str], tmp_path: Path, change: Change, message: str
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(exported[0], path)
    manifest = json.loads((path / artifact_folder.MANIFEST).read_text())
    change(manifest)
    (path / artifact_folder.MANIFEST).write_text(json.dumps(manifest))
    if manifest.get("version") == VERSION:  # for other versions only this field is read
        with pytest.raises(ArtifactError, match="its manifest was changed after it was written"):
            kvpass.load(path, model)
    manifest["digest"] = artifact_folder.manifest_digest(manifest)
    (path / artifact_folder.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises((ArtifactError, PolicyError), match=f"{path}: .*{message}"):
        kvpass.load(path, model)


def test_damaged_folders_are_refused(model: Any, exported: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = exported
    with pytest.raises(ArtifactError, match="is not an artifact"):
        kvpass.load(tmp_path / "none", model)
    with pytest.raises(ArtifactError, match=f"its digest is {digest}, not 00: it is another artifact"):
        kvpass.load(path, model, digest="00")
    for suffix in (".so", ".py"):
        copy = tmp_path / suffix
        shutil.copytree(path, copy)
        file = next(copy.glob(f"*{suffix}"))
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(ArtifactError, match=f"{file.name} is damaged or was changed"):
            kvpass.load(copy, model)
        for text in ((copy / artifact_folder.MANIFEST).read_text()[:100], "[" * 100_000, "[]"):
            (copy / artifact_folder.MANIFEST).write_text(text)
            with pytest.raises(ArtifactError, match="its manifest is damaged"):
                kvpass.load(copy, model)


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        (".so", b"", "a library cannot be loaded"),
        (".py", b"def", r"cannot be read \(SyntaxError"),
        (".py", b"call = 1 / 0", r"cannot be read \(ZeroDivisionError"),
        (".safetensors", b"{}", r"cannot be read \(SafetensorError"),
    ],
)
def test_files_that_were_changed_with_their_digests_are_refused(
    model: Any, exported: tuple[Path, str], suffix: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(exported[0], path)
    manifest = json.loads((path / artifact_folder.MANIFEST).read_text())
    for name in [name for name in manifest["files"] if name.endswith(suffix)] or [artifact_folder.TENSORS]:
        (path / name).write_bytes(content)
        manifest["files"][name] = artifact_folder.sha256_hex(content)
    manifest["digest"] = artifact_folder.manifest_digest(manifest)
    (path / artifact_folder.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=f"{path}: .*{message}"):
        kvpass.load(path, model)


def test_unsupported_exports_are_refused(model: Any, exported: tuple[Path, str], tmp_path: Path) -> None:
    path = tmp_path / "none"
    for budget in (None, 0.5):
        with pytest.raises(BudgetError, match="an artifact has code for fixed slots; give their number"):
            kvpass.export(model, path, "h2o" if budget else "full", budget=budget)
    with pytest.raises(PolicyError, match="inner='eager': only Inductor's code can be exported"):
        kvpass.export(model, path, **H2O, inner="eager")
    with pytest.raises(PolicyError, match="an artifact names its policy: give its class a `name` and decorate it"):
        kvpass.export(model, path, UnregisteredH2O(), budget=8)
    with pytest.raises(PolicyError, match=r"batch=2: requests .* have prompts of one row"):
        kvpass.export(model, path, **H2O, rows=2, batch=2)
    (tmp_path / "other").mkdir()
    for name, message in (("other", "exists and is not an artifact"), ("no/folder", "cannot be written")):
        with pytest.raises(ArtifactError, match=message), artifact_folder.write_folder(tmp_path / name):
            pass
    assert [each.name for each in tmp_path.iterdir()] == ["other"]


def test_an_artifact_stays_until_the_next_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / artifact_folder.MANIFEST).write_text("old")
    replace = os.replace

    def failing(source: Any, target: Any) -> None:
        if str(source).endswith(".unfinished"):
            raise OSError("no space")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    made = artifact_folder.write_folder(tmp_path / "made")
    with pytest.raises(ArtifactError, match="cannot be written: no space"), made:
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made" / artifact_folder.MANIFEST).read_text() == "old"


def test_a_link_to_an_artifact_stays_a_link(tmp_path: Path) -> None:
    folder, link = tmp_path / "elsewhere" / "made", tmp_path / "link"
    folder.mkdir(parents=True)
    link.symlink_to(folder)
    (folder / artifact_folder.MANIFEST).write_text("old")
    with artifact_folder.write_folder(link) as files:
        (files.folder / artifact_folder.MANIFEST).write_text("new")
    assert link.is_symlink()
    assert (folder / artifact_folder.MANIFEST).read_text() == "new"
    assert [each.name for each in folder.parent.iterdir()] == ["made"]


@pytest.mark.parametrize("exists", [False, True])
def test_two_exports_may_write_one_folder(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that one artifact is left, whole, if both become complete at once."""
    target, both, replace = tmp_path / "made", threading.Barrier(2, timeout=60), os.replace

    def replace_slowly(source: Any, there: Any) -> None:
        time.sleep(0.1)
        replace(source, there)

    def write(text: str) -> None:
        with artifact_folder.write_folder(target) as files:
            (files.folder / artifact_folder.MANIFEST).write_text(text)
            both.wait()

    if exists:
        target.mkdir()
        (target / artifact_folder.MANIFEST).write_text("old")
    monkeypatch.setattr(os, "replace", replace_slowly)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, ["first", "second"]))
    assert [each.name for each in tmp_path.iterdir()] == ["made"]
    assert (target / artifact_folder.MANIFEST).read_text() in ("first", "second")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict(policy="streaming", budget=16),
        dict(policy="h2o", budget=16, interval=4, kv_dtype="int8"),
        dict(policy="full", budget=256),
        dict(policy="r_kv", budget=16, window=2, interval=4, kv_dtype="int4"),
        dict(policy="roco", budget=16, prefill_chunk=8),
        dict(policy="buzz", budget=24),
        dict(policy="sage", budget=24),
    ],
    ids=lambda settings: settings["policy"],
)
def test_policies(model: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    kvpass.export(model, tmp_path / "one", **settings)
    assert_equal(talk(kvpass.load(tmp_path / "one", model)), talk(compiled(model, **settings)))


@pytest.mark.slow
def test_code_for_one_length_of_a_chunk(model: Any, tmp_path: Path) -> None:
    """Test `cascade`, which compiles each length of a chunk separately."""
    settings: dict[str, Any] = dict(policy="cascade", budget=24, prefill_chunk=8)
    kvpass.export(model, tmp_path / "one", **settings)
    ours, theirs, (ids, _) = kvpass.load(tmp_path / "one", model), compiled(model, **settings), prompt(1, 40, ())
    for each in (ours, theirs):
        each.prompt(ids)
    assert torch.equal(ours.generate(20), theirs.generate(20))
    with pytest.raises(
        ArtifactError, match=r"a chunk of 1 row\(s\) and 4 token\(s\): .* code for 8 to 8 tokens|8 to 8"
    ):
        ours.prompt(ids[:, :3])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["GPT2", "Qwen3", "Phi"])
def test_architectures_in_batches_with_padding(architecture: str, tmp_path: Path) -> None:
    model = build(architecture)
    kvpass.export(model, tmp_path / "two", **H2O, batch=2)
    ours, theirs = kvpass.load(tmp_path / "two", model), compiled(model, 2, **H2O)
    assert_equal(talk(ours, 2), talk(theirs, 2))
    ids, mask = prompt(2, 11, (3, 0))
    for each in (ours, theirs):
        each.reset()
        each.prompt(ids, mask)
    assert torch.equal(ours.generate(20), theirs.generate(20))


@pytest.mark.slow
def test_requests(model: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(**H2O, rows=3, prefill_chunk=8)
    kvpass.export(model, tmp_path / "rows", **settings)
    ours, theirs = kvpass.load(tmp_path / "rows", model), compiled(model, **settings)
    asked = [prompt(1, length, ())[0] for length in (5, 40, 9, 33, 17)]
    found, expected = (
        {name: output.generated_tokens for name, output in each.generate_batch(asked, max_new_tokens=25).items()}
        for each in (ours, theirs)
    )
    assert found == expected


@given(budget=st.integers(8, 300), chunk=st.integers(2, 128))
def test_two_lengths_show_which_numbers_depend_on_the_length(budget: int, chunk: int) -> None:
    """Test it because with one length an artifact took the length of its prompts for a constant."""
    lengths = prompt_lengths(budget, resolve("h2o", {}), torch.nn.Linear(1, 1), chunk)
    short, long = (chunk_lengths(length, chunk, first=True)[0] for length in lengths)
    assert short < long


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "chunk"), [(32, 16), (32, 8), (24, 3)])
def test_chunks_whose_rests_were_equal(budget: int, chunk: int, model: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(policy="h2o", budget=budget, prefill_chunk=chunk)
    kvpass.export(model, tmp_path / "chunks", **settings)
    assert_equal(talk(kvpass.load(tmp_path / "chunks", model)), talk(compiled(model, **settings)))


@pytest.mark.slow
def test_prompts_of_one_length_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedGraph, match="its budget holds prompts of one length alone"):
        kvpass.export(model, tmp_path / "none", policy="full", budget=4)


def test_models_and_policies_that_need_their_graphs_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedGraph, match="slots whose number depends on the prompt"):
        kvpass.export(model, tmp_path / "none", policy="d2o", budget=16)
    with pytest.raises(UnsupportedGraph, match="heads with different budgets"):
        kvpass.export(model, tmp_path / "none", policy="ada_kv", budget=40, window=8)
    assert not list(tmp_path.iterdir())


def test_a_newer_torch_may_be_why_code_cannot_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = export_recording._GraphWriter({}, artifact_folder.ExportFiles(Path()))
    with pytest.raises(UnsupportedGraph, match=r"without options$"):
        writer._code(print)
    monkeypatch.setattr(versions, "untested_version", lambda package: "9.9")
    with pytest.raises(UnsupportedGraph, match=r"or torch 9\.9, which is newer than the tested versions"):
        writer._code(print)
