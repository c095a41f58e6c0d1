"""Test every way of decoding with every policy, on the first layers of the checkpoint.

The first layers of a real model have properties that random weights lack: sink tokens, features of very large size,
and the logit gaps of a trained vocabulary. Effects of depth are tested in `test_whole`.
"""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint import ways
from tests.checkpoint.oracles import check_against_reference, check_as_near_as_kernels, check_equal
from tests.checkpoint.subject import ROOMY, Subject, forced
from tests.strategies import ROWS

LAYERS = 3
TIGHT = 64
"""A budget that is smaller than the conversations."""
KINDS = ("h2o", "d2o", "cascade", "kv_align")
"""A policy with scores, one that merges, one that scans, and one that repairs rows; the others are slow."""
TURNS = {(name, "turns") for name in KINDS}
LOSSLESS_TURNS = {(name, "turns") for name in ("h2o", "kv_align")}
"""Policies whose steps change state before anything is evicted: column sums, or repaired rows."""

float32 = pytest.mark.parametrize("subject", [(torch.float32, LAYERS)], indirect=True, ids=["float32"])
bfloat16 = pytest.mark.parametrize("subject", [(torch.bfloat16, LAYERS)], indirect=True, ids=["bfloat16"])


def cases(chosen: set[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrize a test by policy and way; all cases except the chosen ones are slow."""
    every = [
        pytest.param(name, way, marks=[] if (name, way) in chosen else pytest.mark.slow)
        for way in ways.WAYS
        for name in ROWS
    ]
    return pytest.mark.parametrize(("name", "way"), every)


@float32
@pytest.mark.some(9)
@cases(LOSSLESS_TURNS | {("h2o", "requests")})
def test_the_uncompiled_model_until_something_is_evicted(subject: Subject, name: str, way: str) -> None:
    settings = subject.settings(name, ROOMY)
    with torch.no_grad():
        answers = ways.WAYS[way](subject, {**settings, "inner": "eager"})
    for answer in answers:
        check_equal(answer, forced(subject.plain, answer))


@float32
@pytest.mark.some(9)
@cases(TURNS | {("h2o", "padded"), ("h2o", "decode_loop")})
def test_the_reference_after_eviction(subject: Subject, name: str, way: str) -> None:
    settings = subject.settings(name, TIGHT)
    with torch.no_grad():
        answers = ways.WAYS[way](subject, {**settings, "inner": "eager"})
        check_against_reference(subject, answers, settings, way)


@float32
def test_beams_are_the_uncompiled_models(subject: Subject) -> None:
    """Compare tokens, because scores alone would not show that a worse beam was chosen."""
    with torch.no_grad():
        (ours,) = ways.beams(subject, {**subject.settings("h2o", ROOMY), "inner": "eager"})
        theirs = ways.beam_search(subject.plain, ways.medium(subject))
    assert torch.equal(ours.tokens, theirs.tokens)


@bfloat16
@pytest.mark.some(9)
@cases({("h2o", "turns")})
def test_as_near_as_torchs_kernels_in_half_precision(subject: Subject, name: str, way: str) -> None:
    with torch.no_grad():
        answers = ways.WAYS[way](subject, {**subject.settings(name, ROOMY), "inner": "eager"})
    check_as_near_as_kernels(subject, answers)


@bfloat16
@pytest.mark.some(5)
@cases({("h2o", "turns")})
def test_eviction_in_half_precision(subject: Subject, name: str, way: str) -> None:
    """Check that outputs are finite; rounding decides which tokens are evicted, so no other run compares."""
    with torch.no_grad():
        answers = ways.WAYS[way](subject, {**subject.settings(name, TIGHT), "inner": "eager"})
    assert all(answer.logits is None or answer.logits.isfinite().all() for answer in answers)
    assert all(answer.tokens.shape[1] == ways.NEW for answer in answers)
