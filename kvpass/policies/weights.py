"""Define weights that are made for one model, and policies with such weights."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor

from kvpass import tensor_files
from kvpass.errors import KVPassError
from kvpass.policies.base import Policy

W = TypeVar("W", bound="Weights")


class Weights:
    """Immutable weights that were made for one model, equal to weights of the same class and digest.

    Class attributes:
        key: the name of their format in the metadata of a file.
        content: what a file contains, for messages: "an aligner".
        error: the class of errors.
        option: the option of a policy that takes the weights or the path of a file.
        how: what to pass as the option and how to make it, for the error without the option.
        mismatch: the error for another model, with the fields `name`, `made` and `found`, and `weights` itself.
    """

    key: ClassVar[str]
    content: ClassVar[str]
    error: ClassVar[type[KVPassError]]
    option: ClassVar[str]
    how: ClassVar[str]
    mismatch: ClassVar[str]
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __deepcopy__(self, memo: dict[int, object]) -> Weights:
        return self

    def model_facts(self) -> Mapping[str, object]:
        """Return the facts about the model that the weights were made for, by name."""
        raise NotImplementedError

    def to_stored(self) -> tuple[object, Mapping[str, Tensor]]:
        """Return the metadata and the tensors of a file."""
        raise NotImplementedError

    @classmethod
    def from_stored(cls: type[W], metadata: Any, tensors: Mapping[str, Tensor]) -> W:
        """Return the weights that `to_stored` describes; KeyError, TypeError or ValueError for anything else."""
        raise NotImplementedError

    def check(self, **found: object) -> None:
        """Raise the class's error if a fact about the model differs from the fact stored with the weights."""
        facts = self.model_facts()
        for name, value in found.items():
            if facts[name] != value:
                raise self.error(self.mismatch.format(name=name, made=facts[name], found=value, weights=self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file, or raise the error of the class."""
        metadata, tensors = self.to_stored()
        tensor_files.write(path, tensors, self.key, metadata, self.error)

    @classmethod
    def load(cls: type[W], path: str | os.PathLike[str]) -> W:
        """Read weights from a safetensors file.

        Raises:
            KVPassError: of the class's `error`, the file does not exist, is damaged or has other content.
        """
        metadata, tensors = tensor_files.read(path, cls.key, cls.content, cls.error)
        try:
            return cls.from_stored(metadata, tensors)
        except (KeyError, TypeError, ValueError) as found:
            raise cls.error(
                f"{os.fspath(path)}: this {cls.content.partition(' ')[2]} cannot be read: {found}"
            ) from found


@dataclasses.dataclass(frozen=True)
class PolicyWithWeights(Policy, Generic[W]):
    """Base class of policies with an option that takes weights W, or the path of their file.

    Class attributes:
        weights_class: W; its `option` is the name of the option.
    """

    needs_weights = True
    weights_class: ClassVar[type[Weights]]

    def __post_init__(self) -> None:
        """Replace a path by the weights of its file, or raise an error without weights."""
        super().__post_init__()
        kind = self.weights_class
        value = getattr(self, kind.option)
        if value is None:
            raise kind.error(f"{self.name} needs {kind.option}=..., {kind.how}")
        if not isinstance(value, kind):
            object.__setattr__(self, kind.option, kind.load(value))

    @property
    def loaded(self) -> W:
        """The weights."""
        return cast(W, getattr(self, self.weights_class.option))

    def for_layer(self, layer: int, layers: int) -> Policy:
        self.loaded.check(layers=layers)  # all layers, as a layer with a sliding window may leave the plan
        return super().for_layer(layer, layers)


def weights_digest(description: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a short hash of a description and of all tensors."""
    return tensor_files.tensors_digest(description, tensors)[:16]
