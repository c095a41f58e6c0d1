"""Test cropping under every policy: the cache continues as if the cropped tokens had never existed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from torch import Tensor

import kvpass
from kvpass.cache.model_cache import caches_in
from kvpass.cache.slots import SavedContent
from kvpass.policies.ranking import slots_by_position
from tests import on_reference
from tests.decoding.test_stepping import interrupting
from tests.models import build, prompt
from tests.strategies import ROWS
from tests.test_invariants import settings
from tests.traces import Traced

CROP = 8
NAMES = [name for name in ROWS if name != "kv_align"]  # refuses to crop, see below
some_policies = pytest.mark.parametrize(
    "name", [name if name == "h2o" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)

Part = tuple[int, int]
"""The number of a call's tokens that stay, and the number that are cropped later."""


def chosen(name: str, inner: str = "eager", crop: int = CROP, layers: int = 1, **more: Any) -> kvpass.Backend:
    return on_reference.backend(**{**settings(name, "Llama", 8, layers=layers), "inner": inner, "crop": crop, **more})


pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def model(shared_traces: None) -> Traced:
    return Traced(build("Llama", layers=1))


class Talk:
    """A conversation of a compiled model, with tokens that stay from one stream and cropped tokens from another."""

    def __init__(self, model: Any, rows: int = 2, padding: tuple[int, ...] = ()) -> None:
        self.model, self.cache, self.done, self.logits = model, None, 0, list[Tensor]()
        self.ids, self.mask = prompt(rows, 64, padding)
        self.others = self.ids.flip(1)

    @torch.no_grad()
    def feed(self, stays: int, goes: int = 0) -> None:
        """Feed tokens that stay, then tokens that are cropped later; after these, feed only more of them."""
        seen = 0 if self.cache is None else self.cache.get_seq_length()
        ahead, here = seen - self.done, slice(self.done, self.done + stays)
        assert not ahead or not stays
        ids = torch.cat([self.ids[:, here], self.others[:, ahead : ahead + goes]], 1)
        mask = torch.cat([self.mask[:, : here.stop], torch.ones_like(self.others[:, : ahead + goes])], 1)
        position = (mask.cumsum(-1) - 1).clamp(min=0)[:, seen:].contiguous()
        given = dict(attention_mask=mask, position_ids=position, past_key_values=self.cache, use_cache=True)
        out = self.model(ids, **given)
        self.cache, self.done = out.past_key_values, here.stop
        self.logits.append(out.logits[:, :stays])

    def crop(self, tokens: int) -> None:
        self.cache.crop(-tokens)

    def held(self) -> list[Tensor]:
        """Return positions and other contents of every layer, ordered by position."""
        found = []
        for cache in caches_in(self.cache):
            slots = cache.slots.joined_classes(cache.layout)
            order, live = slots_by_position(slots.position), (slots.position >= 0).sum(-1)
            found += [slots.seen, slots.length, live, torch.tensor([[*clock] for clock in cache.clocks])]
            for tensor in (slots.position, slots.index, *(slots.state[x] for x in cache.layout.policy.state())):
                kept = torch.arange(order.shape[-1]) < live[..., None]
                found.append(tensor.gather(-1, order).masked_fill(~kept, 0))
            found += [slots.state[x] for x in cache.layout.row_state()]
        return found


