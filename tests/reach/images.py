"""Build tiny vision-language models, and prompts with an image in each row and padding in the first."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.reach.model import TOKENS, VOCABULARY, WIDE, prompt, seeded

IMAGE, VIDEO, BEGIN, END = 120, 121, 122, 123
"""Token ids with special meanings."""
SIDE, PATCH = 16, 8
"""Pixels of an image and of its patches: 4 patches for each image."""
TEXT = dict(WIDE, **TOKENS)
TOWER = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _with_image(tokens: int) -> dict[str, Tensor]:
    """Return a prompt in which this many tokens stand for an image."""
    given = prompt(tokens=12)
    ids = given["input_ids"].clamp(max=IMAGE - 1)
    ids[:, 4 : 4 + tokens] = IMAGE
    return {**given, "input_ids": ids}


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**TOWER, image_size=SIDE, patch_size=PATCH)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=IMAGE, image_seq_length=4
    )
    return seeded(transformers.LlavaForConditionalGeneration, config)


def llava_prompt() -> dict[str, Any]:
    return {**_with_image(4), "pixel_values": _pixels(2, 3, SIDE, SIDE)}


def _qwen(name: str, tower: dict[str, Any]) -> Any:
    text = dict(TEXT, rope_parameters=SECTIONS)
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=BEGIN, vision_end_token_id=END,
    )  # fmt: skip
    return seeded(getattr(transformers, f"{name}ForConditionalGeneration"), config)


def _qwen_prompt() -> dict[str, Any]:
    """Return a prompt with 4 by 4 patches in each row, which the vision tower merges to 4 tokens."""
    given = _with_image(4)
    grid = torch.tensor([[1, 4, 4]] * 2)
    pixels = _pixels(32, 3 * 2 * PATCH * PATCH)
    kinds = (given["input_ids"] == IMAGE).int()
    return {**given, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def qwen2_vl() -> Any:
    return _qwen("Qwen2VL", dict(depth=2, embed_dim=32, hidden_size=WIDE["hidden_size"], num_heads=2, patch_size=PATCH))


def qwen3_vl() -> Any:
    tower = dict(
        depth=2, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=PATCH, num_position_embeddings=16,
        out_hidden_size=WIDE["hidden_size"], deepstack_visual_indexes=[0],
    )  # fmt: skip
    return _qwen("Qwen3VL", tower)


qwen2_vl_prompt = qwen3_vl_prompt = _qwen_prompt


def gemma3() -> Any:
    vision = transformers.SiglipVisionConfig(**TOWER, image_size=SIDE, patch_size=PATCH)
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**TEXT, head_dim=32, sliding_window=64), vision_config=vision,
        mm_tokens_per_image=4, boi_token_index=BEGIN, eoi_token_index=END, image_token_index=IMAGE,
    )  # fmt: skip
    return seeded(transformers.Gemma3ForConditionalGeneration, config)


def gemma3_prompt() -> dict[str, Any]:
    given = _with_image(4)
    kinds = (given["input_ids"] == IMAGE).long()
    return {**given, "pixel_values": _pixels(2, 3, SIDE, SIDE), "token_type_ids": kinds}


assert VOCABULARY > END
