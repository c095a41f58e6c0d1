"""Find random images that a tiny model of any architecture accepts, by trying input forms.

A form is recognised by the parameters of a model's `forward`, not by how the model computes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

SIDE, PATCH, MERGED = 32, 8, 2  # pixels of an image, pixels of a patch, and patches merged into one token
IMAGE = 100  # placeholder token of an image

SMALL: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "spatial_merge_size": MERGED,
    "embed_dim": 64,
    "depth": 2,
    "out_hidden_size": 64,
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": IMAGE + 1,
    "video_token_index": IMAGE + 1,
    "audio_token_id": IMAGE + 2,
    "vision_start_token_id": IMAGE + 3,
    "vision_end_token_id": IMAGE + 4,
    "boi_token_id": IMAGE + 5,
    "eoi_token_id": IMAGE + 6,
}
"""Small values for fields of configurations that concern images."""


def _three_axes(*sections: int) -> dict[str, Any]:
    """Return a configuration with rotary embeddings of three positions, each with this number of frequencies."""
    return dict(text_config=dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[*sections])))


_THREE_AXES, _THREE_FEW = _three_axes(2, 3, 3), _three_axes(1, 1, 2)
_TWO_BY_TWO = dict(mm_tokens_per_image=4)
_ONE_SIZE = dict(image_grid_pinpoints=[[SIDE, SIDE]])
_INTO_64 = dict(vision_config=dict(text_hidden_size=64, projection_hidden_dim=64))

SPECIAL: dict[str, dict[str, Any]] = {
    "apertus1p5": dict(
        image_token_offset=64,
        audio_token_offset=80,
        vision_config=dict(
            codebook_size=16, base_channels=32, channel_multiplier=[1, 2], num_res_blocks=1, latent_channels=32
        ),
        audio_config=dict(codebook_size=16),
    ),
    "aria": dict(projector_patch_to_query_dict={(SIDE // PATCH) ** 2: 4}),
    "gemma3": _TWO_BY_TWO,
    "gemma4": dict(
        vision_config=dict(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            patch_size=PATCH,
            pooling_kernel_size=MERGED,
            default_output_length=4,
        )
    ),
    "glm46v": _THREE_AXES,
    "glm4v": _THREE_AXES,
    "glm4v_moe": _THREE_FEW,
    "glm_ocr": _THREE_AXES,
    "glmga": _THREE_AXES,
    "inkling2": _INTO_64,
    "inkling2_loop": _INTO_64,
    "janus": dict(vision_config=dict(projection_dim=64)),
    "llama4": dict(
        vision_config=dict(intermediate_size=256, vision_output_dim=64, projector_input_dim=64, projector_output_dim=64)
    ),
    "llava_next": _ONE_SIZE,
    "llava_next_video": _ONE_SIZE,
    "llava_onevision": _ONE_SIZE,
    "mllama": dict(
        vision_config=dict(intermediate_layers_indices=[0, 1], num_global_layers=1, vision_output_dim=192),
        text_config=dict(cross_attention_layers=[1]),
    ),
    "paddleocr_vl": _THREE_AXES,
    "paligemma": dict(projection_dim=64, vision_config=dict(projection_dim=64)),
    "qwen2_5_omni_thinker": _THREE_AXES,
    "qwen2_5_vl": _THREE_AXES,
    "qwen2_vl": _THREE_AXES,
    "shieldgemma2": _TWO_BY_TWO,
    "t5gemma2": dict(encoder=_TWO_BY_TWO),
    "vipllava": dict(vision_feature_layers=[-1, -2]),
}
"""Fields of single architectures, in addition to their fields for text."""

Form = Callable[[Any, int], dict[str, Tensor]]


def _pixels(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _plain(model: Any, count: int) -> dict[str, Tensor]:
    return dict(pixel_values=_pixels(count, 3, SIDE, SIDE))


def _apart(model: Any, count: int) -> dict[str, Tensor]:
    """Add a dimension for the images of one row."""
    return dict(pixel_values=_pixels(count, 1, 3, SIDE, SIDE))


def _masked(model: Any, count: int) -> dict[str, Tensor]:
    mask = torch.ones(count, 1, SIDE, SIDE, dtype=torch.int64)
    return dict(_apart(model, count), pixel_attention_mask=mask)


def _sized(model: Any, count: int) -> dict[str, Tensor]:
    return dict(_plain(model, count), image_sizes=torch.full((count, 2), SIDE))


def _cut(model: Any, count: int) -> dict[str, Tensor]:
    """Give each image and one crop of the same size."""
    return dict(pixel_values=_pixels(count, 2, 3, SIDE, SIDE), image_sizes=torch.full((count, 2), SIDE))


def _grid(model: Any, count: int) -> dict[str, Tensor]:
    """Give the patches of all images in one sequence."""
    side = SIDE // PATCH
    vision = _vision(model)
    numbers = _channels(vision) * int(getattr(vision, "temporal_patch_size", 1)) * PATCH**2
    grid = torch.tensor([[1, side, side]] * count)
    return dict(pixel_values=_pixels(count * side**2, numbers), image_grid_thw=grid)


def _grid_of_squares(model: Any, count: int) -> dict[str, Tensor]:
    given = _grid(model, count)
    vision = _vision(model)
    patches = _pixels(len(given["pixel_values"]), _channels(vision), PATCH, PATCH)
    return dict(given, pixel_values=patches)


def _placed(model: Any, count: int) -> dict[str, Tensor]:
    """Give the patches of each image and their positions in the image."""
    side = SIDE // PATCH
    patch_positions = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    return dict(
        pixel_values=_pixels(count, side**2, 3 * PATCH**2).abs().clamp(max=1),
        image_position_ids=patch_positions[None].repeat(count, 1, 1),
    )


def _shaped(model: Any, count: int) -> dict[str, Tensor]:
    """Give the patches of each image and the shape of their grid."""
    side = SIDE // PATCH
    return dict(
        pixel_values=_pixels(count, side**2, 3 * PATCH**2),
        spatial_shapes=torch.tensor([[side, side]] * count),
        pixel_attention_mask=torch.ones(count, side**2, dtype=torch.int64),
    )


def _tiled(model: Any, count: int) -> dict[str, Tensor]:
    """Give one tile for each image, of at most four."""
    return dict(
        pixel_values=_pixels(count, 1, 4, 3, SIDE, SIDE),
        aspect_ratio_ids=torch.ones(count, 1, dtype=torch.int64),
        aspect_ratio_mask=torch.tensor([[[1, 0, 0, 0]]] * count),
    )


def _merged(model: Any, count: int) -> dict[str, Tensor]:
    return dict(_grid(model, count), image_merge_sizes=torch.full((count,), MERGED))


def _asked(model: Any, count: int) -> dict[str, Tensor]:
    """Add a question for the query transformer that looks at the image."""
    return dict(_plain(model, count), qformer_input_ids=torch.full((count, 3), 7))


def _twice(model: Any, count: int) -> dict[str, Tensor]:
    return dict(_plain(model, count), high_res_pixel_values=_pixels(count, 3, SIDE, SIDE))


def _flat(model: Any, count: int) -> dict[str, Tensor]:
    """Give the patches of each image without their positions."""
    return dict(pixel_values=_pixels(count, (SIDE // PATCH) ** 2, 3 * PATCH**2))


def _aimed(model: Any, count: int) -> dict[str, Tensor]:
    return dict(_plain(model, count), target_sizes=torch.full((count, 2), SIDE // PATCH))


def _counted(model: Any, count: int) -> dict[str, Tensor]:
    return dict(_plain(model, count), pixel_attention_mask=torch.ones(count, 1, dtype=torch.int64))


FORMS: tuple[Form, ...] = (
    _merged, _grid, _grid_of_squares, _placed, _shaped, _tiled, _masked, _counted, _cut, _sized, _aimed, _asked, _twice,
    _plain, _apart, _flat,
)  # fmt: skip
"""The forms with most inputs come first, because a model may accept a smaller form and misread it."""


def _vision(model: Any) -> PreTrainedConfig:
    return getattr(model.config, "vision_config", model.config)


def _channels(vision: Any) -> int:
    return int(getattr(vision, "in_channels", getattr(vision, "num_channels", 3)))


class NoForm(Exception):
    """The model accepts none of the forms."""


def shown(model: Any, count: int) -> tuple[dict[str, Tensor], int]:
    """Return inputs with one image for each row, and the number of tokens that stand for an image.

    Raises:
        NoForm: no form runs, or the logits depend on the image in none.
    """
    for form in FORMS:
        for given, tokens in _tried(model, form, count):
            if _matters(model, given, tokens, count):
                return given, tokens
    raise NoForm("no form of an image was found that it takes")


def _tried(model: Any, form: Form, count: int) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yield the form with each possible number of image tokens, if the model has all its parameters."""
    given = form(model, count)
    if not set(given) <= set(inspect.signature(model.forward).parameters):
        return
    parts = (model, getattr(model, "model", None))
    encoders = [part.get_image_features for part in parts if hasattr(part, "get_image_features")]
    if not encoders:
        yield from ((given, tokens) for tokens in _configured(model.config))
        return
    with contextlib.suppress(Exception), torch.no_grad():
        features = encoders[0](**given)
        pooled = getattr(features, "pooler_output", features)
        yield given, _rows(features.last_hidden_state if pooled is None else pooled) // count


