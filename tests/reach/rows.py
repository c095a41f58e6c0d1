"""List ways to prepare or call a model, other than decoding with plain weights: one for each row."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from tests import models
from tests.reach import images, weights
from tests.reach.model import llama, prompt, seq2seq, whisper

Given = dict[str, Tensor | Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to prepare or call a model.

    Attributes:
        group: heading on the page.
        name: the feature, as users call it.
        build: makes the model.
        given: makes the arguments of `generate`; by default ids and a padding mask.
        package: a module that it needs in addition to transformers, or None.
        rounds: whether activations are rounded to integers, so that a difference in the last place can grow.
    """

    group: str
    name: str
    build: Callable[[], Any] = llama
    given: Callable[[], Given] = prompt
    package: str | None = None
    rounds: bool = False

    @property
    def missing(self) -> str | None:
        """Return the name of the required package if it is not installed, else None."""
        with contextlib.suppress(ModuleNotFoundError):  # raised if the parent package is missing
            if self.package is None or importlib.util.find_spec(self.package):
                return None
        return self.package


def asking(**more: Any) -> Callable[[], Given]:
    """Return a function that makes a prompt with further arguments of `generate`."""
    return lambda: {**prompt(), **more}


def with_static_cache() -> Given:
    """Return a prompt with a preallocated cache."""
    cache = transformers.StaticCache(config=llama().config, max_cache_len=64)
    return {**prompt(), "past_key_values": cache}


def spoken() -> Given:
    """Return the input of a speech model: 16 bands in 40 frames."""
    return {"input_features": torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(0))}


WEIGHTS = "Weights"
CACHES = "Caches and outputs"
IMAGES = "Images"
ENCODERS = "Encoder-decoders"

ROWS = (
    Row(WEIGHTS, "torchao, int8 weight-only", weights.torchao_int8, package="torchao"),
    Row(WEIGHTS, "torchao, int8 dynamic", weights.torchao_int8_dynamic, package="torchao", rounds=True),
    Row(WEIGHTS, "torchao, intx weight-only, 4 bits", weights.torchao_intx, package="torchao"),
    Row(WEIGHTS, "torchao, int8 dynamic on intx, 4 bits", weights.torchao_dynamic_intx, package="torchao", rounds=True),
    Row(WEIGHTS, "torchao, int4 weight-only", weights.torchao_int4, package="torchao"),
    Row(WEIGHTS, "torchao, float8 weight-only", weights.torchao_float8, package="torchao"),
    Row(WEIGHTS, "optimum-quanto, int8", weights.quanto_int8, package="optimum.quanto"),
    Row(WEIGHTS, "optimum-quanto, int4", weights.quanto_int4, package="optimum.quanto"),
    Row(WEIGHTS, "bitsandbytes, 8 bits", weights.bitsandbytes_8bit, package="bitsandbytes"),
    Row(WEIGHTS, "bitsandbytes, 4 bits", weights.bitsandbytes_4bit, package="bitsandbytes"),
    Row(WEIGHTS, "PEFT, LoRA", weights.lora, package="peft"),
    Row(WEIGHTS, "PEFT, LoRA merged", weights.lora_merged, package="peft"),
    Row(WEIGHTS, "accelerate, hooks", weights.hooked, package="accelerate"),
    Row(WEIGHTS, "accelerate, weights offloaded to memory", weights.offloaded, package="accelerate"),
    Row(WEIGHTS, "accelerate, weights offloaded to disk", weights.offloaded_to_disk, package="accelerate"),
    Row(CACHES, '`cache_implementation="dynamic"`', given=asking(cache_implementation="dynamic")),
    Row(CACHES, '`cache_implementation="hybrid"`', given=asking(cache_implementation="hybrid")),
    Row(CACHES, '`cache_implementation="offloaded"`', given=asking(cache_implementation="offloaded")),
    Row(CACHES, '`cache_implementation="offloaded_static"`', given=asking(cache_implementation="offloaded_static")),
    Row(
        CACHES, '`cache_implementation="quantized"`', package="optimum.quanto",
        given=asking(cache_implementation="quantized", cache_config={"backend": "quanto", "q_group_size": 32}),
    ),
    Row(CACHES, '`cache_implementation="static"`', given=asking(cache_implementation="static")),
    Row(CACHES, '`cache_implementation="sliding_window"`', given=asking(cache_implementation="sliding_window")),
    Row(CACHES, "`past_key_values=StaticCache(...)`", given=with_static_cache),
    Row(CACHES, "`output_hidden_states=True`", given=asking(output_hidden_states=True)),
    Row(CACHES, "`output_attentions=True`", given=asking(output_attentions=True)),
    Row(
        CACHES, '`output_attentions=True`, `attn_implementation="eager"`',
        lambda: llama(attn_implementation="eager"), asking(output_attentions=True),
    ),
    Row(CACHES, "`prompt_lookup_num_tokens=`", given=lambda: {**prompt(rows=1), "prompt_lookup_num_tokens": 2}),
    Row(CACHES, "`assistant_model=`", given=lambda: {**prompt(rows=1), "assistant_model": models.build("Llama")}),
    Row(IMAGES, "Llava", images.llava, images.llava_prompt),
    Row(IMAGES, "Qwen2-VL", images.qwen2_vl, images.qwen2_vl_prompt),
    Row(IMAGES, "Qwen3-VL", images.qwen3_vl, images.qwen3_vl_prompt),
    Row(IMAGES, "Gemma 3", images.gemma3, images.gemma3_prompt),
    Row(ENCODERS, "T5", lambda: seq2seq("t5")),
    Row(ENCODERS, "BART", lambda: seq2seq("bart")),
    Row(ENCODERS, "Whisper", whisper, spoken),
)  # fmt: skip
