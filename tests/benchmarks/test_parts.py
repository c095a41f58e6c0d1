"""Test that the parts of the benchmark measure what they report."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
import torch

import kvpass
from benchmarks import (
    apart,
    batches,
    bounded,
    chunks,
    passkey,
    peers,
    quantised,
    reading,
    row_products,
    serving,
    standing,
    step,
)
from benchmarks.__main__ import PARTS, ROOT
from benchmarks.bounded import Case
from benchmarks.model import Conversation, build, dynamic, static, tokens
from benchmarks.recall import AT_ONCE, LATER
from kvpass.apps.evaluation.recall import PlantedPairs
from kvpass.apps.models import load_memory


@pytest.fixture(scope="module")
def model():
    return build(layers=1)


def talk_of(model, case: Case, prompt: int) -> Conversation:
    compiled = torch.compile(model, backend=kvpass.backend(inner="eager", **case.settings()))
    return Conversation(compiled, compiled(tokens(prompt), use_cache=True).past_key_values)


def test_the_reference_model_has_as_many_parameters_as_it_says():
    with torch.device("meta"):
        assert sum(p.numel() for p in build().parameters()) == pytest.approx(25.7e6, rel=1e-3)


@torch.inference_mode()
def test_a_conversation_that_is_moved_on_goes_on_at_its_place(model):
    talk = talk_of(model, Case("h2o", budget=16), 40)
    before = kvpass.inspect(talk.cache).layers[0].positions
    bounded.move_on(talk, 5000)
    report = kvpass.inspect(talk.cache)
    assert report.seen == 5000
    later = before + 5000 - 40
    assert torch.equal(report.layers[0].positions, torch.where(before < bounded.SINKS, before, later))
    talk.step()
    assert int(kvpass.inspect(talk.cache).layers[0].positions.max()) == 5000


@torch.inference_mode()
def test_an_untended_cache_overwrites_one_slot(model):
    talk = talk_of(model, Case("untended", budget=8), 40)
    for _ in range(3):
        talk.step()
    layer = kvpass.inspect(talk.cache).layers[0]
    assert layer.capacity == 9
    assert layer.positions[0, 0].tolist() == [*range(1, 8), 40]  # tokens of the last two steps were cropped


@torch.inference_mode()
def test_concatenation_holds_sinks_and_recent_tokens(model):
    talk = peers.concatenating(model, 32)
    first = talk.cache.layers[0].keys.clone()
    talk.step()
    now = talk.cache.layers[0].keys
    assert now.shape[2] == 32
    assert torch.equal(now[:, :, : peers.SINKS], first[:, :, : peers.SINKS])
    assert torch.equal(now[:, :, peers.SINKS : -1], first[:, :, peers.SINKS + 1 :])


@torch.inference_mode()
def test_filled_caches_are_as_long_as_they_should_be(model):
    assert dynamic(model, 50).get_seq_length() == 50
    preallocated = static(model, 64, room=14)
    assert int(preallocated.get_seq_length()) == 50
    assert preallocated.layers[0].keys.shape[2] == 64


@pytest.mark.slow
def test_a_function_runs_apart():
    assert apart.run("benchmarks.bounded:everything") == bounded.everything()


def test_every_part_of_the_benchmark_can_be_called():
    for part in PARTS.values():
        assert part.TITLE
        assert all(callable(getattr(part, name)) for name in ("measure", "tables"))
    assert (ROOT / "README.md").is_file()


def test_batches_are_held_against_one_row_and_dtypes_against_float32():
    taken = {("float32", 1): 8.0, ("float32", 4): 12.0, ("bfloat16", 1): 5.0}
    rows = [
        {"threads": 1, "case": case, "dtype": dtype, "rows": count, "ms": ms * scale, "bytes": 10**6}
        for case, scale in (("no policy", 1), ("d2o", 1.2))
        for (dtype, count), ms in taken.items()
    ]
    found = {target.what.removesuffix(" (1 thread(s))"): target.measured for target in batches.targets(rows)}
    assert found == pytest.approx(
        {
            "no policy: bfloat16, of float32": 0.625,
            "no policy: 4 rows, of one, float32": 1.5,
            "d2o, of no policy, float32": 1.2,
            "d2o, of no policy, bfloat16": 1.2,
        }
    )
    (table,) = batches.tables(rows)
    assert [line["float32, of one row"] for line in table.rows] == [1.0, 1.0, 1.5, 1.5]


def test_requests_come_alike_for_all_and_their_lengths_have_a_tail():
    first, again = serving.arrivals(200), serving.arrivals(200)
    assert first == again
    lengths = sorted(len(request.prompt) for request in first)
    assert serving.PROMPTS[0] <= lengths[0] < 4 * lengths[0] < lengths[-10] <= lengths[-1] <= serving.PROMPTS[1]
    assert [request.at for request in first] == sorted(request.at for request in first)


def test_requests_are_held_against_the_other_ways():
    names = ("tokens a second", "first token, p95, s")
    rows = [
        {"way": way, **dict.fromkeys(names, value)} for way, value in zip(serving.WAYS, (6.0, 3.0, 2.0), strict=True)
    ]
    assert [target.measured for target in serving.targets(rows)] == [2.0, 3.0, 2.0]


def test_chunks_are_held_against_the_whole_prompt():
    rows = [
        {"way": way, "tokens": chunks.LONG, "seconds": s, "MiB": 10 * s} for way, s in (("whole", 8.0), ("h2o", 2.0))
    ]
    found = {target.what: target.measured for target in chunks.targets(rows)}
    assert [value for what, value in found.items() if what.startswith("h2o")] == [0.25, 0.25]
    assert any(value is None for value in found.values())


def test_planted_words_are_surpassed_by_a_share_of_all_tokens():
    found = standing.rows(texts=1, length=200)
    asked = [(way, score) for way in (LATER, AT_ONCE) for score in standing.SCORES]
    assert [(row["asked"], row["score"]) for row in found] == asked
    assert all(0 <= row[str(distance)] < 1 for row in found for distance in (16, 32, 64, 128))


def test_a_planted_word_counts_by_its_best_head():
    planted = PlantedPairs(torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 1, 4, dtype=torch.int64), (1,), times=2)
    scores = torch.arange(9.0).flip(0).repeat(1, 2, 1)  # the first token has most; words at 2 and 6
    assert standing._above([scores], planted, 0) == pytest.approx(2 / 9)
    scores[0, 1, 6] = 10
    assert standing._above([scores, scores.flip(1)], planted, 0) == 0


def test_a_passkey_stands_once_among_the_same_sentences():
    first, last = (passkey.planted_at(load_memory(), depth, trials=2, length=200) for depth in (0.0, 1.0))
    said = first.pairs[0, 0].repeat(first.times)
    assert first.text[0, 1 : 1 + len(said)].tolist() == said.tolist()
    assert last.text[1, -len(said) :].tolist() == last.pairs[1, 0].repeat(last.times).tolist()
    assert len(first.text[0].unique()) < 50


@pytest.mark.slow
@torch.inference_mode()
def test_a_full_cache_says_every_passkey_and_a_window_the_last():
    rows = passkey.rows(["full", "window"], trials=2, length=200, budget=64)
    shares = {(row["policy"], row["asked"], row["depth"]): row["accuracy"] for row in rows}
    for way in (LATER, AT_ONCE):
        assert [shares["full", way, depth] for depth in passkey.DEPTHS] == [1.0] * 5
        assert (shares["window", way, 0.0], shares["window", way, 1.0]) == (0.0, 1.0)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_hadamard_transform_reduces_the_error_of_logits(kind):
    plain, turned = (quantised.logit_error(name, 50) for name in (kind, f"{kind}-hadamard"))
    assert turned < 0.6 * plain


@torch.inference_mode()
def test_a_step_reads_all_weights_and_what_is_held(model):
    talk = talk_of(model, Case("untended", budget=8), 40)
    held = 2 * 9 * 4 * 64 * 4  # keys and values, slots, heads, dimensions, bytes
    assert reading.bytes_read(model, talk.cache) == sum(4 * p.numel() for p in model.parameters()) + held


def test_the_floor_is_held_against_the_fastest_reading():
    about = {"dtype": "float32", "threads": 1}
    times = {step.FLOOR: 6.0, step.LOOP_FLOOR: 5.0, reading.NAMES[0]: 4.0, reading.NAMES[1]: 5.0}
    rows = [{**about, "seen": 1024, "contender": name, "ms": ms, "bytes": 10**8} for name, ms in times.items()]
    rows.append({**about, "seen": 4096, "contender": reading.NAMES[0], "ms": 1.0, "bytes": 10**8})
    found = {target.what: target for target in step.targets(rows) if "reading" in target.what}
    assert {what: (target.measured, target.met) for what, target in found.items()} == {
        f"{step.FLOOR}, of reading its bytes once (float32, 1 thread)": (1.5, False),
        f"{step.LOOP_FLOOR}, of reading its bytes once (float32, 1 thread)": (1.25, False),
    }
    (line,) = step.tables(rows)[-1].rows
    assert line["read at, GB/s"] == 25
    assert not [target for target in step.targets(rows[:2]) if "reading" in target.what]  # as in older measurements


def test_loops_are_the_faster_ones_up_to_a_number_of_rows():
    times = [(1, 2.0, 1.5, 1.0, 0.5), (2, 2.0, 1.5, 1.8, 1.9), (4, 2.0, 3.0, 2.5, 2.6)]
    rows = [
        {"dtype": "float32", "threads": 1, "rows": count, "what": "512 x 512", "library": lib, "loops": one}
        | {"loops over halves": two, "loops over quarters": four}
        for count, lib, one, two, four in times
    ]
    (line,) = row_products.limits(rows)
    assert line["over quarters, of the loops"] == 1
    assert (line["over halves, of the others"], line["any, of all"]) == (4, 2)
