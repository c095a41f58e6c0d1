"""The peak memory of a long prompt, each in a process of its own: nothing grows with queries times keys.

The default run has `tests/lowering/test_attention_statistics.py::test_no_block_is_larger_than_it_may_be` instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

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
    """MiB that a prompt of `TOKENS` needs at most beyond what the process held before it."""
    # Blocks of 64 KiB and more go back to the system when they are freed: what is measured is what is alive.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, policy, str(TOKENS), str(HEADS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads memory from /proc")
@pytest.mark.parametrize("policy", ["h2o", "cascade", "d2o", "roco", "sage", "buzz"])
def test_a_scored_prompt_needs_little_more_memory_than_a_full_cache(policy: str) -> None:
    assert 10 * peak("full") < MATRIX  # a matrix would be noticed
    assert peak(policy) <= 1.2 * peak("full")
