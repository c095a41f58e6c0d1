"""Save and load aligners as safetensors files, with their recipe and signature in the file's metadata."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import torch

from kvpass.errors import AlignerError, KVPassError
from kvpass.policies.aligners.aligner import RECIPES, Aligner, Signature
from kvpass.policies.aligners.signature import signature_of

KEY = "kvpass.align"


def save(aligner: Aligner, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> Aligner:
    """Write an aligner to a file; return the aligner that `load` will return, with weights rounded to `dtype`.

    Args:
        path: of the safetensors file.
        dtype: of the weights in the file; float16 halves it.
    """
    stored = {name: tensor.to(dtype) for name, tensor in aligner.tensors.items()}
    metadata = {"recipe": aligner.recipe, "signature": dataclasses.asdict(aligner.signature)}
    _safetensors().torch.save_file(stored, os.fspath(path), metadata={KEY: json.dumps(metadata)})
    return Aligner(aligner.recipe, aligner.signature, stored)


def load(path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> Aligner:
    """Read an aligner from a file.

    Args:
        path: of the safetensors file.
        model: the model that the aligner must have been trained for, if given.

    Raises:
        AlignerError: the file does not exist, holds no aligner, or holds one for another model.
    """
    try:
        with _safetensors().safe_open(os.fspath(path), "pt") as file:
            metadata = (file.metadata() or {}).get(KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except (OSError, _safetensors().SafetensorError) as error:
        raise AlignerError(f"cannot read an aligner from {os.fspath(path)}: {error}") from error
    if metadata is None:
        raise AlignerError(f"{os.fspath(path)} holds no aligner: its metadata lack {KEY!r}")
    try:
        entries = json.loads(metadata)
        signature, recipe = Signature(**entries["signature"]), entries["recipe"]
    except (ValueError, KeyError, TypeError) as error:
        raise AlignerError(f"{os.fspath(path)}: the metadata of this aligner cannot be read: {error}") from error
    if recipe not in RECIPES:
        raise AlignerError(f"{os.fspath(path)}: unknown recipe {recipe!r}; known are {', '.join(RECIPES)}")
    if model is not None:
        signature.check_model(signature_of(model, signature.window))
    return Aligner(recipe, signature, tensors)


def _safetensors() -> Any:
    """Import safetensors, which is an optional dependency."""
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise KVPassError("aligners are stored as safetensors: pip install 'kvpass[align]'") from error
    return safetensors
