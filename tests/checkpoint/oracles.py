"""Compare answers of the checkpoint with the uncompiled model and with the reference of a policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.checkpoint import ways
from tests.checkpoint.subject import Answer, Subject, forced

CLOSE = 2e-3
"""Largest difference of logits, which are up to 30, in float32 after 30 layers."""
FORCED = ("beams", "decode_loop", "requests")
"""Ways of decoding that the reference lacks: it cannot reorder rows, and its steps cannot be repeated."""


SLACK = 1.5
"""Factor on the error of a kernel.

Uncompiled steps round logits, like eager attention, whose error is 2 to 5 times that of fused kernels in each call.
Generated code does not round logits.
"""


def check_equal(answer: Answer, expected: Tensor) -> None:
    """Check an answer in float32 against logits [B, n, V] that another run gives on the same tokens.

    Greedy tokens must be those of the highest expected logits. A beam's score must equal their log-likelihood.
    """
    if answer.score is None:
        assert torch.equal(answer.tokens, expected.argmax(-1))
    else:
        assert abs(answer.score - float(answer.likelihood(expected))) < CLOSE
    if answer.logits is not None:
        torch.testing.assert_close(answer.logits, expected, atol=CLOSE, rtol=0)


def check_as_near_as_kernels(subject: Subject, answers: Sequence[Answer]) -> None:
    """Check answers in half precision against the uncompiled model under each of torch's attention kernels.

    The root mean square error of all logits, against the same weights in float32, is at most `SLACK` times a kernel's.
    The distance between two kernels bounds nothing, because both may round in the same way. No token's logit is further
    below the highest one than two differences between kernels allow.
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

    The reference decodes in the same way if it can, which shares the traces. Otherwise it is fed with the same calls.
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
