"""Build a tiny random model of every architecture in transformers: causal, encoder-decoder, or with images.

Configurations are shrunk by the names of their fields, regardless of how a model computes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from tests.architectures import images

LAYERS = 2
VOCABULARY = 128

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "hidden_size_global": 64,
    "d_model": 64,
    "n_embd": 64,
    "embedding_size": 64,
    "intermediate_size": 96,
    "d_ff": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "max_seq_len": 512,
    "max_target_positions": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "initializer_range": 0.2,
}
"""Small values for fields of configurations, by name."""

_LATENT = dict(
    num_key_value_heads=4, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, kv_lora_rank=32, q_lora_rank=32
)
_TURNED = dict(_LATENT, head_dim=8)
_DECODER = dict(is_decoder=True)
_ONE_VOICE = dict(num_codebooks=1, decoder_start_token_id=1)
_SHARED = dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, mamba_d_state=16)
_HYBRID = dict(layer_types=["linear_attention", "full_attention"])

_INKLING = dict(
    unpadded_vocab_size=VOCABULARY,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=16,
    sliding_window_size=8,
    rel_extent=8,
    n_layers_per_attn_res_block=1,
)
_ALTERNATING = ["sliding_attention", "full_attention"]

SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": dict(_TURNED, n_group=2, topk_group=1),
    "axk2": _LATENT,
    "bailing_hybrid": dict(_LATENT, **_HYBRID),
    "bamba": dict(attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16),
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "big_bird": _DECODER,
    "camembert": _DECODER,
    "cohere_compass_text": dict(rope_parameters={"full_attention": dict(rope_type="default", rope_theta=10000.0)}),
    "blt": dict(num_hidden_layers=2, encoder_hash_byte_group_vocab=64),
    "codegen": dict(rotary_dim=8),
    "data2vec-text": _DECODER,
    "dbrx": dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0), ffn_config=dict(ffn_hidden_size=96)),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _TURNED,
    "deepseek_v32": _LATENT,
    "doge": dict(sliding_window=None),
    "dots1": dict(n_shared_experts=1),
    "dots3_note_text": dict(num_key_value_heads=4),
    "dory": dict(
        num_hidden_layers=4, n_input_layers=1, n_output_layers=1, layer_types=_ALTERNATING * 2, rope_parameters=None
    ),
    "electra": _DECODER,
    "ernie": _DECODER,
    "gemma3n_text": dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=_ALTERNATING * 2),
    "gemma4_text": dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=_ALTERNATING * 2),
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=8),
    "gptj": dict(rotary_dim=8),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16),
    "inkling2_loop_text": dict(
        _INKLING,
        num_hidden_layers=3,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        loop_layer_index_start=1,
        loop_layer_index_end=2,
        loop_num_passes=2,
        loop_gate_rank=8,
    ),
    "inkling2_text": dict(_INKLING, layer_types=["hybrid_sliding", "hybrid"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "kimi_linear": dict(_LATENT, num_experts_per_token=2, **_HYBRID),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "lfm3": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(head_dim=32, state_size=16, n_groups=1),
    "longcat_flash": dict(_TURNED, num_layers=1),
    "megatron-bert": _DECODER,
    "minicpm3": _LATENT,
    "mistral4": _LATENT,
    "mistral_large4_text": _LATENT,
    "musicgen_decoder": _ONE_VOICE,
    "musicgen_melody_decoder": _ONE_VOICE,
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen4_exp_text": dict(
        _HYBRID, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4
    ),
    "reformer": dict(
        is_decoder=True, axial_pos_embds_dim=[32, 32], axial_pos_shape=[8, 8], attention_head_size=16, num_hashes=1
    ),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "rembert": _DECODER,
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roc_bert": _DECODER,
    "roformer": _DECODER,
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xlstm": dict(hidden_size=128, num_heads=2),
    "xmod": dict(is_decoder=True, languages=["en"], default_language="en"),
    "youtu": _TURNED,
    "zamba": dict(_SHARED, n_mamba_heads=2),
    "zamba2": dict(_SHARED, n_mamba_heads=4),
    "zaya": dict(num_experts_per_tok=1),
}
"""Fields of single architectures that the table above gets wrong, by model type."""


UNPADDED = frozenset({"led", "musicgen", "musicgen_melody"})
"""Models that run unpadded.

