"""The next token from logits, on the device and without a word to the host."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.policies.base import require


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: only the so many likeliest tokens are in the draw.
        top_p: only the likeliest tokens that together have this share of the probability are.
        seed: of the generator.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", self.temperature, "is not negative; 0 is greedy")
        require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "is a number of tokens from 1 on, or None")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "is a share in (0, 1], or None")

    def generator(self, device: torch.device) -> torch.Generator:
        """A fresh generator."""
        return torch.Generator(device).manual_seed(self.seed)

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """The next tokens, int64 [B], from logits [B, vocabulary]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            logits = _likeliest(logits, min(self.top_k, logits.shape[-1]))
        if self.top_p is not None:
            logits = _within(logits, self.top_p)
        noise = torch.empty_like(logits).exponential_(generator=generator)
        # The token whose exponential clock of rate p rings first is drawn with probability p.
        return (torch.softmax(logits, -1) / noise).argmax(-1)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The logits with all but the highest `count` at minus infinity."""
    least = logits.topk(count, -1).values[:, -1:]
    return torch.where(logits < least, -torch.inf, logits)


def _within(logits: Tensor, share: float) -> Tensor:
    """The logits with all at minus infinity before which the likelier ones have the share already."""
    ordered, order = logits.sort(-1, descending=True)
    paid = torch.softmax(ordered, -1)
    out = paid.cumsum(-1) - paid >= share  # the likeliest one is always in
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)
