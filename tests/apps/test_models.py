"""Test that checkpoints which cannot be read are named, whichever of their files is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("missing", ["lm_head", "model.layers.1.", "model.norm"])
def test_a_checkpoint_that_lacks_weights_is_refused(missing: str, tmp_path: Path) -> None:
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=2048, **sizes))
    kept = {name: weight for name, weight in made.state_dict().items() if not name.startswith(missing)}
    count = len(made.state_dict()) - len(kept)
    made.save_pretrained(tmp_path, state_dict=kept)
    transformers.AutoTokenizer.from_pretrained(models.BUNDLED).save_pretrained(tmp_path)
    with pytest.raises(KVPassError, match=rf"it lacks {count} of the model's weights, such as {missing}"):
        models.load(str(tmp_path))


def test_a_weight_that_is_tied_to_another_is_not_missing(tmp_path: Path) -> None:
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    config = transformers.LlamaConfig(vocab_size=2048, tie_word_embeddings=True, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(models.BUNDLED).save_pretrained(tmp_path)
    model = models.load(str(tmp_path)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("Llama", {}, False),
        ("GPT2", {}, True),
        ("Gemma3n", dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, num_kv_shared_layers=0), False),
    ],
)
def test_only_a_table_as_long_as_the_positions_is_one_of_positions(
    name: str, config: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    """Check Gemma3n too, which looks up a further embedding of each token in every layer."""
    sizes = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=2048, head_dim=16)
    kind = f"{name}Text" if name == "Gemma3n" else name
    made = getattr(transformers, f"{kind}Config")(vocab_size=2048, intermediate_size=32, **sizes, **config)
    getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(made).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(models.BUNDLED).save_pretrained(tmp_path)
    assert models.load(str(tmp_path)).has_position_table is expected
