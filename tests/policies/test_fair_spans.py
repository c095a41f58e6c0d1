"""Test spans of the text that share the budget by their lengths."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvpass
from kvpass import policies
from kvpass.errors import PolicyError
from kvpass.policies import Policy, Tokens
from kvpass.policies.fair_spans import FairSpans
from tests.models import build
from tests.strategies import TABLE, Row, cases
from tests.test_chunks_and_padding import compare

SCORE = [0.05, 0.30, 0.02, 0.01, 0.20, 0.15, 0.10, 0.08, 0.06, 0.03]


@dataclasses.dataclass(frozen=True)
class ByScore(Policy):
    """A policy that keeps the highest of given scores."""

    name = "_by_score"

    def score(self, tokens: Tokens) -> Tensor:
        return torch.tensor(SCORE).expand_as(tokens.position)


def kept(spans: tuple[int, ...], budget: int = 5, count: int = 10) -> list[int]:
    position = torch.arange(10).masked_fill(torch.arange(10) >= count, -1)[None, None]
    tokens = Tokens(position, torch.tensor([[[count]]]), {}, budget)
    keep, _ = FairSpans(ByScore(spans=spans)).compact(tokens)
    return torch.nonzero(keep[0, 0]).flatten().tolist()


def test_the_literal_example() -> None:
    """Check by hand that spans [0, 4) and [4, 10) share a budget of 5 as 2 and 3."""
    assert kept(()) == [1, 4, 5, 6, 7]
    assert kept((4,)) == [0, 1, 4, 5, 6]
    assert kept((1, 2, 9)) == [1, 4, 5, 6, 9]  # the share of the first token rounds to zero
    assert kept((20,)) == kept(())
    assert kept((4,), budget=7, count=7) == [*range(7)]  # nothing exceeds the budget


FAIR = [row for row in TABLE if row.periodic and not policies.get(row.name).spans_refusal]


@pytest.mark.parametrize("row", FAIR, ids=lambda row: row.name)
@given(data=st.data())
def test_chunks_and_padding_equal_the_reference(row: Row, data: st.DataObject) -> None:
    case = data.draw(cases(row))
    spans = data.draw(st.sampled_from([(1,), (4,), (2, 9), (40,)]))
    case = dataclasses.replace(case, options={**case.options, "spans": spans})
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 2, 5, 12]), min_size=1, max_size=8))
    compare(case, [case.prompt, *lengths], data.draw(st.sampled_from([0.0, 0.2])))


def ids(tokens: int) -> Tensor:
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@torch.no_grad()
def test_both_instructions_of_a_prompt_are_held() -> None:
    """Check that spans keep as many of the first 12 tokens as of the others, while a window keeps none."""
    held = {}
    for spans in ((), (12,)):
        run = torch.compile(build("Llama"), backend=kvpass.backend("window", budget=8, spans=spans, inner="eager"))
        cache = run(ids(24), use_cache=True).past_key_values
        held[spans] = kvpass.inspect(cache).layers[0].positions[0, 0].tolist()
        cache = run(ids(1), past_key_values=cache, use_cache=True).past_key_values
        assert kvpass.inspect(cache).layers[0].positions[0, 0].tolist() == [*held[spans][1:], 24]
    assert held == {(): [*range(16, 24)], (12,): [8, 9, 10, 11, 20, 21, 22, 23]}


def test_invalid_spans_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"spans=\(4, 4\): must be .* above 0, in increasing order"):
        kvpass.backend("h2o", budget=8, spans=(4, 4))
    with pytest.raises(PolicyError, match=r"spans=\(4,\): must be \(\) for 'buzz': it evicts in batches already"):
        kvpass.backend("buzz", budget=40, spans=(4,))
    with pytest.raises(PolicyError, match=r"must be \(\) for 'h2o': keep_prompt keeps every token of a prompt"):
        kvpass.backend("h2o", budget=8, spans=(4,), keep_prompt=True)
    run = torch.compile(build("Llama"), backend=kvpass.backend("h2o", budget=8, spans=(4,), inner="eager"))
    with pytest.raises(PolicyError, match=r"pin: .* divide the budget already: pass either spans or pins"):
        kvpass.prefill(run, ids(20), chunk=10, pin=[(0, 2)])
