"""Test masks on slots: each slot has the column of its token in the model's whole mask, for any token in any slot."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.capture.key_axis import MaskContext, token_inputs
from kvpass.errors import UnsupportedGraph
from kvpass.fx import shapes, splicing, walk
from kvpass.fx.shapes import SizeResolver
from kvpass.fx.walk import example_value, is_size, placeholders
from kvpass.rewrite.mask_subgraph import MaskSubgraph, PerTokenInput, cut_mask
from kvpass.rewrite.passes.positions import put_length_on_device
from kvpass.torch_private import symbolic_shapes

TRACED, NEW, LONG = 5, 2, 12  # cached tokens in the trace, new tokens, and cached tokens of the comparison
Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(i int64 [q, 1], j int64 [S], p int64 [B, S]) -> a mask with the keys last."""

BY_INDEX: dict[str, Form] = {
    "a window and sinks": lambda i, j, p: (j <= i) & ((j > i - 3) | (j < 2)),
    "blocks": lambda i, j, p: (j <= i) & (j // 4 == i // 4),
    "a bias of heads": lambda i, j, p: (j - i) * torch.tensor([0.5, 0.25])[:, None, None],
    "a filled bias": lambda i, j, p: torch.zeros(j.shape).masked_fill(j > i, -1e9),
    "a table": lambda i, j, p: torch.arange(40).float().sin()[j] - i,
    "transposed": lambda i, j, p: (j[:, None] <= i.view(1, -1)).transpose(0, 1),
}
BY_ENTRY: dict[str, Form] = {
    "marks": lambda i, j, p: (j <= i) & (p[:, None, None] > 0),
    "a weight": lambda i, j, p: p[:, None, None].float() * 2 + (j - i),
}
ON_HOST: dict[str, Form] = {
    "a sum over the keys": lambda i, j, p: (j.float() + p.float().sum(-1)[:, None, None, None]) - i,
    "reversed keys": lambda i, j, p: j.flip(0) <= i,
    "a running sum": lambda i, j, p: (j <= i) & (p.cumsum(-1)[:, None, None] > 3),
}
REFUSED: dict[str, Form] = {
    "keys first": lambda i, j, p: (j[:, None] <= i.view(1, -1)) * 1,
}
INPUT = torch.randint(0, 3, (2, LONG + NEW), generator=torch.Generator().manual_seed(0))


def four_dimensional(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.ndim)]


def traced(form: Form) -> tuple[fx.GraphModule, Any, fx.Node, dict[str, Any]]:
    """Return the graph of a form after `put_length_on_device`, its stub of a step, its mask and its arguments."""

    def function(past: Tensor, x: Tensor, p: Tensor) -> Any:
        keys = torch.cat([past, x], 2)
        i = torch.arange(past.shape[2], past.shape[2] + x.shape[2])[:, None]
        return four_dimensional(form(i, torch.arange(keys.shape[2]), p)), keys

    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, arguments: Any) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    given_names = list(inspect.signature(function).parameters)
    tensors = torch.zeros(2, 1, TRACED, 4), torch.zeros(2, 1, NEW, 4), INPUT[:, : TRACED + NEW].clone()
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(tensors[0], 2)
    torch._dynamo.mark_dynamic(tensors[2], 1)
    torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    (gm,) = found
    nodes, values = placeholders(gm.graph), {f"l_{n}_": x for n, x in zip(given_names, tensors, strict=True)}
    values |= {node.name: symbolic_shapes.size_hint(example_value(node)) for node in nodes if is_size(node)}
    past = next(example_value(node) for node in nodes if node.name == "l_past_")
    with gm.graph.inserting_before(nodes[0]):
        length = gm.graph.placeholder("length")
    length.meta["example_value"] = torch.empty((), dtype=torch.int64, device="meta")
    sizes = SizeResolver((shapes.expr(past.shape[2]),), {}, NEW, 2, (past.shape[2] + NEW,))
    numbers = types.SimpleNamespace(number_or_node=lambda number: number)
    step: Any = types.SimpleNamespace(
        graph=gm.graph, sizes=sizes, length=length, size_nodes=numbers, windows=[None], placeholders=nodes
    )
    put_length_on_device(step)
    return gm, step, walk.results(gm.graph)[0], values


