"""Check results against float64 and against the uncompiled model, before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters

import kvpass
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.layer import RepairOperands, rotary
from kvpass.lowering.attend import attend
from kvpass.lowering.attention_statistics import StatisticsArguments, attention_statistics
from kvpass.lowering.formats import plain

CLOSE = 2e-2  # bfloat16


def _error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-9))


def _row(case: str, error: float, most: float = CLOSE) -> Row:
    return Row("correctness", case, error, "", f"<= {most}", error <= most)


def attention(bench: Bench) -> Iterator[Row]:
    """Compare the kernels with the plain form in float64 on the CPU."""
    for slots, groups, queries in ((1025, 4, 1), (333, 1, 1), (513, 4, 8)):
        query, key = bench.randn(2, 8, groups, queries, 128), bench.randn(2, 8, slots, 128)
        value = bench.randn(2, 8, slots, 128)
        mask = torch.rand(2, 1, 1, queries, slots, device=bench.device) > 0.3
        got = attend(query, plain(key), plain(value), scale=0.1, mask=mask)
        exact = [x.cpu().double() for x in (query, key, value)]
        wanted = attend(exact[0], plain(exact[1]), plain(exact[2]), scale=0.1, mask=mask.cpu())
        case = f"attend, {slots} slots, {groups * queries} rows"
        assert got[1] is not None
        assert wanted[1] is not None
        yield _row(case, _error(got[0].cpu(), wanted[0]))
        yield _row(f"{case}, probabilities", _error(got[1].cpu(), wanted[1]))
        rotate, rope = rotary(slots, key)
        got = attend(query, plain(key), plain(value), scale=0.1, mask=mask, rotate=rotate, rope=rope)
        turned = rotary(slots, exact[1])[0](plain(exact[1]).in_sections(torch.float64))[0]
        wanted = attend(exact[0], plain(turned), plain(exact[2]), scale=0.1, mask=mask.cpu())
        yield _row(f"{case}, keys turned at read", _error(got[0].cpu(), wanted[0]))


def prompt_scores(bench: Bench) -> Iterator[Row]:
    query, key = bench.randn(2, 8, 300, 64), bench.randn(2, 2, 300, 64)
    real = torch.rand(2, 300, device=bench.device) > 0.1
    names = ("total", "squares", "last", "window")
    request = StatisticsArguments(names, True, 0.125, None, 2, window=16).to_text()
    got = attention_statistics(query, key, None, None, None, real, None, request)
    exactly = query.cpu().double(), key.cpu().double()
    wanted = attention_statistics(*exactly, None, None, None, real.cpu(), None, request)
    for name, ours, exact in zip(names, got, wanted, strict=True):
        yield _row(f"prompt scores, {name}", _error(ours.cpu(), exact))


def repairs(bench: Bench) -> Iterator[Row]:
    """Compare rows that kv_align repairs with its plain form on the CPU."""
    rows = RepairOperands.drawn(bench, 2, 513)
    for name, ours, wanted in zip(("keys", "values"), rows.repaired(), rows.on_cpu().repaired(), strict=True):
        yield _row(f"repair, {name}", _error(ours.cpu(), wanted))


def tiny(bench: Bench) -> Any:
    """Return a small random Llama in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().to(bench.device)


def models(bench: Bench) -> Iterator[Row]:
    """Compare tokens of `generate` until the first eviction, and check that no CUDA graph is skipped."""
    model = tiny(bench)
    ids = torch.randint(3, 512, (2, 40), device=bench.device)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    how: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=-1)
    with torch.no_grad():
        expected = model.generate(ids, **how)[:, 40:].cpu()
    for name in bench.few(("full", "h2o", "streaming", "buzz", "d2o")):
        torch._dynamo.reset()
        loop = kvpass.DecodeLoop(model, name, budget=None if name == "full" else 256, inner=bench.inner)
        loop.prompt(ids, mask)
        wrong = float((loop.generate(40) != expected).float().mean())
        yield _row(f"DecodeLoop, {name}: share of tokens that differ from generate", wrong, 0.0)
    if bench.device.type == "cuda":
        yield from _captured(model, ids, mask, how, expected)


def _captured(model: Any, ids: Tensor, mask: Tensor, how: dict[str, Any], expected: Tensor) -> Iterator[Row]:
    """Check `mode="reduce-overhead"`: the same tokens, and no CUDA graph that Inductor skips."""
    torch._dynamo.reset()
    counters.clear()
    kvpass.compile(model, "h2o", budget=256, mode="reduce-overhead")
    with torch.no_grad():
        got = model.generate(ids, **how)[:, 40:].cpu()
    yield _row("reduce-overhead: share of tokens that differ", float((got != expected).float().mean()), 0.0)
    yield _row("reduce-overhead: CUDA graphs skipped", float(counters["inductor"]["cudagraph_skips"]), 0.0)
