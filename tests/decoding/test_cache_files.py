"""Test that saved caches continue in another loop or process, and that bad files raise errors of kvpass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from torch import Tensor

import kvpass
from kvpass import tensor_files
from kvpass.cache.model_cache import caches_in
from kvpass.decoding import cache_files
from kvpass.errors import CacheFileError, CacheHandleError, KVPassError
from kvpass.torch_private import dynamo
from tests.changed_files import KEY, Change, changed
from tests.models import build, prompt
from tests.strategies import ROWS
from tests.test_invariants import settings
from tests.traces import Traced

ROOT = Path(__file__).parents[2]
QUICK = {"h2o": "int4", "d2o": None, "kv_align": None, "ada_kv": "int8"}
"""Column scores with int4, merged values with layer budgets, repaired rows, and head budgets with int8."""
SAVED = [name for name in ROWS if name not in ("critical_kv", "defensive_kv")]  # no further turn after loading

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def model(shared_traces: None) -> Traced:
    return Traced(build("Llama", layers=1))


@torch.no_grad()
def talked(model: Any, cache: Any, pieces: list[int], mask: Tensor, ids: Tensor) -> tuple[Tensor, Any]:
    """Return the logits of further tokens, fed in pieces, and the cache."""
    logits, done = [], 0 if cache is None else caches_in(cache)[0].length
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    for count in pieces:
        here = slice(done, done + count)
        given = dict(attention_mask=mask[:, : here.stop].contiguous(), position_ids=position[:, here].contiguous())
        out = model(ids[:, here].contiguous(), **given, past_key_values=cache, use_cache=True)
        cache, done = out.past_key_values, here.stop
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


def check_a_loaded_cache_goes_on(
    model: Traced, name: str, path: Path, before: list[int], after: list[int], rows: int, kv_dtype: Any
) -> None:
    """Save a conversation after some calls, then compare further calls on its cache and on the loaded one."""
    ids, mask = prompt(rows, 64, (3, 1, 0))
    chosen = kvpass.backend(**{**settings(name, "Llama", 8, layers=1), "kv_dtype": kv_dtype}, inner="eager")
    under = model.under(chosen)
    _, cache = talked(under, None, before, mask, ids)
    kvpass.save_cache(cache, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamo, "backend_of", lambda _: chosen)  # the switch would hide the backend
        loaded = kvpass.load_cache(path, under)
    expected, cache = talked(under, cache, after, mask, ids)
    got, loaded = talked(under, loaded, after, mask, ids)
    assert torch.equal(got, expected)
    for ours, theirs in zip(caches_in(loaded), caches_in(cache), strict=True):
        assert (ours.layout, ours.length, ours.row_budgets, ours.clocks) == (
            theirs.layout, theirs.length, theirs.row_budgets, theirs.clocks
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(ours.slots.tensors(), theirs.slots.tensors(), strict=True))


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "kv_dtype"), QUICK.items())
def test_a_loaded_cache_goes_on_bit_for_bit(model: Traced, name: str, kv_dtype: Any, tmp_path: Path) -> None:
    """Save after a prompt with padding, a chunk and steps, and continue with a chunk and steps."""
    check_a_loaded_cache_goes_on(model, name, tmp_path / "talk", [12, 1, 4, 1], [1, 3, 1], 2, kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_any_loaded_cache_goes_on_bit_for_bit(model: Traced, name: str, tmp_path: Path) -> None:
    """Test prompts, chunks and steps before and after saving, in padded batches and every format."""

    @given(
        first=st.integers(4, 14),
        before=st.lists(st.sampled_from([1, 1, 1, 4]), max_size=5),
        after=st.lists(st.sampled_from([1, 1, 1, 3]), min_size=1, max_size=5),
        rows=st.integers(1, 3),
        kv_dtype=st.sampled_from([None, "int8", "int4"]),
    )
    @profile(max_examples=6)
    def check(first: int, before: list[int], after: list[int], rows: int, kv_dtype: Any) -> None:
        check_a_loaded_cache_goes_on(model, name, tmp_path / "talk", [first, *before], after, rows, kv_dtype)

    check()


def test_tokens_from_before_a_cache_was_loaded_cannot_be_cropped(model: Traced, tmp_path: Path) -> None:
    """Check that tokens after loading can be cropped, and earlier ones cannot."""
    path, (ids, mask) = tmp_path / "talk", prompt(2, 64, (3, 0))
    chosen = kvpass.backend(**settings("h2o", "Llama", 8, layers=1), inner="eager", crop=8)
    under = model.under(chosen)
    _, cache = talked(under, None, [12, 4, 1], mask, ids)
    kvpass.save_cache(cache, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamo, "backend_of", lambda _: chosen)
        kept, loaded = (kvpass.load_cache(path, under) for _ in range(2))
    expected, _ = talked(under, kept, [1, 3], mask, ids)
    with pytest.raises(CacheHandleError, match=r"1 tokens .* 0 can be: .* or when the cache was loaded"):
        loaded.crop(-1)
    _, further = talked(under, loaded, [1, 1, 1], mask, ids)
    further.crop(-2)
    got, _ = talked(under, further, [3], mask, ids)
    assert torch.equal(got, expected[:, 1:])


def test_slots_may_be_fewer_than_the_budget(model: Traced, tmp_path: Path) -> None:
    """Check `buzz`, which keeps a window and fewer of the tokens before it than its budget allows."""
    path, (ids, mask) = tmp_path / "talk", prompt(1, 40, ())
    chosen = kvpass.backend("buzz", budget=14, inner="eager", sinks=1, window=4, threshold=6, stride=3)
    under = model.under(chosen)
    _, cache = talked(under, None, [24, 1], mask, ids)
    kvpass.save_cache(cache, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamo, "backend_of", lambda _: chosen)
        loaded = kvpass.load_cache(path, under)
    (expected, _), (got, _) = (talked(under, each, [1, 3], mask, ids) for each in (cache, loaded))
    assert torch.equal(got, expected)


def test_a_loop_goes_on_with_equal_tokens(tmp_path: Path) -> None:
    """Test sampled tokens, stopped rows, tokens decoded ahead, and a further prompt."""
    ids, mask = prompt(3, 14, (3, 1, 0))
    model, path = build("Llama", layers=1), tmp_path / "loop.safetensors"
    how: dict[str, Any] = dict(policy="h2o", budget=8, inner="eager", temperature=1.0, read_interval=4)
    loop = kvpass.DecodeLoop(model, **how, stop=[7, 9, 11, 40, 41])
    loop.prompt(ids, mask, pin=[(0, 2)])
    first = [next(loop.stream(99)) for _ in range(6)]
    kvpass.save_cache(loop, path)
    other = kvpass.DecodeLoop(model, **how, stop=[7, 9, 11, 40, 41], seed=5)
    kvpass.load_cache(path, other)
    for _ in range(2):
        assert torch.equal(other.generate(9), loop.generate(9))
        for each in (loop, other):
            each.prompt(ids[:, :5])
    assert len(first) == 6
    changes: list[tuple[Change, str]] = [
        (lambda _, tensors: tensors["loop.ids"].fill_(128), "its last tokens or their positions do not fit"),
        (lambda _, tensors: tensors["loop.position"].fill_(99), "its last tokens or their positions do not fit"),
        (lambda _, tensors: tensors.update({"loop.random": torch.zeros(3, dtype=torch.uint8)}), "cannot be read"),
        (
            lambda _, tensors: tensors.update({"loop.stopped": torch.ones(3)}),
            "its stopped cannot belong to 3 conversations",
        ),
        (lambda header, _: header["config"].update(rms_norm_eps=0.5), "configuration: rms_norm_eps is 1e-06, not 0.5"),
    ]
    for change, message in changes:
        with pytest.raises(CacheFileError, match=message):
            kvpass.load_cache(changed(path, change, tmp_path / "changed"), other)
    assert torch.equal(kvpass.inspect(other).layers[0].pinned, kvpass.inspect(loop).layers[0].pinned)


@pytest.mark.parametrize(("handed_out", "seen"), [(0, 15), (1, 16), (6, 21)])
def test_a_save_changes_no_conversation(handed_out: int, seen: int, tmp_path: Path) -> None:
    """Check that a further prompt continues the tokens that were handed out or decoded ahead, and no others."""
    ids, path = prompt(2, 15, ())[0], tmp_path / "loop"
    model, loops = build("Llama", layers=1), []
    for saves in (False, True):
        loops.append(kvpass.DecodeLoop(model, "h2o", budget=24, inner="eager"))
        loops[-1].prompt(ids[:, :10])
        loops[-1].generate(handed_out)
        if saves:
            kvpass.save_cache(loops[-1], path)
    loops.append(kvpass.DecodeLoop(model, "h2o", budget=24, inner="eager"))
    kvpass.load_cache(path, loops[-1])
    for loop in loops:
        loop.prompt(ids[:, 10:])
        (layer,), (expected,) = caches_in(loop), caches_in(loops[0])
        assert layer.length == seen
        assert all(torch.equal(a, b) for a, b in zip(layer.slots.tensors(), expected.slots.tensors(), strict=True))


def test_a_thread_that_goes_on_waits_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in another thread when the save has read the counts, and before it writes the tensors."""
    model, path, write = build("Llama", layers=1), tmp_path / "loop", cache_files.tensor_files.write
    loop, other = (kvpass.DecodeLoop(model, "h2o", budget=8, inner="eager", read_interval=1) for _ in range(2))
    loop.prompt(prompt(1, 12, ())[0])
    loop.generate(3)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(loop.generate(6)))

    def write_late(*given: Any) -> None:
        thread.start()
        thread.join(0.5)  # until it waits for its turn
        write(*given)

    monkeypatch.setattr(cache_files.tensor_files, "write", write_late)
    kvpass.save_cache(loop, path)
    thread.join()
    kvpass.load_cache(path, other)
    assert torch.equal(other.generate(6), found[0])


