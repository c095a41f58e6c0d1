"""Measure tokens per second of a random model with the shape of an 8B, with full caches and each policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

import kvpass
from benchmarks.gpu.bench import Bench, Row
from kvpass import model_access

LENGTHS = ((256, 1024), (512, 2048), (1024, 4096), (2048, 8192))  # prompt and generated tokens: D2O's table 3
BUDGET = 1024
NAMES = ("h2o", "streaming", "d2o", "cascade", "buzz", "tova")


def build(bench: Bench) -> Any:
    """Return a random model with the shape of Llama 3 8B and `layers` of its 32 layers."""
    size = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    if not bench.small:
        size = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
        size["vocab_size"] = 128256
    config = transformers.LlamaConfig(**size, num_hidden_layers=bench.layers, max_position_embeddings=16384)
    with torch.device(bench.device):
        torch.set_default_dtype(bench.dtype)
        try:
            return transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def batch(bench: Bench, model: Any, tokens: int) -> int:
    """Return the largest power of two of rows whose caches fit in addition to the memory of a prompt."""
    config = model.config
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    fitting = int(bench.memory() * 0.6) // (row * tokens * bench.dtype.itemsize)
    return 2 if bench.small else max(1, 1 << (min(fitting, 64).bit_length() - 1))


def _rate(bench: Bench, run: Callable[[], Any], rows: int, steps: int) -> float:
    """Return tokens per second of all rows."""
    bench.sync()
    start = time.perf_counter()
    run()
    bench.sync()
    return rows * steps / (time.perf_counter() - start)


def _plain(bench: Bench, model: Any, ids: Tensor, total: int, static: bool, steps: int) -> float:
    """Return a loop of greedy steps on a full cache of the mean length of the run."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=total) if static else None
    step = torch.compile(model, mode="reduce-overhead") if static and bench.device.type == "cuda" else model
    out = model_access.call_model(model, ids, cache, logits_to_keep=1)
    state = [out.logits[:, -1:].argmax(-1), model_access.cache_of_output(out)]

    def run(count: int) -> None:
        for _ in range(count):
            out = model_access.call_model(step, *state)
            state[:] = [out.logits[:, -1:].argmax(-1).clone(), model_access.cache_of_output(out)]

    run(4)
    return _rate(bench, lambda: run(steps), len(ids), steps)


def _bounded(bench: Bench, model: Any, ids: Tensor, name: str, steps: int) -> float:
    loop = kvpass.DecodeLoop(model, name, budget=64 if bench.small else BUDGET, read_interval=32, inner=bench.inner)
    loop.prompt(ids)
    loop.generate(8)
    return _rate(bench, lambda: loop.generate(steps), len(ids), steps)


@torch.no_grad()
def throughput(bench: Bench) -> Iterator[Row]:
    """Time each contender at its largest batch; a full cache at its mean length."""
    model, steps = build(bench), 8 if bench.small else 64
    for prompt, new in reversed(LENGTHS[:1] if bench.small else LENGTHS):
        full: float | None = None
        total = prompt + new
        for name in ("full, static", "full, dynamic", *bench.few(NAMES)):
            case = f"{prompt}+{new}, {name}"
            if not bench.in_time(case, 5 if bench.small else 45):
                continue
            torch._dynamo.reset()
            whole = name.startswith("full")
            rows = batch(bench, model, total if whole else max(prompt, BUDGET) + 1)
            ids = torch.randint(3, 256, (rows, prompt + new // 2 if whole else prompt), device=bench.device)
            rate = (
                _plain(bench, model, ids, total, name.endswith("static"), steps)
                if whole
                else _bounded(bench, model, ids, name, steps)
            )
            full = rate if full is None else max(full, rate) if whole else full
            last = (prompt, new) == LENGTHS[-1] and not whole
            goal = (">= 3x full", rate >= 3 * full) if last else ("", None)
            yield Row("tokens a second", f"{case}, batch {rows}", rate, "", *goal)


@torch.no_grad()
def loops(bench: Bench) -> Iterator[Row]:
    """Time `DecodeLoop` and `generate` on the compiled model, with one row."""
    if not bench.in_time("DecodeLoop beside generate", 5 if bench.small else 60):
        return
    torch._dynamo.reset()
    model, steps = build(bench), 8 if bench.small else 64
    ids = torch.randint(3, 256, (1, 128), device=bench.device)
    rate = _bounded(bench, model, ids, "h2o", steps)
    yield Row("one row", "DecodeLoop, h2o", rate, "tokens/s")
    torch._dynamo.reset()
    kvpass.compile(model, "h2o", budget=64 if bench.small else BUDGET, inner=bench.inner)
    how: dict[str, Any] = dict(do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate(ids, max_new_tokens=4, **how)
    # The time of the prompt is in both runs and cancels.
    times = []
    for count in (4, 4 + steps):
        bench.sync()
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, **how)
        bench.sync()
        times.append(time.perf_counter() - start)
    yield Row("one row", "generate, h2o", steps / (times[1] - times[0]), "tokens/s")
