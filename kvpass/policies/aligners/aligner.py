"""Define a trained aligner: its weights, the model that they were trained for, and the repair of vectors.

A decode step repairs all cached vectors of one layer.  All that does not depend on the vectors is precomputed once: fc1
acts on [vector; embeddings], so it splits into W vector + table[embeddings].
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.errors import AlignerError
from kvpass.policies.aligners.scope import AlignerScope, scope_of
from kvpass.policies.weights import Weights, weights_digest
from kvpass.tensor_files import write

Recipe = Literal["direct", "paper", "nothing"]
RECIPES: tuple[Recipe, ...] = ("direct", "paper", "nothing")


@dataclasses.dataclass(frozen=True, eq=False)
class Aligner(Weights):
    """The weights of the key and value networks; equal to aligners of the same recipe, scope and weights.

    Attributes:
        recipe: "direct" repairs a row of the model in one move of any distance; "paper" moves a row, repaired or not,
            by `scope.every` positions; "nothing" leaves vectors unchanged.
        scope: the model and settings that it was trained for.
        tensors: float32, by name; see `kvpass.policies.aligners.networks` for the shapes.
        digest: a hash of all these.
    """

    recipe: Recipe
    scope: AlignerScope
    tensors: Mapping[str, Tensor] = dataclasses.field(repr=False)
    digest: str = dataclasses.field(init=False)
    key = "kvpass.align"
    content = "an aligner"
    error = AlignerError
    option = "aligner"
    how = (
        "an Aligner or the path of one (kvpass.policies.aligners); train one for the model with `kvpass align "
        "train --model ... --out ...`"
    )
    mismatch = (
        "the aligner was trained for a model with {name}={made!r}, and this one has {found!r}; "
        "train one for it with `kvpass align train`"
    )

    def __post_init__(self) -> None:
        exact = {name: tensor.detach().to(torch.float32).contiguous() for name, tensor in self.tensors.items()}
        object.__setattr__(self, "tensors", exact)
        object.__setattr__(self, "digest", weights_digest(f"{self.recipe} {self.scope}", exact))

    def model_facts(self) -> Mapping[str, object]:
        return dataclasses.asdict(self.scope)

    def to_stored(self) -> tuple[object, Mapping[str, Tensor]]:
        return {"recipe": self.recipe, "signature": self.model_facts()}, self.tensors

    @classmethod
    def from_stored(cls, metadata: Any, tensors: Mapping[str, Tensor]) -> Aligner:
        scope, recipe = AlignerScope(**metadata["signature"]), metadata["recipe"]
        if recipe not in RECIPES:
            raise ValueError(f"unknown recipe {recipe!r}; known are {', '.join(RECIPES)}")
        return cls(recipe, scope, tensors)

    def layer_weights(self, layer: int) -> list[Tensor]:
        """Return the tensors that `repair` uses in a layer; tensors that all layers share are the same objects."""
        return [by_layer[layer] for by_layer in self._weights]

    @functools.cached_property
    def _weights(self) -> list[Any]:
        """The weights of all layers: tensors [L, ...], and lists that repeat a tensor that all layers share."""
        if self.recipe == "direct":
            return _direct_weights(self.tensors)
        if self.recipe == "paper":
            return [*_paper_weights(self.tensors, "key"), *_paper_weights(self.tensors, "value")]
        return []

    def repair(
        self, weights: Sequence[Tensor], key: Tensor, value: Tensor, made: Tensor, rank: Tensor, moves: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return vectors as if they had been computed at `rank` where they move; the others stay unchanged.

        Args:
            weights: the result of `layer_weights` for the layer, on the device of the vectors.
            key, value: [B, Hkv, C, D] and [B, Hkv, C, Dv].
            made: int64 [B, C], the position at which each row was computed; "paper" ignores it.
            rank: int64 [B, C], the position that each row must have.
            moves: bool [B, C], the vectors to repair.
        """
        made, rank = (each.clamp(0, self.scope.window) for each in (made, rank))
        if self.recipe == "direct":
            return _direct(weights, key, value, made, rank, moves)
        if self.recipe == "paper":
            half = len(weights) // 2
            return _paper(weights[:half], key, rank, moves), _paper(weights[half:], value, rank, moves)
        return key, value


