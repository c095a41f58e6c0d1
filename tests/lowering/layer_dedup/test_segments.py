"""Test where graphs are cut, and which segments are equal."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import transformers
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from transformers import DynamicCache

import kvpass
from kvpass import model_access
from kvpass.fx import walk
from kvpass.lowering.layer_dedup.segments import Segment, split
from kvpass.torch_private import symbolic_shapes
from tests.models import build, prompt, teacher_forced


def readers_of_slots(gm: fx.GraphModule) -> list[fx.Node]:
    """Return `StepRewrite.layers` of a rewritten step."""
    keys = [node for node in walk.placeholders(gm.graph) if re.fullmatch(r"slots_\d+_key", node.name)]
    return [min(node.users) for node in keys]


def steps_of(model: Any, policy: str, steps: list[int]) -> list[fx.GraphModule]:
    """Return the rewritten graphs of a run, without the prompt's."""
    inner, (ids, mask) = EagerAndRecordGraphs(), prompt(2, sum(steps), (3, 0))
    teacher_forced(model, ids, mask, steps, inspect=False, policy=policy, budget=8, inner=inner)
    return inner.graphs[1:]


def bodies(segments: list[Segment]) -> list[int]:
    """Return the kind of each segment, numbered in order of appearance."""
    kinds: dict[Any, int] = {}
    return [kinds.setdefault(segment.body, len(kinds)) for segment in segments]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_a_step_and_a_chunk_are_a_prologue_and_alike_layers_and_an_epilogue(policy: str) -> None:
    for gm in steps_of(build("Llama", layers=4), policy, [9, 1, 4]):
        segments = split(gm, readers_of_slots(gm))
        assert bodies(segments) == [0, 1, 1, 1, 1, 2]
        run = [node for segment in segments for node in segment.nodes]
        assert set(run) == {node for node in gm.graph.nodes if node.op not in ("placeholder", "output")}
        index = {node: i for i, node in enumerate(run)}
        assert len(run) == len(index)
        assert all(index[parent] < index[node] for node in run for parent in node.all_input_nodes if parent in index)


@pytest.mark.slow
def test_layers_of_two_kinds() -> None:
    model = build("Llama", layers=6)
    for layer in model.model.layers[1::2]:
        layer.self_attn.scaling /= 2
    gm = steps_of(model, "h2o", [9, 1])[0]
    assert bodies(split(gm, readers_of_slots(gm))) == [0, 1, 2, 1, 2, 1, 2, 3]


@pytest.mark.slow
def test_layers_of_which_each_has_a_scale_of_its_own_are_compiled_whole() -> None:
    config = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=512)
    gpt2 = steps_of(transformers.GPT2LMHeadModel(config).eval(), "h2o", [9, 1])[0]
    config.scale_attn_by_inverse_layer_idx = True
    scaled = steps_of(transformers.GPT2LMHeadModel(config).eval(), "h2o", [9, 1])[0]
    assert bodies(split(gpt2, readers_of_slots(gpt2))) == [0, 1, 1, 1, 2]
    assert split(scaled, readers_of_slots(scaled)) == []


def test_two_layers_are_compiled_whole() -> None:
    gm = steps_of(build("Llama"), "h2o", [9, 1])[0]
    assert len(readers_of_slots(gm)) == 2
    assert split(gm, readers_of_slots(gm)) == []


def whole(function: Callable[..., Any]) -> Segment:
    """Return all nodes of a function as one segment."""
    graph = fx.symbolic_trace(function).graph
    return Segment.of([node for node in graph.nodes if node.op not in ("placeholder", "output")])


DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "one operand twice": (lambda a, b: (a + a, b), lambda a, b: (a + b, b)),
    "order of operands": (lambda a, b: ((a - b) * a,), lambda a, b: ((a - b) * b,)),
    "numbers": (lambda a, b: (a * 0.5,), lambda a, b: (a * 0.25,)),
    "types of numbers": (lambda a, b: (a * 1,), lambda a, b: (a * 1.0,)),
    "truth is no number": (lambda a, b: (a.sum(0, keepdim=True),), lambda a, b: (a.sum(0, keepdim=1),)),
    "dtypes": (lambda a, b: (a.to(torch.float64),), lambda a, b: (a.to(torch.int32),)),
    "negative zero": (lambda a, b: (a + 0.0,), lambda a, b: (a + -0.0,)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_functions_are_told_apart(case: str) -> None:
    one, other = map(whole, DIFFERENT[case])
    assert one.body != other.body
    assert one.body == whole(DIFFERENT[case][0]).body


class Held(torch.nn.Module):
    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return x + self.held


def test_constants_are_compared_by_their_contents() -> None:
    one, same, other, wide = (
        whole(Held(held)).body for held in (torch.ones(2), torch.ones(2), torch.tensor([1.0, 2.0]), torch.ones(1, 2))
    )
    assert one == same
    assert one != other
    assert one != wide


def test_operands_are_keyed_by_layout_and_dtype_alone() -> None:
    segment = whole(lambda a, b: (a + b,))
    plain, transposed = torch.randn(3, 3), torch.randn(3, 3).T
    shifted = torch.randn(10)[1:].view(3, 3)
    keys = [segment.key([plain, b]) for b in (plain, torch.randn(3, 3), transposed, shifted, plain.double())]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    assert segment.key([plain, torch.nn.Parameter(plain)]) != keys[0]


class Pair(Tensor):
    """A tensor subclass with two tensors and other attributes."""

    parts: tuple[Tensor, Tensor]
    context: Any

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor, context: Any) -> Pair:
        made: Pair = Tensor._make_wrapper_subclass(cls, first.shape, dtype=torch.float32)
        made.first, made.second, made.context = first, second, context  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], self.context

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, *_: Any) -> Pair:
        return Pair(**inner, context=context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_wrapper_tensors_are_keyed_by_the_wrapped_tensors() -> None:
    segment, one, codes = whole(lambda a: (a + a,)), torch.ones(2), torch.ones(2, dtype=torch.int8)
    same = [Pair(codes, one, {"block": [1, 2], "of": None}) for _ in range(2)]
    others = [
        one,
        Pair(codes, one.double(), {"block": [1, 2], "of": None}),
        Pair(codes, torch.ones(4)[::2], {"block": [1, 2], "of": None}),
        Pair(codes, one, {"block": [1, 4], "of": None}),
        Pair(codes, one, {"block": [1, True], "of": None}),
        Pair(codes, one, {"block": [1, 2], "of": object()}),
        Pair(codes, one, {"block": [1, 2], "of": {1}}),  # a set cannot be hashed
        Pair(codes, one, {"block": [1, 2], "of": torch.ones(2).numpy()}),  # `==` gives no bool
        Pair(codes, one, {"block": [1, 2], "of": Listed([1])}),  # claims to be hashable, but is not
    ]
    first, second, *rest = (segment.key([each]) for each in (*same, *others))
    assert first == second
    assert len({first, *rest}) == 10


class Made(Pair):
    """A subclass whose context is created at every access."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], {self.context}


def test_contexts_are_compared_by_value() -> None:
    segment, one = whole(lambda a: (a + a,)), torch.ones(2)
    keys = [segment.key([Made(one, one, number // 2)]) for number in range(60)]
    assert len(set(keys)) == 30


@dataclasses.dataclass(frozen=True)
class Listed:
    block: list[int]


def test_one_alike_size_may_replace_another() -> None:
    """Check that one of two interchangeable sizes may replace the other everywhere.

    Segments that use both differ from those that use one, and other sizes differ from both.
    """
    sizes = symbolic_shapes.SymbolicSizes([5, 6, 7], set(), exchangeable=(0, 1))
    one, other, third = (sizes.size(symbol) for symbol in sizes.symbols)
    segment = whole(lambda x, y: x.sum() + y.sum())

    def key(*shape: Any) -> Any:
        return segment.key([sizes.like(part, None) for part in shape], sizes.exchangeable)

    assert key((2, one), (one,)) == key((2, other), (other,))
    assert key((2, one), (other,)) != key((2, other), (one,))
    assert key((2, one), (one,)) != key((2, one), (other,))
    assert key((2, one), (one,)) != key((2, third), (third,))
    assert key((2, one), (2 * one,)) == key((2, other), (2 * other,)) != key((2, one), (3 * one,))
    assert segment.key([sizes.like((one,), None)]) != segment.key([sizes.like((other,), None)])


def test_segments_are_equal_whatever_the_names() -> None:
    def one(a: Tensor, b: Tensor) -> tuple[Tensor]:
        return (a + b * 2,)

    def other(first: Tensor, second: Tensor) -> tuple[Tensor]:
        return (first + second * 2,)

    assert whole(one).body == whole(other).body


def cut_by_hand(function: Callable[..., Any], *examples: Tensor) -> list[Segment]:
    """Trace a function in which each call of `tanh` is the anchor of a layer."""
    gm = fx.symbolic_trace(function)
    Recorder(gm).run(*examples)
    return split(gm, [node for node in gm.graph.nodes if node.target is torch.tanh])


class Recorder(fx.Interpreter):
    """Records the value of each node, like Dynamo."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def layers(x: Tensor, between: Callable[[Tensor, int], Tensor]) -> Tensor:
    for number in range(4):
        x = between(torch.tanh(x * 2) + x, number)
    return x


def test_a_layer_ends_where_one_value_is_alive() -> None:
    segments = cut_by_hand(lambda x: layers(x, lambda y, _: y), torch.randn(3))
    assert [len(segment.nodes) for segment in segments] == [3, 3, 3, 3]
    assert bodies(segments) == [0, 0, 0, 0]
    assert all(len(segment.operands) == 1 for segment in segments)


def test_values_read_by_all_layers_are_computed_before_the_first() -> None:
    def function(x: Tensor) -> Tensor:
        table = None
        for _ in range(4):
            y = x * 2
            table = x.cos() if table is None else table
            x = torch.tanh(y + table) + x
        return x

    segments = cut_by_hand(function, torch.randn(3))
    assert bodies(segments) == [0, 1, 1, 1, 1]
    assert [node.target for node in segments[0].nodes] == ["cos"]


def test_memory_that_is_written_to_keeps_a_graph_whole() -> None:
    """Check a total that every layer writes in place, so that the compiler must see all layers in one graph."""

    def function(x: Tensor) -> Any:
        total = torch.zeros_like(x)
        return layers(x, lambda y, _: y + total.add_(y)), total

    def harmless(x: Tensor) -> Any:
        return layers(x, lambda y, _: y + torch.zeros_like(y).add_(y))

    assert cut_by_hand(function, torch.randn(3)) == []
    assert len(cut_by_hand(harmless, torch.randn(3))) == 4


@torch.library.custom_op("kvpass_tests::add_to", mutates_args={"total"})
def add_to(x: Tensor, total: Tensor) -> Tensor:
    """Write to the second argument, and return a new tensor."""
    total += x
    return total * 2


@add_to.register_fake
def _(x: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(total)


def by_out(y: Tensor, into: Tensor) -> Tensor:
    return torch.mul(y, 2.0, out=into)


def by_method(y: Tensor, into: Tensor) -> Tensor:
    return into.copy_(y)


def by_packet(y: Tensor, into: Tensor) -> Tensor:
    made: Tensor = torch.ops.kvpass_tests.add_to(y, into)
    return made


def by_overload(y: Tensor, into: Tensor) -> Tensor:
    made: Tensor = torch.ops.kvpass_tests.add_to.default(y, into)
    return made


WRITES = [by_out, by_method, by_packet, by_overload]


@pytest.mark.parametrize("write", WRITES)
def test_the_memory_that_is_written_is_that_of_the_argument_which_is_written(write: Callable[..., Tensor]) -> None:
    """Test writes of which only one is to the first argument: within a layer, to a view, and to a tensor of all."""

    def harmless(x: Tensor) -> Any:
        return layers(x, lambda y, _: y + write(y, torch.zeros_like(y)))

    def through_a_view(x: Tensor) -> Any:
        return layers(x, lambda y, _: y + write(y, torch.zeros_like(y)[None][0]))

    def shared(x: Tensor) -> Any:
        total = torch.zeros_like(x)
        return layers(x, lambda y, _: y + write(y, total)), total

    assert len(cut_by_hand(harmless, torch.randn(3))) == 4
    assert len(cut_by_hand(through_a_view, torch.randn(3))) == 4
    assert cut_by_hand(shared, torch.randn(3)) == []


@pytest.mark.parametrize("write", [by_out, by_overload])
def test_layers_that_write_to_another_argument_than_the_first_are_compiled(write: Callable[..., Tensor]) -> None:
    """Compile such a model with Inductor, layer by layer."""
    model = build("Llama", layers=4)
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda hidden, own=mlp: type(own).forward(own, hidden) + write(hidden, torch.zeros_like(hidden))
    ids, _ = prompt(1, 9, ())
    with torch.no_grad():
        wanted = model(ids).logits
        kvpass.compile(model, "full")
        cache, made = DynamicCache(config=model.config), []
        for part in ids.split([7, 1, 1], 1):
            out = model_access.call_model(model, part, cache)
            cache = model_access.cache_of_output(out)
            made.append(out.logits)
    torch.testing.assert_close(torch.cat(made, 1), wanted, atol=1e-4, rtol=1e-4)


def test_a_view_that_is_written_through_keeps_a_graph_whole() -> None:
    def function(x: Tensor, kept: Tensor) -> Any:
        part = kept[1:]
        return layers(x, lambda y, n: y + part.add_(1)[0] if n == 3 else y), kept

    assert cut_by_hand(function, torch.randn(3), torch.randn(2, 3)) == []
    assert len(cut_by_hand(lambda x, kept: layers(x, lambda y, _: y + kept[0]), torch.randn(3), torch.randn(2, 3))) == 4
