"""Test an exported loop of the checkpoint: another process decodes the same answer without compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvpass
from tests.checkpoint.conversations import next_turn, of_length
from tests.checkpoint.subject import WHOLE, Subject

ROOT = Path(__file__).parents[2]
DTYPES = [
    pytest.param((dtype, WHOLE), id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float32)
]
DECODE = """
import json, sys, time, torch, kvpass
from kvpass.apps import checkpoint
path, digest, dtype, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model, _ = checkpoint.load(dtype)
turns = [torch.tensor(ids) for ids in json.load(sys.stdin)]
began, made = time.perf_counter(), []
loop = kvpass.load(path, model, digest=digest, read_interval=1)
loop.prompt(turns[0])
loop.generate(2)
seconds = time.perf_counter() - began
loop.reset()
for turn in turns:
    loop.prompt(turn)
    made += loop.generate(60)[0].tolist()
print(json.dumps({"seconds": seconds, "tokens": made, "compiles": "torch._inductor.compile_fx" in sys.modules}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("subject", DTYPES, indirect=True)
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_another_process_gives_the_same_answer(subject: Subject, policy: str, tmp_path: Path) -> None:
    path, settings = tmp_path / "artifact", {"policy": policy, "budget": 256}
    digest = kvpass.export(subject.plain, path, **settings)
    question = "Is it one that asks for copies of its text?"
    turns = [of_length(subject.tokenizer, 300), next_turn(subject.tokenizer, question)]
    loop = kvpass.DecodeLoop(subject.plain, **settings)
    loop.warm()
    expected: list[int] = []
    for turn in turns:
        loop.prompt(turn)
        expected += loop.generate(60)[0].tolist()
    arguments = [str(path), digest, str(subject.dtype).removeprefix("torch."), str(torch.get_num_threads())]
    given = json.dumps([turn.tolist() for turn in turns])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "none")}
    command = [sys.executable, "-c", DECODE, *arguments]
    ran = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    found = json.loads(ran.stdout.splitlines()[-1])
    print(f"second token {found['seconds']:.2f} s after the weights, {len(set(expected))} different tokens")
    assert found["tokens"] == expected
    assert len(set(expected)) > 20
    assert not found["compiles"]
