"""Build tiny random models and prompts that several rows share."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests import models

VOCABULARY = 128
WIDE = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
"""SizeResolver wide enough for the groups and blocks of quantised weights."""
TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=None)


def seeded(model_class: Any, config: Any) -> Any:
    """Return a model with the same weights in every call."""
    torch.manual_seed(0)
    return model_class(config).eval()


def llama(**config: Any) -> Any:
    return seeded(transformers.LlamaForCausalLM, transformers.LlamaConfig(**WIDE, **TOKENS, **config))


def seq2seq(kind: str) -> Any:
    """Return an encoder-decoder for text."""
    narrow = dict(d_model=64, num_layers=2, num_heads=4, d_kv=16, d_ff=64, encoder_layers=2, decoder_layers=2)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    config = transformers.AutoConfig.for_model(kind, **narrow, **heads, **TOKENS, decoder_start_token_id=1)
    return seeded(type(transformers.AutoModelForSeq2SeqLM.from_config(config)), config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=20, max_target_positions=64,
        decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[], **TOKENS,
    )  # fmt: skip
    return seeded(transformers.WhisperForConditionalGeneration, config)


def prompt(rows: int = 2, tokens: int = 9) -> dict[str, Tensor]:
    """Return ids and a padding mask [rows, tokens]; of several rows the first is left-padded."""
    ids, mask = models.prompt(rows, tokens, (3, 0) if rows > 1 else ())
    return {"input_ids": ids, "attention_mask": mask}
