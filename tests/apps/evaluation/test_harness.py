"""Compare with the harness's Hugging Face model under `full`, and with `generate` under a budget.

These tests need the extra `lm-eval`, which is large; see docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'kvpass[lm-eval]'")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import kvpass  # noqa: E402
from kvpass.apps import cli  # noqa: E402
from kvpass.apps.evaluation.harness import BoundedLM, _Ends, _sampling  # noqa: E402
from kvpass.errors import BudgetError, PolicyError  # noqa: E402
from tests.models import graphs  # noqa: E402

TASKS = Path(__file__).parent / "tasks"
NAMES = [f"local_{kind}" for kind in ("generate_until", "loglikelihood", "loglikelihood_rolling", "multiple_choice")]
SAME = dict(device="cpu", dtype="float32", batch_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tasks and their data."""
    made = tmp_path_factory.mktemp("tasks")
    for path in TASKS.iterdir():
        (made / path.name).write_text(path.read_text().replace("{folder}", str(made)))
    return made


def evaluated(lm: Any, folder: Path) -> dict[str, Any]:
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found: dict[str, Any] = lm_eval.simple_evaluate(lm, tasks=NAMES, task_manager=tasks, bootstrap_iters=0)
    return found


@pytest.fixture(scope="module")
def theirs(checkpoint: Path, folder: Path) -> dict[str, Any]:
    return evaluated(HFLM(str(checkpoint), **SAME), folder)


def bounded(checkpoint: Path, **more: Any) -> BoundedLM:
    return BoundedLM(str(checkpoint), **{**SAME, "inner": "eager", **more})


def responses(found: dict[str, Any], name: str) -> Iterator[Any]:
    for sample in sorted(found["samples"][name], key=lambda sample: sample["doc_id"]):
        yield from (answer for answers in sample["resps"] for answer in answers)


def numbers(found: dict[str, Any], name: str) -> dict[str, float]:
    return {metric: value for metric, value in found["results"][name].items() if isinstance(value, float)}


@pytest.mark.parametrize("way", [dict(), dict(prefill_chunk=8, scoring="chunk"), dict(scoring="full")])
def test_full_is_the_harness_own_model(
    checkpoint: Path, folder: Path, theirs: dict[str, Any], way: dict[str, Any]
) -> None:
    ours = evaluated(bounded(checkpoint, **way), folder)
    for name in NAMES:
        assert numbers(ours, name) == pytest.approx(numbers(theirs, name), rel=1e-4)
        assert numbers(theirs, name)
        for mine, other in zip(responses(ours, name), responses(theirs, name), strict=True):
            assert mine == (other if isinstance(other, str) else pytest.approx(other, rel=1e-4))


def test_the_answers_are_not_all_alike(theirs: dict[str, Any]) -> None:
    """Check that the compared answers vary."""
    for name in NAMES:
        assert len(set(responses(theirs, name))) > 3


def asked(*contexts: str, **how: Any) -> list[Instance]:
    given = {"until": ["~"], "max_gen_toks": 12, **how}
    return [Instance("generate_until", {}, (context, given), 0) for context in contexts]


def test_bounded_generation_is_that_of_a_compiled_model(checkpoint: Path) -> None:
    settings = dict(policy="h2o", budget=8, kv_dtype="int8")
    lm, text = bounded(checkpoint, **settings), "class Reader:\n    def __init__(self, path):\n        pass"
    (said,) = lm.generate_until(asked(text), disable_tqdm=True)
    ids = torch.tensor([lm.tok_encode(text)])
    assert ids.shape[1] > settings["budget"]
    kvpass.compile(lm.model, **settings, inner="eager")
    made = lm.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert said == lm.tok_decode(made)
    (free,) = bounded(checkpoint).generate_until(asked(text), disable_tqdm=True)
    assert said != free  # tokens were evicted


def test_rows_end_each_at_its_text_and_no_length_is_compiled_for_itself(checkpoint: Path) -> None:
    lm = bounded(checkpoint, policy="streaming", budget=8, prefill_chunk=8)
    texts = ["def parse(line):\n    return line", "import"]
    whole = lm.generate_until(asked(*texts), disable_tqdm=True)
    cut = [text[len(text) // 2] for text in whole]
    said = lm.generate_until(asked(*texts, until=cut), disable_tqdm=True)
    assert said == [min((text.split(end)[0] for end in cut), key=len) for text in whole]
    before = graphs()
    lm.generate_until(asked("for name in names:\n    print(name, end='')\n", "x = 1"), disable_tqdm=True)
    assert graphs() == before


def test_ends_are_found_across_tokens(checkpoint: Path) -> None:
    tokenizer = bounded(checkpoint).tokenizer
    said = tokenizer.encode("return value\n", add_special_tokens=False)
    ends = _Ends(tokenizer, ["lue\n"], [], 1)
    columns = list(ends.until_all(iter(torch.tensor([*said, 5, 6])[:, None])))
    assert len(columns) == len(said)


def test_sampling_is_that_of_a_loop_and_what_it_cannot_do_is_refused() -> None:
    assert _sampling(dict(do_sample=False, temperature=0.7, num_beams=1)) == {}
    assert _sampling(dict(do_sample=True, temperature=0.7, top_p=0.9)) == {"temperature": 0.7, "top_p": 0.9}
    with pytest.raises(PolicyError, match="num_beams=4"):
        _sampling(dict(num_beams=4))


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (dict(policy="h2o"), BudgetError, "needs a budget"),
        (dict(policy="h2o", budget=0.2, prefill_chunk=8), BudgetError, "share of the prompt"),
        (dict(policy="h2o:heavy=2", budget=8), PolicyError, "heavy"),
        (dict(scoring="whole"), PolicyError, "scoring='whole'"),
        (dict(scoring="chunk"), PolicyError, "prefill_chunk"),
    ],
)
def test_settings_are_refused_before_a_task_runs(
    checkpoint: Path, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        bounded(checkpoint, **settings)


def test_the_command_is_the_harness_own(
    checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvpass"])
    given = f"pretrained={checkpoint},dtype=float32,inner=eager,policy=sage:top=2:sinks=2,budget=9"
    tasks = ["--include_path", str(folder), "--tasks", "local_multiple_choice", "--output_path", str(tmp_path)]
    assert cli.main(["lm-eval", "--model_args", given, "--device", "cpu", "--batch_size", "4", *tasks]) == 0
    printed = capsys.readouterr().out
    assert "kvpass ({'pretrained'" in printed
    assert "acc_norm" in printed
    assert list(tmp_path.rglob("results*.json"))