`generate` prepends a start token for musicgen, so a mask of the prompt has the wrong length. LED's steps attend to
padding that its prompts mask.
"""


_STARTS = dict(decoder_start_token_id=1)
_FEW_FILTERS = dict(num_filters=2)
_TWO_BERTS = dict(encoder=dict(is_decoder=False), decoder=dict(is_decoder=True, add_cross_attention=True))

SPECIAL_READERS: dict[str, dict[str, Any]] = {
    "dia": dict(
        decoder_config=dict(
            cross_hidden_size=64, cross_num_attention_heads=4, cross_num_key_value_heads=4, cross_head_dim=16
        )
    ),
    "encoder-decoder": _TWO_BERTS,
    "fsmt": dict(langs=["en", "de"], src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY, forced_eos_token_id=None),
    "fun_asr_nano": dict(adaptor_config=dict(intermediate_size=16)),
    "kyutai_speech_to_text": dict(
        audio_bos_token_id=16,
        audio_pad_token_id=VOCABULARY + 2 * 17,
        num_codebooks=2,
        codebook_vocab_size=17,
        codec_config=dict(
            codebook_size=16,
            codebook_dim=16,
            num_quantizers=2,
            num_filters=8,
            vector_quantization_hidden_dimension=16,
            upsample_groups=64,
        ),
    ),
    "marian": _STARTS,
    "nemo_speechlm": dict(
        audio_config=dict(diarization_config=dict(head_config=dict(audio_hidden_size=64))),
        word_timestamp_config=dict(blank_token_id=0),
    ),
    "moonshine_streaming": dict(num_key_value_heads=4),
    "pop2piano": dict(_STARTS, composer_vocab_size=1),
    "speech-encoder-decoder": _TWO_BERTS,
    "switch_transformers": dict(num_decoder_layers=LAYERS),
    "t5": _STARTS,
    "vibevoice": dict(
        audio_config=_FEW_FILTERS,
        semantic_model_config=_FEW_FILTERS,
        eos_token_id=2,
        audio_bos_token_id=103,
        audio_eos_token_id=104,
        audio_token_id=102,
    ),
    "vibevoice_asr": dict(
        acoustic_tokenizer_encoder_config=_FEW_FILTERS, semantic_tokenizer_encoder_config=_FEW_FILTERS
    ),
    "whisper": dict(_STARTS, max_source_positions=16),
}
"""Fields of models that read text or speech first, in addition to those above."""


GENERATION: dict[str, dict[str, Any]] = {"pop2piano": dict(composer_to_feature_token={"composer1": 0})}
"""Fields of the generation configuration that a model needs, by model type."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Architectures that are reported together.

    Attributes:
        classes: name of the class, by model type.
        small: small values for fields of configurations, by name.
        special: fields of single architectures.
    """

    classes: Mapping[str, str]
    small: Mapping[str, Any]
    special: Mapping[str, dict[str, Any]]


TAKEN_APART = frozenset({"whisper"})
"""Models that return their caches split by row, so that `inspect` cannot read them."""


NEEDS = {"gemma3n": "timm", "fast_vlm": "timm", "vibevoice": "diffusers"}
"""Packages that a model needs in addition to kvpass's own, by model type."""


def can_be_built(name: str) -> bool:
    """Return whether the package that a model needs, if any, is installed."""
    return importlib.util.find_spec(NEEDS.get(name, "torch")) is not None


def _reading() -> dict[str, str]:
    """Return the classes that read text or speech; a type with one class for each has two entries."""
    text, speech = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    apart = {name: name if text.get(name, made) == made else f"{name} (speech)" for name, made in speech.items()}
    return dict(text) | {apart[name]: made for name, made in speech.items()}


TABLES = {
    "causal": Table(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, SMALL, SPECIAL),
    "reading": Table(_reading(), SMALL | dict(init_std=0.2), SPECIAL | SPECIAL_READERS),
    "images": Table(
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, SMALL | images.SMALL, SPECIAL | SPECIAL_READERS | images.SPECIAL
    ),
}


def names(table: str = "causal") -> list[str]:
    """Return the model types of all architectures of a table."""
    return sorted(TABLES[table].classes)


def attends_to_another(name: str, table: str = "causal") -> bool:
    """Tell whether a model has no cache of its own, but is given the keys and values of the model that it assists."""
    known = inspect.signature(_model_class(name, table).forward).parameters
    return "shared_kv_states" in known and not {"cache", "past_key_values"} & set(known)


def config(name: str, table: str = "causal") -> PreTrainedConfig:
    """Return the smallest configuration of an architecture, by the name that its table gives it."""
    config_class, chosen = _model_class(name, table).config_class, TABLES[table]
    return _shrunk(config_class, chosen, chosen.special.get(name, chosen.special.get(config_class.model_type, {})))


def _model_class(name: str, table: str) -> type[PreTrainedModel]:
    model_class: type[PreTrainedModel] = getattr(transformers, TABLES[table].classes[name])
    return model_class


def _shrunk(config_class: type[PreTrainedConfig], table: Table, special: dict[str, Any]) -> PreTrainedConfig:
    default = config_class()
    fields = default.to_dict()
    small = {key: value for key, value in table.small.items() if key in fields}
    parts = {}
    for key, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            own = table.special.get(value.model_type, {}) | special.get(key, {})
            parts[key] = _shrunk(type(value), table, own).to_dict()
    return config_class(**{**small, **special, **parts})


def build(name: str, table: str = "causal") -> torch.nn.Module:
    """Return the tiny random model, in float32 and evaluation mode."""
    torch.manual_seed(0)
    model = _model_class(name, table)(config(name, table)).float().eval()
    _stir(model)
    vars(model.generation_config).update(GENERATION.get(name, {}))
    return model


@torch.no_grad()
def _stir(model: torch.nn.Module) -> None:
    """Fill parameters that start as zeros, such as biases and sinks, so that an error in their use shows."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.normal_(std=0.2)
