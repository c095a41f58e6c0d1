"""Test graph breaks in and around attention: outputs are right, or an error says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import kvpass
from kvpass.cache.handle import Handle
from tests.adversary.models import Small
from tests.models import build, prompt


class Cache:
    """Keys and values by layer."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.held:
            old = self.held[layer]
            key, value = torch.cat([old[0], key], 2), torch.cat([old[1], value], 2)
        self.held[layer] = key, value
        return key, value


class Uncompiled(Cache):
    """A cache whose update is a function that is never compiled."""

    update = torch._dynamo.disable(Cache.update)


class Layer(nn.Module):
    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.breaks, self.qkv, self.out = breaks, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Cache, number: int) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        k, v = cache.update(number, k, v)
        if self.breaks == "before attention":
            torch._dynamo.graph_break()
        count, total = q.shape[2], k.shape[2]
        seen = (torch.arange(total) <= torch.arange(total - count, total)[:, None])[None, None]
        y = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        if self.breaks == "after attention":
            torch._dynamo.graph_break()
        if self.breaks == "item" and y.abs().max().item() > 1e9:
            y = y * 0
        y = self.out(y.transpose(1, 2).flatten(2))
        if self.breaks == "after the projection":
            torch._dynamo.graph_break()
        return x + y


class Model(nn.Module):
    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.breaks = breaks
        self.embed, self.first, self.second = nn.Embedding(64, 16), Layer(breaks), Layer(breaks)
        self.out = nn.Linear(16, 64)

    def forward(self, ids: Tensor, cache: Cache) -> Tensor:
        x = self.first(self.embed(ids), cache, 0)
        if self.breaks == "between layers":
            torch._dynamo.graph_break()
        return self.out(self.second(x, cache, 1))


@torch.no_grad()
def run(model: Any, ids: Tensor, cache: Cache, pieces: list[int]) -> Tensor:
    return torch.cat([model(part, cache) for part in ids.split(pieces, 1)], 1)


@pytest.mark.few(3)
@pytest.mark.parametrize("pieces", [[5, 1, 1, 1, 1], [4, 5]], ids=["tokens", "chunk"])
@pytest.mark.parametrize("where", ["after attention", "item", "after the projection", "between layers"])
def test_breaks_behind_attention_are_held(where: str, pieces: list[int]) -> None:
    torch.manual_seed(0)
    model, ids, cache = Model(where).eval(), torch.randint(0, 64, (2, 9)), Cache()
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=32, inner="eager"))
    assert torch.allclose(run(compiled, ids, cache, pieces), run(model, ids, Cache(), pieces), atol=1e-5)
    assert all(isinstance(tensor, Handle) for pair in cache.held.values() for tensor in pair)


@pytest.mark.few(3)
@pytest.mark.parametrize("pieces", [[5, 1, 1, 1, 1], [4, 5]], ids=["tokens", "chunk"])
@pytest.mark.parametrize(
    ("where", "kind", "said"),
    [
        ("before attention", Cache, "feeds no attention call"),
        ("nowhere", Uncompiled, "all come from outside of the graph"),
        ("after attention", Uncompiled, "all come from outside of the graph"),
    ],
)
def test_breaks_before_attention_are_refused(where: str, kind: type[Cache], said: str, pieces: list[int]) -> None:
    torch.manual_seed(0)
    model, ids = Model(where).eval(), torch.randint(0, 64, (2, 9))
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=32, inner="eager"))
    with pytest.raises(kvpass.UnsupportedGraph, match=said):
        run(compiled, ids, kind(), pieces)


def test_a_cache_that_grows_uncompiled_is_left_if_not_strict() -> None:
    torch.manual_seed(0)
    model, ids, pieces = Model("nowhere").eval(), torch.randint(0, 64, (2, 9)), [5, 1, 1, 1, 1]
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=32, inner="eager", strict=False))
    with pytest.warns(kvpass.KVPassWarning, match="all come from outside"):
        got = run(compiled, ids, Uncompiled(), pieces)
    assert torch.allclose(got, run(model, ids, Cache(), pieces), atol=1e-5)


