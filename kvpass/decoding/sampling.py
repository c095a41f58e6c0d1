"""Sample the next token from logits, on the device and without synchronisation with the host."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from torch import Tensor

from kvpass.arguments import Condition, Natural, Positive, between
from kvpass.policies.hashing import PRIME, mix

Temperature = Annotated[float, between(0, 1e30)]  # logits are divided by it in float32
TopK = Positive
TopP = Annotated[float, Condition("above 0 and up to 1", lambda share: 0 < share <= 1)]
Seed = Natural


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for the choice of the next token.

    Attributes:
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: draw from the `top_k` most likely tokens only, and from tokens as likely as the last of them, as in
            transformers; None for all.
        top_p: draw from the smallest set of most likely tokens with this share of the probability; None for all.
        seed: the seed of the generator.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a new generator with the seed."""
        return torch.Generator(device).manual_seed(self.seed)

    def sample(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return the next tokens, int64 [B], from logits [B, vocabulary]."""
        if self.temperature < 1e-30:
            return logits.argmax(-1)
        logits = _sharpen(logits, self.temperature)
        if self.top_k is not None:
            logits = _keep_top_k(logits, min(self.top_k, logits.shape[-1]))
        if self.top_p is not None:
            logits = _keep_top_p(*logits.sort(-1, descending=True), self.top_p)
        noise = torch.empty_like(logits).exponential_(generator=generator)
        # Exponential race: of exponential times with the rates p, a token's is the smallest with probability p.
        return (torch.softmax(logits, -1) / noise).argmax(-1)


def _keep_top_k(logits: Tensor, count: int) -> Tensor:
    """Return the logits with all but the highest `count` set to minus infinity."""
    least = logits.topk(count, -1).values[:, -1:]
    return torch.where(logits < least, -torch.inf, logits)


def _keep_top_p(ordered: Tensor, order: Tensor, share: Tensor | float) -> Tensor:
    """Return sorted logits in their own order, with minus infinity for tokens outside of the top share."""
    probs = torch.softmax(ordered, -1)
    dropped = probs.cumsum(-1) - probs >= share  # the most likely token always stays
    dropped = dropped & (share < 1)  # a rounded sum may reach one before the last token
    return torch.empty_like(ordered).scatter(-1, order, ordered.masked_fill(dropped, -torch.inf))


MAX_NOISE = 32.0
GREEDY = Sampling()


@dataclasses.dataclass
class RowSampling:
    """Settings of sampling for each row of a batch, whose tokens depend on the row's own settings and count alone.

    Rows share no generator state: the random numbers for a row's n-th token are a hash of its seed, n and the token.

    Attributes:
        rows: the settings on the host.
        temperature, top_p: float32 [R].
        top_k, seed: int64 [R].
    """

    rows: list[Sampling]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor

    @staticmethod
    def of(rows: int, device: torch.device) -> RowSampling:
        """Return the settings of `rows` greedy rows."""
        floats, whole = torch.zeros(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
        # `set_row` writes in place, so each setting has its own memory.
        return RowSampling([GREEDY] * rows, floats, whole, floats.clone(), whole.clone())

    def set_row(self, row: int, sampling: Sampling) -> None:
        """Set the settings of a row."""
        self.rows[row] = sampling
        self.temperature[row] = sampling.temperature
        # Without a limit: more tokens than any vocabulary has, and all of the probability.
        self.top_k[row] = PRIME if sampling.top_k is None else sampling.top_k
        self.top_p[row] = 1.0 if sampling.top_p is None else sampling.top_p
        self.seed[row] = sampling.seed % PRIME

    def of_row(self, row: int) -> RowSampling:
        """Return the settings of one row as a batch of one."""
        part = slice(row, row + 1)
        return RowSampling(self.rows[part], self.temperature[part], self.top_k[part], self.top_p[part], self.seed[part])

    @property
    def draws(self) -> bool:
        """True if any row is not greedy."""
        return any(row.temperature > 0 for row in self.rows)

    @property
    def has_limits(self) -> bool:
        """True if any row has top_k or top_p."""
        return any(row.top_k is not None or row.top_p is not None for row in self.rows)

    def sample(self, logits: Tensor, generated: Tensor) -> Tensor:
        """Return the next tokens, int64 [R], from logits [R, vocabulary]; `generated` counts each row's."""
        likeliest = logits.argmax(-1)
        if not self.draws:
            return likeliest
        sharp = _sharpen(logits, torch.where(self.temperature > 0, self.temperature, 1.0)[:, None])
        if self.has_limits:
            sharp = self._apply_limits(sharp)
        drawn = (torch.softmax(sharp, -1) / self._noise(generated, logits.shape[-1])).argmax(-1)
        return torch.where(self.temperature > 0, drawn, likeliest)

    def _apply_limits(self, logits: Tensor) -> Tensor:
        """Return the logits with minus infinity for tokens outside of each row's top_k and top_p; see `Sampling`."""
        ordered, order = logits.sort(-1, descending=True)
        last = ordered.gather(-1, (self.top_k[:, None] - 1).clamp(0, logits.shape[-1] - 1))
        return _keep_top_p(ordered.masked_fill(ordered < last, -torch.inf), order, self.top_p[:, None])

    def _noise(self, generated: Tensor, vocabulary: int) -> Tensor:
        """Return exponential random numbers of rate one, float32 [R, vocabulary], above zero."""
        row = mix(mix(self.seed) + generated)[:, None]
        # From 1 on, as the hash of zero is zero: the first token of seed 0 would always be the token 0.
        token = mix(row + 48271 * torch.arange(1, vocabulary + 1, device=generated.device))
        # log1p is precise near zero, where tokens win; the largest hashes round to one, whose logarithm is infinite.
        return (-torch.log1p(-(token.float() + 0.5) / (PRIME + 1))).clamp(max=MAX_NOISE)


def _sharpen(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Divide logits [B, vocabulary] by a temperature of any size; the highest becomes zero."""
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / temperature