def test_two_threads_may_write_one_file(
    saved: Path, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that neither thread writes into the unfinished file of the other."""
    path, both, finish = tmp_path / "talk", threading.Barrier(2, timeout=60), tensor_files.finish
    caches = [kvpass.load_cache(saved, compiled) for _ in range(2)]
    failed: list[Exception] = []

    def finish_together(*given: Any) -> None:
        both.wait()
        finish(*given)

    def save(cache: Any) -> None:
        try:
            kvpass.save_cache(cache, path)
        except Exception as error:
            failed.append(error)

    monkeypatch.setattr(tensor_files, "finish", finish_together)
    threads = [threading.Thread(target=save, args=[cache]) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    kvpass.load_cache(path, compiled)
    assert [each.name for each in tmp_path.iterdir()] == ["talk"]


@pytest.mark.parametrize("stops", [0, 1, 2])
def test_rows_that_had_stopped_stay_so_in_a_loop_of_other_stops(stops: int, tmp_path: Path) -> None:
    ids, path = prompt(2, 15, ())[0], tmp_path / "loop"
    model = build("Llama", layers=1)
    alone = kvpass.DecodeLoop(model, "h2o", budget=24, inner="eager")
    alone.prompt(ids)
    first, second = alone.generate(12)
    stop = [token for token in range(128) if token not in first and token not in second][:stops]
    last = next(int(token) for token in first[2:] if token not in second)
    made, loops = [], [kvpass.DecodeLoop(model, "h2o", budget=24, inner="eager", stop=[last], pad=9)]
    loops[0].prompt(ids)
    loops[0].generate(8)
    kvpass.save_cache(loops[0], path)
    loops.append(kvpass.DecodeLoop(model, "h2o", budget=24, inner="eager", stop=stop, pad=9))
    kvpass.load_cache(path, loops[1])
    for loop in loops:
        made.append(loop.generate(4))
        loop.prompt(ids[:, :3])
    assert torch.equal(made[0], made[1])
    assert made[0][0].tolist() == [9] * 4
    for ours, theirs in zip(*(caches_in(loop)[0].slots.tensors() for loop in loops), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a folder"])
def test_what_is_no_file_is_never_replaced(saved: Path, compiled: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "there"
    make = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link to a folder": lambda: path.symlink_to("/")}
    make[kind]()
    before, cache = path.lstat(), kvpass.load_cache(saved, compiled)
    with pytest.raises(CacheFileError, match="cannot be written: it exists and is not a regular file"):
        kvpass.save_cache(cache, path)
    assert path.lstat() == before


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_to_a_file_stays_a_link(saved: Path, compiled: Any, tmp_path: Path, exists: bool) -> None:
    path, link = tmp_path / "elsewhere" / "cache.safetensors", tmp_path / "link"
    path.parent.mkdir()
    link.symlink_to(path)
    if exists:
        path.write_text("old")
    kvpass.save_cache(kvpass.load_cache(saved, compiled), link)
    assert link.is_symlink()
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    kvpass.load_cache(path, compiled)


CONTINUE = """
import sys, torch, kvpass
from tests.models import build, prompt
from tests.decoding.test_cache_files import talked
path, out = sys.argv[1:]
torch.set_num_threads(1)
ids, mask = prompt(2, 64, (3, 0))
model = torch.compile(build("Llama", layers=1), backend=kvpass.backend("h2o", budget=8, inner="eager"))
cache = kvpass.load_cache(path, model)
logits, cache = talked(model, cache, [1, 1, 3, 1], mask, ids)
torch.save({"logits": logits, "held": kvpass.inspect(cache).layers[0].positions}, out)
"""


@pytest.mark.slow
def test_another_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    ids, mask = prompt(2, 64, (3, 0))
    model = torch.compile(build("Llama", layers=1), backend=kvpass.backend("h2o", budget=8, inner="eager"))
    _, cache = talked(model, None, [12, 1, 1], mask, ids)
    path, out = tmp_path / "talk.safetensors", tmp_path / "out.pt"
    kvpass.save_cache(cache, path)
    subprocess.run([sys.executable, "-c", CONTINUE, str(path), str(out)], check=True, cwd=ROOT)
    expected, cache = talked(model, cache, [1, 1, 3, 1], mask, ids)
    got = torch.load(out)
    assert torch.equal(got["logits"], expected)
    assert torch.equal(got["held"], kvpass.inspect(cache).layers[0].positions)


@pytest.fixture(scope="module")
def compiled(shared_traces: None) -> Any:
    return torch.compile(build("Llama", layers=1), backend=kvpass.backend("h2o", budget=8, inner="eager"))


@pytest.fixture(scope="module")
def saved(compiled: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "talk.safetensors"
    ids, mask = prompt(2, 20, ())
    _, cache = talked(compiled, None, [12, 1], mask, ids)
    kvpass.save_cache(cache, path)
    return path


def change_layer(header: dict[str, Any], layout: dict[str, Any] | None = None, **fields: Any) -> None:
    """Change fields of the first layer, and of its layout."""
    header["layers"][0]["layout"].update(layout or {})
    header["layers"][0].update(fields)


CHANGES: list[tuple[Change, str]] = [
    (lambda header, _: header.update(version=3), "by an older kvpass, in format 3, .* reads format 4: run the text of"),
    (lambda header, _: header.update(version=5), "by a newer kvpass, in format 5, .* reads format 4: update kvpass"),
    (lambda header, _: header.update(version="1"), "has the format version '1', which no kvpass writes"),
    (lambda header, _: header.pop("version"), r"its header cannot be read \(KeyError: 'version'\)"),
    (lambda header, _: header.pop("layers"), r"its header cannot be read \(KeyError"),
    (lambda header, _: header["settings"].update(budget=9), "other settings: budget 9 in the file and 8 here"),
    (lambda header, _: header["settings"].update(policy=["tova", {}]), r"other settings: policy \['tova'"),
    (lambda header, _: header["weights"].append("0" * 32), "made by other weights: 1 of"),
    (lambda header, _: header["config"].update(vocab_size=7), "configuration: .*vocab_size is 128, not 7"),
    (lambda header, _: change_layer(header, {"batch": 3}, row_budgets=[8] * 3), r"for 'key', where .* \[3, 2, 9, 16\]"),
    (lambda header, _: change_layer(header, {"capacity": -1}), "its capacity is -1"),
    (lambda header, _: change_layer(header, {"heads": True}), "its heads is True"),
    (lambda header, _: change_layer(header, {"dtype": "int8"}), "its dtype is 'int8'"),
    (lambda header, _: change_layer(header, {"dtype": "nn"}), "its dtype is 'nn'"),
    (lambda header, _: change_layer(header, row_budgets=[8]), "do not fit 2 rows"),
    (lambda header, _: change_layer(header, row_budgets=[8, 100]), "its capacity cannot be"),
    (lambda header, _: change_layer(header, length=4), "its index and length cannot be|its length cannot be"),
    (lambda _, tensors: tensors["0.free"].fill_(9), "its free cannot belong to 13 tokens in 9 slots"),
    (lambda _, tensors: tensors["0.free"].fill_(-1), "its free cannot be"),
    (lambda _, tensors: tensors["0.position"].fill_(99), "its position cannot be"),
    (lambda _, tensors: tensors["0.rank"].fill_(99), "its rank cannot be"),
    (lambda _, tensors: tensors.pop("0.value"), "it has nothing for 'value'"),
    (lambda _, tensors: tensors.update({"0.score": torch.zeros(1)}), r"it has torch.float32 \[1\] for 'score'"),
    (lambda _, tensors: tensors.update({"0.absent": torch.zeros(3, 1, dtype=torch.int64)}), "record of padding"),
    (lambda header, _: header["object"].update(object="StaticCache"), "it holds a StaticCache of 1 layers"),
    (lambda header, _: header["object"]["layers"][0].__setitem__(0, "Other"), "of 1 layers, Other, and this model"),
    (lambda header, _: header["object"]["layers"][0][1].update(update={"value": 1}), "it has a value for 'update'"),
    (lambda header, _: header["object"]["layers"][0][1].update(keys={"code": 1}), r"cannot be read \(KeyError: 'code'"),
    (lambda header, _: header["object"]["layers"][0][1].update(keys={"handle": [5, "keys"]}), "cannot be read"),
    (lambda header, _: header.update(loop={"all_stopped": False}), "it holds a DecodeLoop: pass one to load_cache"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_a_changed_file_is_refused(saved: Path, compiled: Any, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CacheFileError, match=message):
        kvpass.load_cache(changed(saved, change, tmp_path / "changed"), compiled)


def test_damaged_and_missing_files_are_refused(saved: Path, compiled: Any, tmp_path: Path) -> None:
    whole, damaged = saved.read_bytes(), tmp_path / "damaged"
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:size])
        with pytest.raises(CacheFileError, match="cannot read a cache of kvpass from"):
            kvpass.load_cache(damaged, compiled)
    with pytest.raises(CacheFileError, match=r"cannot read a cache of kvpass from .*none"):
        kvpass.load_cache(tmp_path / "none", compiled)
    with pytest.raises(CacheFileError, match=f"cannot read a cache of kvpass from {tmp_path}: it is a folder"):
        kvpass.load_cache(tmp_path, compiled)
    safetensors.torch.save_file({"x": torch.zeros(1)}, damaged)
    with pytest.raises(CacheFileError, match="holds no cache of kvpass"):
        kvpass.load_cache(damaged, compiled)
    for text in ("{", "[" * 100_000):
        safetensors.torch.save_file({"x": torch.zeros(1)}, damaged, metadata={KEY: text})
        with pytest.raises(CacheFileError, match="the metadata of this cache of kvpass cannot be read"):
            kvpass.load_cache(damaged, compiled)


def test_a_changed_bit_is_noticed(saved: Path, compiled: Any, tmp_path: Path) -> None:
    """Check bits of the header and of the tensors, except for the name of the digest, without which it is not read."""
    whole, damaged = saved.read_bytes(), tmp_path / "damaged"
    name = whole.index(tensor_files.DIGEST.encode())
    kept = range(name, name + len(tensor_files.DIGEST))
    for index in range(0, len(whole), 61):
        content = bytearray(whole)
        content[index] ^= 1 << index % 8
        damaged.write_bytes(content)
        if index not in kept:
            with pytest.raises(CacheFileError, match=str(damaged)):
                kvpass.load_cache(damaged, compiled)


def folded() -> Any:
    """Return an object that is too deep for recursion, and not too deep for Python's json."""
    limit = sys.getrecursionlimit()  # other tests raise it
    levels = 2 * limit // 5 if sys.version_info < (3, 12) else limit
    return json.loads('{"list": [' * levels + "]}" * levels)


ODD: dict[str, Change] = {
    "an unknown policy": lambda header, _: header["settings"].update(policy=["tova2", {}]),
    "a class that is not registered": lambda header, _: header["settings"].update(policy=["h2o", {}, "own.H2O"]),
    "an unknown option": lambda header, _: header["settings"].update(policy=["h2o", {"heavier": 1}]),
    "a budget below zero": lambda header, _: header["settings"].update(budget=-8),
    "a budget beyond all numbers": lambda header, _: change_layer(header, row_budgets=[10**400] * 2),
    "no heads": lambda header, _: change_layer(header, {"heads": 0}),
    "a folded object": lambda header, _: header.update(object=folded()),
}


@pytest.mark.parametrize("name", ODD)
def test_errors_of_others_become_errors_of_the_file(name: str, saved: Path, tmp_path: Path) -> None:
    """Check a model that is not compiled, for which the file's settings make a backend."""
    path = changed(saved, ODD[name], tmp_path / "changed")
    with pytest.raises(CacheFileError, match=f"{path}: "):
        kvpass.load_cache(path, build("Llama", layers=1))


@torch.no_grad()
def test_a_loop_of_requests_takes_a_saved_cache_as_a_prefix(tmp_path: Path) -> None:
    model, how = build("Llama", layers=1), dict(policy="h2o", budget=8, inner="eager")
    ids, _ = prompt(1, 20, ())
    cache = torch.compile(model, backend=kvpass.backend(**how))(ids, use_cache=True).past_key_values
    kvpass.save_cache(cache, tmp_path / "talk")
    made = []
    for load in (lambda loop: cache, lambda loop: kvpass.load_cache(tmp_path / "talk", loop)):
        loop = kvpass.DecodeLoop(model, rows=2, **how)
        loop.add(ids[0, :3], prefix=load(loop), max_new_tokens=12)
        outputs = []
        while loop.pending:
            outputs += loop.step()
        made.append(outputs[-1].generated_tokens)
    assert len(made[0]) == 12
    assert made[0] == made[1]


def test_other_models_and_settings_are_refused(saved: Path, compiled: Any) -> None:
    other = build("Llama", layers=1)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.add_(1e-3)
    with pytest.raises(CacheFileError, match=r"1 of .* weight tensors are not in this LlamaForCausalLM"):
        kvpass.load_cache(saved, other)
    with pytest.raises(CacheFileError, match="made by other weights"):
        kvpass.load_cache(saved, build("Llama", torch.bfloat16, layers=1))
    for backend in (kvpass.backend("h2o", budget=9), kvpass.backend("h2o", budget=8, kv_dtype="int8")):
        with pytest.raises(CacheFileError, match="other settings"):
            kvpass.load_cache(saved, torch.compile(build("Llama", layers=1), backend=backend))
    with pytest.raises(CacheFileError, match="it holds no DecodeLoop: pass its model"):
        kvpass.load_cache(saved, kvpass.DecodeLoop(build("Llama", layers=1), "h2o", budget=8))
    with pytest.raises(CacheFileError, match="a int is not a model"):
        kvpass.load_cache(saved, 3)


def test_an_unsupported_save_is_refused(compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "none"
    ids, mask = prompt(2, 20, ())
    _, cache = talked(compiled, None, [12], mask, ids)
    loop = kvpass.DecodeLoop(build("Llama", layers=1), "h2o", budget=8, inner="eager")
    for wrong in (loop, kvpass.DecodeLoop(build("Llama", layers=1), "h2o", budget=8, rows=2)):
        with pytest.raises(CacheHandleError, match="is saved after a prompt"):
            kvpass.save_cache(wrong, path)
    loop.prompt(ids)
    kvpass.save_cache(loop, tmp_path / "loop")
    with pytest.raises(CacheFileError, match="this DecodeLoop serves requests: leave out rows="):
        kvpass.load_cache(tmp_path / "loop", wrong)
    (tmp_path / "loop").unlink()
    with pytest.raises(CacheHandleError, match="there is no kvpass cache in this list"):
        kvpass.save_cache([], path)
    cache.layers[0].note = object()
    with pytest.raises(CacheHandleError, match=r"holds a object \(layer.0.note\)"):
        kvpass.save_cache(cache, path)
    del cache.layers[0].note
    with pytest.raises(CacheFileError, match="cannot be written"):
        kvpass.save_cache(cache, tmp_path / "missing" / "file")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(KVPassError, match=r"pip install 'kvpass\[save\]'"):
        kvpass.save_cache(cache, path)


def test_the_backend_of_a_compiled_model_is_found() -> None:
    chosen = kvpass.backend("h2o", budget=8, inner="eager")
    assert dynamo.backend_of(torch.compile(build("Llama", layers=1), backend=chosen)) is chosen
    assert dynamo.backend_of(torch.compile(build("Llama", layers=1).forward, backend=chosen)) is chosen
    model = build("Llama", layers=1)
    assert dynamo.backend_of(model) is None
    model.compile(backend=chosen)
    assert dynamo.backend_of(model) is chosen
    assert dynamo.backend_of(kvpass.compile(model, "h2o", budget=8, inner="eager")) == chosen


CLOCKS: dict[str, Any] = {
    "none": lambda clocks: [],
    "of another row": lambda clocks: clocks[:1],
    "of two counts": lambda clocks: [clock * 2 for clock in clocks],
    "empty": lambda clocks: [[] for _ in clocks],
    "below zero": lambda clocks: [[-1] * len(clock) for clock in clocks],
}


@pytest.mark.parametrize("policy", ["h2o:interval=4", "buzz", "sage"])
def test_clocks_that_are_not_those_of_the_policy_are_refused(policy: str, tmp_path: Path) -> None:
    """Check that no file makes a cache whose policy is never due."""
    ids, mask = prompt(2, 24, ())
    backend = kvpass.backend(kvpass.policies.parse(policy), budget=16, inner="eager")
    compiled = torch.compile(build("Llama", layers=1), backend=backend)
    _, cache = talked(compiled, None, [20, 1], mask, ids)
    kvpass.save_cache(cache, tmp_path / "talk")
    kvpass.load_cache(tmp_path / "talk", compiled)
    for change in CLOCKS.values():
        path = changed(
            tmp_path / "talk",
            lambda header, _, change=change: header["layers"][0].update(clocks=change(header["layers"][0]["clocks"])),  # type: ignore[misc]
            tmp_path / "changed",
        )
        with pytest.raises(CacheFileError, match="do not fit 2 rows"):
            kvpass.load_cache(path, compiled)
