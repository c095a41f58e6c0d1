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
    return dict(text_config=dict(rope_parameters=_rotated(*sections)))


def _rotated(*sections: int) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=1e4, mrope_section=[*sections])


_THREE_AXES, _THREE_FEW = _three_axes(2, 3, 3), _three_axes(1, 1, 2)
_TWO_BY_TWO = dict(mm_tokens_per_image=4)
_ONE_SIZE = dict(image_grid_pinpoints=[[SIDE, SIDE]])
_FEW_CODES = dict(
    num_embeddings=8, codebook_size=8, base_channels=32, channel_multiplier=[1, 1, 1, 2], num_res_blocks=1
)
_INTO_64 = dict(vision_config=dict(text_hidden_size=64, projection_hidden_dim=64))

SPECIAL: dict[str, dict[str, Any]] = {
    "apertus1p5": dict(
        image_token_offset=64,
        audio_token_offset=80,
        vision_config=dict(
            codebook_size=16, base_channels=32, channel_multiplier=[1, 2], num_res_blocks=1, latent_channels=32
        ),
        audio_config=dict(codebook_size=16, codebook_dim=64),
    ),
    "aria": dict(projector_patch_to_query_dict={(SIDE // PATCH) ** 2: 4}),
    "chameleon": dict(
        vocabulary_map={"<image>": IMAGE} | {f"IMGIMG{chr(ord('A') + i)}Z": 80 + i for i in range(8)},
        vq_config=_FEW_CODES,
    ),
    "cosmos3_edge": dict(_THREE_AXES, projector_hidden_size=64, vision_config=dict(num_patches=16)),
    "deepseek_ocr2": dict(text_config=dict(mlp_layer_types=["dense", "sparse"], num_key_value_heads=4)),
    "diffusion_gemma": dict(text_config=dict(top_k_experts=2), canvas_length=8),
    "dots3_note": dict(
        vision_config=dict(mlp_layer_types=["dense", "sparse"], adapter_in_dim=64, adapter_out_dim=64),
        audio_config=dict(adapter_input_size=64, adapter_out_dim=64),
    ),
    "emu3": dict(
        vocabulary_map={"<image>": IMAGE, "<|extra_200|>": 79} | {f"<|visual token {i:06}|>": 80 + i for i in range(8)},
        vq_config=_FEW_CODES,
    ),
    "ernie4_5_vl_moe": dict(
        text_config=dict(moe_intermediate_size=[32, 32], rope_parameters=_rotated(3, 3, 2)),
    ),
    "fast_vlm": dict(
        vision_config=dict(
            architecture="fastvit_t8", hidden_size=768, global_pool="avg", model_args=dict(inference_mode=True)
        )
    ),
    "florence2": dict(
        vision_config=dict(
            patch_size=[7, 3, 3, 3],
            depths=[1] * 4,
            embed_dim=[16] * 4,
            num_heads=[2] * 4,
            num_groups=[2] * 4,
            window_size=4,
            projection_dim=64,
        )
    ),
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
    "glm5_next": dict(
        text_config=dict(
            num_key_value_heads=4,
            layer_types=["linear_attention", "full_attention"],
            linear_num_heads=4,
            linear_head_dim=16,
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_nope_head_dim=16,
            v_head_dim=16,
        )
    ),
    "glm_ocr": _THREE_AXES,
    "glmga": _THREE_AXES,
    "granite4_vision": dict(
        downsample_rate="1/2",
        deepstack_layer_map=[[-1, 0]],
        spatial_target_layers=[0, 1, 0, 1],
        qformer_config=dict(
            max_position_embeddings=512, cross_attention_frequency=1, num_hidden_layers=1, use_qformer_text_input=False
        ),
        **_ONE_SIZE,
    ),
    "hunyuan_vl": _three_axes(2, 2, 2, 2),
    "idefics": dict(vision_config=dict(embed_dim=64)),
    "inkling2": dict(_INTO_64, text_config=dict(layer_types=["hybrid_sliding", "hybrid"])),
    "inkling2_loop": _INTO_64,
    "inkling_mm_model": dict(vision_config=dict(text_hidden_size=64, n_layers=6)),  # fewer layers need scipy
    "instructblipvideo": dict(video_token_index=IMAGE),
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
    "molmo2": dict(
        image_patch_id=IMAGE,
        vision_config=dict(image_size=[SIDE, SIDE]),
        adapter_config=dict(vision_feature_layer=[-1, -2], text_hidden_size=64),
    ),
    "muse_spark": dict(
        out_hidden_size=64 * MERGED**2,
        projector_hidden_size=64,
        audio_config=dict(num_hidden_layers=4, hidden_sizes=[16] * 4, out_hidden_size=64),
    ),
    "nemotron_h_omni": dict(
        vision_hidden_size=64, projector_hidden_size=64, vision_config=dict(video_temporal_patch_size=2)
    ),
    "paddleocr_vl": _THREE_AXES,
    "paligemma": dict(projection_dim=64, vision_config=dict(projection_dim=64)),
    "pp_formulanet": dict(vision_config=dict(decoder_hidden_size=64)),
    "qwen2_5_omni_thinker": dict(_THREE_AXES, vision_start_token_id=IMAGE + 3),
    "qwen2_5_vl": _THREE_AXES,
    "qwen2_vl": _THREE_AXES,
    "qwen3_omni_moe_thinker": dict(_THREE_AXES, vision_start_token_id=IMAGE + 3),
    "shieldgemma2": _TWO_BY_TWO,
    "t5gemma2": dict(encoder=_TWO_BY_TWO),
    "udop": dict(decoder_start_token_id=1),
    "vipllava": dict(vision_feature_layers=[-1, -2]),
    "vision-encoder-decoder": dict(decoder=dict(is_decoder=True, add_cross_attention=True)),
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
    frames = next(
        (getattr(vision, name) for name in ("temporal_patch_size", "patch_temporal") if hasattr(vision, name)), 1
    )
    numbers = _channels(vision) * int(frames) * PATCH**2
    grid = torch.tensor([[1, side, side]] * count)
    return dict(pixel_values=_pixels(count * side**2, numbers), image_grid_thw=grid)


def _grid_of_squares(model: Any, count: int) -> dict[str, Tensor]:
    given = _grid(model, count)
    vision = _vision(model)
    patches = _pixels(len(given["pixel_values"]), _channels(vision), PATCH, PATCH)
    return dict(given, pixel_values=patches)


def _cubes(model: Any, count: int) -> dict[str, Tensor]:
    """Give the patches of all images over two moments, with the channels last."""
    return dict(pixel_values=_pixels(count * (SIDE // PATCH) ** 2, 2, PATCH, PATCH, 3))


def _grid_of_merged(model: Any, count: int) -> dict[str, Tensor]:
    """Give squares of the patches that become one token, with the channels last."""
    side, pixels = SIDE // PATCH // MERGED, PATCH * MERGED
    grid = torch.tensor([[1, side, side]] * count)
    return dict(pixel_values=_pixels(count * side**2, pixels, pixels, 3), image_grid_thw=grid)


def _grid_of_two(model: Any, count: int) -> dict[str, Tensor]:
    """Give the height and width of each grid of patches."""
    side = SIDE // PATCH
    return dict(pixel_values=_pixels(count * side**2, 3 * PATCH**2), image_grid_hw=torch.tensor([[side, side]] * count))


def _pooled(model: Any, count: int) -> dict[str, Tensor]:
    """Say which patches of an image are pooled into each of its tokens."""
    side, merged = SIDE // PATCH, SIDE // PATCH // MERGED
    pooled = torch.arange(count * side**2).view(count, merged, MERGED, merged, MERGED).transpose(2, 3)
    return dict(
        pixel_values=_pixels(count, side**2, 3 * PATCH**2),
        image_token_pooling=pooled.reshape(-1, MERGED**2),
        image_grids=torch.tensor([[merged, merged, 0, 0]] * count),
        image_num_crops=torch.ones(count, dtype=torch.int64),
    )


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


def _filmed(model: Any, count: int) -> dict[str, Tensor]:
    """Give a film of two frames, and the question of `_asked`."""
    return dict(_asked(model, count), pixel_values=_pixels(count, 2, 3, SIDE, SIDE))


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
    _merged, _grid, _grid_of_squares, _grid_of_merged, _grid_of_two, _pooled, _placed, _shaped, _tiled, _masked,
    _counted, _cut, _sized, _aimed, _filmed, _asked, _twice, _plain, _apart, _flat, _cubes,
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
    names = ("get_image_features", "get_video_features")
    encoders = [getattr(part, name) for name in names for part in parts if hasattr(part, name)]
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
    """Return the inputs that mark image tokens, or that say what each token sees, as far as the model takes them."""
    known = inspect.signature(model.forward).parameters
    marks = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), (ids == IMAGE).long())
    seen = {
        "image_attention_mask": torch.ones(*ids.shape, 1),
        "cross_attention_mask": torch.tensor([1, 0, 0, 0]).expand(*ids.shape, 1, 4).clone(),  # for `_tiled`
        "bbox": torch.zeros(*ids.shape, 4),
    }
    return {name: value for name, value in (marks | seen).items() if name in known}


def _matters(model: Any, given: dict[str, Tensor], tokens: int, count: int) -> bool:
    """True if the model runs, and its logits change with the image."""
    ids = torch.tensor([[1, *[IMAGE] * tokens, 5, 6, 7]] * count)
    beginning = dict(decoder_input_ids=ids[:, -3:]) if model.config.is_encoder_decoder else {}
    other = dict(given, pixel_values=given["pixel_values"].flip(-1) / 2)
    try:
        with torch.no_grad():
            one, two = (model(input_ids=ids, **beside(model, ids), **beginning, **x).logits for x in (given, other))
    except Exception:
        return False
    return bool((one - two).abs().max() > 1e-4)
