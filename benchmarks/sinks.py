"""Measure the attention of the bundled models to the first tokens of a text (sinks, arXiv:2309.17453, Fig. 2).

python -m benchmarks.sinks
"""

from __future__ import annotations

import torch

from benchmarks.report import Row
from kvpass.apps import corpus
from kvpass.apps.evaluation.tables import markdown
from kvpass.apps.models import LoadedModel, load, load_memory

DOCUMENTS, LENGTH, AFTER = 4, 1024, 256
SINKS = 4


@torch.no_grad()
def rows(name: str, subject: LoadedModel) -> list[Row]:
    """Return the attention of tokens from `AFTER` on to the first token and to the first four, by layer."""
    texts = subject.encode(corpus.read(corpus.held_out_files()))
    documents = torch.tensor(corpus.documents(texts, DOCUMENTS, LENGTH, subject.bos))
    subject.model.set_attn_implementation("eager")
    out = subject.model(documents, output_attentions=True, use_cache=False)
    return [{"model": name, "layer": layer, **_paid(rows)} for layer, rows in enumerate(out.attentions)]


def _paid(attention: torch.Tensor) -> Row:
    """Return the shares for attention [B, Hq, T, T]."""
    first = attention[:, :, AFTER:, 0].mean((0, 2))
    sinks = attention[:, :, AFTER:, :SINKS].sum(-1).mean((0, 2))
    return {
        "first token, mean of heads": first.mean().item(),
        "first token, largest head": first.max().item(),
        f"first {SINKS}, mean of heads": sinks.mean().item(),
    }


def main() -> None:
    every = {"tiny-llama": load(None), "tiny-recall": load_memory(None)}
    print(markdown([row for name, subject in every.items() for row in rows(name, subject)]))


if __name__ == "__main__":
    main()
