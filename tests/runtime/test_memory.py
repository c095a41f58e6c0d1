"""Test the memory that remains after compilation, and the peak memory of long prompts.

Peaks are measured in separate processes: no tensor grows with queries times keys. The default run has
`tests/lowering/test_attention_statistics.py::test_no_block_is_larger_than_it_may_be` instead.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import linecache
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import transformers

import kvpass
from benchmarks.memory import resident
from kvpass.capture.canonical import APPEND
from kvpass.torch_private import dynamo, fx_nodes, processor
from tests.models import build, prompt, teacher_forced

TOKENS, HEADS = 8192, 8
MATRIX = HEADS * TOKENS**2 * 4 / 2**20  # MiB of one layer's attention matrix: 2,048

SCRIPT = """
import resource, sys
import torch, transformers, kvpass

policy, tokens, heads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=heads,
    num_key_value_heads=heads // 2, max_position_embeddings=tokens,
)
model = transformers.LlamaForCausalLM(config).eval()
budget = None if policy == "full" else 516
compiled = torch.compile(model, backend=kvpass.backend(policy, budget=budget, inner="eager"))
ids = torch.randint(3, 128, (1, tokens))


def peak():  # MiB; getrusage would also count the process that started this one
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


with torch.inference_mode():
    for count in (640, 700):  # traces the graph, with a fixed and then with any length
        compiled(ids[:, :count], use_cache=True, logits_to_keep=1)
    now = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
    compiled(ids, use_cache=True, logits_to_keep=1)
print(peak() - now)
"""


@cache
def peak(policy: str) -> float:
    """Return the peak memory in MiB of a prompt with `TOKENS` tokens, above the memory of the process before."""
    # Freed blocks of 64 KiB and more return to the system, so that the peak measures live memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, policy, str(TOKENS), str(HEADS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def compiled_apart(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph to code that holds a copy of the graph, not the graph itself, like Inductor."""
    return copy.deepcopy(gm).forward  # type: ignore[no-any-return]


@torch.no_grad()
def test_one_graph_stays_alive_to_rewrite_steps_from(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[fx.GraphModule]] = []
    original = fx_nodes.copy_graph_module

    def noted(gm: fx.GraphModule) -> Any:
        result = original(gm)
        made.append(weakref.ref(result[0]))
        return result

    monkeypatch.setattr(fx_nodes, "copy_graph_module", noted)
    model, (ids, _) = build("Llama", layers=1), prompt(1, 17, ())
    expected = model(ids).logits
    compiled = torch.compile(model, backend=kvpass.backend("h2o", budget=20, inner=compiled_apart))
    out = compiled(ids[:, :12], use_cache=True)
    for start, end in ((12, 13), (13, 14), (14, 17)):  # the last call rewrites the remaining graph again
        if end == 17:
            gc.collect()
            (left,) = (gm for ref in made if (gm := ref()) is not None)
            assert len(made) >= 5  # prompt and step, each in Dynamo's form, in canonical form, and with outputs
            assert any(node.target is APPEND for node in left.graph.nodes)
        out = compiled(ids[:, start:end], past_key_values=out.past_key_values, use_cache=True)
    torch.testing.assert_close(out.logits, expected[:, -3:], atol=1e-4, rtol=1e-4)


def test_lines_of_source_files_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    original = dynamo.release_source_lines

    def noted() -> None:
        read.update(linecache.cache)
        original()

    monkeypatch.setattr(dynamo, "release_source_lines", noted)
    monkeypatch.setitem(linecache.cache, "<a notebook>", (2, None, ["x\n"], "<a notebook>"))
    teacher_forced(build("Llama"), *prompt(1, 12, ()), [10, 1, 1], policy="h2o", budget=8, inner="eager")
    folder = str(Path(transformers.__file__).parent)
    assert any(name.startswith(folder) for name in read)
    assert not any(name.startswith(folder) for name in linecache.cache)
    assert linecache.getline("<a notebook>", 1) == "x\n"


def test_source_lines_that_change_meanwhile_disturb_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check iteration over linecache: a collected graph removes its entry, at any allocation."""
    lines = {f"<graph {number}>": (2, None, ["x"], __file__) for number in range(50)}
    monkeypatch.setattr(linecache, "cache", lines)

    def collected(phase: str, info: dict[str, int]) -> None:
        lines[f"<graph {len(lines) + 1000}>"] = (2, None, ["x"], __file__)

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1, 1, 1)
    try:
        dynamo.release_source_lines()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert not any(f"<graph {number}>" in lines for number in range(50))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
def test_free_memory_goes_back_to_the_system() -> None:
    """Check that free memory below a live block returns to the system."""
    libc, size, count = ctypes.CDLL(None), 50_000, 2000
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(block)
    before = resident()
    processor.return_free_memory()
    assert before - resident() > size * count / 2
    libc.free(blocks[-1])


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads memory from /proc")
@pytest.mark.parametrize("policy", ["h2o", "cascade", "d2o", "roco", "sage", "buzz"])
def test_a_scored_prompt_needs_little_more_memory_than_a_full_cache(policy: str) -> None:
    assert 10 * peak("full") < MATRIX  # a full attention matrix would exceed this
    assert peak(policy) <= 1.2 * peak("full")
