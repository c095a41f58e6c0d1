"""Test how cross-attention is distinguished from a cache that grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.capture import cache_search
from kvpass.capture.cache_search import SearchResult
from tests.capture.traced import query_graph

WIDTH = 16
Made = Callable[["Decoder", Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(model, hidden [B, q, W], heard [B, S, W]) -> query [B, q, W], and the source of keys and values [B, S, W]."""


class Decoder(nn.Module):
    """One layer of self-attention and one of another attention: forward(ids, heard, past) -> (hidden, new past).

    Args:
        made: returns the query, and the source of keys and values, of the other attention.
        grows: whether the other attention appends to its cache at every step.
    """

    def __init__(self, made: Made, grows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.latents = nn.Embedding(32, WIDTH), nn.Parameter(torch.randn(2, WIDTH))
        self.own, self.query, self.both = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
        )
        self.made, self.grows = made, grows

    def forward(self, ids: Tensor, heard: Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        query, key, value = map(in_heads, self.own(x).chunk(3, -1))
        mine = extended(past and past[0], key, value)
        sees = torch.arange(mine[0].shape[2]) <= torch.arange(x.shape[1])[:, None] + mine[0].shape[2] - x.shape[1]
        x = x + joined(F.scaled_dot_product_attention(query, *mine, attn_mask=sees))
        query, source = self.made(self, x, heard)
        theirs = past[1] if past and not self.grows else extended(past and past[1], *self.cached(source))
        return joined(F.scaled_dot_product_attention(in_heads(self.query(query)), *theirs)), (mine, theirs)

    def cached(self, source: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.both(source).chunk(2, -1)
        return in_heads(key), in_heads(value)


def in_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def extended(past: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Append to the cache like transformers: the first tokens are concatenated to an empty tensor."""
    before = past or (torch.empty(0), torch.empty(0))
    return torch.cat([before[0], key], -2), torch.cat([before[1], value], -2)


def crossed(model: Decoder, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    return x, heard


def written(model: Decoder, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    """Add the tokens to the source of keys by a write in place."""
    source = heard * 2
    source[:, : x.shape[1]] += x
    return x, source


def with_another_input(model: Decoder, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to the tokens, with queries that also depend on another input."""
    return x + heard[:, :1], x


def latent(model: Decoder, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    """Attend with queries that are parameters, so that they do not tell whose keys they attend to."""
    return model.latents.expand(x.shape[0], -1, -1), x


def over_layers(model: Decoder, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to the tokens after an attention over layers, whose query is a parameter."""
    layers, query = torch.stack([x, 2 * x], 2), model.latents[:1].expand(*x.shape[:2], -1, -1)
    y = F.scaled_dot_product_attention(query, layers, layers)[:, :, 0]
    return y + heard[:, :1], y


def spelled_over_layers(model: Decoder, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    layers = torch.stack([x, 2 * x], 2)
    y = ((model.latents[:1] @ layers.transpose(-1, -2)).softmax(-1) @ layers)[:, :, 0]
    return y * heard[:, :1], y


def twice_over_layers(model: Decoder, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    first = over_layers(model, x, heard)[1]
    return over_layers(model, first, heard)


def mixed(model: Decoder, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.cat([heard, x], 1)


def given(tokens: int = 5, heard: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 32, (2, tokens)), torch.randn(2, heard, WIDTH)


def found(made: Made, *arguments: Any) -> list[SearchResult]:
    """Return the search results of the two calls in the graph of a prompt."""
    answer: list[SearchResult] = []

    def question(gm: fx.GraphModule) -> None:
        answer.extend(cache_search.find_cached_attention(gm, set()))

    with torch.no_grad():
        query_graph(Decoder(made).eval(), arguments, question)
    return answer


@pytest.mark.parametrize(("tokens", "heard"), [(5, 4), (5, 5), (1, 1), (1, 4), (4, 1)])
def test_cross_attention_is_found_at_any_lengths(tokens: int, heard: int) -> None:
    own, other = found(crossed, *given(tokens, heard))
    assert own.cached_call
    assert not own.cross_cache
    assert len(other.cross_cache) == 2
    assert other.refusal is None


@pytest.mark.parametrize(
    "made",
    [written, with_another_input, latent, over_layers, spelled_over_layers, twice_over_layers, mixed],
    ids=lambda made: str(made.__name__),
)
def test_keys_computed_from_the_querys_tokens_are_no_cross_attention(made: Made) -> None:
    """Check that a query identifies its rows only through inputs, so that parameters cannot hide the tokens."""
    assert not any(each.cross_cache for each in found(made, *given(4, 4)))


def steps(model: nn.Module, ids: Tensor, heard: Tensor) -> Tensor:
    with torch.no_grad():
        made, past = model(ids[:, :4], heard)
        outputs = [made]
        for t in range(4, ids.shape[1]):
            made, past = model(ids[:, t : t + 1], heard, past)
            outputs.append(made)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("heard", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_steps_read_stored_cross_attention(heard: int) -> None:
    model, arguments = Decoder(crossed).eval(), given(10, heard)
    torch._dynamo.reset()
    for policy, budget in (("full", None), ("streaming", 64)):
        compiled = torch.compile(model, backend=kvpass.backend(policy, budget=budget, inner="eager"))
        torch.testing.assert_close(steps(compiled, *arguments), steps(model, *arguments))


@pytest.mark.parametrize(
    ("heard", "why"), [(1, "is an ordinary tensor, while other layers"), (4, "numbers of new keys")]
)
def test_growth_in_a_step_is_refused_there(heard: int, why: str) -> None:
    """Check a refusal in a step, because only steps show that new sound is appended."""
    model = Decoder(crossed, grows=True).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=6, inner="eager"))
    with pytest.raises(kvpass.UnsupportedGraph, match=rf"test_cross_attention.py:\d+[\s\S]*{why}"):
        steps(compiled, *given(10, heard))
