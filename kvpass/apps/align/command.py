"""Run `kvpass align train`: train an aligner for a model, and write it with its figures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import torch

from kvpass import tensor_files
from kvpass.apps import corpus, models
from kvpass.apps.align.train import TrainedAligner, TrainingSettings
from kvpass.apps.align.train import train as train_aligner
from kvpass.errors import KVPassError
from kvpass.policies import aligners


def train(parsed: argparse.Namespace) -> None:
    """Run `kvpass align train`: write an aligner and, with the same name, a json of every figure.

    Raises:
        KVPassError: a model, text or folder that cannot be used; see also `kvpass.apps.align.train.train`.
    """
    names = ("window", "recipe", "every", "steps", "tokens", "rate", "seed")
    options: dict[str, Any] = {name: getattr(parsed, name) for name in names}
    options |= {name: tuple(getattr(parsed, name) or ()) or None for name in ("hidden", "hidden_values")}
    settings, out, text = TrainingSettings(**options), parsed.out, parsed.text
    figures_file, checkpoint = out.with_suffix(".json"), out.with_suffix(".checkpoint.pt")
    _check_files(out, figures_file, checkpoint, text)
    loaded = models.load(parsed.model)
    models.to_device(loaded.model, parsed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loaded.check_positions(settings.window + 1, f"--window {settings.window}")
    texts = corpus.read(corpus.training_files()) if text is None else [corpus.read_file(text)]
    stream = torch.tensor([token for ids in loaded.encode(texts) for token in (loaded.bos, *ids)])
    trained = train_aligner(loaded.model, stream, settings, checkpoint)
    aligners.save(trained.aligner, out, getattr(torch, parsed.dtype))
    summary = figures(trained, settings, len(stream))
    tensor_files.write_text(figures_file, json.dumps(summary, indent=2) + "\n", KVPassError)
    checkpoint.unlink(missing_ok=True)
    print(json.dumps(summary, indent=2))


def _check_files(out: Path, figures_file: Path, checkpoint: Path, text: Path | None) -> None:
    """Raise KVPassError if a file cannot be written, or would overwrite the aligner or the text."""
    for path in (out, figures_file, checkpoint):
        tensor_files.check_writable(path, KVPassError)
    if out.suffix.lower() == figures_file.suffix:
        raise KVPassError(
            f"cannot write {out}: the figures go to a file of this name; choose another --out, such as "
            f"{out.with_suffix('.safetensors')}"
        )
    corpus.check_kept(text, out, figures_file, checkpoint)


def figures(trained: TrainedAligner, settings: TrainingSettings, tokens: int) -> dict[str, object]:
    """Return the settings and figures of a run, for the json file."""
    errors = trained.errors
    return {
        "signature": dataclasses.asdict(trained.aligner.scope),
        "settings": dataclasses.asdict(settings),
        "text_tokens": tokens,
        "parameters": sum(tensor.numel() for tensor in trained.aligner.tensors.values()),
        "seconds": round(trained.seconds),
        "held_out": {
            **{name: round(value, 6) for name, value in dataclasses.asdict(errors).items()},
            "key_ratio": round(errors.key_ratio, 4),
            "value_ratio": round(errors.value_ratio, 4),
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
