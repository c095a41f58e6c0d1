"""Save a tiny checkpoint to a folder, for `from_pretrained`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

TOKENIZER = Path(__file__).parents[3] / "kvpass" / "apps" / "data" / "tokenizer"
POSITIONS = 64


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random Llama of 64 positions, whose logits have clear maxima, and a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, initializer_range=0.3, pad_token_id=0,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
