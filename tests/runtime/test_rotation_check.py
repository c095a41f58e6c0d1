"""Test tensors other than positions that rotate keys and can differ between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.rewrite.rotary_subgraph import RotaryProbe
from kvpass.runtime import checks
from tests.own_llama import Output, halves
from tests.test_tokens_first import compiled, tokens

PIECES = (9, 1, 1, 1, 3, 1)


def scale_of(ids: Tensor) -> Tensor:
    """Return a scale [1, 1] that depends on the tokens of a call."""
    return 1 + ids.float().mean().reshape(1, 1) * 0.02


class Scaled(nn.Module):
    """A model of one layer that scales its rotated keys; `break_before` computes the scale in a separate graph."""

    def __init__(self, break_before: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(128, 32), nn.Linear(32, 128, bias=False)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.scale, self.break_before = torch.ones(1, 1), break_before
        self.register_buffer("frequency", 1e4 ** -torch.arange(0, 1, 0.25))
        self.register_buffer("buffer", torch.ones(1, 1))
        self.eval()

    def forward(self, input_ids: Tensor, gain: Tensor | None = None, past_key_values: Any = None) -> Output:
        rows, count = input_ids.shape
        seen = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        if self.break_before:
            gain = scale_of(input_ids)
            torch._dynamo.graph_break()
        scale = self.scale * self.buffer if gain is None else gain
        angle = (torch.arange(seen, seen + count)[None, :, None] * self.frequency)[:, None]
        x = self.embed(input_ids)
        query, key, value = (layer(x).view(rows, count, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        query, key = halves(query, angle), halves(key, angle) * scale
        if past_key_values is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(past_key_values[0], (key, value), strict=True))
        allowed = torch.arange(seen + count) <= torch.arange(seen, seen + count)[:, None]
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return Output(self.head(x + y.transpose(1, 2).flatten(2)), ((key, value),))


Before = Callable[[Scaled, Tensor], Any]


@torch.no_grad()
def fed(
    call: Any, model: Scaled, before: Before, ids: Tensor, pieces: Sequence[int] = PIECES, cache: Any = None
) -> tuple[Tensor, Any]:
    """Return the logits of all tokens and the cache; `before` runs before each call and may return arguments."""
    logits = []
    for piece in ids.split(list(pieces), 1):
        piece = piece.contiguous()
        out = call(piece, past_key_values=cache, **(before(model, piece) or {}))
        logits, cache = [*logits, out.logits], out.past_key_values
    return torch.cat(logits, 1), cache


def replace(name: str) -> Before:
    return lambda model, ids: setattr(model, name, scale_of(ids))


def write(model: Scaled, ids: Tensor) -> None:
    model.scale.copy_(scale_of(ids))


def other_frequencies(model: Scaled, ids: Tensor) -> None:
    model.frequency = model.frequency * 1.1


ATTRIBUTES: dict[str, Before] = {
    "an attribute": replace("scale"), "a buffer": replace("buffer"), "in place": write, "angles": other_frequencies,
    "a number": lambda model, ids: setattr(model, "scale", float(scale_of(ids))),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("positions", [None, "cache"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_rotation_that_has_changed_is_an_error(name: str, positions: str | None) -> None:
    """Check the error, which suggests a setting, also under default positions: most models have such tensors."""
    model, ids = Scaled(), tokens(1, sum(PIECES))
    call = compiled(model, "streaming", budget=32, positions=positions)
    with pytest.raises(kvpass.UnsupportedGraph, match=r"rotates keys by other angles.*positions='absolute'"):
        fed(call, model, ATTRIBUTES[name], ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_frequencies_that_have_changed_are_an_error(dtype: torch.dtype) -> None:
    """In bfloat16 they turn a key of the first positions by less than it is rounded."""
    model, ids, made = Scaled().to(dtype), tokens(1, sum(PIECES)), list[Any]()
    model.frequency, model.scale = torch.tensor([0.002, 0.0015, 0.001, 0.0005]), model.scale.to(dtype)

    def later(model: Scaled, ids: Tensor) -> None:
        made.append(ids)
        if len(made) == 3:
            model.frequency = model.frequency * 2

    call = compiled(model, "streaming", budget=32, positions="cache")
    with pytest.raises(kvpass.UnsupportedGraph, match=r"rotates keys by other angles"):
        fed(call, model, later, ids)
    assert len(made) == 3


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_with_absolute_positions_a_rotation_may_change(name: str) -> None:
    ids, models = tokens(1, sum(PIECES)), (Scaled(), Scaled())
    call = compiled(models[0], "streaming", budget=32, positions="absolute")
    ours, theirs = (fed(*pair, ATTRIBUTES[name], ids)[0] for pair in ((call, models[0]), (models[1], models[1])))
    assert torch.allclose(ours, theirs, atol=1e-5)


VALUES: dict[str, tuple[bool, Before]] = {
    "an argument": (False, lambda model, ids: {"gain": scale_of(ids)}),
    "an argument for each token": (False, lambda model, ids: {"gain": 1 + ids[0, :, None] * 0.02}),
    "of an earlier graph": (True, lambda model, ids: None),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_the_call_is_no_part_of_a_rotation_by_position(name: str) -> None:
    break_before, before = VALUES[name]
    model, ids = Scaled(break_before), tokens(1, sum(PIECES))
    with pytest.raises(kvpass.UnsupportedGraph, match=r"test_rotation_check\.py.*positions='cache' is not possible"):
        fed(compiled(model, "streaming", budget=32, positions="cache"), model, before, ids)
    ours, _ = fed(compiled(model, "streaming", budget=32), model, before, ids)
    assert torch.allclose(ours, fed(model, model, before, ids)[0], atol=1e-5)


def test_a_tensor_of_a_closure_may_scale_keys() -> None:
    model, ids, scale = Scaled(), tokens(1, sum(PIECES)), torch.full((1, 1), 1.5)

    def closed(input_ids: Tensor, past_key_values: Any = None) -> Output:
        out: Output = model(input_ids, scale, past_key_values)
        return out

    call = torch.compile(closed, backend=kvpass.backend("streaming", budget=32, inner="eager", positions="cache"))
    ours, theirs = (fed(each, model, lambda *_: None, ids)[0] for each in (call, closed))
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_thread_that_comes_while_another_one_rotates_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Any]()

    class SlowProbe:
        indices = (0,)

        def __init__(self, *_: Any) -> None:
            self.runs = 0

        def run(self, arguments: Sequence[Any], device: torch.device) -> Tensor:
            self.runs += 1
            if self.runs == 1:
                with ThreadPoolExecutor(1) as pool:
                    found.append(pool.submit(check.rotated_key, arguments, lambda: None, device).result(60))
            return torch.ones(1)

    monkeypatch.setattr(checks, "RotaryProbe", SlowProbe)
    check: Any = checks.RotationCheck(None, [])  # type: ignore[arg-type]
    found.append(check.rotated_key([torch.zeros(2)], lambda: None, torch.device("cpu")))
    assert all(torch.equal(each, torch.ones(1)) for each in found)
    assert len(found) == 2


def test_each_conversation_has_the_rotation_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each conversation has the rotation of its prompt, and that each graph rotates a key once."""
    model, ids, runs = Scaled(), tokens(1, sum(PIECES)), list[int]()
    call, run = compiled(model, "streaming", budget=32, positions="cache"), RotaryProbe.run
    monkeypatch.setattr(RotaryProbe, "run", lambda *given: runs.append(1) or run(*given))
    scales, caches = [torch.full((1, 1), each) for each in (1.0, 1.5)], []
    for index in (0, 1, 0):
        model.scale, before = scales[index], len(runs)
        ours, cache = fed(call, model, lambda *_: None, ids)
        assert torch.allclose(ours, fed(model, model, lambda *_: None, ids)[0], atol=1e-5)
        assert len(runs) - before == 3  # one for each graph: prompt, step and chunk
        caches.append(cache)
    model.scale = scales[0].clone()
    fed(call, model, lambda *_: None, ids[:, :2], (1, 1), caches[0])
    with pytest.raises(kvpass.UnsupportedGraph, match="a tensor of the model was replaced"):
        fed(call, model, lambda *_: None, ids[:, :1], (1,), caches[1])


def test_a_scale_for_each_token_of_a_prompt_is_no_rotation_by_position() -> None:
    def by_token(model: Scaled, ids: Tensor) -> None:
        model.scale = 1 + ids[0, :, None] * 0.02

    for ids in (torch.tensor([[3, 4, 5, 3]]), tokens(1, 10)):
        model = Scaled()
        call = compiled(model, "streaming", budget=32, positions="cache")
        with pytest.raises(kvpass.UnsupportedGraph, match="scales them differently"):
            fed(call, model, by_token, ids, (ids.shape[1] - 1, 1))
