"""Test prompts and chunks of several lengths: they share one graph from the first one on, compiled at the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import kvpass
from kvpass.backend import Backend
from kvpass.runtime.calling import model_arguments
from kvpass.torch_private import dynamo, symbolic_shapes
from tests.models import build, graphs, prompt

LENGTHS = (12, 9, 20, 12)
BUDGET = 24


def named_arguments(ids: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the arguments of a call without a cache under some names."""
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    known = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    return {name: known[name] for name in names}


@pytest.mark.parametrize(
    "names",
    [
        ("input_ids",),
        ("input_ids", "attention_mask"),
        ("position_ids", "attention_mask", "input_ids"),
    ],
    ids=" ".join,
)
@torch.no_grad()
def test_prompts_of_all_lengths_share_a_graph(names: tuple[str, ...]) -> None:
    model = build("Llama", layers=1)
    expected = [model(**named_arguments(prompt(2, length, ())[0], names)).logits for length in LENGTHS]
    torch._dynamo.reset()
    kvpass.compile(model, "h2o", budget=BUDGET, inner="eager")
    for length, wanted in zip(LENGTHS, expected, strict=True):
        made = model(**named_arguments(prompt(2, length, ())[0], names), use_cache=True).logits
        assert torch.allclose(made, wanted, atol=1e-5)
        assert graphs() == 1


@torch.no_grad()
def test_chunks_of_all_lengths_share_a_graph() -> None:
    model = kvpass.compile(build("Llama", layers=1), "h2o", budget=BUDGET, inner="eager")
    ids, _ = prompt(1, 40, ())
    cache = model(ids[:, :12], use_cache=True).past_key_values
    torch._dynamo.utils.counters.clear()
    for start, end in ((12, 17), (17, 20), (20, 27)):
        model(ids[:, start:end], past_key_values=cache, attention_mask=torch.ones(1, end, dtype=torch.int64))
        assert graphs() == 1


@torch.no_grad()
def test_the_callers_tensors_are_not_marked() -> None:
    model = kvpass.compile(build("Llama", layers=1), "h2o", budget=BUDGET, inner="eager")
    given = named_arguments(prompt(1, 12, ())[0], ("input_ids", "attention_mask"))
    model(**given, use_cache=True)
    assert [vars(tensor) for tensor in given.values()] == [{}, {}]


class Renaming(nn.Module):
    """A model that writes to its token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("Llama", layers=1)

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        input_ids.remainder_(7)
        return self.model(input_ids, past_key_values=past_key_values, use_cache=use_cache)


@pytest.mark.parametrize(
    ("inner", "mode"),
    [("eager", torch.no_grad), ("eager", torch.inference_mode), ("inductor", torch.no_grad)],
    ids=["eager", "inference-mode", "inductor"],
)
def test_a_model_that_writes_to_its_token_ids_writes_to_the_callers(inner: str, mode: Callable[[], Any]) -> None:
    model = kvpass.compile(Renaming(), "h2o", budget=BUDGET, inner=inner)
    with mode():
        for length in LENGTHS:
            ids, _ = prompt(1, length, ())
            expected = ids.remainder(7)
            cache = model(ids).past_key_values
            assert torch.equal(ids, expected)
        for start in range(3):
            step = torch.full((1, 5), 40 + start)
            model(step[:, start : start + 1], past_key_values=cache)  # a view
            assert step[0, start] == (40 + start) % 7


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_expanded_arguments_that_a_model_only_reads_are_left_as_they_are(mode: Callable[[], Any]) -> None:
    """An expanded tensor cannot be written to, and one with NaN does not equal its copy."""
    with mode():
        given = [torch.full((1, 3), value).expand(4, -1) for value in (torch.nan, 1.0, True)]
        copies = [model_arguments.as_contiguous_tokens(each) for each in given]
        model_arguments.write_back(given, copies)
    assert all(copy is not each and copy.is_contiguous() for copy, each in zip(copies, given, strict=True))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from([torch.int64, torch.bool, torch.float]))
def test_arguments_of_the_prompts_length_are_marked(count: int, other: int, planes: int, dtype: torch.dtype) -> None:
    ids = torch.ones(1, count, dtype=torch.int64)
    values = [ids, torch.ones(2, other, dtype=dtype), torch.ones(planes, 2, count, dtype=dtype), "text", None]
    made = model_arguments.with_dynamic_lengths(values, ids, None)
    marked = [isinstance(each, Tensor) and dynamo.is_dynamic_dim(each, each.ndim - 1) for each in made]
    several, whole = count > 1, dtype != torch.float
    assert marked == [several, several and whole and other == count, several and whole, False, False]
    for before, after, is_marked in zip(values, made, marked, strict=True):
        assert (after is not before) == is_marked
        assert not is_marked or torch.equal(before, after)


# -- compiling at the second prompt ------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the compiled prompts' runs, whose code serves even lengths only and is the uncompiled graph's."""
    ran: list[str] = []

    def compile_prompt(backend: Backend, gm: torch.fx.GraphModule, examples: Any, *how: Any) -> Callable[..., Any]:
        symbolic = [
            size for x in examples if isinstance(x, Tensor) for size in x.shape if isinstance(size, torch.SymInt)
        ]
        assert symbolic
        assert all(size % 2 == 0 for size in symbolic)  # which sets a guard
        forward = gm.forward

        def run(*arguments: Any) -> Any:
            ran.append("compiled")
            return forward(*arguments)

        return run

    monkeypatch.setattr(Backend, "compile_prompt", compile_prompt)
    return ran


@torch.no_grad()
def test_prompts_that_compiled_code_does_not_serve_run_uncompiled(compiled: list[str]) -> None:
    model = build("Llama", layers=1)
    lengths = (12, 10, 14, 15, 16, 9)
    expected = [model(prompt(1, length, ())[0]).logits for length in lengths]
    torch._dynamo.reset()
    kvpass.compile(model, "streaming", budget=BUDGET)
    counts = []
    for length, wanted in zip(lengths, expected, strict=True):
        made = model(prompt(1, length, ())[0], use_cache=True).logits
        assert torch.allclose(made, wanted, atol=1e-5)
        counts.append(len(compiled))
    assert counts == [0, 1, 2, 2, 3, 3]
    assert graphs() == 1


def test_guards_that_follow_from_dynamos_are_not_added() -> None:
    sizes = symbolic_shapes.SymbolicSizes([7, 7, 7], set())
    one, two, three = (sizes.size(symbol) for symbol in sizes.symbols)
    assert one <= two
    assert two <= one
    added = symbolic_shapes.AddedGuards()
    added.begin([one, two, three])
    assert added.expressions == []
    assert one == two
    assert added.expressions == []
    assert two == three
    (guard,) = added.expressions
    numbers = dict.fromkeys(sizes.symbols, 5)
    assert symbolic_shapes.are_true([guard], numbers)
    assert not symbolic_shapes.are_true([guard], numbers | {sizes.symbols[2]: 6})
    assert not symbolic_shapes.are_true([sympy.Symbol("unknown") > 3], numbers)


def test_sizes_that_are_numbers_have_no_guards() -> None:
    added = symbolic_shapes.AddedGuards()
    added.begin([torch.ones(3), 4])
    assert added.expressions == []
