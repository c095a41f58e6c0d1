"""What a tiny model of any architecture is given: text, and to one that hears or sees, random sound or images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.architectures import images, zoo

READ = 9
"""How many tokens an encoder reads."""

HEARD: dict[str, tuple[int, ...]] = {
    "canary": (64, 80),
    "cohere_asr": (64, 80),
    "moonshine": (8000,),
    "moonshine_streaming": (8000,),
    "seamless_m4t": (32, 160),
    "seamless_m4t_v2": (32, 160),
    "speech-encoder-decoder": (8000,),
    "speech_to_text": (64, 80),
    "speecht5": (8000,),
    "whisper": (80, 32),
}
"""By model type the shape of the sound, or of its features, of one row."""


def of(model: Any, prompt: int, padding: int) -> dict[str, Tensor]:
    """Arguments of `generate` for two rows, the first of which has so much padding on the left of its prompt.

    A decoder-only model is given text alone.  Of an encoder-decoder's text the end of the second row is padding.
    """
    ids = torch.randint(3, zoo.VOCABULARY, (2, prompt), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    if not model.config.is_encoder_decoder:
        return dict(input_ids=ids, attention_mask=mask)
    ids[1, 0] = _start(model)
    beside = dict(decoder_attention_mask=mask) if padding else {}
    return dict(_read(model), decoder_input_ids=ids, **beside)


TEXT_FIRST = 4
"""How many tokens stand before an image."""


def with_images(model: Any, prompt: int, padding: int) -> dict[str, Tensor]:
    """The same, with an image in each row, behind the padding.

    Raises:
        images.NoForm: of no image is known how the model takes it.
    """
    given = of(model, prompt, padding)
    shown, tokens = images.shown(model, 2)
    ids, mask = (given.pop(name) for name in ("input_ids", "attention_mask"))
    ids[ids >= images.IMAGE] -= images.IMAGE  # whatever else such a token means to a model
    ids = torch.cat([ids[:, :TEXT_FIRST], torch.full((2, tokens), images.IMAGE), ids[:, TEXT_FIRST:]], 1)
    mask = torch.cat([mask, torch.ones(2, tokens, dtype=mask.dtype)], 1)
    return dict(given, input_ids=ids, attention_mask=mask, **images.beside(model, ids), **shown)


def _start(model: Any) -> int:
    """The token that a decoder begins with: `generate` would put it in front."""
    chosen = model.generation_config
    start = chosen.decoder_start_token_id
    return int(start if start is not None else chosen.bos_token_id)


def _read(model: Any) -> dict[str, Tensor]:
    """What the encoder is given."""
    made = torch.Generator().manual_seed(1)
    if model.main_input_name != "input_ids":
        return {model.main_input_name: torch.randn(2, *HEARD[model.config.model_type], generator=made)}
    mask = torch.ones(2, READ, dtype=torch.int64)
    mask[1, -2:] = 0
    return dict(input_ids=torch.randint(3, zoo.VOCABULARY, (2, READ), generator=made), attention_mask=mask)
