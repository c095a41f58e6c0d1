"""Make the synthetic conversation of a validation: arguments of a step for the model's own graph.

Earlier tokens have random keys and values, which equal layers share.  Arguments are created on demand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture import sparse_index
from kvpass.capture.canonical import attention_calls
from kvpass.capture.rotary import find_rotary
from kvpass.fx import splicing, walk
from kvpass.fx.walk import example_value
from kvpass.lowering.formats import EncodedVectors, Sections, plain
from kvpass.rewrite.computed_keys import split_heads
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.pipeline import StepRewrite
from kvpass.rewrite.rotary_subgraph import RotarySubgraph
from kvpass.rewrite.step_graph import StepRewriteInput
from kvpass.rewrite.validation.interpreter import copy_unless_constant, written_inputs
from kvpass.torch_private import symbolic_shapes


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A step graph, the result of its rewrite, and the current call.

    Attributes:
        dynamo_gm: the model's own graph.
        context, rewrite: the context that the passes shared, and the result.
        pasts: for each layer, the indices of its keys and values among the arguments.
    """

    dynamo_gm: fx.GraphModule
    context: StepContext
    rewrite: StepRewrite
    pasts: Sequence[tuple[int, int]]

    @property
    def given(self) -> StepRewriteInput:
        """The current call on the canonical graph; nothing writes to its slots."""
        return self.context.given

    @functools.cached_property
    def padding_indices(self) -> dict[fx.Node, int]:
        """The inputs that mark padding, and their indices."""
        placeholders = walk.placeholders(self.given.canonical_gm.graph)
        return {node: placeholders.index(node) for nodes in self.given.padding_inputs.by_layer for node in nodes}

    @functools.cached_property
    def written_inputs(self) -> frozenset[int]:
        """The indices of the inputs to which the model's own graph writes."""
        return written_inputs(self.dynamo_gm)

    @property
    def stores_unrotated_keys(self) -> bool:
        return self.context.stores_unrotated_keys

    @property
    def renumbers(self) -> bool:
        """True if cached tokens get other positions than in the model's own cache."""
        return self.stores_unrotated_keys or any(layout.policy.renumbers for layout in self.given.layouts)

    @property
    def query_len(self) -> int:
        """q of the current call."""
        return symbolic_shapes.size_hint(self.rewrite.signature.query_len)

    @functools.cached_property
    def most_keys(self) -> float:
        """The most keys of which sparse indices select all; on slots a sparse index hides no key."""
        masks = dict.fromkeys(each.mask for each in attention_calls(self.given.sites))
        indices = [index.limit for mask in masks for index in sparse_index.sparse_indices(mask)]
        return min((most for most in indices if most is not None), default=math.inf)


@dataclasses.dataclass(frozen=True)
class ConversationPlan:
    """The properties of a synthetic conversation.

    Attributes:
        count: the number of tokens before the new ones.
        tokens_of_interest: tokens that stay cached if not all tokens fit.
        has_gap: whether a token between others is padding, if padding is known.
        ids: where the integers that belong to tokens change: amid the conversation ("changing") or at the new tokens
            ("new"); None keeps them.
        pads_left: whether rows begin with padding, if padding is known.
        dropped: the number of last tokens before the new ones that are not cached.
    """

    count: int
    tokens_of_interest: tuple[int, ...] = ()
    has_gap: bool = False
    ids: Literal["changing", "new"] | None = None
    pads_left: bool = True
    dropped: int = 0

    @property
    def label(self) -> str:
        """The conversation in an error message."""
        return f"on a synthetic conversation of {self.count} tokens"


