"""Test the checks on aligner files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import kvpass
from kvpass.errors import AlignerError
from kvpass.policies.aligners import Aligner, load, save
from kvpass.policies.aligners.scope import scope_of
from kvpass.policies.calibration import Calibration
from kvpass.policies.head_gates import HeadGates
from kvpass.policies.kv_align import KVAlign
from tests.aligners import random_aligner
from tests.models import build

BUNDLED = Path(__file__).parents[2] / "kvpass" / "apps" / "data"


@pytest.mark.parametrize("recipe", ["direct", "paper", "nothing"])
def test_an_aligner_survives_being_stored(recipe, tmp_path):
    aligner = random_aligner(recipe)
    saved = save(aligner, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors") == saved == aligner
    halved = save(aligner, tmp_path / "b.safetensors", torch.float16)
    assert load(tmp_path / "b.safetensors") == halved
    assert KVAlign(str(tmp_path / "b.safetensors")) == KVAlign(halved)


def test_an_aligner_of_another_model_is_refused(tmp_path):
    model = build("GPT2")
    own = random_aligner("direct", 2, 4, 16)
    right = dataclasses.replace(own, scope=dataclasses.replace(own.scope, architecture="gpt2"))
    save(right, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors", model) == right
    for changed in ({"architecture": "opt"}, {"layers": 3}, {"heads": 2}, {"key_dim": 8}):
        other = dataclasses.replace(right, scope=dataclasses.replace(right.scope, **changed))
        save(other, tmp_path / "b.safetensors")
        with pytest.raises(AlignerError, match=next(iter(changed))):
            load(tmp_path / "b.safetensors", model)


def test_the_target_of_a_model():
    assert scope_of(build("GPT2"), 30).architecture == "gpt2"
    grouped = scope_of(build("Llama"), 30)
    assert (grouped.layers, grouped.heads, grouped.key_dim) == (2, 2, 16)


def test_files_that_hold_no_aligner_are_named(tmp_path):
    with pytest.raises(AlignerError, match="cannot read"):
        load(tmp_path / "missing.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(AlignerError, match=r"bad\.safetensors"):
        load(tmp_path / "bad.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(AlignerError, match="holds no aligner"):
        load(tmp_path / "other.safetensors")
    for about in (
        "{}",
        json.dumps({"recipe": "new", "signature": dataclasses.asdict(random_aligner("paper").scope)}),
    ):
        save_file({"x": torch.zeros(1)}, tmp_path / "odd.safetensors", metadata={"kvpass.policies.aligners": about})
        with pytest.raises(AlignerError, match=r"odd\.safetensors"):
            load(tmp_path / "odd.safetensors")


@pytest.mark.parametrize(
    "path", sorted(BUNDLED.glob("*-align/*.safetensors")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_bundled_aligners_are_for_the_model_that_they_lie_beside(path):
    aligner = load(path)
    config = transformers.AutoConfig.from_pretrained(path.parent.with_name(path.parent.name.removesuffix("-align")))
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    scope = aligner.scope
    assert (scope.architecture, scope.layers) == (config.model_type, config.num_hidden_layers)
    assert (scope.heads, scope.window) == (heads, 255)


def test_errors_are_the_projects_own():
    assert issubclass(AlignerError, kvpass.KVPassError)
    assert issubclass(AlignerError, ValueError)


@pytest.mark.parametrize(
    ("kind", "noun"), [(Aligner, "aligner"), (Calibration, "calibration"), (HeadGates, "file of gates")]
)
def test_weights_that_cannot_be_read_are_named_with_their_file(kind, noun, tmp_path):
    path = tmp_path / "odd.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={kind.key: json.dumps({"recipe": "new"})})
    with pytest.raises(kind.error, match=rf"odd\.safetensors: this {noun} cannot be read"):
        kind.load(path)
