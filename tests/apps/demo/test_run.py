"""Test the complete demo on a small random model, its fallback, and its output."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from kvpass import tensor_files
from kvpass.apps import checkpoint, cli, corpus
from kvpass.apps.demo import run
from kvpass.apps.demo.chat import QUESTIONS
from kvpass.apps.demo.settings import FULL, PARTS, POLICIES, DemoSettings, DemoSizes
from kvpass.apps.evaluation.session import PositionSnapshot
from kvpass.decoding.loop import DecodeLoop
from kvpass.errors import BudgetError, CheckpointError, KVPassError
from kvpass.policies import Policy
from tests.changed_files import full_disk

TOKENIZER = Path(__file__).parents[3] / "kvpass" / "apps" / "data" / "tokenizer"
SIZES = DemoSizes(answer=6, chunk=16, beyond=40, parts=6, prompt=120, trials=1, timed=40, steps=4)
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


def model(folder: Path) -> Path:
    """Save a random Llama of 128 positions with a tokenizer that has a chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    return rows


def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_loop(model: Any, policy: Policy, **settings: Any) -> DecodeLoop:
        if policy.name == "tova":
            raise BudgetError("too few slots")
        return DecodeLoop(model, policy, **settings)

    monkeypatch.setattr(run, "DecodeLoop", decode_loop)
    out, text = tmp_path / "out", tmp_path / "book.txt"
    text.write_text(corpus.read(corpus.held_out_files())[0][:4000])
    settings = DemoSettings(
        str(model(tmp_path / "model")), ("window", "h2o", "tova"), budget=16, text=text, out=out, inner="eager",
        sizes=SIZES,
    )  # fmt: skip
    run.main(settings)
    printed = capsys.readouterr().out
    names = ["window", "h2o", "tova", FULL]

    turns = table(out, "chat")
    assert [row["policy"] for row in turns] == [name for name in ("window", "h2o", FULL) for _ in QUESTIONS]
    assert turns[-1]["seen"] > 16

    book = {row["policy"]: row for row in table(out, "book")}
    assert list(book) == names
    assert book["tova"]["error"] == "too few slots"
    assert printed.count("tova: too few slots") == 4
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[0, *tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]]])[:, :168]
    uncompiled = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        logits = uncompiled(ids[:, :-1]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    inside = 28 * 4  # four of the six parts end within the trained range
    expected = [math.exp(part.mean().item()) for part in (losses[:inside], losses[inside:])]
    found = [book[FULL]["perplexity up to 128"], book[FULL]["beyond"]]
    assert found == pytest.approx(expected, rel=1e-3)
    assert book["window"]["beyond"] != pytest.approx(book[FULL]["beyond"], rel=1e-4)

    assert [list(row) for row in table(out, "retrieval")[:2]] == [["policy", "0%", "25%", "50%", "75%", "100%"]] * 2
    cost = {row["policy"]: row for row in table(out, "cost") if "error" not in row}
    assert cost["window"]["cache, MiB"] < cost[FULL]["cache, MiB"]
    assert all(row["ms per token"] > 0 and row["first token, s"] > 0 for row in cost.values())

    kept = {row["policy"]: row for row in table(out, "kept")}
    assert kept["window"] == {
        "policy": "window", "of the first 4": 0, "recent": 16, "between": 0, "median position between": None,
    }  # fmt: skip
    assert kept["h2o"]["recent"] >= 8
    assert FULL not in kept

    page = (out / "demo.md").read_text()
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == list(PARTS)
    for name in ("book", "retrieval", "kept"):
        with Image.open(out / f"{name}.png") as picture:
            assert np.asarray(picture.convert("L")).std() > 0
            assert picture.info["Title"] in page


def test_without_the_checkpoint_the_bundled_models_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise CheckpointError("it needs a package; run `pip install it`")

    monkeypatch.setattr(checkpoint, "folder", missing)
    run.main(DemoSettings(policies=("window",), parts=("chat",), out=tmp_path, sizes=SIZES))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "This demo runs on small bundled models: it needs a package; run `pip install it`"
    assert "No chat: tiny-llama has no chat template." in lines


@pytest.mark.slow
def test_the_bundled_models_recall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_load_model", lambda settings: (run.load(None), True))
    run.main(DemoSettings(policies=("window",), parts=("retrieval",), budget=128, out=tmp_path, inner="eager"))
    window, full = table(tmp_path, "retrieval")
    assert list(full.values())[1:] == [1.0] * 6
    assert (window["32"], window["1,024"]) == (1.0, 0.0)


def test_an_empty_book_is_refused(tmp_path: Path) -> None:
    (tmp_path / "book.txt").touch()
    folder, text = str(model(tmp_path / "model")), tmp_path / "book.txt"
    settings = DemoSettings(folder, parts=("book",), budget=16, text=text, out=tmp_path, inner="eager", sizes=SIZES)
    with pytest.raises(KVPassError, match="tokens=1: must be at least 2"):
        run.main(settings)


def test_a_folder_that_takes_no_files_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    with pytest.raises(KVPassError, match=f"{tmp_path / 'demo.md'} cannot be written: there is no folder {tmp_path}"):
        run.main(DemoSettings("nowhere", out=tmp_path))


@pytest.mark.parametrize("name", ["book.json", "book.png", "demo.md"])
def test_a_full_disk_is_an_error_that_names_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneTable(run.Demo):
        def __init__(self, settings: DemoSettings) -> None:
            self.settings = settings

        def run(self) -> None:
            rows: list[Any] = [{"policy": "h2o", "perplexity": 20.0}]
            part = run.PartResult("caption " * 9, rows, run.Figure() if name == "book.png" else None)
            self._write("book", part)
            run._write_page(self.settings.out / run.PAGE, {"book": part})

    write_text = tensor_files.write_text
    monkeypatch.setattr(
        tensor_files, "write_text", lambda path, *rest: write_text(path, *rest) if path.name == name else None
    )
    monkeypatch.setattr(run, "Demo", OneTable)
    with full_disk(), pytest.raises(KVPassError, match=f"{name} cannot be written: .*File too large"):
        run.main(DemoSettings("nowhere", out=tmp_path))
    assert not list(tmp_path.iterdir())


def test_kept_tokens_are_counted_by_region() -> None:
    assert run.cached_row(PositionSnapshot(20, [0, 2, 7, 9, 11, 17, 18, 19])) == {
        "of the first 4": 2, "recent": 3, "between": 3, "median position between": 9,
    }  # fmt: skip


def test_the_command_has_the_names_of_the_modules() -> None:
    given = cli.parser().parse_args(["demo"])
    assert tuple(given.policy) == POLICIES
    assert tuple(given.part) == PARTS
