"""Transcribe `buzz`: append tokens; sample the old part of a long middle, and keep each hive's best token."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor

from kvpass.policies.buzz import Buzz
from kvpass.reference.base import HeadStream, Reference, Token


class BuzzReference(Reference):
    policy: Buzz

    @property
    def interval(self) -> int:
        return self.policy.old_stride or math.floor((self.policy.stride + 1) / 2)

    def sizes(self, budget: int) -> tuple[int, int]:
        """Return the window w and the threshold T, by the parameter theorem.

        Both are 1 + s - s / s', which is also true for another s' than the paper's.
        """
        s, window, threshold = self.policy.stride, self.policy.window, self.policy.threshold
        rest = budget - self.policy.sinks
        if window is None:
            ratio = float(1 + s - Fraction(s, self.interval))
            window = max(1, round(rest / (1 + ratio))) if threshold is None else rest - threshold
        return window, rest - window if threshold is None else threshold

    def logit_scale(self, count: int) -> float:
        return math.log(max(count, 1), 512) if self.policy.log_n else 1.0

    def observe(self, tokens: list[Token], probabilities: Tensor) -> None:
        if len(probabilities) == 0:
            return
        for token, probs in zip(tokens, probabilities.sum((0, 1)).tolist(), strict=True):
            token.score = probs + (0.0 if self.policy.variant == "fast" else token.score)

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        policy, tokens, prompt = self.policy, stream.tokens + new, not stream.tokens
        self.observe(tokens, probabilities)
        stream.tokens = tokens
        window, threshold = self.sizes(stream.budget)
        if len(tokens) - policy.sinks - window <= threshold:
            return
        end = len(tokens) - window
        sinks, middle, last = tokens[: policy.sinks], tokens[policy.sinks : end], tokens[end:]
        middle = self.sample(middle, stream.notes.get("old", 0))
        again = policy.iterate_prompt if prompt else not stream.step
        while again and len(middle) > threshold:
            middle = middle[:: self.interval]
        stream.notes["old"] = len(middle)
        stream.tokens = sinks + middle + last

    def sample(self, middle: list[Token], count: int) -> list[Token]:
        policy = self.policy
        old, new = middle[:count][:: self.interval], middle[count:]
        for token in old:
            token.score = 0.0
        hives = [new[n : n + policy.stride] for n in range(0, len(new), policy.stride)]
        if policy.variant == "nomax":
            return old + [hive[0] for hive in hives]
        return old + [max(hive, key=lambda token: token.score) for hive in hives]