def same(one: Talk, other: Talk) -> None:
    for ours, theirs in zip(one.held(), other.held(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    real = one.mask[:, : one.done].bool()
    logits = (torch.cat(talk.logits, 1)[real] for talk in (one, other))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@some_policies
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_come(model: Traced, name: str) -> None:
    """Crop prompts, chunks, steps and complete calls, in parts; rows are left-padded."""
    under = model.under(chosen(name))
    # A single token of a chunk is not equal to a step: its mask is that of the chunk.
    chunks = st.tuples(st.sampled_from([0, 2, 3, 5]), st.integers(0, CROP)).filter(lambda part: sum(part) > 1)

    @given(
        first=st.tuples(st.integers(2, 14), st.integers(0, CROP)),
        parts=st.lists(chunks, min_size=1, max_size=3),
        steps=st.integers(1, 4),
        padding=st.sampled_from([(), (4, 1)]),
    )
    @example(first=(12, 5), parts=[(3, 4), (0, 3)], steps=3, padding=(4, 1))
    @profile(max_examples=2)
    def compare(first: Part, parts: list[Part], steps: int, padding: tuple[int, ...]) -> None:
        cropped, straight = Talk(under, padding=padding), Talk(under, padding=padding)
        for stays, goes in (first, *parts):
            cropped.feed(stays, goes)
            cropped.crop(goes // 2)  # in two parts
            cropped.crop(goes - goes // 2)
            if stays:
                straight.feed(stays)
            same(cropped, straight)
            for _ in range(steps):  # beyond one call
                cropped.feed(0, 1)
            cropped.crop(steps)
            for talk in (cropped, straight):
                talk.feed(1)
            same(cropped, straight)

    compare()


@pytest.mark.parametrize("before", [(12,), ()], ids=["chunk", "prompt"])
@some_policies
def test_steps_and_a_part_of_the_call_before_them_are_taken_back_together(
    model: Traced, name: str, before: tuple[int, ...]
) -> None:
    """Crop steps and a part of the chunk or prompt before them, as an assistant whose first guesses are all wrong."""
    under = model.under(chosen(name))
    cropped, straight = Talk(under, padding=(4, 1)), Talk(under, padding=(4, 1))
    for talk in (cropped, straight):
        for count in before:
            talk.feed(count)
    cropped.feed(12, 3)
    for _ in range(3):
        cropped.feed(0, 1)
    cropped.crop(6)
    straight.feed(12)
    for talk in (cropped, straight):
        talk.feed(1)
    same(cropped, straight)


WAYS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("h2o", {"kv_dtype": "int8"}, ()),
    ("h2o", {"positions": "cache"}, ()),
    ("h2o", {"budget": 0.5}, ()),
    ("h2o", {"budget": 0.5}, (5, 0)),
    ("cascade", {"budget": 0.8, "cascades": 2, "sinks": 1}, (5, 0)),
    ("buzz", {"budget": 0.8}, (5, 0)),
    ("h2o", {"interval": 2}, (5, 0)),
    ("streaming", {"budget": 0.8, "interval": 3}, (5, 0)),
]


@pytest.mark.parametrize(("name", "more", "padding"), WAYS, ids=str)
@pytest.mark.slow
def test_other_ways_to_store_and_to_count(
    model: Traced, name: str, more: dict[str, Any], padding: tuple[int, ...]
) -> None:
    under = model.under(chosen(name, **more))
    cropped, straight = Talk(under, padding=padding), Talk(under, padding=padding)
    for stays, goes in ((13, 3), (3, 4), (2, 0)):
        cropped.feed(stays, goes)
        cropped.crop(goes)
        straight.feed(stays)
    cropped.feed(0, 1)
    cropped.crop(1)
    for talk in (cropped, straight):
        talk.feed(1)
    same(cropped, straight)


@pytest.mark.slow
def test_slots_that_were_doubled_in_between_go_back(model: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test `full` without a budget."""
    monkeypatch.setattr("kvpass.user_budget.SPARE", 1)
    under = model.under(chosen("full", budget=None))
    cropped, straight = Talk(under, rows=1), Talk(under, rows=1)
    for talk in (cropped, straight):
        talk.feed(4)
        talk.feed(caches_in(talk.cache)[0].layout.capacity - 5)
    for _ in range(3):
        cropped.feed(0, 1)
    assert caches_in(cropped.cache)[0].layout.capacity > caches_in(straight.cache)[0].layout.capacity
    cropped.crop(3)
    for talk in (cropped, straight):
        talk.feed(1)
    same(cropped, straight)


@pytest.fixture(scope="module")
def started(model: Traced) -> Talk:
    """Return a conversation after a prompt of twelve tokens, three steps and a chunk of four, with `crop=6`."""
    talk = Talk(model.under(chosen("h2o", crop=6)))
    for count in (12, 1, 1, 1, 4):
        talk.feed(count)
    return talk


@pytest.fixture
def talk(started: Talk) -> Talk:
    """Return a copy with another chunk of four, which can be cropped."""
    again = copy.copy(started)
    again.cache, again.logits = copy.deepcopy(started.cache), []
    again.feed(4)
    return again


def test_more_than_the_option_is_refused(talk: Talk) -> None:
    with pytest.raises(kvpass.CacheHandleError, match=r"7 tokens .* cropped, and 4 can be: crop=6 .*pass crop=7"):
        talk.crop(7)
    talk.crop(4)  # the conversation is unchanged


def test_more_than_is_remembered_is_refused(talk: Talk) -> None:
    with pytest.raises(kvpass.CacheHandleError, match=r"5 tokens .* 4 can be: earlier tokens have no record"):
        talk.crop(5)


def test_a_prompt_keeps_its_first_token(talk: Talk) -> None:
    talk.cache, talk.done = None, 0
    talk.feed(4)
    with pytest.raises(kvpass.CacheHandleError, match=r"4 tokens .* 3 can be"):
        talk.crop(4)
    talk.crop(3)


def test_rows_that_were_reordered_are_not_cropped(talk: Talk) -> None:
    talk.cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(kvpass.CacheHandleError, match=r"0 can be: .* selection or copy of rows"):
        talk.crop(1)


def test_an_old_handle_is_refused_however_many_tokens_have_come_since(talk: Talk) -> None:
    layer = talk.cache.layers[0]
    old = layer.keys, layer.values
    talk.crop(2)
    layer.keys, layer.values = old
    with pytest.raises(kvpass.CacheHandleError, match="2 tokens of this cache have since been cropped"):
        talk.feed(1)


def test_keys_and_values_are_cropped_alike(talk: Talk) -> None:
    layer = talk.cache.layers[0]
    layer.keys = layer.keys[..., :-2, :]
    with pytest.raises(kvpass.CacheHandleError, match="have since been cropped"):
        layer.values[..., :-1, :]
    layer.values = layer.values[:, :, : talk.done - 2]
    assert layer.values.cache is layer.keys.cache


@pytest.mark.parametrize("crop", [-1, 1.5, True, "4"])
def test_settings_that_are_no_number_of_tokens(crop: Any) -> None:
    with pytest.raises(kvpass.PolicyError, match=r"crop=.*must be a 64-bit integer of at least 0"):
        kvpass.backend("h2o", budget=8, crop=crop)


def test_policies_whose_calls_cannot_be_shortened() -> None:
    with pytest.raises(kvpass.PolicyError, match=r"crop=4: .*weighs the tokens of a call by their count"):
        kvpass.backend("buzz", budget=32, log_n=True, crop=4)
    with pytest.raises(kvpass.PolicyError, match="crop=4: kv_align numbers the tokens"):
        kvpass.backend(**settings("kv_align", "Llama", 8), crop=4)


def test_an_interrupted_crop_is_noticed(model: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a crop when the slots are as before the last step, and the counts are not."""
    talk = Talk(model.under(chosen("h2o")))
    talk.feed(12)
    for _ in range(3):
        talk.feed(0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(SavedContent, "write_to", interrupting(SavedContent.write_to, 2))
        with pytest.raises(KeyboardInterrupt, match="by the user"):
            talk.crop(2)
    uses = (lambda: talk.feed(0, 1), lambda: talk.crop(1))
    for use in uses:
        with pytest.raises(kvpass.CacheHandleError, match="was interrupted by an error"):
            use()
    talk.cache = copy.deepcopy(talk.cache)
    for use in uses:
        with pytest.raises(kvpass.CacheHandleError, match="was interrupted by an error"):
            use()


def test_a_decode_loop_takes_nothing_back() -> None:
    with pytest.raises(kvpass.PolicyError, match="crop=4: nothing takes tokens back in a DecodeLoop"):
        kvpass.DecodeLoop(build("Llama", layers=1), "h2o", budget=8, crop=4)