def test_a_frame_that_torch_skips_returns_no_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the cache after a compiled model's call, because skipped frames never reach the backend."""
    model = build("GPT2")
    kvpass.compile(model, "window", budget=8, inner="eager")
    monkeypatch.setattr(type(model), "forward", torch._dynamo.disable(type(model).forward))
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="ordinary cache, which grows"):
        model(prompt(2, 8, ())[0], use_cache=True)


def test_attention_without_a_softmax_is_named_where_the_cache_grows() -> None:
    model = kvpass.compile(Small(lambda q, k, v, i, j: (q @ k.mT).sigmoid() @ v), "window", budget=8, inner="eager")
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="attends without scaled_dot_product_attention"):
        model(torch.arange(10).view(2, 5))


def test_an_encoder_behind_graph_breaks_is_no_cache() -> None:
    """Test an encoder with as many keys as queries, and one whose queries are parameters on keys from outside."""

    class Encoder(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v)

    compiled = torch.compile(Encoder(), backend=kvpass.backend("window", budget=8, inner="eager"))
    same, other = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    with torch.no_grad():
        assert torch.allclose(compiled(same, same, same), scaled_dot_product_attention(same, same, same))
        with pytest.raises(kvpass.UnsupportedGraph, match="come from outside"):
            compiled(same, other, other)


def _wider(x: Tensor) -> Tensor:
    return torch.cat([x, x[:, :1]], 1)


@pytest.mark.parametrize("end", [slice(-1, None), slice(-2, None), slice(1)], ids=["last", "last two", "first"])
def test_a_selection_in_a_graph_of_its_own_does_not_grow(end: slice) -> None:
    """Test the end of hidden states, which is shorter than they are at every length of its graph."""
    compiled = torch.compile(lambda x: x[:, end], backend=kvpass.backend("window", budget=8, inner="eager"))
    for tokens in (9, 7, 5):
        x = torch.randn(2, tokens, 4)
        assert torch.equal(compiled(x), x[:, end])
    grown = torch.compile(_wider, backend=kvpass.backend("window", budget=8, inner="eager"), dynamic=True)
    with pytest.raises(kvpass.UnsupportedGraph, match="grows here"):
        grown(torch.randn(2, 7, 4))


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["lm_head", "model.norm", "model.layers.0.mlp"])
def test_after_an_error_of_the_user_the_model_is_compiled_again(where: str) -> None:
    """Test errors after which torch skips a model's forward, and whose parts a decode loop could not repeat."""
    model, ids = build("Llama", layers=1), prompt(1, 8, ())[0]
    loop = kvpass.DecodeLoop(model, "window", budget=32, inner="eager", validate=False)
    calls = []

    def fail_at_the_third_call(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("of the user")

    hook = model.get_submodule(where).register_forward_pre_hook(fail_at_the_third_call)
    loop.prompt(ids)
    with pytest.raises(RuntimeError, match="of the user"):
        loop.generate(6)
    hook.remove()
    loop.reset()
    loop.prompt(ids)
    assert torch.equal(loop.generate(6), model.generate(ids, max_new_tokens=6, do_sample=False)[:, 8:])


def test_after_a_cache_of_fewer_layers_models_are_compiled_again() -> None:
    """Test an error in the middle of a graph, of code that all models of transformers share."""
    small, large = (kvpass.compile(build("Llama", layers=n), "window", budget=32, inner="eager") for n in (1, 2))
    ids = prompt(2, 8, ())[0]
    with torch.no_grad():
        cache = large(ids).past_key_values
        cache.layers.pop()
        with pytest.raises(IndexError, match="out of range"):
            large(ids[:, :1], past_key_values=cache)
        with pytest.raises(kvpass.CacheHandleError, match="a model with other weights"):
            large(ids[:, :1], past_key_values=small(ids).past_key_values)
        assert torch.allclose(small(ids).logits, build("Llama", layers=1)(ids).logits, atol=1e-5)
        assert torch.allclose(large(ids).logits, build("Llama", layers=2)(ids).logits, atol=1e-5)
