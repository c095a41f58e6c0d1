"""The made-up conversation of a validation: arguments of a step for the model's own graph.

Tokens that went before have random keys and values, which lie in order.  Arguments are made when they are asked for,
and layers that are alike share their rows.
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

from kvpass.cache.slots import Layout, Slots
from kvpass.capture import sparse_index
from kvpass.capture.rotary import find_rotary
from kvpass.capture.sites import AttentionSite
from kvpass.fx import walk
from kvpass.fx.shapes import Sizes
from kvpass.fx.walk import value
from kvpass.lowering.formats import KVDtype, Rows, Sections, plain
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.result import StepRewrite
from kvpass.rewrite.rotary_slice import RotarySlice
from kvpass.rewrite.validation.interpreter import GraphRun, copied
from kvpass.torch_private import symbolic_shapes


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A step graph, the result of its rewrite, and the call at hand.

    Attributes:
        gm: the model's own graph.
        canonical: the same in canonical form; sites: its attention calls on caches.
        context, rewrite: what the passes left, and the result.
        layouts, slots: of each layer, at hand; nothing is written to them.
        arguments: of the call.
        pasts: for each layer the numbers of its keys and values among the arguments.
        padding_inputs: the inputs that mark padding, and their numbers.
        seen: the tokens before the call.
        kv_dtype: the format that rows are stored in.
    """

    gm: fx.GraphModule
    canonical: fx.GraphModule
    sites: Sequence[AttentionSite]
    context: StepContext
    rewrite: StepRewrite
    layouts: Sequence[Layout]
    slots: Sequence[Slots]
    arguments: tuple[Any, ...]
    pasts: Sequence[tuple[int, int]]
    padding_inputs: dict[fx.Node, int]
    seen: int
    kv_dtype: KVDtype | None = None

    @property
    def sizes(self) -> Sizes:
        return self.context.sizes

    @property
    def ranked(self) -> bool:
        return self.layouts[0].ranked

    @property
    def queries(self) -> int:
        """q of the call at hand."""
        return symbolic_shapes.size_hint(self.rewrite.queries)

    @functools.cached_property
    def most_keys(self) -> float:
        """The most keys of which sparse indices choose all: what they hide of more is not hidden on the slots."""
        masks = dict.fromkeys(each.mask for site in self.sites for each in site.all)
        found = [index.most for mask in masks for index in sparse_index.find(mask)]
        return min((most for most in found if most is not None), default=math.inf)

    def line(self, layer: int = 0) -> str:
        """The source line of a layer's attention."""
        return walk.source_line(self.sites[layer].call)


@dataclasses.dataclass(frozen=True)
class ConversationPlan:
    """What a conversation is to be like.

    Attributes:
        count: the tokens before those of the call.
        near: tokens of interest, which are held where not all are.
        gap: whether one token amid the others is padding, too, where padding is known.
        ids: what the whole numbers that belong to tokens are changed to: "changing" amid the conversation, or with the
            new tokens ("new"); None leaves them.
        pads: whether rows begin with padding, where padding is known.
        forgets: so many of the last tokens before the call are not held.
    """

    count: int
    near: tuple[int, ...] = ()
    gap: bool = False
    ids: Literal["changing", "new"] | None = None
    pads: bool = True
    forgets: int = 0

    @property
    def said(self) -> str:
        """Describes it, for an error."""
        return f"on a made-up conversation of {self.count} tokens"


