"""Save and load aligners as safetensors files, with their recipe and signature in the file's metadata."""

from __future__ import annotations

import dataclasses
import os

import torch

from kvpass.errors import AlignerError
from kvpass.policies import tensor_files
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
    tensor_files.write(path, stored, KEY, metadata, AlignerError)
    return Aligner(aligner.recipe, aligner.signature, stored)


def load(path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> Aligner:
    """Read an aligner from a file.

    Args:
        path: of the safetensors file.
        model: the model that the aligner must have been trained for, if given.

    Raises:
        AlignerError: the file does not exist, holds no aligner, or holds one for another model.
    """
    entries, tensors = tensor_files.read(path, KEY, "an aligner", AlignerError)
    try:
        signature, recipe = Signature(**entries["signature"]), entries["recipe"]
    except (ValueError, KeyError, TypeError) as error:
        raise AlignerError(f"{os.fspath(path)}: the metadata of this aligner cannot be read: {error}") from error
    if recipe not in RECIPES:
        raise AlignerError(f"{os.fspath(path)}: unknown recipe {recipe!r}; known are {', '.join(RECIPES)}")
    if model is not None:
        signature.check_model(signature_of(model, signature.window))
    return Aligner(recipe, signature, tensors)
