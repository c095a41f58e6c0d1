import pytest
import torch

from kvpass.apps import checkpoint, cli, models
from kvpass.errors import CheckpointError


def refused(arguments, capsys) -> str:
    """Return the error output of a refused `kvpass demo`."""
    pytest.importorskip("matplotlib")
    assert cli.main(["demo", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["demo", "--budget", "0"], "--budget: 0 is less than 1"),
        (["demo", "--budget", "many"], "--budget: 'many' is not a whole number"),
        (["demo", "--policy"], "--policy: expected at least one argument"),
        (["serve", "MODEL", "--port", "65536"], "--port: 65536 is more than 65535"),
        (["serve", "MODEL", "--drain", "nan"], "--drain: 'nan' is not a number from 0 to 86400"),
        (["eval", "--depth", "0.5", "1.5"], "--depth: '1.5' is not a number from 0 to 1"),
        (["eval", "--depth", "half"], "--depth: 'half' is not a number from 0 to 1"),
        (["eval", "--restart", "-5"], "--restart: -5 is less than 0"),
        (["eval", "--seed", "4294967296"], "--seed: 4294967296 is more than 4294967295"),
        (["eval", "--tokens", "9223372036854775808"], "--tokens: 9223372036854775808 is more than"),
        (["eval", "--threads", "99999999999"], "--threads: 99999999999 is more than 4096"),
        (["align", "train", "--rate", "-1"], "--rate: '-1' is not a number from 0 to 1"),
    ],
)
def test_usage_errors_name_the_argument(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["demo"], ["eval"], ["serve", "MODEL"], ["align", "train", "--model", "MODEL", "--out", "FILE"]]
)
def test_a_default_is_what_its_text_would_be(arguments):
    """Measures draw their prompts by the text of their settings, so 0 and 0.0 would be different prompts."""
    defaults = vars(cli.parser().parse_args(arguments))
    for name, value in defaults.items():
        values = value if isinstance(value, list) else [value]
        given = [f"--{name.replace('_', '-')}", *map(str, values)]
        if values and type(values[0]) in (int, float):
            assert repr(vars(cli.parser().parse_args([*arguments, *given]))[name]) == repr(value), name


def test_an_unknown_policy_is_refused_before_anything_is_loaded(tmp_path, capsys):
    message = refused(["--policy", "h2o", "nonsense", "--out", str(tmp_path / "out")], capsys)
    assert "unknown policy 'nonsense'" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["gates", "calibrate"])
def test_a_window_beyond_the_positions_of_a_table_is_refused(command, tmp_path, capsys):
    model, out = models.BUNDLED.with_name("tiny-gpt2"), tmp_path / "out"
    assert cli.main([command, str(model), "--window", "513", "--out", str(out)]) == 2
    assert f"--window 513: {model} has positions 0 to 511; choose a smaller number" in capsys.readouterr().err
    assert not out.exists()


def test_a_missing_text_is_named(tmp_path, capsys):
    missing = tmp_path / "missing.txt"
    assert str(missing) in refused(["--text", str(missing), "--out", str(tmp_path)], capsys)


def test_a_text_that_is_not_text(tmp_path, capsys):
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\xfa")
    assert "cannot read the text" in refused(["--text", str(binary), "--out", str(tmp_path)], capsys)


def test_a_folder_that_is_a_file(tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.touch()
    assert "cannot write to the folder" in refused(["--out", str(taken)], capsys)


def test_a_model_that_does_not_exist(tmp_path, capsys):
    message = refused(["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path)], capsys)
    assert "cannot load a language model" in message


def test_the_bundled_model_may_be_absent(tmp_path, capsys, monkeypatch):
    def missing():
        raise CheckpointError("not installed")

    monkeypatch.setattr(checkpoint, "folder", missing)
    monkeypatch.setattr(models, "BUNDLED", tmp_path)
    assert "choose another with --model" in refused(["--out", str(tmp_path)], capsys)


@pytest.mark.parametrize("command", ["eval", "align"])
def test_a_device_that_torch_has_not_is_named(command, tmp_path, capsys):
    arguments = {"eval": ["eval"], "align": ["align", "train", "--model", str(models.BUNDLED)]}[command]
    assert cli.main([*arguments, "--device", "cuda:99", "--out", str(tmp_path / "out")]) == 2
    assert "cannot put the model on the device 'cuda:99'" in capsys.readouterr().err


def test_threads_are_set_before_a_command_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(cli, "run_command", lambda parsed: asked.append(parsed.model))
    assert cli.main(["serve", "MODEL", "--threads", "3"]) == cli.main(["serve", "OTHER"]) == 0
    assert asked == [3, "MODEL", "OTHER"]
