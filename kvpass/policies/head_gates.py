"""Define gates of KV heads: how much a head needs the tokens between the first and the last tokens.

DuoAttention trains a gate for each KV head of a model; `kvpass gates` measures one, or reads a table of trained gates.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import CalibrationError
from kvpass.policies.weights import Weights, weights_digest


@dataclasses.dataclass(frozen=True, eq=False)
class HeadGates(Weights):
    """Gates of the KV heads of a model; equal to gates with the same content.

    Attributes:
        architecture: as the model's configuration names it.
        gates: float32 [L, Hkv], from 0 for a head that loses nothing without the tokens between the first and the last.
        digest: a hash of both.
    """

    architecture: str
    gates: Tensor = dataclasses.field(repr=False)
    digest: str = dataclasses.field(init=False)
    key = "kvpass.head_gates"
    content = "a file of gates"
    error = CalibrationError
    option = "gates"
    how = (
        "a kvpass.HeadGates or the path of one; measure gates of the model with `kvpass gates MODEL --out FILE`, "
        "or convert a table with --table"
    )
    mismatch = (
        "the gates are of a {weights.architecture} with {name}={made!r}, and this model has {found!r}; "
        "measure gates for it with `kvpass gates MODEL --out FILE`"
    )

    def __post_init__(self) -> None:
        """Check the gates.

        Raises:
            CalibrationError: they are not finite numbers in two dimensions.
        """
        if self.gates.ndim != 2 or not self.gates.is_floating_point() or not bool(self.gates.isfinite().all()):
            raise CalibrationError(
                f"gates are finite numbers of the shape [layers, KV heads], not {self.gates.dtype} of shape "
                f"{tuple(self.gates.shape)}"
            )
        object.__setattr__(self, "gates", self.gates.detach().float().cpu())
        object.__setattr__(self, "digest", weights_digest(self.architecture, {"gates": self.gates}))

    def model_facts(self) -> Mapping[str, object]:
        layers, heads = self.gates.shape
        return {"layers": layers, "heads": heads}

    def to_stored(self) -> tuple[object, Mapping[str, Tensor]]:
        return {"architecture": self.architecture}, {"gates": self.gates}

    @classmethod
    def from_stored(cls, metadata: Any, tensors: Mapping[str, Tensor]) -> HeadGates:
        return cls(metadata["architecture"], tensors["gates"])

    @staticmethod
    def of_table(path: str | os.PathLike[str], architecture: str) -> HeadGates:
        """Read gates from a text file with a line of numbers, one for each KV head, per layer.

        This is the format of `full_attention_heads.tsv` in the repository of DuoAttention, whose code also clips
        numbers to 0 and 1.

        Raises:
            CalibrationError: the file cannot be read or is not such a table.
        """
        try:
            lines = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
            return HeadGates(architecture, torch.tensor([[float(x) for x in line] for line in lines]).clamp(0, 1))
        except (OSError, ValueError) as error:
            raise CalibrationError(
                f"{os.fspath(path)} is not a table of gates, which has a line for each layer and a number for each KV "
                f"head: {error}"
            ) from error
