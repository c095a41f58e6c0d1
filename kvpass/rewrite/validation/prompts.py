"""Validate a prompt: compare Dynamo's graph, its canonical form, and the graph with the policy's outputs.

They run in lockstep, see `kvpass.rewrite.validation.lockstep`.  A graph for all lengths runs on a short synthetic
prompt.  Its length and number of rows differ from the graph's other sizes, so that swapped dimensions show.  A graph
for one length runs on the current call, with one layer of each kind and some of the queries.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.fx import shapes, walk
from kvpass.fx.shapes import expr
from kvpass.fx.walk import example_value
from kvpass.rewrite.prompt import PromptRewrite, PromptRewriteInput, rewrite_prompt
from kvpass.rewrite.validation.coverage import last_new_kind, length_constants, smallest_table
from kvpass.rewrite.validation.interpreter import GraphRun, Visit, copy_unless_constant, written_inputs
from kvpass.rewrite.validation.lockstep import Lockstep, Validation, on_few_threads, run_validation
from kvpass.torch_private import symbolic_shapes

LENGTHS = (11, 13, 17, 19, 23, 9, 7)
"""Lengths of a synthetic prompt; the first that differs from the graph's other sizes is taken."""
ROWS = (3, 5, 2)
"""Numbers of rows, chosen in the same way."""
MAX_FULLY_COMPARED_TOKENS = 64
"""Prompts with more tokens than this, all rows together, run one layer of each kind only."""
MAX_LENGTH, MORE = 600, 3
"""The length of the longest prompts beyond constants of a graph, and the most such prompts."""
MAX_QUERIES = 24
"""The most queries of a call that are compared."""


@dataclasses.dataclass(frozen=True)
class PromptCase:
    """A prompt graph, as the model's own and as the canonical one that is rewritten."""

    dynamo_gm: fx.GraphModule
    given: PromptRewriteInput

    @functools.cached_property
    def padding_indices(self) -> list[int]:
        """The indices of the inputs that mark padding."""
        return [*map(walk.placeholders(self.given.canonical_gm.graph).index, self.given.padding_by_site[0])]

    def rewrite(self) -> PromptRewrite:
        """Return the rewritten graph, with the model's own logits."""
        plain = [each.with_plain_logits() if each.scales_logits else each for each in self.given.policies]
        return rewrite_prompt(dataclasses.replace(self.given, policies=plain))

    @functools.cached_property
    def written_inputs(self) -> frozenset[int]:
        """The indices of the inputs to which the model's own graph writes."""
        return written_inputs(self.dynamo_gm)


def validate_prompt(prompt: PromptCase, arguments: tuple[Any, ...]) -> Validation:
    """Run the graphs and compare them.

    Raises:
        UnsupportedGraph: they differ; the message names the first attention call that does.
    """
    with on_few_threads(prompt.dynamo_gm.graph):
        return run_validation(
            _calls(prompt, arguments),
            lambda _: _longer_prompts(prompt, arguments),
            functools.partial(_compare, prompt),
            "prompts",
            "no call was tried",
        )


def _longer_prompts(prompt: PromptCase, arguments: tuple[Any, ...]) -> Iterator[_ComparedCall]:
    """Yield prompts beyond the constants of the graph."""
    lengths = [number + 2 for number in length_constants(prompt.dynamo_gm.graph) if LENGTHS[0] < number <= MAX_LENGTH][
        -MORE:
    ]
    if example_value(prompt.given.sites[0].query).device.type != "cpu":  # a lookup out of range cannot be caught there
        lengths = [number for number in lengths if number <= smallest_table(prompt.dynamo_gm.graph)]
    yield from _make_prompts(prompt, arguments, lengths, 2)


@dataclasses.dataclass(frozen=True)
class _ComparedCall:
    """A prompt on which the graphs are compared.

    Attributes:
        real: bool [B or 1, q], false for padding.
        written: the indices of the arguments to which the graphs write.
    """

    arguments: tuple[Any, ...]
    rows: int
    query_len: int
    real: Tensor
    label: str
    written: frozenset[int]

    def argument(self, number: int) -> Any:
        return copy_unless_constant(self.arguments[number], number in self.written)