def _configured(config: Any) -> list[int]:
    names = ("num_image_tokens", "num_query_tokens", "image_seq_length", "mm_tokens_per_image", "latent_query_num")
    found = [getattr(config, name, None) for name in names]
    return [*(x for x in found if isinstance(x, int)), (SIDE // PATCH) ** 2, 0]


def _rows(features: Any) -> int:
    """Return the number of vectors in one or several tensors."""
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    return sum(map(_rows, features))


def beside(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the inputs that mark image tokens, and those that show every token the tiles of `_tiled`."""
    known = inspect.signature(model.forward).parameters
    of_tokens = {name: (ids == IMAGE).long() for name in ("mm_token_type_ids", "token_type_ids") if name in known}
    if "cross_attention_mask" in known:
        of_tokens["cross_attention_mask"] = torch.tensor([[1, 0, 0, 0]]).expand(*ids.shape, 1, 4).clone()
    return of_tokens


def _matters(model: Any, given: dict[str, Tensor], tokens: int, count: int) -> bool:
    """True if the model runs, and its logits change with the image."""
    ids = torch.tensor([[1, *[IMAGE] * tokens, 5, 6, 7]] * count)
    other = dict(given, pixel_values=given["pixel_values"].flip(-1) / 2)
    try:
        with torch.no_grad():
            one, two = (model(input_ids=ids, **beside(model, ids), **x).logits for x in (given, other))
    except Exception:
        return False
    return bool((one - two).abs().max() > 1e-4)
