"""Test a later turn with another image on slots that hold the first image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.runtime.calling.in_place import compile_in_place
from tests import on_reference
from tests.reach import images
from tests.reach.check import BUDGET, TOLERANCE, apart
from tests.switch import Switch

STEPS = 3


class Talk:
    """A prompt with an image, steps, a turn with another image, and steps, with fixed tokens."""

    def __init__(self, model: Any, given: dict[str, Tensor]) -> None:
        said = torch.randint(3, 100, (2, STEPS), generator=torch.Generator().manual_seed(5))
        ids, later = given["input_ids"], given["input_ids"][1:].repeat(2, 1)
        self.model, self.given = model, given
        self.ids = torch.cat([ids, said, later, said], 1)
        new = self.ids.shape[1] - ids.shape[1]
        self.mask = torch.cat([given["attention_mask"], torch.ones(2, new, dtype=torch.int64)], 1)
        self.turn = slice(ids.shape[1] + STEPS, self.ids.shape[1] - STEPS)
        self.kinds = next((name for name in given if name.endswith("token_type_ids")), None)
        self.positions = self._positions()

    def _positions(self) -> Tensor | None:
        """Return positions [3, B, T] for models that count tokens along three axes; they depend on all images."""
        if self.kinds is None or not hasattr(self.model.model, "get_rope_index"):
            return None
        grid = self.given["image_grid_thw"].repeat_interleave(2, 0)
        how = dict(image_grid_thw=grid, attention_mask=self.mask, mm_token_type_ids=self.kinds_of(slice(None)))
        places: Tensor = self.model.model.get_rope_index(self.ids, **how)[0]
        return places

    def kinds_of(self, chosen: slice) -> Tensor:
        """Mark the tokens that stand for an image."""
        assert self.kinds is not None
        return (self.ids[:, chosen] == images.IMAGE).to(self.given[self.kinds].dtype)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return logits [B, n, vocabulary] from the prompt's last token on."""
        start, end = self.turn.start - STEPS, self.ids.shape[1]
        cache, found = None, []
        for part in [slice(0, start), *_singly(start, self.turn.start), self.turn, *_singly(self.turn.stop, end)]:
            out = self.model(**self._call(part), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[:, -1:] if part.start == 0 else out.logits)
        return torch.cat(found, 1)

    def _call(self, part: slice) -> dict[str, Tensor]:
        call = {"input_ids": self.ids[:, part], "attention_mask": self.mask[:, : part.stop]}
        if self.positions is not None:
            call["position_ids"] = self.positions[:, :, part]
        if part.stop - part.start == 1:
            return call
        shown = {name: self.given[name] for name in ("pixel_values", "image_grid_thw") if name in self.given}
        if part.start:
            shown["pixel_values"] = 1.5 * shown["pixel_values"].flip(0)
        return {**call, **shown, **({self.kinds: self.kinds_of(part)} if self.kinds else {})}


def _singly(start: int, stop: int) -> list[slice]:
    return [slice(place, place + 1) for place in range(start, stop)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl", "qwen3_vl"])
def test_a_later_turn_may_bring_another_image(name: str) -> None:
    build: Callable[[], Any] = getattr(images, name)
    model, given = build(), getattr(images, f"{name}_prompt")()
    expected = Talk(model, given).logits()
    switch = Switch()
    torch._dynamo.reset()
    compile_in_place(model, switch, strict=True)
    talk = Talk(model, given)
    switch.to(kvpass.backend("full", inner="eager"))
    assert apart(talk.logits(), expected) < TOLERANCE
    graphs, runs = switch.graphs, []
    for inner in ("eager", "reference"):
        switch.to(on_reference.backend("h2o", budget=BUDGET, inner=inner))
        runs.append(talk.logits())
    assert apart(*runs) < TOLERANCE
    assert apart(runs[0], expected) > TOLERANCE  # tokens were evicted
    assert switch.graphs == graphs