class Conversation:
    """A synthetic conversation; equal plans give equal conversations.

    Attributes:
        valid: bool [B, L], false for padding.
        stored: for each layer, how many of the last tokens the model's cache stores.
        kept: for each layer, the sorted indices of the tokens in its slots.
        arguments_without_past: the arguments without the past.
    """

    def __init__(self, case: StepCase, plan: ConversationPlan) -> None:
        self.case, self.plan, self.count = case, plan, plan.count
        self.batch = case.given.layouts[0].batch
        self.placeholders = walk.placeholders(case.dynamo_gm.graph)
        # For each argument that is a past, its layer, and 0 for keys or 1 for values.
        self._pasts = {index: (i, kind) for i, pair in enumerate(case.pasts) for kind, index in enumerate(pair)}
        self.tokens_cut = case.given.length - plan.count
        self.valid = self._valid()
        self.stored = [min(plan.count, window or plan.count) for window in case.context.windows]
        self.kept = [self._choose_kept(layer) for layer in range(len(case.given.layouts))]
        self.signature = case.rewrite.signature.with_numbers(symbolic_shapes.size_hint)
        self._vectors: dict[Any, tuple[EncodedVectors, EncodedVectors]] = {}
        self._rotated: dict[Any, Tensor] = {}
        self.arguments_without_past = self._plain_arguments()

    def _valid(self) -> Tensor:
        """Return which tokens are real: up to two on the left are padding, and one in the middle (`has_gap`)."""
        # Padding needs an input that marks it, and positions among the arguments would not count it.  A gap changes
        # ranks.
        valid = torch.ones(self.batch, self.count, dtype=torch.bool)
        has_positions = self.case.stores_unrotated_keys and self.case.context.rotations.positions
        if self.plan.pads_left and self.case.context.padding_inputs.ones_for_cached and not has_positions:
            for row in range(self.batch):
                valid[row, : (row + 1) % (min(self.count, 2) + 1)] = False
                if self.plan.has_gap and not self.case.stores_unrotated_keys and self.count >= 6:
                    valid[row, self.count // 2 + row % 2] = False
        inputs = [self.case.given.arguments[index] for index in self.case.padding_indices.values()]
        if any(column.numel() == column.shape[-1] for column in inputs):  # it marks the same tokens in every row
            valid[:] = valid[:1].clone()
        return valid

    def _choose_kept(self, layer: int) -> Tensor:
        """Return all stored tokens if they fit, else tokens at both ends, near tokens of interest, and random ones."""
        stored = self.stored[layer]
        capacity = min(each.capacity for each in self.case.given.slots[layer].by_class) - self.case.context.decodes
        first = self.count - stored
        if self.plan.dropped:  # at least one token is cached
            last = max(self.count - self.plan.dropped, first + 1)
            return torch.arange(max(first, last - capacity), last)
        if stored <= capacity:
            return torch.arange(first, self.count)
        neighbours = [token + offset for token in self.plan.tokens_of_interest for offset in (0, -1, 1)]
        preferred = [self.count - 1, first, self.count - 2, first + 1, *neighbours]
        random = torch.randperm(stored, generator=torch.Generator().manual_seed(stored)) + first
        order = [token for token in (*preferred, *random.tolist()) if first <= token < self.count]
        return torch.tensor(sorted(list(dict.fromkeys(order))[:capacity]))

    def key_indices(self, layer: int) -> Tensor | None:
        """Return the indices of the keys that are in the slots or new among the model's keys; None for all."""
        kept, stored = self.kept[layer], self.stored[layer]
        if len(kept) == stored:
            return None
        new = torch.arange(stored, stored + self.case.query_len)
        return torch.cat([kept - self.count + stored, new]).to(self.case.given.layouts[layer].device)

    def vectors(self, layer: int) -> tuple[EncodedVectors, EncodedVectors]:
        """Return keys and values [B, Hkv, stored, D] in the slots' formats; equal layers share them."""
        layout, stored_count = self.case.given.layouts[layer], self.stored[layer]
        shape = (layout.batch, layout.heads, stored_count)
        kind = (layout.key_format, layout.value_format, layout.dtype, layout.kv_dtype, shape)
        if kind not in self._vectors:
            generator = torch.Generator().manual_seed(layout.key_dim)
            pair = [torch.randn(*shape, dim, generator=generator) for dim in (layout.key_dim, layout.value_dim)]
            key, value = (x.to(layout.device, layout.dtype) for x in pair)
            stored = EncodedVectors.of(layout.key_format, key), EncodedVectors.of(layout.value_format, value)
            if layout.kv_dtype is None:
                stored = plain(stored[0].read_as(layout.dtype)), plain(stored[1].read_as(layout.dtype))
            self._vectors[kind] = stored
        return self._vectors[kind]

    def _plain_arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the call without the past, cut to the length of the conversation."""
        arguments = [self._cut_argument(i, node) for i, node in enumerate(self.placeholders)]
        marks = self.case.padding_indices.values()
        for i, argument in enumerate(arguments):
            if i not in marks and i not in self._pasts and self._is_ids(argument):
                arguments[i] = self._continue_ids(argument)
        for node, index in self.case.padding_indices.items():
            if node in self.case.given.padding_inputs.ones_for_cached:
                arguments[index] = self._mark_padding(arguments[index])
        for index in self.case.context.rotations.positions:
            counted = torch.arange(self.count, self.count + self.case.query_len)
            arguments[index] = counted.expand(arguments[index].shape).to(arguments[index])
        return tuple(arguments)

    def _is_ids(self, argument: Any) -> bool:
        is_input = isinstance(argument, Tensor) and not isinstance(argument, torch.nn.Parameter) and argument.ndim > 0
        return is_input and argument.dtype in (torch.int64, torch.int32) and argument.numel() > 0

    def _continue_ids(self, ids: Tensor) -> Tensor:
        """Make positions continue this conversation, and change token ids if the plan says so."""
        new, total = self.case.query_len, self.count + self.case.query_len
        if ids.shape[-1] == new and bool((ids.amax(-1) == self.case.given.length + new - 1).all()):
            return (ids - self.tokens_cut).clamp(min=0)
        if self.plan.ids is None or ids.shape[-1] != total or ids.is_cuda:
            return ids
        changed, start = ids.clone(), self.count // 2 if self.plan.ids == "changing" else self.count
        changed[..., :start], changed[..., start:] = ids.amax(), ids.amax() - 1 if int(ids.amax()) > 0 else 1
        return changed

    def _cut_argument(self, index: int, node: fx.Node) -> Any:
        argument, sizes = self.case.given.arguments[index], self.case.given.sizes
        if isinstance(argument, int) and not isinstance(argument, bool):
            return argument - self.tokens_cut if sizes.grows(example_value(node)) else argument
        if not isinstance(argument, Tensor) or isinstance(argument, torch.nn.Parameter) or index in self._pasts:
            return argument
        for dim in sizes.growing_dims(example_value(node)):
            argument = argument.index_select(dim, self._sample_entries(argument.shape[dim]).to(argument.device))
        return argument

    def _sample_entries(self, size: int) -> Tensor:
        """Return indices into entries for all tokens: some earlier ones, repeated if too few, and all new ones."""
        seen, generator = self.case.given.length, torch.Generator().manual_seed(size)
        times = -(-self.count // seen)
        before = torch.cat([torch.randperm(seen, generator=generator) for _ in range(times)])[: self.count]
        return torch.cat([before.sort().values, torch.arange(seen, size)])

    def plain_argument(self, index: int) -> Any:
        """Return an argument that is not a past, as a copy if a graph may write to it."""
        return copy_unless_constant(self.arguments_without_past[index], index in self.case.written_inputs)

    def _mark_padding(self, column: Tensor) -> Tensor:
        """Return an input that marks padding, for this conversation; the new tokens are real."""
        marks = torch.ones_like(column)
        marks[..., : self.count] = self.valid[: column.shape[:-1].numel()].view(*column.shape[:-1], self.count)
        return marks

    def argument(self, index: int, rotated: bool = True) -> Any:
        """Return an argument of the model's own graph; unrotated keys are for results that do not depend on them."""
        if index not in self._pasts:
            return self.plain_argument(index)
        layer, kind = self._pasts[index]
        vectors = self.vectors(layer)[kind].read_as(self.case.given.layouts[layer].dtype)
        if kind == 0 and self.case.stores_unrotated_keys and rotated:
            vectors = self._as_cached(layer, vectors)
        return split_heads(vectors, self.case.given.arguments[index].shape[1])

    def _as_cached(self, layer: int, key: Tensor) -> Tensor:
        """Return keys as the model caches them, rotated."""
        rotary = self.case.context.rotations.subgraphs[layer].with_numbers()
        nodes = [*rotary.angles.bound, *rotary.rotate.bound]
        follows = self.positions_follow_padding(layer)
        kind = (rotary.key, tuple(node.name for node in nodes), key.shape, key.dtype, follows)
        if kind not in self._rotated:
            self._rotated[kind] = self._rotate(rotary, key, follows, self._evaluate(nodes))
        return self._rotated[kind]

    def positions_follow_padding(self, layer: int) -> bool:
        """Return whether the model's own positions count real tokens only."""
        site = self.case.given.sites[layer]
        rotary = None if self.valid.all() else find_rotary(site)
        return rotary is not None and not self.case.padding_indices.keys().isdisjoint(walk.ancestors(rotary.position))

    def _rotate(self, rotary: RotarySubgraph, key: Tensor, follows: bool, bound: list[Any]) -> Tensor:
        table = rotary.table(self.count, bound[: len(rotary.angles.bound)], key.device)
        valid = self.valid if follows else torch.ones_like(self.valid)
        position = (valid.cumsum(-1) - 1).clamp(min=0)[:, None].to(key.device)
        return torch.cat(rotary.on_slots(Sections((key,)), position, table, bound[len(rotary.angles.bound) :]), -1)

    def _evaluate(self, nodes: list[fx.Node]) -> list[Any]:
        """Return the values of nodes that depend on no token, such as frequencies."""
        named = {node.name: node for node in self.case.dynamo_gm.graph.nodes}
        cut_gm = splicing.extract(self.case.dynamo_gm, [named[node.name] for node in nodes])
        inputs = enumerate(walk.placeholders(cut_gm.graph))
        return list(cut_gm.forward(*(self.argument(i, rotated=False) if node.users else None for i, node in inputs)))