def _calls(prompt: PromptCase, arguments: tuple[Any, ...]) -> Iterator[_ComparedCall]:
    """Yield synthetic prompts, if the graph serves other sizes, then the current call."""
    yield from _make_prompts(prompt, arguments, LENGTHS, max(ROWS))
    current = shapes.measure_symbols(prompt.given.canonical_gm.graph, arguments)
    call = _prompt_call(prompt, arguments, current, "on a prompt")
    if call is not None:
        yield call


def _make_prompts(
    prompt: PromptCase, arguments: tuple[Any, ...], lengths: Sequence[int], most_rows: int
) -> Iterator[_ComparedCall]:
    """Yield prompts of some lengths, if the graph serves them."""
    inputs = walk.placeholders(prompt.given.canonical_gm.graph)
    current = shapes.measure_symbols(prompt.given.canonical_gm.graph, arguments)
    for sizes in _other_sizes(prompt, inputs, current, lengths, most_rows):
        changed = tuple(_resize(node, x, sizes) for node, x in zip(inputs, arguments, strict=True))
        call = _prompt_call(prompt, _with_padding(prompt, changed), sizes, "on a synthetic prompt")
        if call is not None:
            yield call


def _other_sizes(
    prompt: PromptCase, inputs: Sequence[fx.Node], current: dict[Any, int], lengths: Sequence[int], most_rows: int
) -> Iterator[dict[Any, int]]:
    """Yield sizes of synthetic prompts that the guards of the graph allow, each length once.

    A symbol that equals the length, or else the number of rows, in the current call changes with it.  Inputs that mark
    padding must have one row, or all rows.
    """
    site = prompt.given.sites[0]
    length, rows = expr(site.query_len), expr(example_value(site.key).shape[0])
    if not length.is_Symbol or length not in current or site.past_key is not None:
        return
    guards = shapes.guards(prompt.given.canonical_gm.graph)
    taken = {
        size
        for node in (site.query, site.key, site.value)
        for size in example_value(node).shape
        if isinstance(size, int)
    }
    variable = rows.is_Symbol and rows in current
    counts = [x for x in ROWS if x not in taken and x <= most_rows] + [current[rows]] if variable else [0]
    for new in (x for x in lengths if x not in taken):
        for count in (x for x in counts if x != new):
            new_rows = {symbol: count for symbol, number in current.items() if variable and number == current[rows]}
            longer = {
                symbol: new for symbol, number in current.items() if symbol == length or number == current[length]
            }
            sizes = {**current, **new_rows, **longer, **({rows: count} if variable else {})}
            allowed = symbolic_shapes.are_true(guards, sizes) and all(_in_range(node, sizes) for node in inputs)
            padding_inputs = [inputs[index] for index in prompt.padding_indices]
            if allowed and all(_marks_rows(node, example_value(site.key).shape[0], sizes) for node in padding_inputs):
                yield sizes
                break


def _marks_rows(node: fx.Node, rows: Any, sizes: dict[Any, int]) -> bool:
    """Return whether an input that marks padding has one row, or the number of rows of the prompt."""
    return math.prod(shapes.number(size, sizes) for size in example_value(node).shape[:-1]) in (
        1,
        shapes.number(rows, sizes),
    )


def _in_range(node: fx.Node, sizes: dict[Any, int]) -> bool:
    """Return whether the ranges of an input's symbols allow some values."""
    shape = example_value(node).shape if walk.is_tensor(node) else (example_value(node),)
    symbols = [size for size in shape if isinstance(size, torch.SymInt)]
    return all(symbolic_shapes.may_equal(size, shapes.number(size, sizes)) for size in symbols)


