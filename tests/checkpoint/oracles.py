"""What answers of the checkpoint are held against: the uncompiled model, and the reference of a policy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.checkpoint import ways
from tests.checkpoint.subject import Answer, Subject, forced

CLOSE = 2e-3
"""How far logits of up to 30 may be apart in float32 after 30 layers."""
FORCED = ("beams", "decode_loop", "requests")
"""Ways that the reference has not: it reorders no rows, and its steps are not repeated."""


def check_equal(answer: Answer, expected: Tensor) -> None:
    """Check an answer in float32 against logits [B, n, V] that another run gives on the same tokens.

    Greedy tokens are those of the highest expected logits; a beam's score is the likelihood that they give.
    """
    if answer.score is None:
        assert torch.equal(answer.tokens, expected.argmax(-1))
    else:
        assert abs(answer.score - float(answer.likelihood(expected))) < CLOSE
    if answer.logits is not None:
        torch.testing.assert_close(answer.logits, expected, atol=CLOSE, rtol=0)


def check_as_near_as_kernels(subject: Subject, answers: Sequence[Answer]) -> None:
    """Check answers in half precision against the uncompiled model under each of torch's attention kernels.

    Logits of all answers together are no further from one of the kernels' than two kernels' are from each other, by
    their root mean square. No token's logit is further below the highest than two such differences allow.
    """
    by_kernel = [subject.by_kernel(answer) for answer in answers]
    for answer, logits in zip(answers, by_kernel, strict=True):
        _check_tokens(answer, logits)
    pairs = [(a, k) for a, k in zip(answers, by_kernel, strict=True) if a.logits is not None]
    if pairs:
        ours = [_rms([answer.logits - logits[i] for answer, logits in pairs]) for i in range(len(by_kernel[0]))]
        between = [
            _rms([logits[i] - logits[j] for _, logits in pairs])
            for i, j in itertools.combinations(range(len(by_kernel[0])), 2)
        ]
        assert min(ours) <= max(between)


def _check_tokens(answer: Answer, by_kernel: Sequence[Tensor]) -> None:
    first, *others = by_kernel
    allowed = 2 * max(float((first - other).abs().max()) for other in others)
    if answer.score is None:
        chosen = first.gather(-1, answer.tokens[..., None])[..., 0]
        assert float((first.amax(-1) - chosen).max()) <= allowed
    else:
        assert abs(answer.score - float(answer.likelihood(first))) <= allowed


def _rms(differences: Sequence[Tensor]) -> float:
    return float(torch.cat([each.flatten() for each in differences]).square().mean().sqrt())


def check_against_reference(subject: Subject, answers: Sequence[Answer], settings: dict[str, object], way: str) -> None:
    """Check answers in float32 against the eager reference of their policy.

    It decodes in the same way where it can, which shares the traces, and else is fed with the same calls.
    """
    literal = {**settings, "inner": "reference"}
    if way not in FORCED:
        for answer, expected in zip(answers, ways.WAYS[way](subject, literal), strict=True):
            assert expected.logits is not None
            check_equal(answer, expected.logits)
        return
    reference = subject.under(**literal)
    for answer in answers:
        check_equal(answer, forced(reference, answer))
