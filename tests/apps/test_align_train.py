"""Test collection of training pairs, training, and resumption of a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os

import pytest
import torch

from kvpass.apps import cli
from kvpass.apps.align.data import lengths, pair, run_windows, windows
from kvpass.apps.align.train import TrainingSettings, draw, learning_rate, network_of, train
from kvpass.errors import AlignerError
from kvpass.policies.aligners.scope import scope_of
from tests.changed_files import full_disk
from tests.models import build

SMALL = TrainingSettings(window=24, steps=40, tokens=200, hidden=(32, 32), embedding=8)


def text(tokens=4000):
    """Return tokens that follow a simple rule, so that a model can learn it."""
    drawn = torch.randint(3, 20, (tokens,), generator=torch.Generator().manual_seed(0))
    return drawn + 5 * (torch.arange(tokens) % 7)


def test_pairs_are_the_same_tokens_in_both_windows():
    model, sinks = build("GPT2"), 4
    ids = windows(text(), 3, 20, sinks, torch.Generator().manual_seed(1))
    pairs = pair(model, run_windows(model, ids), 6, sinks)
    assert pairs.key.shape == pairs.target_value.shape == (2, 3 * 10, 4, 16)
    assert pairs.position.tolist() == list(range(10, 20)) * 3
    assert pairs.rank.tolist() == list(range(4, 14)) * 3
    shorter = torch.cat([ids[:, :4], ids[:, 10:]], 1)
    with torch.no_grad():
        cache = model(shorter, use_cache=True).past_key_values
    assert torch.allclose(pairs.target_key[1].view(3, 10, 4, 16), cache.layers[1].keys[:, :, 4:].transpose(1, 2))


def test_every_second_window_has_sinks_from_elsewhere():
    stream = torch.arange(1000)
    ids = windows(stream, 8, 30, 4, torch.Generator().manual_seed(2))
    jumps = ids[:, 4] - ids[:, 3] != 1
    assert jumps.tolist() == [True, False] * 4


def test_windows_of_all_lengths_are_drawn():
    generator = torch.Generator().manual_seed(0)
    drawn = [lengths(255, 4, generator) for _ in range(300)]
    assert min(drawn) < 16
    assert 60 < sum(length == 255 for length in drawn) < 140


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["direct", "paper"])
def test_training_beats_doing_nothing(recipe):
    trained = train(build("GPT2"), text(), dataclasses.replace(SMALL, recipe=recipe, steps=120))
    assert trained.errors.ratio < 0.95
    assert trained.aligner.scope == scope_of(build("GPT2"), 24)


def test_parts_of_rows_hold_every_row_once():
    drawn = draw(build("GPT2"), text(), dataclasses.replace(SMALL, recipe="paper"), 1)[0]
    order = torch.randperm(len(drawn.position), generator=torch.Generator().manual_seed(1))
    parts = [drawn.select(rows) for rows in order.chunk(3)]
    assert torch.equal(torch.cat([part.key for part in parts], 1), drawn.key[:, order])
    assert torch.equal(torch.cat([part.rank for part in parts]), drawn.rank[order])


@pytest.mark.parametrize("recipe", ["direct", "paper"])
def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch, recipe):
    model, settings = build("GPT2"), dataclasses.replace(SMALL, recipe=recipe, steps=6)
    monkeypatch.setattr("kvpass.apps.align.train.SAVE_EVERY", 3)
    whole = train(model, text(), settings)
    checkpoint = tmp_path / "run.pt"
    calls = iter(range(100))

    def stop(settings, step):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return learning_rate(settings, step)

    monkeypatch.setattr("kvpass.apps.align.train.learning_rate", stop)
    with pytest.raises(KeyboardInterrupt):
        train(model, text(), settings, checkpoint)
    assert torch.load(checkpoint)["step"] == 3
    monkeypatch.undo()
    again = train(model, text(), settings, checkpoint)
    assert again.aligner == whole.aligner
    with pytest.raises(AlignerError, match="another run"):
        train(model, text(), dataclasses.replace(settings, seed=1), checkpoint)


def other_weights():
    model = build("GPT2")
    torch.nn.init.normal_(model.transformer.h[1].mlp.c_fc.weight, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize(
    ("make_model", "stream"),
    [
        (other_weights, text()),
        (lambda: build("GPTNeoX"), text()),
        (lambda: build("GPT2", layers=1), text()),
        (lambda: build("GPT2"), text() + 1),
        (lambda: build("GPT2"), text(3900)),
    ],
    ids=["weights", "architecture", "layers", "tokens", "length"],
)
def test_a_checkpoint_of_another_model_or_text_is_refused(tmp_path, make_model, stream):
    settings, checkpoint = dataclasses.replace(SMALL, steps=2), tmp_path / "run.pt"
    train(build("GPT2"), text(), settings, checkpoint)
    with pytest.raises(AlignerError, match=r"run.pt is of another run, with another model or text; remove it to"):
        train(make_model(), stream, settings, checkpoint)
    assert train(build("GPT2"), text(), settings, checkpoint).aligner.scope == scope_of(build("GPT2"), 24)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, state: path.write_bytes(b""),
        lambda path, state: path.write_bytes(path.read_bytes()[:-2000]),
        lambda path, state: path.write_bytes(path.read_bytes()[:500]),
        lambda path, state: path.write_text("notes of mine"),
        lambda path, state: torch.save([1, 2], path),
        lambda path, state: torch.save({"model": torch.ones(2)}, path),
        lambda path, state: torch.save({name: state[name] for name in state if name != "network"}, path),
        lambda path, state: torch.save({**state, "network": {}}, path),
        lambda path, state: torch.save({**state, "optimizer": {"state": {}}}, path),
        lambda path, state: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "cut", "short", "text", "list", "other", "no network", "no weights", "optimizer", "folder"],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, damage):
    settings, checkpoint = dataclasses.replace(SMALL, steps=2), tmp_path / "run.pt"
    train(build("GPT2"), text(), settings, checkpoint)
    damage(checkpoint, torch.load(checkpoint))
    with pytest.raises(AlignerError, match=r"run.pt is damaged or not a training checkpoint .*; remove it to start"):
        train(build("GPT2"), text(), settings, checkpoint)


def test_a_run_that_was_stopped_on_a_gpu_goes_on_without_one(tmp_path, monkeypatch):
    settings, checkpoint = dataclasses.replace(SMALL, steps=2), tmp_path / "run.pt"
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        whole = train(build("GPT2"), text(), settings, checkpoint)
    assert train(build("GPT2"), text(), settings, checkpoint).aligner == whole.aligner


class Killed(BaseException):
    pass


@pytest.mark.parametrize("function", [torch.save, os.fsync, os.replace])
def test_a_run_killed_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch, function):
    model, settings, checkpoint = build("GPT2"), dataclasses.replace(SMALL, steps=4), tmp_path / "run.pt"
    monkeypatch.setattr("kvpass.apps.align.train.SAVE_EVERY", 2)
    whole, calls = train(model, text(), settings), itertools.count()

    def killed_at_second_call(*arguments):
        if next(calls) == 1:
            if function is torch.save:
                arguments[1].write(b"the first half")
            raise Killed
        return function(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("torch.save" if function is torch.save else f"os.{function.__name__}", killed_at_second_call)
        with pytest.raises(Killed):
            train(model, text(), settings, checkpoint)
    assert torch.load(checkpoint)["step"] == 2
    assert train(model, text(), settings, checkpoint).aligner == whole.aligner
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.usefixtures("capsys")  # in place of pytest's file, which the bar could not be written to either
def test_a_full_disk_is_an_error_that_names_the_checkpoint(tmp_path):
    settings, checkpoint = dataclasses.replace(SMALL, steps=2), tmp_path / "run.pt"
    message = r"run.pt cannot be written: .*File too large; free space there, and run the command again"
    with full_disk(), pytest.raises(AlignerError, match=message):
        train(build("GPT2"), text(), settings, checkpoint)
    assert not list(tmp_path.iterdir())


def test_too_little_text_and_bad_settings_are_named():
    with pytest.raises(AlignerError, match="has no window of"):
        train(build("GPT2"), text(20), SMALL)
    with pytest.raises(AlignerError, match="leaves nothing to move"):
        TrainingSettings(window=5, every=2)
    with pytest.raises(AlignerError, match="recipe"):
        TrainingSettings(recipe="other")


def test_a_model_without_a_cache_is_refused():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, use_cache):
            return type("Output", (), {"past_key_values": None})()

    with pytest.raises(AlignerError, match="Bare returns no cache"):
        scope_of(Bare(), 24)


@pytest.mark.parametrize(
    ("out", "said"),
    [("no/a.pt", "there is no folder"), ("file/a.pt", "there is no folder"), ("", "is not a regular file")],
)
@pytest.mark.parametrize("command", ["align train --model", "calibrate", "gates"])
def test_a_path_that_cannot_be_written_is_refused_before_a_model_is_loaded(command, out, said, tmp_path, capsys):
    (tmp_path / "file").write_text("text")
    assert cli.main([*command.split(), "nowhere", "--out", str(tmp_path / out)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "text"),
    [("a.json", None), ("a.JSON", None), ("a.safetensors", "a.json"), ("a.pt", "a.pt"), ("a.pt", "a.checkpoint.pt")],
)
def test_files_that_would_overwrite_each_other_are_refused_before_a_model_is_loaded(out, text, tmp_path, capsys):
    arguments = ["align", "train", "--model", "nowhere", "--out", str(tmp_path / out)]
    assert cli.main([*arguments, *(["--text", str(tmp_path / text)] if text else [])]) == 2
    said = capsys.readouterr().err
    assert f"cannot write {tmp_path / out}: " in said
    assert "choose another --out" in said


@pytest.mark.parametrize("command", ["calibrate nowhere --text", "gates nowhere --text", "gates nowhere --table"])
def test_a_text_that_would_be_overwritten_by_what_is_read_from_it_is_kept(command, tmp_path, capsys):
    (tmp_path / "file").write_text("1 0\n")
    assert cli.main([*command.split(), str(tmp_path / "file"), "--out", str(tmp_path / "." / "file")]) == 2
    assert "the run would overwrite its text" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "1 0\n"


@pytest.mark.parametrize(
    ("given", "keys", "values"),
    [
        ({}, (256, 64), (64, 128)),
        ({"hidden": (128, 128)}, (128, 128), (128, 128)),
        ({"hidden": (32, 16), "hidden_values": (8, 4)}, (32, 16), (8, 4)),
        ({"hidden_values": (8, 4)}, (256, 64), (8, 4)),
    ],
)
def test_the_hidden_layers_are_the_papers_or_those_that_are_given(given, keys, values):
    network = network_of(scope_of(build("GPT2"), 24), TrainingSettings(window=24, recipe="paper", **given))
    for part, sizes in ((network.key, keys), (network.value, values)):
        assert (part.fc1.out_features, part.fc2.out_features) == sizes


@pytest.mark.parametrize(
    ("given", "named"),
    [({"rate": 0.0}, "rate=0.0"), ({"hidden_values": (8, 4)}, "has one network for both"), ({"window": 4}, "window=4")],
)
def test_settings_that_cannot_be_are_named(given, named):
    with pytest.raises(AlignerError, match=named):
        TrainingSettings(**given)


@pytest.mark.slow
def test_the_command_trains_and_writes(tmp_path, capsys):
    """Train on the bundled Llama for a few steps."""
    source, out = tmp_path / "text.txt", tmp_path / "aligner.safetensors"
    source.write_text("def f(x):\n    return x + 1\n" * 400, encoding="utf-8")
    arguments = ["align", "train", "--model", "kvpass/apps/data/tiny-llama", "--text", str(source), "--window", "16"]
    arguments += ["--rate", "1e-3", "--hidden", "16", "8", "--device", "cpu", "--threads", "1"]
    assert cli.main([*arguments, "--out", str(out), "--steps", "3", "--tokens", "64"]) == 0
    written = json.loads(out.with_suffix(".json").read_text())
    assert (written["settings"]["rate"], written["settings"]["hidden"]) == (1e-3, [16, 8])
    assert written["signature"]["layers"] == 6
    assert written["held_out"]["key_ratio"] > 0
    assert not out.with_suffix(".checkpoint.pt").exists()
