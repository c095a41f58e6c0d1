"""Test which decode steps a loop repeats, and which it runs through the model or refuses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from tests.models import build, discard_compiled_code, prompt

TOKENS = 8


class Broken(torch.nn.Module):
    """A model whose graph breaks behind what it makes of its token ids."""

    def __init__(self, model: Any, what: str) -> None:
        super().__init__()
        self.model, self.config, self.what = model, model.config, what
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        named: dict[str, Any]
        if self.what == "the ids":
            named = dict(input_ids=input_ids)
        elif self.what == "other ids":
            named = dict(input_ids=input_ids + 0)
        elif self.what == "embeddings":
            named = dict(inputs_embeds=self.model.get_input_embeddings()(input_ids))
        else:
            named = dict(input_ids=input_ids, position_ids=self.positions(input_ids, past_key_values))
        torch._dynamo.graph_break()
        return self.model(**named, past_key_values=past_key_values, use_cache=use_cache)

    @torch._dynamo.disable
    def positions(self, input_ids: Tensor, cache: Any) -> Tensor:
        before = 0 if cache is None else cache.get_seq_length()
        return torch.arange(before, before + input_ids.shape[1])[None]


def greedy(model: torch.nn.Module, ids: Tensor) -> list[int]:
    with torch.no_grad():
        out, made = model(ids), []
        for _ in range(TOKENS):
            made.append(int(out.logits[:, -1].argmax(-1)))
            out = model(torch.tensor([made[-1:]]), past_key_values=out.past_key_values)
    return made


def decoded(model: torch.nn.Module, ids: Tensor, rows: int | None) -> list[int]:
    settings: dict[str, Any] = {} if rows is None else dict(rows=rows)
    loop = kvpass.DecodeLoop(model, "full", budget=48, inner="eager", **settings)
    if rows is not None:
        [output] = loop.generate_batch([ids[0]], max_new_tokens=TOKENS).values()
        if output.cause is not None:
            raise output.cause
        return list(output.generated_tokens)
    loop.prompt(ids)
    made: list[int] = loop.generate(TOKENS)[0].tolist()
    return made


@pytest.mark.parametrize(
    ("what", "rows"),
    [("the ids", None), ("other ids", None), ("embeddings", None), ("embeddings", 2), ("positions", None)],
)
def test_an_argument_that_code_outside_of_the_graph_computes_is_not_repeated(what: str, rows: int | None) -> None:
    """Check that no later step gets the ids, embeddings or positions of an earlier one."""
    discard_compiled_code()
    model, (ids, _) = Broken(build("Llama", layers=1), what), prompt(1, 20, ())
    expected = greedy(model, ids)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", kvpass.KVPassWarning)
        assert decoded(model, ids, rows) == expected
    warned = any("outside of the graph of its decode step" in str(each.message) for each in found)
    assert warned == (what != "the ids")


@pytest.mark.parametrize(
    ("where", "rows", "message"),
    [
        ("lm_head", None, "logits of this model are not computed in the graph"),
        ("lm_head", 2, "logits of this model are not computed in the graph"),
        ("model.layers.1", None, "ran its decode step in 2 graphs"),
    ],
)
def test_a_break_within_the_step_is_refused(where: str, rows: int | None, message: str) -> None:
    discard_compiled_code()
    model, (ids, _) = build("Llama"), prompt(1, 20, ())
    model.get_submodule(where).register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(kvpass.UnsupportedGraph, match=message):
        decoded(model, ids, rows)


def test_an_export_of_a_model_that_embeds_outside_of_its_graph_is_refused(tmp_path: Path) -> None:
    discard_compiled_code()
    model = Broken(build("Llama", layers=1), "embeddings")
    with pytest.raises(kvpass.UnsupportedGraph, match="its token ids are not read in its graph"):
        kvpass.export(model, tmp_path / "exported", "streaming", budget=16)
