"""Run `kvpass calibrate`: read a model's queries on a text, and write their statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpass.apps import corpus, models
from kvpass.diagnostics.calibrate import calibrate
from kvpass.policies.calibration import pair_norms

MOST_TOKENS = 32_768
"""As many as TriAttention's own calibration reads."""


def model_and_tokens(model: str, text: Path | None, dtype: str, most: int) -> tuple[Any, Tensor]:
    """Return a model and up to `most` token ids of a text, int64 [T]; see `main`."""
    chosen = models.load(model, dtype)
    texts = [*corpus.prose().values()] if text is None else [corpus.read_file(text)]
    tokens = [token for each in chosen.encode(texts) for token in (chosen.bos, *each)]
    return chosen.model, torch.tensor(tokens[:most])


def main(model: str, text: Path | None, out: Path, window: int, dtype: str, threads: int | None) -> None:
    """Calibrate a model and write `out`.

    Args:
        model: name or path for transformers.
        text: a UTF-8 file, or None for the English prose of Python's language reference.
        window: the tokens that are run at once.
        dtype: of the weights while the model runs.
        threads: of torch; None leaves them as they are.

    Raises:
        KVPassError: a model, text or folder that cannot be used; see also `kvpass.calibrate`.
    """
    if threads:
        torch.set_num_threads(threads)
    corpus.check_folder_of(out)
    chosen, tokens = model_and_tokens(model, text, dtype, MOST_TOKENS)
    found = calibrate(chosen, tokens, window=window)
    found.save(out)
    share = pair_norms(found.tensors["mean"]) / found.tensors["size"].clamp(min=1e-12)
    print(
        f"{out}: {found.model.layers} layers, {found.model.query_heads} query heads, "
        f"{len(tokens) // window} windows of {window} tokens; the sizes of mean pairs are {share.mean():.2f} of mean "
        "sizes (1 if all queries of a head are equal)"
    )
