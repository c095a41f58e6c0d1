"""Test agreement with a full cache: distributions, bins and intervals, by hand and with the uncompiled model."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpass.apps.evaluation import agreement, scoring
from kvpass.apps.evaluation.agreement import ALL, BEFORE, SAME, AgreementMeasure, interval
from kvpass.apps.evaluation.scoring import (
    AgreementScores,
    Feed,
    FullPredictions,
    ScoringBatch,
    divergence,
    log_probs_of,
)
from kvpass.apps.evaluation.session import Session
from kvpass.apps.models import LoadedModel
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.model_call import ModelCall
from kvpass.errors import KVPassError, PolicyError
from tests.models import build

KL = "KL, nats"


def session(policy: str, budget: int | None, feed: Feed = "chunk", chunk: int | None = 4) -> Session:
    model, tokenizer = build("Llama", layers=1), SimpleNamespace(bos_token_id=0, eos_token_id=1)
    loop = DecodeLoop(model, policy, budget=budget, prefill_chunk=chunk, inner="eager")
    drawn = torch.randint(2, 128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = {"a": drawn[:40], "b": drawn[40:]}
    return Session(LoadedModel("stub", model, tokenizer, None, False), loop, texts, feed, chunk, budget)


MEASURE = AgreementMeasure(documents=3, tokens=20, batch=2, edges=(0, 4))


@pytest.mark.few(1)
@pytest.mark.parametrize(("feed", "chunk"), [("chunk", 4), ("token", 1), ("whole", None)])
def test_a_full_cache_agrees_with_itself(feed: Feed, chunk: int | None) -> None:
    rows = list(MEASURE.rows(session("full", None, feed, chunk)))
    assert [row["tokens after eviction"] for row in rows] == [BEFORE]
    assert rows[0][KL] == pytest.approx(0, abs=1e-6)
    assert (rows[0][SAME], rows[0]["documents"]) == (1.0, 3)
    assert rows[0]["tokens"] == 3 * (10 if feed == "whole" else 19)


@pytest.mark.few(1)
@pytest.mark.parametrize(("feed", "chunk"), [("chunk", 4), ("token", 1)])
def test_a_policy_agrees_until_it_evicts(feed: Feed, chunk: int | None) -> None:
    found = session("window", 8, feed, chunk)
    before, *bins, whole = MEASURE.rows(found)
    assert before[KL] == pytest.approx(0, abs=1e-6)
    assert before["distance"] == -8
    assert [(row["distance"], row["tokens"]) for row in bins] == [(0, 12), (4, 24)]
    if feed == "chunk":  # a chunk attends to all cached tokens and to itself, and only then evicts
        assert bins[0][KL] == pytest.approx(0, abs=1e-6)
    else:
        assert bins[0][KL] > 1e-6
    assert bins[1][KL] > 1e-5 + bins[0][KL]
    assert all(row[f"{KL}, low"] <= row[KL] <= row[f"{KL}, high"] for row in bins)
    assert (whole["tokens after eviction"], whole["distance"]) == (ALL, None)
    assert whole[KL] == pytest.approx((bins[0][KL] * 12 + bins[1][KL] * 24) / 36)
    columns = MEASURE.columns([before, *bins, whole])
    assert columns[KL] == whole[KL]
    assert columns["KL, 0 to 3"] == bins[0][KL]


def test_after_a_whole_prompt_eviction_begins_at_its_end() -> None:
    rows = list(MEASURE.rows(session("window", 8, "whole", None)))
    assert [row["distance"] for row in rows] == [0, 4, None]
    assert rows[0]["tokens"] == 3 * 4


def test_losses_are_those_of_the_tokens() -> None:
    found = session("full", None)
    contexts, continuations = [found.texts["a"][:1]], [found.texts["a"][1:21]]
    scores = found.agree(contexts, continuations)
    expected = -found.score(contexts, continuations).log_likelihoods
    assert scores.loss == pytest.approx(expected, abs=1e-4)
    assert scores.full_loss == pytest.approx(expected, abs=1e-4)


def test_the_full_model_runs_once_for_each_batch_that_fits() -> None:
    """Check a limit that fits the logits of one of two equal batches."""
    found, calls = session("window", 8), []
    plain = ModelCall.of(found.loaded.model)
    counted = dataclasses.replace(plain, call=lambda *given, **named: calls.append(1) or plain.call(*given, **named))
    full = FullPredictions(counted)
    full.LIMIT = 20 * 128 * 4  # type: ignore[misc]  # bytes of 20 tokens' logits over 128 words in float32
    batches = [ScoringBatch.of([[1]], [list(range(2, 21 + n))], torch.device("cpu")) for n in (0, 1)]
    fed = [len(list(scoring.pieces(plain, batch, 4, "chunk"))) for batch in batches]
    first = [torch.cat(list(full.of(batch, 4, "chunk")), 1) for batch in batches]
    assert len(calls) == sum(fed)
    again = [torch.cat(list(full.of(batch, 4, "chunk")), 1) for batch in batches]
    assert len(calls) == sum(fed) + fed[1]
    assert all(map(torch.equal, first, again))
    alone = [piece.logits for piece in scoring.pieces(plain, batches[0], 4, "chunk")]
    assert torch.equal(first[0], torch.cat(alone, 1))


def test_divergence_is_that_of_the_definition() -> None:
    full, ours = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    found = divergence(log_probs_of(ours.log()[None, None] + 3.0), log_probs_of(full.log()[None, None]))
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))


def test_rows_are_means_over_documents_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check two documents of 6 tokens and 2 slots by hand: columns are at distances -1, 0, 1, 2, 3."""
    monkeypatch.setattr(agreement, "DRAWS", 500)
    scores = AgreementScores(
        torch.tensor([[0.0, 1.0, 3.0, 5.0, 7.0], [0.0, 0.0, 0.0, 1.0, 1.0]]),
        torch.tensor([[True, True, False, False, False], [True, True, True, True, False]]),
        torch.tensor([[0.0, 2.0, 2.0, 4.0, 4.0], [0.0, 0.0, 0.0, 2.0, 2.0]]),
        torch.full((2, 5), 1.5),
    )
    stub: Any = SimpleNamespace(
        texts={"a": [5] * 20}, loaded=SimpleNamespace(bos=0), feed="chunk", slots=lambda tokens: 2,
        agree=lambda contexts, continuations: scores,
    )  # fmt: skip
    measure = AgreementMeasure(documents=2, tokens=6, batch=2, edges=(0, 2))
    before, near, far, whole = measure.rows(stub)
    assert (before[KL], before[SAME]) == (0.0, 1.0)
    assert (near[KL], near[SAME]) == ((2.0 + 0.0) / 2, (0.5 + 1.0) / 2)
    assert (far[KL], far[SAME]) == ((6.0 + 1.0) / 2, (0.0 + 0.5) / 2)
    assert (whole[KL], whole["tokens"]) == ((4.0 + 0.5) / 2, 8)
    columns = measure.columns([before, near, far, whole])
    assert columns["perplexity"] == pytest.approx(math.exp((12 / 4 + 4 / 4) / 2))
    assert columns["full perplexity"] == pytest.approx(math.exp(1.5))
    # A draw of two documents has one of them twice, or both.
    assert (far[f"{KL}, low"], far[f"{KL}, high"]) == (1.0, 6.0)


