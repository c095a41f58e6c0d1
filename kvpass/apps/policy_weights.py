"""Run `kvpass calibrate` and `kvpass gates`: read what policies need of a model, and write it to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from kvpass.apps import checkpoint, corpus, models
from kvpass.diagnostics.gate_measurement import measure_gates
from kvpass.diagnostics.query_statistics import calibrate
from kvpass.errors import KVPassError
from kvpass.policies.calibration import pair_norms
from kvpass.policies.head_gates import HeadGates

MOST_TOKENS = 32_768
"""As many as TriAttention's own calibration reads."""
MOST_FOR_GATES = 8_192


def write_calibration(model: str, text: Path | None, out: Path, window: int, dtype: str) -> None:
    """Calibrate a model and write `out`; see `kvpass calibrate`.

    Raises:
        KVPassError: a model, text or folder that cannot be used; see also `kvpass.calibrate`.
    """
    corpus.check_folder_of(out)
    chosen, tokens = _model_and_tokens(model, text, dtype, MOST_TOKENS)
    found = calibrate(chosen, tokens, window=window)
    found.save(out)
    share = pair_norms(found.tensors["mean"]) / found.tensors["size"].clamp(min=1e-12)
    print(
        f"{out}: {found.model.layers} layers, {found.model.query_heads} query heads, "
        f"{len(tokens) // window} windows of {window} tokens; the sizes of mean pairs are {share.mean():.2f} of mean "
        "sizes (1 if all queries of a head are equal)"
    )


def write_gates(model: str, text: Path | None, table: Path | None, out: Path, window: int, dtype: str) -> None:
    """Measure gates of a model's KV heads, or convert a table of trained ones, and write `out`; see `kvpass gates`.

    Raises:
        KVPassError: a model, text, table or folder that cannot be used; see also `measure_gates`.
    """
    corpus.check_folder_of(out)
    if table is not None:
        found = HeadGates.of_table(table, _architecture(model))
    else:
        chosen, tokens = _model_and_tokens(model, text, dtype, MOST_FOR_GATES)
        found = measure_gates(chosen, tokens, window=window)
    found.save(out)
    layers, heads = found.gates.shape
    print(
        f"{out}: {layers} layers with {heads} KV heads, gates from {found.gates.min():.3f} to {found.gates.max():.3f}"
    )


def _model_and_tokens(model: str, text: Path | None, dtype: str, most: int) -> tuple[Any, Tensor]:
    """Return a model and up to `most` token ids int64 [T] of a text, by default of Python's manual."""
    chosen = models.load(model, dtype)
    texts = [*corpus.prose().values()] if text is None else [corpus.read_file(text)]
    tokens = [token for each in chosen.encode(texts) for token in (chosen.bos, *each)]
    return chosen.model, torch.tensor(tokens[:most])


def _architecture(model: str) -> str:
    """Return the architecture in a model's configuration, without loading its weights."""
    folder = checkpoint.folder() if model == checkpoint.NAME else model
    try:
        return str(AutoConfig.from_pretrained(folder).model_type)
    except (OSError, ValueError) as error:
        raise KVPassError(f"there is no configuration of a model {model!r}: {error}") from error
