"""Test that checkpoints which cannot be read are named, whichever of their files is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from kvpass.apps import models
from kvpass.errors import KVPassError


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("model.safetensors", -100),
        ("model.safetensors", 100),
        ("model.safetensors", 0),
        ("pytorch_model.bin", 1000),
        ("pytorch_model.bin", 0),
        ("tokenizer.json", 1000),
        ("tokenizer_config.json", 10),
        ("config.json", 10),
        ("config.json", 0),
    ],
)
def test_a_checkpoint_with_a_file_that_is_cut_off_is_named(name: str, kept: int, tmp_path: Path) -> None:
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=2048, **sizes))
    made.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(models.BUNDLED).save_pretrained(tmp_path)
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(made.state_dict(), tmp_path / name)
    assert models.load(str(tmp_path)).trained_length == 2048
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(KVPassError, match=f"cannot load a language model from {str(tmp_path)!r}: "):
        models.load(str(tmp_path))
