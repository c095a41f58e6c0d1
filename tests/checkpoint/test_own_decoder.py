"""Test a hand-written decoder with the checkpoint's weights: cache order and rotary tables change no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from tests.checkpoint.conversations import of_length
from tests.checkpoint.subject import WHOLE, Subject
from tests.own_llama import Way, of_llama

DTYPES = [
    pytest.param((dtype, WHOLE), id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float32)
]


@torch.no_grad()
def decoded(model: Any, ids: Tensor, count: int, policy: str = "h2o") -> tuple[list[int], list[Tensor]]:
    """Return the next tokens, and the positions in each layer at the end."""
    torch._dynamo.reset()
    run = torch.compile(model, backend=kvpass.backend(policy, budget=64, inner="eager"))
    out, made = run(ids, logits_to_keep=1), []
    for _ in range(count):
        made.append(int(out.logits[0, -1].argmax()))
        out = run(torch.tensor([made[-1:]]), past_key_values=out.past_key_values, logits_to_keep=1)
    return made, [layer.positions for layer in kvpass.inspect(out.past_key_values).layers]


@pytest.mark.slow
@pytest.mark.parametrize("subject", DTYPES, indirect=True)
def test_tokens_first_and_heads_first_give_the_same_answer(subject: Subject) -> None:
    ids = of_length(subject.tokenizer, 100)
    if subject.plain.dtype == torch.float32:
        with torch.no_grad():
            assert torch.allclose(of_llama(subject.plain, Way())(ids).logits, subject.plain(ids).logits, atol=1e-3)
    (ours, held), (theirs, others) = (decoded(of_llama(subject.plain, way), ids, 24) for way in (Way(), Way(2, 2)))
    assert ours == theirs
    assert all(torch.equal(one, other) for one, other in zip(held, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("subject", DTYPES, indirect=True)
@pytest.mark.parametrize("dim", [1, 2])
def test_a_sliced_table_gives_the_answer_of_computed_angles(subject: Subject, dim: int) -> None:
    """Test a policy that rotates keys by their positions in the cache."""
    ids = of_length(subject.tokenizer, 100)
    ways = Way(dim, dim, table="angles"), Way(dim, dim)
    (ours, held), (theirs, others) = (decoded(of_llama(subject.plain, way), ids, 24, "streaming") for way in ways)
    assert ours == theirs
    assert all(torch.equal(one, other) for one, other in zip(held, others, strict=True))
