"""Define the settings of the demo."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvpass.lowering.formats import KVDtype
from kvpass.runtime.backend_base import Inner

PARTS = ("chat", "book", "retrieval", "cost", "kept")
POLICIES = ("window", "streaming", "h2o")
FULL = "full, uncompiled"


@dataclasses.dataclass(frozen=True)
class DemoSizes:
    """The amounts of everything; the defaults take eight minutes of processor time.

    Attributes:
        answer: the largest number of tokens of an answer of the chat.
        chunk: tokens that are fed together, after which a policy evicts.
        beyond: tokens of the book beyond the trained range.
        book: tokens of the book for a model whose trained range is unknown.
        parts: pieces of the book, each with its perplexity.
        prompt: tokens of a prompt with a passkey.
        trials: prompts for each depth.
        timed: tokens of the prompt before the steps that are timed.
        steps: tokens that are timed.
    """

    answer: int = 100
    chunk: int = 128
    beyond: int = 4096
    book: int = 2048
    parts: int = 12
    prompt: int = 1024
    trials: int = 2
    timed: int = 2048
    steps: int = 32


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """The settings of the demo.

    Attributes:
        model: name or path for transformers; None for the packaged checkpoint, or for the bundled models where the
            package is missing.
        policies: names, with options as `kvpass.policies.parse` reads them; the uncompiled model is shown too.
        text: a UTF-8 file to read as the book; None for `kvpass.apps.corpus.prose`.
    """

    model: str | None = None
    policies: tuple[str, ...] = POLICIES
    parts: tuple[str, ...] = PARTS
    budget: int = 256
    text: Path | None = None
    out: Path = Path("out")
    kv_dtype: KVDtype | None = None
    inner: Inner = "inductor"
    sizes: DemoSizes = DemoSizes()
