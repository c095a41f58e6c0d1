"""What answers of the checkpoint are held against: the uncompiled model, and the reference of a policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.checkpoint import ways
from tests.checkpoint.subject import Answer, Subject, forced

CLOSE = 2e-3
"""How far logits of up to 30 may be apart in float32 after 30 layers."""
FORCED = ("beams", "decode_loop", "requests")
"""Ways that the reference has not: it reorders no rows, and its steps are not repeated."""


SLACK = 1.5
"""Uncompiled steps round logits, as attention that is spelled out does, which errs 2 to 5 times as much a call as fused
kernels; generated code does not round them."""


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

    The error of the logits of all answers, against the same weights in float32, is at most `SLACK` times a kernel's, by
    their root mean square: two kernels may round alike, so their distance from each other bounds nothing. No token's
    logit is further below the highest than two differences between kernels allow.
    """
    by_kernel = [subject.by_kernel(answer) for answer in answers]
    for answer, logits in zip(answers, by_kernel, strict=True):
        _check_tokens(answer, logits)
    pairs = [(a, k) for a, k in zip(answers, by_kernel, strict=True) if a.logits is not None]
    if pairs:
        exact = [subject.exact(answer) for answer, _ in pairs]
        ours = _rms([answer.logits - right for (answer, _), right in zip(pairs, exact, strict=True)])
        kernels = range(len(by_kernel[0]))
        theirs = [_rms([logits[i] - right for (_, logits), right in zip(pairs, exact, strict=True)]) for i in kernels]
        assert ours <= SLACK * max(theirs), (ours, theirs)


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