def test_an_interval_holds_the_mean_and_shrinks_with_more_documents() -> None:
    drawn = torch.randn(400, generator=torch.Generator().manual_seed(1)).double()
    few, many = interval(drawn[:25], seed=0), interval(drawn, seed=0)
    for (low, high), count in ((few, 25), (many, 400)):
        assert low is not None
        assert high is not None
        assert low < drawn[:count].mean() < high
        assert high - low == pytest.approx(2 * 1.96 * drawn[:count].std().item() / count**0.5, rel=0.2)
    assert interval(drawn, seed=0) == many


def test_equal_documents_leave_no_doubt_and_a_single_one_says_nothing() -> None:
    assert interval(torch.full((5,), 2.0), seed=3) == (2.0, 2.0)
    assert interval(torch.tensor([2.0]), seed=3) == (None, None)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens": 2}, "tokens=2"),
        ({"documents": 0}, "documents=0"),
        ({"edges": (4, 4)}, "edges"),
        ({"edges": ()}, "edges"),
        ({"edges": (-1, 4)}, "edges"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(PolicyError, match=named):
        AgreementMeasure(**fields)


def test_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(KVPassError, match="give more text"):
        list(AgreementMeasure(documents=9, tokens=60).rows(session("window", 8)))


@pytest.mark.parametrize(("budget", "slots"), [(0.29, 29), (0.57, 57), (32, 32)])
def test_distances_are_counted_from_the_slots_that_a_share_has(budget: float, slots: int) -> None:
    """Check shares whose product with 100 is just below a whole number in floating point."""
    assert session("streaming", 8).slots(100) == 8
    assert dataclasses.replace(session("streaming", 8), budget=budget).slots(100) == slots