class Conversation:
    """A made-up conversation, the same every time it is made.

    Attributes:
        valid: bool [B, L], which tokens are no padding.
        stored: for each layer how many of the last tokens the model's cache has.
        kept: for each layer which of these its slots hold, sorted, as numbers of tokens.
    """

    def __init__(self, step: StepCase, plan: ConversationPlan) -> None:
        self.step, self.plan, self.count = step, plan, plan.count
        self.batch = step.layouts[0].batch
        self.holders = walk.placeholders(step.gm.graph)
        self.cut = step.seen - plan.count
        self.valid = self._valid()
        self.stored = [min(plan.count, window or plan.count) for window in step.context.windows]
        self.kept = [self._kept(layer) for layer in range(len(step.layouts))]
        numbers = {index: symbolic_shapes.size_hint(size) for index, size in step.rewrite.lengths.items()}
        self.rewrite = dataclasses.replace(step.rewrite, queries=step.queries, lengths=numbers)
        self._rows: dict[Any, tuple[Rows, Rows]] = {}
        self._rotated: dict[Any, Tensor] = {}
        self.plain = self._plain()

    def _valid(self) -> Tensor:
        """Up to two tokens on the left of a row are padding, where that is known and no one gives positions.

        One more amid the others leaves ranks as they are only where keys are not rotated by rank.
        """
        valid = torch.ones(self.batch, self.count, dtype=torch.bool)
        if (
            self.plan.pads
            and self.step.context.padding_inputs.known
            and not (self.step.ranked and self.step.rewrite.positions)
        ):
            for row in range(self.batch):
                valid[row, : (row + 1) % (min(self.count, 2) + 1)] = False
                if self.plan.gap and not self.step.ranked and self.count >= 6:
                    valid[row, self.count // 2 + row % 2] = False
        return valid

    def _kept(self, layer: int) -> Tensor:
        """All that is stored if it fits, else tokens at both ends, those near some of interest, and others."""
        stored = self.stored[layer]
        first, room = self.count - stored, self.step.slots[layer].capacity - self.step.context.decodes
        if self.plan.forgets:  # at least one token is held
            last = max(self.count - self.plan.forgets, first + 1)
            return torch.arange(max(first, last - room), last)
        if stored <= room:
            return torch.arange(first, self.count)
        near = [token + by for token in self.plan.near for by in (0, -1, 1)]
        wanted = [self.count - 1, first, self.count - 2, first + 1, *near]
        drawn = torch.randperm(stored, generator=torch.Generator().manual_seed(stored)) + first
        order = [token for token in (*wanted, *drawn.tolist()) if first <= token < self.count]
        return torch.tensor(sorted(list(dict.fromkeys(order))[:room]))

    @property
    def evicted(self) -> bool:
        """Whether a layer holds fewer tokens than the model's cache has."""
        return any(len(kept) < stored for kept, stored in zip(self.kept, self.stored, strict=True))

    def columns(self, layer: int) -> Tensor | None:
        """Which of the keys of the model's attention the slots hold and the call adds; None for all."""
        kept, stored = self.kept[layer], self.stored[layer]
        if len(kept) == stored:
            return None
        new = torch.arange(stored, stored + self.step.queries)
        return torch.cat([kept - self.count + stored, new]).to(self.step.layouts[layer].device)

    def rows(self, layer: int) -> tuple[Rows, Rows]:
        """Keys and values [B, Hkv, held, D] as slots hold them; the same for layers that are alike."""
        layout, held = self.step.layouts[layer], self.stored[layer]
        shape = (layout.batch, layout.heads, held)
        kind = (layout.key_format, layout.value_format, layout.dtype, layout.kv_dtype, shape)
        if kind not in self._rows:
            drawn = torch.Generator().manual_seed(layout.key_dim)
            pair = [torch.randn(*shape, dim, generator=drawn) for dim in (layout.key_dim, layout.value_dim)]
            key, val = (x.to(layout.device, layout.dtype) for x in pair)
            stored = Rows.of(layout.key_format, key), Rows.of(layout.value_format, val)
            if layout.kv_dtype is None:
                stored = plain(stored[0].read_as(layout.dtype)), plain(stored[1].read_as(layout.dtype))
            self._rows[kind] = stored
        return self._rows[kind]

    def _plain(self) -> tuple[Any, ...]:
        """The arguments of the call, cut, without the past."""
        made = [self._cut(i, node) for i, node in enumerate(self.holders)]
        marks = self.step.padding_inputs.values()
        for i, argument in enumerate(made):
            if i not in marks and i not in self._pasts and self._is_ids(argument):
                made[i] = self._moved(i, argument)
        for node, index in self.step.padding_inputs.items():
            if node in self._known():
                made[index] = self._padded(made[index])
        for index in self.step.rewrite.positions:
            made[index] = self._counted(made[index])
        return tuple(made)

    def _known(self) -> set[fx.Node]:
        names = {node.name for node in self.step.context.padding_inputs.known}
        return {node for node in self.step.padding_inputs if node.name in names}

    def _is_ids(self, argument: Any) -> bool:
        whole = isinstance(argument, Tensor) and not isinstance(argument, torch.nn.Parameter) and argument.ndim > 0
        return whole and argument.dtype in (torch.int64, torch.int32) and argument.numel() > 0

    def _moved(self, index: int, ids: Tensor) -> Tensor:
        """Positions that count the tokens go on from this conversation; ids of tokens change if they are to."""
        new, total = self.step.queries, self.count + self.step.queries
        if ids.shape[-1] == new and bool((ids.amax(-1) == self.step.seen + new - 1).all()):
            return (ids - self.cut).clamp(min=0)
        if self.plan.ids is None or ids.shape[-1] != total or ids.is_cuda:
            return ids
        changed, since = ids.clone(), self.count // 2 if self.plan.ids == "changing" else self.count
        changed[..., :since], changed[..., since:] = ids.amax(), ids.amax() - 1 if int(ids.amax()) > 0 else 1
        return changed

    def _cut(self, index: int, node: fx.Node) -> Any:
        given, sizes = self.step.arguments[index], self.step.sizes
        if isinstance(given, int) and not isinstance(given, bool):
            return given - self.cut if sizes.grows(value(node)) else given
        if not isinstance(given, Tensor) or isinstance(given, torch.nn.Parameter) or index in self._pasts:
            return given
        for dim, size in enumerate(value(node).shape):
            if sizes.grows(size):
                given = given.index_select(dim, self._chosen(given.shape[dim]).to(given.device))
        return given

    @property
    def _pasts(self) -> dict[int, tuple[int, int]]:
        """For each argument that is a past its layer, and 0 for keys, 1 for values."""
        return {index: (i, kind) for i, pair in enumerate(self.step.pasts) for kind, index in enumerate(pair)}

    def _chosen(self, size: int) -> Tensor:
        """Which of the entries for all tokens are taken: some of those that went before, and all that are new.

        Where too few went before, theirs come several times.
        """
        seen, drawn = self.step.seen, torch.Generator().manual_seed(size)
        times = -(-self.count // seen)
        before = torch.cat([torch.randperm(seen, generator=drawn) for _ in range(times)])[: self.count]
        return torch.cat([before.sort().values, torch.arange(seen, size)])

    def _padded(self, column: Tensor) -> Tensor:
        """An input that marks padding, for this conversation; the new tokens are real."""
        made = torch.ones_like(column)
        valid = self.valid if column.ndim == 2 and column.shape[0] == self.batch else self.valid[-1:]
        made[..., : self.count] = valid.view(*column.shape[:-1], self.count).to(column.device, column.dtype)
        return made

    def _counted(self, positions: Tensor) -> Tensor:
        return torch.arange(self.count, self.count + self.step.queries).expand(positions.shape).to(positions)

    def argument(self, index: int) -> Any:
        """An argument of the model's own graph."""
        if index not in self._pasts:
            return copied(self.plain[index])
        layer, kind = self._pasts[index]
        rows = self.rows(layer)[kind].read_as(self.step.layouts[layer].dtype)
        if kind == 0 and self.step.ranked:
            rows = self._as_cached(layer, rows)
        return self.apart(rows, self.step.arguments[index].shape[1])

    def apart(self, rows: Tensor, heads: int) -> Tensor:
        """[B, 1, L, h * D] as the model's cache has it, [B, h, L, D]; see `kvpass.rewrite.computed_keys.joined`."""
        return rows if rows.shape[1] == heads else torch.unflatten(rows[:, 0], -1, (heads, -1)).transpose(1, 2)

    def _as_cached(self, layer: int, key: Tensor) -> Tensor:
        """Keys as the model caches them, which are rotated."""
        rotary = self.step.context.rotaries[layer].with_numbers()
        nodes = [*rotary.angles.bound, *rotary.rotate.bound]
        follows = self.positions_follow_padding(layer)
        kind = (rotary.key, tuple(node.name for node in nodes), key.shape, key.dtype, follows)
        if kind not in self._rotated:
            self._rotated[kind] = self._rotate(rotary, key, follows, self._evaluated(nodes))
        return self._rotated[kind]

    def positions_follow_padding(self, layer: int) -> bool:
        """Whether the model's own code counts real tokens, and not places in the padded sequence."""
        site = self.step.sites[layer]
        found = None if self.valid.all() else find_rotary(self.step.canonical, site)
        return found is not None and not self.step.padding_inputs.keys().isdisjoint(walk.ancestors(found.position))

    def _rotate(self, rotary: RotarySlice, key: Tensor, follows: bool, bound: list[Any]) -> Tensor:
        table = rotary.table(self.count, bound[: len(rotary.angles.bound)], key.device)
        valid = self.valid if follows else torch.ones_like(self.valid)
        rank = (valid.cumsum(-1) - 1).clamp(min=0)[:, None].to(key.device)
        return torch.cat(rotary.on_slots(Sections((key,)), rank, table, bound[len(rotary.angles.bound) :]), -1)

    def _evaluated(self, nodes: list[fx.Node]) -> list[Any]:
        """The values of nodes that depend on no token, such as frequencies."""
        found = {node.name: argument for node, argument in zip(self.holders, self.plain, strict=True)}
        wanted = [node for node in self.step.gm.graph.nodes if node.name in {n.name for n in nodes} - found.keys()]

        def keep(_: GraphRun, node: fx.Node, result: Any) -> Any:
            found[node.name] = copied(result)
            return result

        if wanted:
            GraphRun(self.step.gm, self._unrotated, dict.fromkeys(wanted, keep)).run_to(wanted[-1])
        return [found[node.name] for node in nodes]

    def _unrotated(self, index: int) -> Any:
        if index not in self._pasts:
            return copied(self.plain[index])
        layer, kind = self._pasts[index]
        return self.rows(layer)[kind].read_as(self.step.layouts[layer].dtype)