def save(aligner: Aligner, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> Aligner:
    """Write an aligner to a file; return the aligner that `load` will return, with weights rounded to `dtype`.

    Args:
        path: the path of the safetensors file.
        dtype: the dtype of the weights in the file; float16 halves the file.
    """
    metadata, tensors = aligner.to_stored()
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    write(path, stored, aligner.key, metadata, aligner.error)
    return dataclasses.replace(aligner, tensors=stored)


def load(path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> Aligner:
    """Read an aligner from a file.

    Args:
        path: the path of the safetensors file.
        model: the model that the aligner must have been trained for, if given.

    Raises:
        AlignerError: the file does not exist, holds no aligner, or holds one for another model.
    """
    aligner = Aligner.load(path)
    if model is not None:
        trained = aligner.scope
        aligner.check(**dataclasses.asdict(scope_of(model, trained.window, trained.sinks, trained.every)))
    return aligner


def identity_aligner(scope: AlignerScope) -> Aligner:
    """Return an aligner that repairs nothing: sinks and a window with renumbered positions."""
    return Aligner("nothing", scope, {})


def _direct_weights(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    positions = tensors["place"]
    made = positions @ tensors["fc1.made"]  # [L, M + 1, h1]
    rank = positions @ tensors["fc1.rank"] + tensors["fc1.bias"][:, None]
    shift = positions @ tensors["shift"]  # [L, M + 1, Hkv * (D + Dv)]
    rest = [tensors[name] for name in ("fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias")]
    return [tensors["fc1.key"], tensors["fc1.value"], made, rank, shift, *rest]


def _direct(
    weights: Sequence[Tensor], key: Tensor, value: Tensor, made: Tensor, rank: Tensor, moves: Tensor
) -> tuple[Tensor, Tensor]:
    on_key, on_value, from_made, from_rank, shift, inner, inner_bias, outer, outer_bias = weights
    keys, values = (x.transpose(1, 2).flatten(2).float() for x in (key, value))  # [B, C, Hkv * D]
    hidden = torch.relu(keys @ on_key + values @ on_value + from_made[made] + from_rank[rank])  # [B, C, h1]
    hidden = torch.relu(hidden @ inner + inner_bias)  # [B, C, h2]
    change = hidden @ outer + outer_bias + shift[rank] - shift[made]  # [B, C, Hkv * (D + Dv)]
    width = keys.shape[-1]
    parts = change[..., :width], change[..., width:]
    on_keys, on_values = (x.view(*x.shape[:2], key.shape[1], -1).transpose(1, 2) for x in parts)
    return _with_moved(key, on_keys, moves), _with_moved(value, on_values, moves)


def _with_moved(vectors: Tensor, change: Tensor, moves: Tensor) -> Tensor:
    """Add a change to vectors [B, Hkv, C, D] where they move, in their dtype."""
    return torch.where(moves[:, None, :, None], (vectors.float() + change).to(vectors.dtype), vectors)


def _paper_weights(tensors: Mapping[str, Tensor], part: str) -> list[Any]:
    """Return weights of keys or values: table [L, M + 1, Hkv, h1], and shared W [D, h1], fc2, fc3."""
    named = {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items() if name.startswith(part)}
    position, layer, head = named["position"], named["layer"], named["head"]
    widths = [x.shape[1] for x in (position, layer, head)]
    dim = named["fc1.weight"].shape[1] - sum(widths)
    on_row, on_position, on_layer, on_head = torch.split(named["fc1.weight"], [dim, *widths], 1)
    table = (position @ on_position.T)[:, None] + (layer @ on_layer.T)[:, None, None]
    table = table + head @ on_head.T + named["fc1.bias"]
    rest = [named["fc2.weight"].T, named["fc2.bias"], named["fc3.weight"].T, named["fc3.bias"]]
    return [table, *([x.contiguous()] * len(layer) for x in (on_row.T, *rest))]


def _paper(weights: Sequence[Tensor], vectors: Tensor, rank: Tensor, moves: Tensor) -> Tensor:
    table, on_row, inner, inner_bias, outer, outer_bias = weights
    at_position = table[rank].transpose(1, 2)  # [B, Hkv, C, h1]
    hidden = torch.relu(vectors.float() @ on_row + at_position)
    hidden = torch.relu(hidden @ inner + inner_bias)
    return _with_moved(vectors, hidden @ outer + outer_bias, moves)
