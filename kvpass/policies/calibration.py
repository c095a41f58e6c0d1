"""Define calibrations: statistics of a model's queries before their rotary embedding, and policies that read them.

A calibration is made once for a model (`kvpass.calibrate`).  Queries before the rotary embedding are concentrated
around a mean in many heads, so the logits that a key will get from later queries can be predicted from the key alone.

Rotary embeddings turn pairs of dimensions (a, b) of a row at position p as complex numbers,

    (a + ib) -> (a + ib) exp(i w p)

with the frequency w of the pair, 0 for dimensions that are not rotated.  Statistics and relative keys are in the
layout [first dimensions of all pairs, second dimensions of all pairs].
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import CalibrationError
from kvpass.policies.weights import PolicyWithWeights, Weights, weights_digest


@dataclasses.dataclass(frozen=True)
class CalibratedModel:
    """Describe the model of a calibration.

    Attributes:
        architecture: as the model's configuration names it.
        layers: its attention layers that cache keys and values.
        query_heads, heads: Hq and Hkv.
        dim: D, the dimension of keys.
    """

    architecture: str
    layers: int
    query_heads: int
    heads: int
    dim: int


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration(Weights):
    """Statistics of the queries of each layer and head; equal to calibrations with the same content.

    Attributes:
        model: the model that was measured.
        tensors: float32, by name, with P = D / 2 pairs: the `mean` [L, Hq, D] and the `second` moments around it
            [L, Hq, D, D], both in the layout of pairs; `size` [L, Hq, P], the mean absolute value of each pair;
            `frequency` float64 [L, P] in radians for each position; `pairs` int64 [L, 2, P], the dimensions of the
            pairs; `scale` [L], the factor on the products of queries and keys.
        digest: a hash of all these.
    """

    model: CalibratedModel
    tensors: Mapping[str, Tensor] = dataclasses.field(repr=False)
    digest: str = dataclasses.field(init=False)
    key = "kvpass.calibration"
    content = "a calibration"
    error = CalibrationError
    option = "calibration"
    how = (
        "a kvpass.Calibration or the path of one; make one for the model with `kvpass calibrate MODEL --out FILE` "
        "or kvpass.calibrate"
    )
    mismatch = (
        "the calibration is of a model with {name}={made!r}, and this one has {found!r}; "
        "make one for it with `kvpass calibrate`"
    )

    def __post_init__(self) -> None:
        """Check the shapes.

        Raises:
            CalibrationError: a tensor is missing or has another shape.
        """
        layers, heads, dim = self.model.layers, self.model.query_heads, self.model.dim
        shapes = dict(
            mean=(layers, heads, dim),
            size=(layers, heads, dim // 2),
            second=(layers, heads, dim, dim),
            frequency=(layers, dim // 2),
            pairs=(layers, 2, dim // 2),
            scale=(layers,),
        )
        found = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if found != shapes:
            raise CalibrationError(f"a calibration of {self.model} has tensors of the shapes {shapes}, not {found}")
        object.__setattr__(self, "digest", weights_digest(f"{self.model}", self.tensors))

    def model_facts(self) -> Mapping[str, object]:
        return dataclasses.asdict(self.model)

    def to_stored(self) -> tuple[object, Mapping[str, Tensor]]:
        return self.model_facts(), self.tensors

    @classmethod
    def from_stored(cls, metadata: Any, tensors: Mapping[str, Tensor]) -> Calibration:
        return cls(CalibratedModel(**metadata), tensors)


@dataclasses.dataclass(frozen=True)
class CalibratedPolicy(PolicyWithWeights[Calibration]):
    """Base class of policies that predict attention from a calibration.

    Attributes:
        calibration: a `Calibration`, or the path of a saved one.
    """

    calibration: Calibration | str | os.PathLike[str] | None = None
    heads = "kv"
    weights_class = Calibration
    cache_positions_refusal = "it predicts attention from positions in the text, and keys must be rotated to these"

    def layer_weights(self, layer: int) -> list[Tensor]:
        return [x[layer] for x in self._weights_of_all_layers]

    @functools.cached_property
    def _weights_of_all_layers(self) -> list[Tensor]:
        return self.weights_from(self.loaded.tensors)

    def weights_from(self, statistics: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the weights of `Policy.rescore` for all layers, each [L, ...], from calibration tensors."""
        raise NotImplementedError

    def relative_keys(self, key: Tensor, seen: Tensor, frequency: Tensor, pairs: Tensor, live: Tensor) -> Tensor:
        """Rotate keys back by the next query's position: float32 [B, Hkv, N, D] in the layout of pairs.

        A query at that position then needs no rotary embedding.  Free slots are zero.

        Args:
            key: [B, Hkv, N, D], stored after their rotary embedding.
            seen: int64 [B, 1, 1], the position of the next query.
            frequency: [P]; pairs: int64 [2, P].
            live: bool [B, Hkv, N].

        Raises:
            CalibrationError: the calibration is for a model with other keys.
        """
        self.loaded.check(heads=key.shape[1], dim=key.shape[3])
        key = torch.where(live[..., None], key.float(), 0.0)
        first, second = key.index_select(-1, pairs[0]), key.index_select(-1, pairs[1])
        angle = (seen.to(frequency.dtype) * frequency)[:, None]  # [B, 1, 1, P]
        cos, sin = angle.cos().float(), angle.sin().float()
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


def multiply_pairs(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply the pairs of vectors [..., D], in the layout of pairs, by complex numbers [..., P]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * factor.real - second * factor.imag, first * factor.imag + second * factor.real], -1)


def pair_norms(x: Tensor) -> Tensor:
    """Return the absolute values [..., P] of the pairs of vectors [..., D] in the layout of pairs."""
    first, second = x.chunk(2, -1)
    return (first.square() + second.square()).sqrt()
