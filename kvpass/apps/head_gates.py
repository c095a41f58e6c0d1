"""Run `kvpass gates`: measure gates of a model's KV heads, or convert a table of trained ones."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from kvpass.apps import checkpoint, corpus
from kvpass.apps.calibrate import model_and_tokens
from kvpass.diagnostics.head_gates import measure_gates
from kvpass.errors import KVPassError
from kvpass.policies.head_gates import HeadGates

MOST_TOKENS = 8_192


def main(
    model: str, text: Path | None, table: Path | None, out: Path, window: int, dtype: str, threads: int | None
) -> None:
    """Write the gates of a model to `out`.

    Args:
        model: name or path for transformers.
        text: a UTF-8 file, or None for the English prose of Python's language reference.
        table: a table of gates to convert; None to measure them.
        window: see `measure_gates`.
        dtype: of the weights while the model runs.
        threads: of torch; None leaves them as they are.

    Raises:
        KVPassError: a model, text, table or folder that cannot be used; see also `measure_gates`.
    """
    if threads:
        torch.set_num_threads(threads)
    corpus.check_folder_of(out)
    if table is not None:
        found = HeadGates.of_table(table, _architecture(model))
    else:
        chosen, tokens = model_and_tokens(model, text, dtype, MOST_TOKENS)
        found = measure_gates(chosen, tokens, window=window)
    found.save(out)
    layers, heads = found.gates.shape
    print(
        f"{out}: {layers} layers with {heads} KV heads, gates from {found.gates.min():.3f} to {found.gates.max():.3f}"
    )


def _architecture(model: str) -> str:
    """Return the architecture in a model's configuration, without loading its weights."""
    folder = checkpoint.folder() if model == checkpoint.NAME else model
    try:
        return str(AutoConfig.from_pretrained(folder).model_type)
    except (OSError, ValueError) as error:
        raise KVPassError(f"there is no configuration of a model {model!r}: {error}") from error
