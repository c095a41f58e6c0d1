"""Store rows in eight bits: integers from -127 to 127 and one scale per row.

    scale = max |x| / 127,   code = round(x / scale),   x ~ scale * code

A head of 64 numbers takes 66 bytes.  Attention never decodes rows: the scale of a key multiplies its logit, that of a
value its probability.  Numbers of one head and token have similar magnitudes, so one scale per row is fine enough
(per-token scales: Sheng et al., "FlexGen", 2023, section 4.2, https://arxiv.org/abs/2303.06865).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.fx.precision import upcast
from kvpass.lowering.formats import grid, words
from kvpass.lowering.formats.base import Parts

HIGHEST_CODE = 127


@dataclasses.dataclass(frozen=True)
class Int8(words.IntegerFormat):
    """Codes [..., D] and scales [..., 1]."""

    names = ("scale",)
    bits = 8

    def layout(self) -> list[tuple[int, torch.dtype]]:
        return [(self.dim, torch.int8), (1, grid.SCALE)]

    def encode(self, rows: Tensor) -> Parts:
        exact = upcast(rows)
        scale = grid.storable(exact.abs().amax(-1, keepdim=True).float() / HIGHEST_CODE)
        codes = grid.rounded_codes(exact, scale.to(exact.dtype)).clamp(-HIGHEST_CODE, HIGHEST_CODE)
        return self.to_device_layout((codes.to(torch.int8), scale.to(grid.SCALE)))

    def decode(self, parts: Parts) -> Tensor:
        codes, scale = self._codes_and_scale(self.ordered(parts))
        return codes * scale

    def sections(self, parts: Parts) -> list[Tensor]:
        return self._words(parts).decoded() if self._in_planes(parts[0]) else [self.decode(parts)]

    def _in_planes(self, codes: Tensor) -> bool:
        return self.rotated and words.fill(codes, self.dim)

    def _codes_and_scale(self, parts: Parts) -> tuple[Tensor, Tensor]:
        return parts[0].to(self._upcast), parts[1].to(self._upcast)

    def _products(self, query: Tensor, parts: Parts) -> Tensor:
        if words.fill(parts[0], self.dim):
            return words.products(query, [self._words(parts)])
        codes, scale = self._codes_and_scale(parts)
        return grid.summed_over_dim(query, [codes]) * scale[:, :, None, :, 0]

    def _weighted_sum(self, probs: Tensor, parts: Parts) -> Tensor:
        if words.fill(parts[0], self.dim):
            return words.weighted_sum(probs, [self._words(parts)])
        codes, scale = self._codes_and_scale(parts)
        return grid.summed_over_rows([probs * scale[:, :, None, :, 0]], [codes])

    def _words(self, parts: Parts) -> words.WordGroup:
        """Return the whole rows as one word group."""
        codes = words.signed(parts[0].view(torch.int32), self._upcast)
        return words.WordGroup(codes, parts[1].to(self._upcast), in_planes=self._in_planes(parts[0]))