def _resize(node: fx.Node, argument: Any, sizes: dict[Any, int]) -> Any:
    """Return an argument at other sizes: its entries repeat, and positions continue."""
    if isinstance(example_value(node), torch.SymInt):
        return shapes.number(node, sizes)
    if not isinstance(argument, Tensor) or not symbolic_shapes.symbols(example_value(node)):
        return argument
    for dim, size in enumerate(example_value(node).shape):
        size = shapes.number(size, sizes)
        if size != argument.shape[dim]:
            indices = torch.arange(size, device=argument.device)
            is_count = argument.dtype == torch.int64 and bool((argument.diff(dim=dim) == 1).all())
            is_count = is_count and argument.shape[dim] > 1
            selected = argument.index_select(dim, indices % max(argument.shape[dim], 1))
            shape = [-1 if d == dim else 1 for d in range(selected.ndim)]
            argument = argument.narrow(dim, 0, 1) + indices.view(shape) if is_count else selected
    return argument


def _with_padding(prompt: PromptCase, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pad each row on its left by a different number of tokens, and later rows also in the middle."""
    padded = list(arguments)
    for index in prompt.padding_indices:
        column = torch.ones_like(padded[index])
        for row, entries in enumerate(column.reshape(-1, column.shape[-1])):
            entries[: (row + 1) % 3] = 0
            entries[5 : 5 + min(row, 1)] = 0
        padded[index] = column
    return tuple(padded)


def _prompt_call(
    prompt: PromptCase, arguments: tuple[Any, ...], sizes: dict[Any, int], label: str
) -> _ComparedCall | None:
    """Return a call with these arguments; None if its sizes are unknown."""
    site = prompt.given.sites[0]
    try:
        rows, query_len = shapes.number(example_value(site.key).shape[0], sizes), shapes.number(site.query_len, sizes)
    except TypeError:  # not all symbols are sizes of inputs
        return None
    real = torch.ones(1, query_len, dtype=torch.bool)
    for index in prompt.padding_indices:
        total = arguments[index].shape[-1] if site.past_key is not None else query_len
        column = arguments[index].reshape(-1, arguments[index].shape[-1])[:, total - query_len : total]
        real = real & (column != 0).cpu()
    return _ComparedCall(arguments, rows, query_len, real, f"{label} of {query_len} tokens", prompt.written_inputs)


def _compare(prompt: PromptCase, call: _ComparedCall, one_of_each: bool) -> None:
    """Run the three graphs on one prompt and compare them, up to the last new kind of layer if `one_of_each`."""
    device = example_value(prompt.given.sites[0].query).device
    is_cut = one_of_each or call.rows * call.query_len > MAX_FULLY_COMPARED_TOKENS
    last = last_new_kind(prompt.given.canonical_gm.graph, prompt.given.sites) if is_cut else None
    queries = None
    if call.query_len > MAX_QUERIES:
        sampled = torch.randperm(call.query_len, generator=torch.Generator().manual_seed(0))[: MAX_QUERIES - 2].tolist()
        queries = torch.tensor(sorted({*sampled, 0, call.query_len - 1}), device=device)
    graphs = (prompt.dynamo_gm, prompt.given.canonical_gm, prompt.given.sites)
    lockstep = Lockstep(*graphs, call.argument, call.query_len, call.label, last, queries, call.real.to(device))
    expected = lockstep.run_model()
    lockstep.run_canonical()
    if any(policy.renumbers for policy in prompt.given.policies):  # which also changes positions
        return
    rewrite = prompt.rewrite()
    visits: dict[fx.Node, Visit] = {}
    for _, site in lockstep.calls:
        for node in site.results:
            problem = "the prompt's attention is not the model's"
            visits[rewrite.calls[node.name]] = lockstep.at_call(site, node, problem)
    end = None if last is None else rewrite.calls[last.name]
    actual = lockstep.run("rewritten", GraphRun(rewrite.rewritten_gm, call.argument, visits, lockstep.caches), end)
    lockstep.compare_outputs(actual[: len(expected)], expected, ())
