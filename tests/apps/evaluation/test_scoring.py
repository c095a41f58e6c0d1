"""Check that continuations are scored as in decoding, regardless of the rest of their batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpass
from kvpass.apps.evaluation.scoring import Feed, ScoringBatch, score
from kvpass.decoding.model_call import ModelCall
from kvpass.errors import PolicyError
from tests.models import build, graphs, teacher_forced

CONTEXTS = [[5, 9, 77, 31, 8, 40, 41, 42, 43, 44, 50], [4, 60, 3], [17]]
CONTINUATIONS = [[9, 12], [99, 98, 97, 96, 95], [33, 34, 35]]
BATCH = ScoringBatch.of(CONTEXTS, CONTINUATIONS, torch.device("cpu"))


def model_call(**backend: Any) -> tuple[Any, ModelCall]:
    model = build("Llama", layers=1)
    return model, ModelCall.of(torch.compile(model, backend=kvpass.backend(inner="eager", **backend)))


def expected(model: Any, context: list[int], continuation: list[int]) -> torch.Tensor:
    """Return log-likelihoods from one forward of the uncompiled model."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        every = model(ids).logits[0, :-1].log_softmax(-1)
    return every[torch.arange(len(every)), ids[0, 1:]][len(context) - 1 :]


def test_continuations_begin_at_one_column() -> None:
    assert BATCH.context == 11
    assert BATCH.ids.shape == (3, 16)
    assert BATCH.scored.sum(-1).tolist() == [2, 5, 3]
    assert BATCH.ids[BATCH.mask.bool()].tolist() == [
        token for pair in zip(CONTEXTS, CONTINUATIONS, strict=True) for part in pair for token in part
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("chunk", "feed"),
    [pytest.param(None, "token", marks=pytest.mark.slow), (4, "token"), (4, "chunk"), (None, "whole")],
)
def test_nothing_evicted_is_the_uncompiled_model(chunk: int | None, feed: Feed) -> None:
    model, call = model_call(policy="full")
    found = score(call, BATCH, chunk, feed)
    for row, (context, continuation) in enumerate(zip(CONTEXTS, CONTINUATIONS, strict=True)):
        mine = found.log_likelihoods[row, : len(continuation)]
        torch.testing.assert_close(mine, expected(model, context, continuation), atol=1e-4, rtol=1e-4)
    assert not found.log_likelihoods[~BATCH.scored].any()


def test_a_token_is_predicted_from_what_a_decode_step_would_have_held() -> None:
    model, call = model_call(policy="h2o", budget=0.5)
    context, continuation = CONTEXTS[0], CONTINUATIONS[1]
    found = score(call, ScoringBatch.of([context], [continuation], torch.device("cpu")), None)
    ids = torch.tensor([[*context, *continuation]])
    run = teacher_forced(
        model, ids, torch.ones_like(ids), [len(context), 1, 1, 1, 1], policy="h2o", budget=0.5, inner="eager"
    )
    decoded = run.logits[0, len(context) - 1 :].log_softmax(-1)
    torch.testing.assert_close(found.log_likelihoods[0], decoded[torch.arange(5), torch.tensor(continuation)])
    whole = expected(model, context, continuation)
    torch.testing.assert_close(found.log_likelihoods[0, :1], whole[:1])  # from the prompt, in which nothing was evicted
    assert (found.log_likelihoods[0, 1:] - whole[1:]).abs().max() > 1e-2


@pytest.mark.slow
def test_a_row_is_scored_as_alone() -> None:
    _, call = model_call(policy="streaming", budget=6)
    together = score(call, BATCH, None).rows()
    for row in range(3):
        alone = score(call, ScoringBatch.of([CONTEXTS[row]], [CONTINUATIONS[row]], torch.device("cpu")), None)
        assert alone.rows()[0][0] == pytest.approx(together[row][0], abs=1e-4)


@pytest.mark.slow
def test_greedy_is_what_greedy_decoding_says() -> None:
    model, call = model_call(policy="full")
    context = torch.tensor([CONTEXTS[0]])
    said = model.generate(context, max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, 11:].tolist()
    other = [*said[:2], (said[2] + 1) % 128]
    batch = ScoringBatch.of([CONTEXTS[0]] * 3, [said, other, said[:1]], torch.device("cpu"))
    assert [same for _, same in score(call, batch, None).rows()] == [True, False, True]


@pytest.mark.slow
def test_no_length_is_compiled_for_itself() -> None:
    _, call = model_call(policy="h2o", budget=8)

    def scored(context: int, continuation: int) -> None:
        batch = ScoringBatch.of([[5] * context, [6] * 3], [[7] * continuation, [8]], torch.device("cpu"))
        score(call, batch, 8)

    for context, continuation in ((40, 3), (9, 4)):  # a prompt, chunks and steps; a prompt in one call
        scored(context, continuation)
    before = graphs()
    for context, continuation in ((41, 7), (12, 2), (23, 1), (57, 5)):
        scored(context, continuation)
    assert graphs() == before


def test_invalid_scoring_requests_are_refused() -> None:
    _, call = model_call(policy="full")
    with pytest.raises(PolicyError, match="context"):
        ScoringBatch.of([[1], []], [[2], [3]], torch.device("cpu"))
    with pytest.raises(PolicyError, match="chunk"):
        score(call, BATCH, None, "chunk")
    with pytest.raises(PolicyError, match="feed"):
        score(call, BATCH, None, "steps")  # type: ignore[arg-type]
