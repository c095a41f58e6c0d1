"""Test CriticalKV: its choice by hand, and the output projection that it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.cache.model_cache import caches_in
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.policies import critical_kv
from kvpass.policies.critical_kv import CriticalKV, output_norms
from kvpass.policies.types import Tokens
from kvpass.runtime.kv_store import output_weight_by_head
from tests.models import build

SCORE = [.30, .20, .15, .10, .05, .05, .05, .05, .03, .02]  # fmt: skip
NORMS = [1.0, 1, 1, 1, 9, 1, 1, 1, 8, 1]


def kept(first: float) -> list[int]:
    """Return the tokens kept of ten selected tokens and one token of the window; four others may stay."""
    policy = CriticalKV(window=1, kernel=1, first=first)
    position = torch.arange(11)[None, None]
    state = {"score": torch.tensor([[[*SCORE, 0.0]]]), "selected": position < 10}
    tokens = Tokens(position, torch.tensor([[[11]]]), state, 5)
    value = torch.tensor([*NORMS, 1.0])[None, None, :, None] * torch.tensor([0.5, -0.5])
    keep, _ = policy.compact(tokens.with_state(policy.project(tokens, value, None)))
    return torch.nonzero(keep[0, 0]).flatten().tolist()


def test_the_choice_by_hand() -> None:
    assert kept(first=0.5) == [0, 1, 4, 8, 10]
    assert kept(first=1.0) == [0, 1, 2, 3, 10]
    assert kept(first=0.0) == [0, 1, 4, 8, 10]


@pytest.mark.parametrize("elements", [1, 80, 2**20])
def test_norms_are_of_each_query_heads_part_of_the_output(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critical_kv, "BLOCK_ELEMENTS", elements)
    drawn = torch.Generator().manual_seed(0)
    weight, value = torch.randn(6, 2 * 3 * 4, generator=drawn), torch.randn(1, 2, 5, 4, generator=drawn)
    norms = output_norms(value, output_weight_by_head(weight, 2, 4))
    for head in range(2):
        for token in range(5):
            parts = []
            for group in range(3):
                output = torch.zeros(2 * 3, 4)
                output[3 * head + group] = value[0, head, token]
                parts.append(torch.nn.functional.linear(output.flatten(), weight).abs().sum())
            torch.testing.assert_close(norms[0, head, token], torch.stack(parts).mean())


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(0))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend=kvpass.backend("critical_kv", budget=12, window=3, inner="eager"))


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "name"), [("Llama", "o_proj"), ("GPTNeoX", "dense"), ("Phi", "dense")])
def test_the_projection_is_found(architecture: str, name: str) -> None:
    model = build(architecture)
    cache = compiled(model)(ids(1, 30), use_cache=True).past_key_values
    named = [weight for key, weight in model.named_parameters() if f".{name}.weight" in key]
    read = [layer.output_projection() for layer in caches_in(cache)]
    assert [one is other for one, other in zip(read, named, strict=True)] == [True, True]


@torch.no_grad()
def test_another_projection_is_refused() -> None:
    with pytest.raises(UnsupportedGraph, match="one linear layer, head after head: use policy='ada_kv'"):
        compiled(build("GPT2"))(ids(1, 30), use_cache=True)


@torch.no_grad()
def test_heads_that_are_moved_before_the_projection_are_refused() -> None:
    """Reorder heads before the projection, whose columns then belong to other heads."""
    model = build("Llama")
    for layer in model.model.layers:
        inner = layer.self_attn.o_proj

        class Flipped(torch.nn.Module):
            def __init__(self, inner: Any) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x.flip(-1))

        layer.self_attn.o_proj = Flipped(inner)
    with pytest.raises(UnsupportedGraph, match="head after head"):
        compiled(model)(ids(1, 30), use_cache=True)


@pytest.mark.slow
@torch.no_grad()
def test_a_cache_from_a_file_decodes_and_takes_no_turn(tmp_path: Any) -> None:
    run = compiled(build("Llama"))
    cache = run(ids(1, 30), use_cache=True).past_key_values
    kvpass.save_cache(cache, tmp_path / "talk")
    loaded = kvpass.load_cache(tmp_path / "talk", run)
    one, other = (run(ids(1, 1), past_key_values=each, use_cache=True) for each in (cache, loaded))
    assert torch.equal(one.logits, other.logits)
    with pytest.raises(CacheHandleError, match="start again with the whole conversation"):
        run(ids(1, 4), past_key_values=loaded, use_cache=True)
