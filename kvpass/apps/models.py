"""Load the language model that an application works on: a bundled one, the packaged checkpoint, or any other."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpass.apps import checkpoint
from kvpass.decoding.model_call import learned_positions
from kvpass.errors import KVPassError

BUNDLED = Path(__file__).parent / "data" / "tiny-llama"
MEMORY = BUNDLED.with_name("tiny-recall")
ALIGNER = BUNDLED.with_name("tiny-llama-align") / "direct.safetensors"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A causal language model with its tokenizer.

    Attributes:
        trained_length: positions that it was trained on; None if its configuration does not say.
        has_position_table: whether positions come from a table, so the model has none beyond `trained_length`.
    """

    name: str
    model: Any
    tokenizer: Any
    trained_length: int | None
    has_position_table: bool

    @property
    def bos(self) -> int:
        """The token id that introduces a document; KVPassError if the tokenizer has none."""
        first = self.tokenizer.bos_token_id
        token: int | None = self.tokenizer.eos_token_id if first is None else first
        if token is None:
            raise KVPassError(
                f"the tokenizer of {self.name} has neither a first nor an end-of-text token; set its bos_token"
            )
        return token

    def check_positions(self, tokens: int, option: str) -> None:
        """Raise KVPassError, which names an option, if so many tokens need positions that the model has not."""
        if self.has_position_table and self.trained_length is not None and tokens > self.trained_length:
            raise KVPassError(
                f"{option}: {self.name} has positions 0 to {self.trained_length - 1}; choose a smaller number"
            )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without the tokenizer's own first and last ones."""
        return [self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]


def load(name: str | None, dtype: torch.dtype | str = torch.float32, device: str = "cpu") -> LoadedModel:
    """Load a causal language model of transformers.

    Args:
        name: a name or path; None for the bundled Llama; `kvpass.apps.checkpoint.NAME` for the packaged checkpoint.
        dtype: the dtype of the weights, or its name in torch; "auto" for the checkpoint's.

    Raises:
        KVPassError: there is no such model, or the package of the checkpoint is missing.
    """
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    if name is None:
        return _load(_bundled(BUNDLED, "python examples/train_tiny.py llama"), BUNDLED.name, dtype, device)
    if name == checkpoint.NAME:
        return _load(str(checkpoint.folder()), name, dtype, device)
    return _load(name, name, dtype, device)


def load_memory() -> LoadedModel:
    """Load the bundled model that has learnt to recall planted pairs."""
    return _load(_bundled(MEMORY, "python -m examples.train_recall"), MEMORY.name)


def _bundled(folder: Path, command: str) -> str:
    if not (folder / "config.json").is_file():
        raise KVPassError(
            f"the bundled model {folder.name} is missing from this installation ({folder}): reinstall kvpass, make it "
            f"with `{command}` in a checkout, or choose another with --model NAME_OR_PATH"
        )
    return str(folder)


def _load(source: str, name: str, dtype: torch.dtype | str = torch.float32, device: str = "cpu") -> LoadedModel:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except Exception as error:  # each reader raises its own errors for a damaged file
        raise KVPassError(
            f"cannot load a language model from {source!r}: {type(error).__name__}: {error}; give the name or folder "
            "of a causal model"
        ) from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers, and only reports it
        raise KVPassError(
            f"cannot load a language model from {source!r}: it lacks {len(missing)} of the model's weights, such as "
            f"{missing[0]}; give the complete checkpoint of a causal model"
        )
    trained_length = getattr(model.config, "max_position_embeddings", None)
    return LoadedModel(
        name, to_device(model.eval(), device), tokenizer, trained_length, math.isfinite(learned_positions(model))
    )


def to_device(model: Any, device: str) -> Any:
    """Move a model to a device; KVPassError if torch has none here, or not enough memory on it."""
    try:
        return model.to(device)
    except (AssertionError, RuntimeError) as error:
        raise KVPassError(f"cannot put the model on the device {device!r}: {error}; choose another --device") from error


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the token ids that end an answer: the generation config's and the tokenizer's."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    tokens = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    return sorted({token for token in tokens if token is not None})
