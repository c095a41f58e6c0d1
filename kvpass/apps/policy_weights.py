"""Run `kvpass calibrate` and `kvpass gates`: read weights that policies need from a model, and write them."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from kvpass import tensor_files
from kvpass.apps import checkpoint, corpus, models
from kvpass.calibration.gate_measurement import measure_gates
from kvpass.calibration.query_statistics import calibrate
from kvpass.errors import KVPassError
from kvpass.policies.calibration import pair_norms
from kvpass.policies.head_gates import HeadGates

MAX_WEIGHT_TOKENS = 32_768
"""The number of tokens that TriAttention's own calibration reads."""
MAX_GATE_TOKENS = 8_192


def write_calibration(parsed: argparse.Namespace) -> None:
    """Run `kvpass calibrate`: calibrate a model and write a file.

    Raises:
        KVPassError: a model, text or folder that cannot be used; see also `kvpass.calibrate`.
    """
    tensor_files.check_writable(parsed.out, KVPassError)
    corpus.check_kept(parsed.text, parsed.out)
    model, tokens = _model_and_tokens(parsed, MAX_WEIGHT_TOKENS)
    calibration = calibrate(model, tokens, window=parsed.window)
    calibration.save(parsed.out)
    share = pair_norms(calibration.tensors["mean"]) / calibration.tensors["size"].clamp(min=1e-12)
    print(
        f"{parsed.out}: {calibration.model.layers} layers, {calibration.model.query_heads} query heads, "
        f"{len(tokens) // parsed.window} windows of {parsed.window} tokens; the sizes of mean pairs are "
        f"{share.mean():.2f} of mean sizes (1 if all queries of a head are equal)"
    )


def write_gates(parsed: argparse.Namespace) -> None:
    """Run `kvpass gates`: measure gates of a model's KV heads, or convert a table of gates, and write a file.

    Raises:
        KVPassError: a model, text, table or folder that cannot be used; see also `measure_gates`.
    """
    tensor_files.check_writable(parsed.out, KVPassError)
    corpus.check_kept(parsed.text or parsed.table, parsed.out)
    if parsed.table is not None:
        head_gates = HeadGates.of_table(parsed.table, _architecture(parsed.model))
    else:
        head_gates = measure_gates(*_model_and_tokens(parsed, MAX_GATE_TOKENS), window=parsed.window)
    head_gates.save(parsed.out)
    layers, heads = head_gates.gates.shape
    print(
        f"{parsed.out}: {layers} layers with {heads} KV heads, "
        f"gates from {head_gates.gates.min():.3f} to {head_gates.gates.max():.3f}"
    )


def _model_and_tokens(parsed: argparse.Namespace, max_tokens: int) -> tuple[Any, Tensor]:
    """Return a model and up to `max_tokens` token ids int64 [T] of a text, by default of Python's manual."""
    loaded = models.load(parsed.model, parsed.dtype)
    loaded.check_positions(parsed.window, f"--window {parsed.window}")
    texts = [*corpus.prose().values()] if parsed.text is None else [corpus.read_file(parsed.text)]
    tokens = [token for ids in loaded.encode(texts) for token in (loaded.bos, *ids)]
    return loaded.model, torch.tensor(tokens[:max_tokens])


def _architecture(model: str) -> str:
    """Return the architecture in a model's configuration, without loading its weights."""
    folder = checkpoint.folder() if model == checkpoint.NAME else model
    try:
        return str(AutoConfig.from_pretrained(folder).model_type)
    except (OSError, ValueError) as error:
        raise KVPassError(f"there is no configuration of a model {model!r}: {error}") from error
