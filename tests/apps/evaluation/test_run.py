"""Test cases, reuse of measurements, tables, and the complete command."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvpass import tensor_files
from kvpass.apps import cli
from kvpass.apps.evaluation import report, run
from kvpass.apps.evaluation.full_cache import CacheLayer, FullCache
from kvpass.apps.evaluation.perplexity import Perplexity
from kvpass.apps.evaluation.recall import RecallMeasure
from kvpass.apps.evaluation.run import MEASURE_FACTORIES
from kvpass.apps.evaluation.settings import FILE, Case, EvaluationSettings, Result, Results, cases
from kvpass.errors import KVPassError
from kvpass.policies.cascade import Cascade
from kvpass.policies.full import Full
from kvpass.policies.h2o import H2O
from tests.apps.evaluation.conftest import TOKENIZER
from tests.calibrations import random_gates
from tests.changed_files import full_disk


def settings(**more: Any) -> EvaluationSettings:
    given: dict[str, Any] = dict(measures=(Perplexity(), RecallMeasure()), policies=("full", "h2o"), budgets=(8, 0.5))
    return EvaluationSettings(**{**given, **more})


def test_a_policy_that_evicts_nothing_is_measured_once() -> None:
    found = [(case.measure.name, case.policy, case.budget) for case in cases(settings())]
    assert found == [
        ("perplexity", "full", None), ("recall", "full", None), ("perplexity", "h2o", 8), ("recall", "h2o", 8),
        ("perplexity", "h2o", 0.5), ("recall", "h2o", 0.5),
    ]  # fmt: skip


def test_a_budget_is_fitted_to_the_policy() -> None:
    full = FullCache((CacheLayer(2, 16, 16, torch.float32),))
    assert Case(Perplexity(tokens=99), "full", None).slots(Full(), full) == 99
    assert Case(Perplexity(tokens=10**6), "full", None).slots(Full(), full) is None  # a full cache grows
    assert Case(Perplexity(), "cascade", 65).slots(Cascade(), full) == 64
    assert Case(Perplexity(), "cascade", 0.3).slots(Cascade(), full) == 0.3
    assert Case(Perplexity(), "h2o", 0.25, of_bytes=True).slots(H2O(), full) == full.budget(0.25, 2048, H2O(), None)


@pytest.mark.parametrize(
    "more", [dict(prefill="chunk"), dict(dtype="bfloat16"), dict(model="another"), dict(kv_dtype="int8")]
)
def test_another_way_of_measuring_is_another_case(more: dict[str, Any]) -> None:
    case = Case(Perplexity(), "h2o", 8)
    assert case.key(settings(**more), "texts") != case.key(settings(), "texts")
    assert case.key(settings(out=Path("elsewhere")), "texts") == case.key(settings(), "texts")
    assert Case(Perplexity(tokens=9), "h2o", 8).key(settings(), "texts") != case.key(settings(), "texts")
    assert case.key(settings(), "others") != case.key(settings(), "texts")


@pytest.mark.parametrize("change", ["weights", "configuration", "texts", "boundaries of texts"])
def test_another_model_or_text_under_the_same_name_is_another_case(change: str, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    before = run.digest_of(model, [[1, 2], [3]])
    assert run.digest_of(transformers.AutoModelForCausalLM.from_pretrained(checkpoint), [[1, 2], [3]]) == before
    if change == "weights":
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)
    elif change == "configuration":
        model.config.rms_norm_eps *= 2
    texts = {"texts": [[1, 2], [4]], "boundaries of texts": [[1], [2, 3]]}.get(change, [[1, 2], [3]])
    assert run.digest_of(model, texts) != before


def test_another_file_at_the_path_of_an_option_is_another_case(tmp_path: Path) -> None:
    case = Case(Perplexity(), f"duo_attention:gates={tmp_path / 'gates'}", 8)
    random_gates(seed=0).save(tmp_path / "gates")
    before = case.key(settings(), "inputs")
    random_gates(seed=1).save(tmp_path / "gates")
    assert case.key(settings(), "inputs") != before


def test_results_are_read_as_they_were_written_and_refusals_are_tried_again(tmp_path: Path) -> None:
    key = Case(RecallMeasure((4, 9)), "h2o", 8).key(settings(), "texts")
    Results(tmp_path / "new").add(Result(key, [], {}, "why"))
    again = Results(tmp_path / "new")
    assert again.of(key) is None
    again.add(Result(key, [{"distance": 4}], {"4": 1.0}))
    assert Results(tmp_path / "new").entries == [Result(key, [{"distance": 4}], {"4": 1.0})]
    assert Results(tmp_path / "new").of(key) is not None


@pytest.mark.parametrize("text", ["[{", "[1]", "[" * 100_000, "null"])
def test_a_folder_with_something_else_is_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(KVPassError, match=f"cannot continue with {tmp_path / FILE}: "):
        Results(tmp_path)
    assert (tmp_path / FILE).read_text() == text


def test_results_that_cannot_be_written_leave_the_complete_file(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(result("h2o", 8, Perplexity()))
    before = (tmp_path / FILE).read_text()
    with full_disk(), pytest.raises(KVPassError, match=r"results.json cannot be written: .*; free space there"):
        results.add(result("h2o", 16, Perplexity()))
    assert (tmp_path / FILE).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("plots", [False, True])
def test_a_full_disk_is_an_error_of_the_tables_and_pictures(
    plots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = RecallMeasure((32, 64))
    arguments: Any = (tmp_path, [measure], [result("h2o", 8, measure)])
    if plots:
        monkeypatch.setattr(tensor_files, "write_text", lambda *_: None)
    name = "recall.png" if plots else "results.md"
    with full_disk(), pytest.raises(KVPassError, match=f"{name} cannot be written: .* File too large"):
        report.write(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("together", [False, True])
def test_two_runs_may_write_to_one_folder(together: bool, tmp_path: Path) -> None:
    """Check that the results of each run stay, and that the file has a case that both measured once."""
    runs = [Results(tmp_path) for _ in range(2)]

    def add_all(number: int) -> None:
        for budget in range(8, 14):
            runs[number].add(result("h2o", budget + 6 * number, Perplexity()))
        runs[number].add(result("h2o", 99, Perplexity()))

    if together:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(add_all, range(2)))
    else:
        add_all(0)
        add_all(1)
    assert sorted(entry.key["budget"] for entry in Results(tmp_path).entries) == [*range(8, 20), 99]


@pytest.mark.parametrize("name", [FILE, "results.md"])
def test_a_folder_that_takes_no_results_is_refused_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(KVPassError, match=f"{name} cannot be written: it exists and is not a regular file"):
        Results(tmp_path)


def result(policy: str, budget: int | None, measure: Any, error: str | None = None) -> Result:
    rows = [{"distance": d, "pairs": d / 100} for d in (32, 64)]
    key = Case(measure, policy, budget).key(settings(), "texts")
    return Result(key, rows, {"perplexity": 2.0 + (budget or 0)}, error)


def test_tables_have_a_line_for_each_result_and_say_what_was_refused() -> None:
    found = [result("full", None, Perplexity()), result("h2o", 8, Perplexity()), result("h2o", 2, Perplexity(), "why")]
    text = report.section(Perplexity(), found)
    assert text.splitlines()[0] == "## perplexity"
    assert "| full | - | 2.00 |" in text
    assert "| h2o | 8 | 10.00 |" in text
    assert text.endswith("h2o 2: why")
    assert report.section(RecallMeasure(), found) == ""


def test_lines_go_across_rows_or_budgets() -> None:
    by_budget = [result("full", None, Perplexity()), result("h2o", 8, Perplexity()), result("h2o", 16, Perplexity())]
    assert report.lines(Perplexity(), by_budget) == {"full": [(8, 2.0), (16, 2.0)], "h2o": [(8, 10.0), (16, 18.0)]}
    assert report.lines(RecallMeasure(), [result("h2o", 8, RecallMeasure())]) == {"h2o 8": [(32, 0.32), (64, 0.64)]}


def test_every_measure_has_a_name_on_the_command_line() -> None:
    given = cli.parser().parse_args(["eval", "--measure", *MEASURE_FACTORIES])
    assert (
        [MEASURE_FACTORIES[name](given).name for name in cli.MEASURES] == list(cli.MEASURES) == list(MEASURE_FACTORIES)
    )


@pytest.mark.parametrize("option", ["--budget=0", "--budget=1.5", "--budget=many", "--budget=-3", "--bytes=2"])
def test_bad_budgets_are_usage_errors(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", option])
    assert option.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("measures", [["ruler"], ["recall"], ["stream"], ["perplexity", "recall", "ruler"]])
def test_rows_of_a_measure_without_batches_are_refused(
    measures: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["eval", "--measure", *measures, "--rows", "4", "--out", str(out), "--text", "nowhere"]) == 2
    named = ", ".join(name for name in measures if name != "perplexity")
    assert capsys.readouterr().err.startswith(f"kvpass: --rows 4: has no effect on {named}; ")
    assert not out.exists()


@pytest.mark.parametrize("name", sorted({*cli.MEASURES} - {*run.WITHOUT_ROWS}))
def test_every_other_measure_has_its_rows(name: str) -> None:
    one, four = (
        run.settings_of(cli.parser().parse_args(["eval", "--measure", name, "--rows", rows])) for rows in ("1", "4")
    )
    assert one.measures != four.measures


def test_budgets_in_bytes_are_measured_and_refused(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("def a(x):\n    return x + 1\n" * 9)
    given = cli.parser().parse_args(
        ["eval", "--model", str(checkpoint), "--text", str(text), "--prefill", "chunk", "--chunk", "8", "--tokens",
         "64", "--policy", "h2o", "--bytes", "0.75", "0.001", "--inner", "eager", "--out", str(tmp_path / "out")],
    )  # fmt: skip
    given.run(given)
    found, refused = json.loads((tmp_path / "out" / FILE).read_text())
    full = FullCache.of(transformers.AutoModelForCausalLM.from_pretrained(checkpoint))
    assert found["columns"]["slots"] == full.budget(0.75, 64, H2O(), None)
    assert (found["key"]["budget"], found["key"]["of"]) == (0.75, "bytes")
    assert "no budget of 'h2o' takes at most 0.001" in refused["error"]


def test_a_table_has_the_slots_of_a_policy_that_cannot_have_the_budget(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("def a(x):\n    return x + 1\n" * 9)
    given = cli.parser().parse_args(
        ["eval", "--model", str(checkpoint), "--text", str(text), "--prefill", "chunk", "--chunk", "8", "--tokens",
         "64", "--policy", "full", "streaming:sinks=20", "streaming", "--budget", "8", "--inner", "eager", "--out",
         str(tmp_path / "out")],
    )  # fmt: skip
    given.run(given)
    found = json.loads((tmp_path / "out" / FILE).read_text())
    assert [result["columns"].get("slots") for result in found] == [None, 21, None]


def test_a_run_that_measures_nothing_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("def a(x):\n    return x + 1\n" * 9)
    arguments = ["eval", "--model", str(checkpoint), "--text", str(text), "--inner", "nope", "--policy", "h2o"]
    assert cli.main([*arguments, "--tokens", "64", "--out", str(tmp_path / "out")]) == 2
    assert "nothing was measured, because every case is refused; the first one: inner='nope'" in capsys.readouterr().err


def test_an_empty_text_is_refused_by_its_name(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "empty.txt"
    text.touch()
    arguments = ["eval", "--model", str(checkpoint), "--text", str(text), "--measure", "needle", "--policy", "h2o"]
    assert cli.main([*arguments, "--budget", "32", "--inner", "eager", "--out", str(tmp_path / "out")]) == 2
    assert f"a text of 0 tokens is too short to measure anything: {text}" in capsys.readouterr().err


def test_an_unknown_policy_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "--policy", "h2o:weight=1", "--out", str(tmp_path / "out")]) == 2
    assert "unknown option 'weight'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def arguments_with_a_table(tmp_path: Path) -> list[str]:
    """Save a GPT-2 of 32 positions and a text, and return the arguments of an evaluation without its measure."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_head=2, n_layer=1, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("def f(x):\n    return x + 1\n" * 99)
    return [
        "eval", "--model", str(tmp_path / "model"), "--text", str(tmp_path / "a.txt"), "--inner", "eager",
        "--prefill", "chunk", "--chunk", "16", "--policy", "window", "--budget", "8", "--out", str(tmp_path / "out"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "measure", [["perplexity", "--tokens", "40"], ["agreement", "--tokens", "40", "--documents", "1"], ["recall"]]
)
def test_a_measure_beyond_the_positions_of_a_table_is_refused(measure: list[str], tmp_path: Path) -> None:
    assert cli.main([*arguments_with_a_table(tmp_path), "--measure", *measure]) == 2
    (entry,) = json.loads((tmp_path / "out" / FILE).read_text())
    assert entry["error"].startswith(f"{tmp_path / 'model'} has 32 positions, and this measure feeds more tokens; ")


def test_a_lack_of_memory_is_not_a_lack_of_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Perplexity, "rows", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory$"):
        cli.main([*arguments_with_a_table(tmp_path), "--measure", "perplexity", "--tokens", "16"])


@pytest.mark.slow
def test_the_command_measures_what_the_folder_lacks(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in texts:
        path.write_text(f"def {path.stem}(x):\n    return x + 1  # {path.name}\n" * 9)
    out = tmp_path / "out"
    arguments = [
        "eval", "--model", str(checkpoint), "--text", *map(str, texts), "--prefill", "chunk", "--chunk", "8",
        "--tokens", "40", "--length", "160", "--depth", "0.5", "--trials", "2", "--distance", "4", "18",
        "--documents", "4", "--task", "single", "--inner", "eager", "--out", str(out), "--measure", *cli.MEASURES,
    ]  # fmt: skip
    assert cli.main([*arguments, "--policy", "full"]) == 0
    found = {entry["key"]["measure"]: entry for entry in json.loads((out / FILE).read_text())}
    assert [entry["error"] for entry in found.values()] == [None] * len(cli.MEASURES)
    expected = [perplexity(checkpoint, path, 40) for path in texts]
    rows = found["perplexity"]["rows"]
    assert [row["perplexity"] for row in rows[:2]] == pytest.approx(expected, rel=1e-3)
    assert found["speed"]["rows"][0]["tokens a second"] > 0
    assert found["speed"]["rows"][0]["cache, MiB"] > 0
    printed = capsys.readouterr().out
    assert all(f"## {name}" in printed for name in cli.MEASURES)
    assert (out / "stream.png").is_file()

    monkeypatch.setattr(run, "DecodeLoop", lambda *_, **__: pytest.fail("all of it was measured"))
    assert cli.main([*arguments, "--policy", "full"]) == 0
    assert capsys.readouterr().out == printed


def perplexity(checkpoint: Path, path: Path, tokens: int) -> float:
    """Return the perplexity from one forward of the uncompiled model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    text = tokenizer(path.read_text(), add_special_tokens=False)["input_ids"][: tokens - 1]
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = torch.tensor([[first, *text]])
    with torch.no_grad():
        return math.exp(model(ids, labels=ids).loss.item())