@functools.cache
def cut(name: str) -> tuple[MaskSubgraph, tuple[Tensor, ...]]:
    """Return a form as a function of the key's index, and the values that it binds after `LONG` tokens."""
    gm, step, mask, values = traced({**BY_INDEX, **BY_ENTRY, **ON_HOST, **REFUSED}[name])
    stored = walk.results(gm.graph)[1]
    nodes = {node for node in walk.ancestors(mask, [stored]) if node.name != "l_past_"}
    inputs = token_inputs(nodes, {node: values[node.name] for node in step.placeholders}, step.sizes)
    indices = [node for node in step.lengths.key_indices[None] if node in nodes]
    context = MaskContext(indices, inputs, [], [stored, stored], step.length, step.lengths.nodes, None)
    found = cut_mask(gm, mask, step.sizes, context)
    values["l_p_"] = INPUT
    arguments = [torch.tensor(LONG), *(values[node.name] for node in step.placeholders)]
    return found, splicing.extract(gm, list(found.subgraph.bound))(*arguments)


def whole(name: str) -> Tensor:
    """Return the model's mask of the new tokens after `LONG` tokens, [B or 1, H or 1, q, S]."""
    form = {**BY_INDEX, **BY_ENTRY}[name]
    return four_dimensional(form(torch.arange(LONG, LONG + NEW)[:, None], torch.arange(LONG + NEW), INPUT))


@pytest.mark.parametrize("name", [*BY_INDEX, *BY_ENTRY])
@settings(max_examples=3)
@given(
    orders=st.lists(st.permutations(range(-2, LONG + NEW)), min_size=4, max_size=4),
    groups=st.integers(1, 2),
    heads=st.integers(1, 2),
)
def test_a_slot_has_the_column_of_its_token(name: str, orders: list[list[int]], groups: int, heads: int) -> None:
    """Put tokens into slots in any order, and leave some free."""
    assume(groups in (1, heads))
    found, bound = cut(name)
    index = torch.tensor(orders)[: 2 * groups, :9].view(2, groups, 9).clamp(min=-1)
    entries = [entry.gather(INPUT, index) for entry in found.entries]
    assert bool(found.entries) == (name in BY_ENTRY)
    masks = found.on_slots(index, index - 1, heads, [torch.tensor(LONG), *entries, *bound], [])
    expected = whole(name)
    own = masks.shape[2] if expected.shape[1] > 1 else 1
    for row, head, group, slot in itertools.product(range(2), range(heads), range(own), range(9)):
        at = int(index[row, head % groups, slot])
        if at >= 0:
            ours = masks[row, head % masks.shape[1], group, :, slot]
            query_head = (head * own + group) % expected.shape[1]
            assert torch.equal(ours, expected[row % expected.shape[0], query_head, :, at])


@pytest.mark.parametrize("name", ON_HOST)
def test_what_reads_all_tokens_is_left_to_the_host(name: str) -> None:
    found, _ = cut(name)
    precomputed = [entry.node for entry in found.entries if entry.node.op != "placeholder"]
    assert [*found.host_values, *precomputed]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_key_by_key_is_refused_by_its_line(name: str) -> None:
    with pytest.raises(UnsupportedGraph, match=r"test_mask_subgraph\.py"):
        cut(name)


def test_equal_masks_have_equal_keys() -> None:
    keys = {name: cut(name)[0].key for name in (*BY_INDEX, *BY_ENTRY)}
    assert len(set(keys.values())) == len(keys)
    cut.cache_clear()
    assert cut("blocks")[0].key[0][:-1] == keys["blocks"][0][:-1]  # but for the nodes that it binds


@given(axis=st.integers(0, 2), indices=st.lists(st.integers(-1, 6), min_size=4, max_size=4))
def test_entries_are_gathered_along_the_tokens(axis: int, indices: list[int]) -> None:
    """Check that an index out of range, as of a free slot, has the entry of the nearest token."""
    shape = [2, 3]
    shape.insert(axis, 5)
    x = torch.randn(shape)
    entry = PerTokenInput(fx.Graph().placeholder("x"), axis, (*shape[:axis], 1, *shape[axis + 1 :]))
    assert entry.entry_shape == (2, 3)
    found = entry.gather(x, torch.tensor(indices).view(2, 1, 2))
    assert found.shape == (2, 1, 2, 2, 3)
    for number, index in enumerate(indices):
        assert torch.equal(found.flatten(0, 2)[number], x.select(axis, min(max(index, 0), 4)))
