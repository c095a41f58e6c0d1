"""Make inputs for a tiny model of any architecture: text, and random sound or images if it takes them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tests.architectures import images, zoo

READ = 9
"""Number of tokens that an encoder reads."""

HEARD: dict[str, tuple[int, ...]] = {
    "canary": (64, 80),
    "cohere_asr": (64, 80),
    "moonshine": (8000,),
    "moonshine_streaming": (8000,),
    "pop2piano": (9, 64),
    "pp_formulanet": (3, 32, 32),
    "seamless_m4t": (32, 160),
    "seamless_m4t_v2": (32, 160),
    "speech-encoder-decoder": (8000,),
    "speech_to_text": (64, 80),
    "speecht5": (8000,),
    "vision-encoder-decoder": (3, 32, 32),
    "whisper": (80, 32),
}
"""Shape of the sound, the image or its features for one row, by model type."""

BESIDE_TEXT: dict[str, dict[str, tuple[int, ...]]] = {
    "kyutai_speech_to_text": dict(input_values=(1, 24 * 1920)),
    "voxtral_realtime": dict(input_features=(128, 24 * 8)),
}
"""Shapes of the sound for one row that a decoder needs beside each token of its text, by model type."""


def of(model: Any, prompt: int, padding: int) -> dict[str, Tensor]:
    """Return arguments of `generate` for two rows; the first prompt has `padding` tokens of left padding.

    A decoder-only model gets text alone. For an encoder-decoder, the text of the second row ends with padding.
    """
    ids = torch.randint(3, zoo.VOCABULARY, (2, prompt), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    if not model.config.is_encoder_decoder:
        shapes = BESIDE_TEXT.get(model.config.model_type, {})
        sound = {name: _random(2, *shape) for name, shape in shapes.items()}
        return dict(input_ids=ids, attention_mask=mask, **sound)
    ids[1, 0] = _start(model)
    channels = getattr(getattr(model.config, "decoder_config", None), "num_channels", 0)
    ids = ids[..., None].repeat(1, 1, channels) if channels else ids  # Dia's decoder reads several tokens at a time
    beside = dict(decoder_attention_mask=mask) if padding else {}
    return dict(_read(model), decoder_input_ids=ids, **beside)


TEXT_FIRST = 4
"""Number of tokens before an image."""


def with_images(model: Any, prompt: int, padding: int) -> dict[str, Tensor]:
    """Return the arguments of `of` with an image in each row, after the padding.

    Raises:
        images.NoForm: no form of an image is found that the model takes.
    """
    given = of(model, prompt, padding)
    shown, tokens = images.shown(model, 2)
    ids, mask = (given.pop(name) for name in ("input_ids", "attention_mask"))
    ids[ids >= images.IMAGE] -= images.IMAGE  # other tokens must not equal the placeholder or later special tokens
    ids = torch.cat([ids[:, :TEXT_FIRST], torch.full((2, tokens), images.IMAGE), ids[:, TEXT_FIRST:]], 1)
    mask = torch.cat([mask, torch.ones(2, tokens, dtype=mask.dtype)], 1)
    return dict(given, input_ids=ids, attention_mask=mask, **images.beside(model, ids), **shown)


def _start(model: Any) -> int:
    """Return the first token of a decoder, which `generate` would prepend otherwise."""
    chosen = model.generation_config
    start = chosen.decoder_start_token_id
    return int(start if start is not None else chosen.bos_token_id)


def _read(model: Any) -> dict[str, Tensor]:
    """Return the inputs of the encoder."""
    required = next(iter(inspect.signature(model.generate).parameters))
    name = required if required == "input_features" else model.main_input_name
    if name != "input_ids":
        return {name: _random(2, *HEARD[model.config.model_type])}
    mask = torch.ones(2, READ, dtype=torch.int64)
    mask[1, -2:] = 0
    ids = torch.randint(3, zoo.VOCABULARY, (2, READ), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, attention_mask=mask)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
