"""Test the command line of the server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvpass
from kvpass.apps import cli, models
from kvpass.apps.serving.command import KEY, config_of, service_of
from kvpass.apps.serving.conversations import Limits
from kvpass.apps.serving.service import Service
from kvpass.decoding import artifact_folder, artifacts
from kvpass.errors import ArtifactError, KVPassError, PolicyError


def service(*arguments: str) -> Service:
    return service_of(cli.parser().parse_args(["serve", str(models.BUNDLED), "--inner", "eager", *arguments]))


def test_options_become_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "three")
    made = service(
        *("--policy", "h2o:heavy=0.25", "--budget", "64", "--rows", "3", "--api-key", "one", "--api-key", "two"),
        *(
            "--queue",
            "5",
            "--max-tokens",
            "9",
            "--conversations",
            "7",
            "--kept-bytes",
            "100",
            "--folder",
            str(tmp_path),
        ),
    )
    assert (made.name, made.engine.rows, made.engine.max_requests, made.engine.slots) == ("tiny-llama", 3, 8, 192)
    assert made.settings.api_keys == ("one", "two", "three")
    assert (made.settings.max_tokens, made.settings.context, made.settings.folder) == (9, 2048, tmp_path)
    assert made.settings.conversations == Limits(rows=6, nbytes=100, count=7)
    assert made.model_card()["kvpass"]["budget"] == 64
    assert '"heavy": 0.25' in made.model_card()["kvpass"]["policy"]


@pytest.mark.parametrize("key", ["", "one two", "one\n", "schlüssel"])
def test_an_api_key_that_no_request_can_send_is_refused(key: str) -> None:
    with pytest.raises(KVPassError, match="no request could send it: give another --api-key"):
        service("--api-key", key)


def test_a_model_in_the_current_folder_has_the_name_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models.BUNDLED)
    assert service_of(cli.parser().parse_args(["serve", ".", "--inner", "eager"])).name == models.BUNDLED.name


def test_a_folder_that_is_no_artifact_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("text")
    with pytest.raises(ArtifactError, match=f"{tmp_path} exists and is not an artifact"):
        service("--artifact", str(tmp_path), "--inner", "inductor")
    assert (tmp_path / "other").read_text() == "text"


@pytest.mark.parametrize("folder", ["none", "file"])
def test_an_artifact_that_cannot_be_written_is_refused_before_the_server_starts(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    path = tmp_path / folder / "code"
    with pytest.raises(ArtifactError, match=f"{path} cannot be written: there is no folder {path.parent}"):
        service("--artifact", str(path), "--inner", "inductor")


def test_code_that_cannot_be_exported_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="only Inductor's code can be exported"):
        service("--artifact", str(tmp_path / "code"), "--inner", "eager")


def test_a_server_whose_artifact_cannot_be_completed_serves_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that requests run although the disk is full once everything is compiled."""
    made = service("--artifact", str(tmp_path / "code"), "--inner", "inductor", "--budget", "32")
    monkeypatch.setattr(artifacts, "visit_graphs", lambda *_, **__: None)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(artifact_folder, "write_manifest", fail)
    made.prepare()
    assert "writes no artifact" in caplog.text
    assert "cannot be written: no space left" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_server_loads_what_the_one_before_it_has_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "code"
    options = ("--artifact", str(path), "--inner", "inductor", "--rows", "2", "--prefill-chunk", "16")
    prompts = [torch.arange(1, length)[None] for length in (9, 50)]
    answers: list[list[list[int]]] = []
    for _ in range(2):
        made = service(*options, "--budget", "32")
        made.prepare()
        loop = made.engine.loop
        done = list(loop.generate_batch(prompts, max_new_tokens=20, keep=True).values())
        if not answers:
            kvpass.save_cache(done[1].cache, tmp_path / "talk")
        prefix = kvpass.load_cache(tmp_path / "talk", loop)
        done += loop.generate_batch([prompts[0]], max_new_tokens=20, prefix=prefix).values()
        answers.append([output.generated_tokens for output in done])
    assert isinstance(made.engine.loop, artifacts.LoadedLoop)
    assert answers[0] == answers[1]
    assert not [record for record in caplog.records if record.name.startswith("kvpass")]
    other = service(*options, "--budget", "48")
    assert not isinstance(other.engine.loop, artifacts.LoadedLoop)
    assert "--artifact written again: is for budget 32, and wanted is 48" in caplog.text


def test_a_policy_that_numbers_tokens_anew_has_no_context() -> None:
    made = service("--policy", "streaming", "--budget", "64", "--name", "other")
    assert (made.name, made.settings.context) == ("other", None)
    assert service("--policy", "streaming", "--budget", "64", "--context", "500").settings.context == 500


GPT2 = models.BUNDLED.with_name("tiny-gpt2")
ALIGNER = models.BUNDLED.with_name("tiny-gpt2-align") / "direct.safetensors"


@pytest.mark.parametrize(
    ("policy", "context"), [("h2o", 512), ("streaming", 512), (f"kv_align:aligner={ALIGNER}", None)]
)
def test_a_table_of_positions_limits_the_context(policy: str, context: int | None) -> None:
    """Check that a table is exceeded only under a policy that changes the position ids of a prompt."""
    arguments = ["serve", str(GPT2), "--inner", "eager", "--rows", "1", "--budget", "32", "--policy", policy]
    assert service_of(cli.parser().parse_args(arguments)).settings.context == context
    longer = cli.parser().parse_args([*arguments, "--context", "513"])
    if context is None:
        assert service_of(longer).settings.context == 513
    else:
        with pytest.raises(KVPassError, match=r"--context 513: .*tiny-gpt2 has positions 0 to 511"):
            service_of(longer)


def test_the_server_listens_at_the_loopback_address() -> None:
    parsed = cli.parser().parse_args(["serve", str(models.BUNDLED), "--inner", "eager", "--drain", "7"])
    config = config_of(parsed, service_of(parsed))
    assert (config.host, config.port, config.timeout_graceful_shutdown) == ("127.0.0.1", 8000, 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/model"], "cannot load a language model"),
        ([str(models.BUNDLED), "--policy", "nonsense"], "unknown policy 'nonsense'"),
        ([str(models.BUNDLED), "--policy", "h2o", "--budget", "1"], "is too small for"),
    ],
)
def test_invalid_arguments_end_the_command_before_it_serves(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_is_interrupted_while_it_compiles_ends_quietly() -> None:
    command = [sys.executable, "-m", "kvpass.apps.cli", "serve", str(models.BUNDLED), "--inner", "eager", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "running on" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    assert "terminate" not in rest


def test_a_port_in_use_is_an_error_while_the_model_compiles() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = ["-m", "kvpass.apps.cli", "serve", str(models.BUNDLED), "--inner", "eager"]
        command += ["--port", str(taken.getsockname()[1])]
        done = subprocess.run([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "address already in use" in done.stderr
    assert "terminate" not in done.stderr


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sse_starlette", None)
    for name in [name for name in sys.modules if name.startswith("kvpass.apps.serving")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["serve", "anything"]) == 2
    assert "the server needs sse_starlette: pip install 'kvpass[serve]'" in capsys.readouterr().err
