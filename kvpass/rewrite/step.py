"""The step graph: attention on slots, and nothing left that grows."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass import compat, graphs, selection
from kvpass.capture import rotary as rotaries
from kvpass.capture import tokens
from kvpass.capture.sites import AttentionSite
from kvpass.errors import UnsupportedGraph
from kvpass.expansion import Expansion, cut_expansion
from kvpass.graphs import Sizes, placeholders, value
from kvpass.instantiate import Around, Entry, MaskSlice, RotarySlice, cut_mask, cut_rotary
from kvpass.lowering.turns import Pairs, Turn
from kvpass.lowering.written import written_out
from kvpass.rewrite import renumber
from kvpass.rewrite.lengths import OnLength
from kvpass.rewrite.masks import ColumnMask, MaskOnSlots, SlicedMask
from kvpass.selection import Selection
from kvpass.slots import NAMES, Layout, Slots
from kvpass.step import Attended, Site, decode_step, extend_step, read_step


@dataclasses.dataclass
class StepRewrite:
    """A step graph on slots.

    Attributes:
        gm: takes the slots' tensors of every layer, the `weights`, then `columns`, `entries`,
            what is computed `beside`, and the `inputs`.
        weights: the policy's own, on the device of the slots.
        inputs: which of Dynamo's arguments it still takes.
        loose: which of those came with strides that may change from call to call.
        columns: which of Dynamo's arguments it takes the new tokens' columns of.
        entries: what it looks up for the token of each slot.
        outputs: for each output of the original graph its place in the rewritten one's, None for a cache.
        lengths: outputs of the original graph that are the tokens seen before, plus a number.
        chunks: for each site of an extend graph the places of stored key, value, real and statistics.
        beside: computes, from Dynamo's arguments and uncompiled, what takes all tokens to compute: first the `grown`
            outputs of the original graph, such as a mask that another graph goes on with, then `asides` further
            inputs, then what entries are looked up in.
        unread: outputs of the original graph that grow and that nothing reads on slots: the argument that each is
            longer than, and the dimension.
        real: the place of bool [B, 1], which of the tokens were real, if the graph leaves counting to its caller.
        positions: which of Dynamo's arguments are positions that ranks have taken the place of.
    """

    gm: fx.GraphModule
    weights: list[Tensor]
    inputs: list[int]
    loose: set[int]
    columns: list[int]
    entries: list[LookedUp]
    queries: int
    outputs: list[int | None]
    lengths: dict[int, int]
    chunks: list[list[int]]
    beside: fx.GraphModule | None
    grown: list[int]
    asides: int = 0
    unread: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    real: int | None = None
    positions: tuple[int, ...] = ()

    def count(self, slots: list[Slots], results: Sequence[Any]) -> None:
        """Count the tokens of a step, if its graph leaves that to its caller: see `_leave_counting`."""
        if self.real is not None:
            new = results[self.real][:, 0].long()
            torch._foreach_add_([layer.seen for layer in slots], [new] * len(slots))
            torch._foreach_add_([layer.length for layer in slots], 1)

    def on_all_tokens(self, arguments: tuple[Any, ...]) -> list[Any]:
        """What `beside` gives."""
        return list(self.beside(*arguments)) if self.beside else []

    def flat(self, slots: list[Slots], arguments: tuple[Any, ...], aside: list[Any], seen: int) -> list[Any]:
        """The rewritten graph's arguments: from the slots, Dynamo's arguments, and `on_all_tokens`.

        Args:
            seen: the tokens before these.
        """
        dense = torch.contiguous_format
        flat: list[Any] = [tensor for layer in slots for tensor in layer.tensors()]
        flat += self.weights
        for place in self.columns:
            column = arguments[place]
            start = min(seen, column.shape[-1] - self.queries)  # it ends with the new tokens, or has room for more
            flat.append(column.narrow(-1, start, self.queries).clone(memory_format=dense))
        further = aside[len(self.grown) :]
        for entry in self.entries:
            full = arguments[entry.place] if entry.given else further[self.asides + entry.place]
            flat.append(full if entry.layer is None else entry.of(full, slots[entry.layer], self.queries))
        flat += further[: self.asides]
        for place in self.inputs:
            flat.append(arguments[place].clone(memory_format=dense) if place in self.loose else arguments[place])
        return flat

    @property
    def repeats(self) -> bool:
        """Whether a later step of one token can do with the same arguments."""
        return not (self.beside or self.entries)


@dataclasses.dataclass(frozen=True)
class LookedUp:
    """An entry for each slot of a layer, see `Entry`.

    Attributes:
        layer: whose slots; None for the tensor itself, in which a reference looks up.
        given: whether the tensor is one of Dynamo's arguments, and not computed beside the graph.
        place: among these, or among what is looked up of those.
    """

    layer: int | None
    entry: Entry
    given: bool
    place: int

    def of(self, full: Tensor, slots: Slots, queries: int) -> Tensor:
        """[B, H', C + q, ...]: of the slots, then of the new tokens."""
        new = slots.length[:, None] + torch.arange(queries, device=slots.length.device)
        places = torch.cat([slots.index, new[:, None].expand(-1, slots.index.shape[1], -1)], -1)
        return self.entry.at(full, places.to(full.device))


@dataclasses.dataclass(frozen=True)
class Telling:
    """Which inputs tell padding from real tokens, see `kvpass.capture.hiding`.

    Attributes:
        sites: for each site those that do in all masks on its cache.
        known: those of which every held token is known to have an entry of one.
    """

    sites: tuple[tuple[fx.Node, ...], ...]
    known: frozenset[fx.Node]

    def moved(self, to: dict[fx.Node, fx.Node]) -> Telling:
        """The same in a copy of the graph."""
        sites = tuple(tuple(to[node] for node in told) for told in self.sites)
        return Telling(sites, frozenset(to[node] for node in self.known))


class StepRewriter:
    """Rewrites one step graph for layouts and arguments that are at hand."""

    def __init__(
        self,
        gm: fx.GraphModule,
        sites: list[AttentionSite],
        layouts: list[Layout],
        slots: list[Slots],
        arguments: tuple[Any, ...],
        sizes: Sizes,
        seen: int,
        windows: tuple[int | None, ...],
        telling: Telling,
        sweep: bool = False,
    ) -> None:
        """`seen` is the tokens before this call, `windows` how many of them the model stores if not all."""
        copy, moved = compat.copy_graph_module(gm)
        self.original, self.gm, self.graph = gm, copy, copy.graph
        self.sites = [site.moved(moved) for site in sites]
        self.layouts, self.slots = layouts, slots
        self.holders = placeholders(self.graph)
        self.actual = dict(zip(self.holders, arguments, strict=True))
        self.rows, self.seen, self.windows = layouts[0].rows, seen, windows
        self.sizes, self.queries = sizes, sizes.queries
        self.sweep = sweep
        # A prompt that is still held whole takes its first token in as a chunk.
        self.decodes = self.queries == 1 and all(s.capacity == x.capacity for s, x in zip(slots, layouts, strict=True))
        self.ranked = layouts[0].ranked
        self._masks: dict[tuple[fx.Node, tuple[fx.Node, ...]], MaskSlice] = {}
        self._firsts: dict[int, fx.Node] = {}
        self._traced: dict[Any, fx.GraphModule] = {}
        self._columns: dict[fx.Node, fx.Node] = {}
        self._entries: dict[tuple[int, Entry], fx.Node] = {}
        self._asides: dict[fx.Node, fx.Node] = {}
        self._real: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.telling = telling.moved(moved)
        self._tables: dict[Any, list[fx.Node]] = {}
        self._mixing: dict[Any, Pairs | None] = {}
        self._unread: dict[int, tuple[int, int]] = {}
        self._first_rank: fx.Node | None = None
        self.counted: fx.Node | None = None
        self.given_positions: list[int] = []
        self.replaced: dict[str, fx.Node] = {}

    @property
    def decodes_on_gpu(self) -> bool:
        return self.decodes and self.layouts[0].device.type == "cuda"

    def run(self) -> StepRewrite:
        """Rewrite everything; see the class of the result."""
        first = self.holders[0]
        with self.graph.inserting_before(first):
            self.inputs = [
                [self.graph.placeholder(f"slots_{i}_{n}") for n in self._names(i)] for i in range(len(self.sites))
            ]
        self._own = {node for nodes in self.inputs for node in nodes}
        for nodes, slots in zip(self.inputs, self.slots, strict=True):
            for node, tensor in zip(nodes, slots.tensors(), strict=True):
                compat.as_new_input(node, tensor, in_place=True)
        self.on_weights = self._take_weights(first)
        with self.graph.inserting_after(self.holders[-1]):
            counter = self.graph.call_function(operator.getitem, (self.inputs[0][6], 0))
        with self.graph.inserting_after(counter):
            self.length = self.graph.call_method("clone", (counter,))  # the counter moves on with the first layer
        for node in (counter, self.length):
            node.meta["example_value"] = torch.empty((), dtype=torch.int64, device="meta")
        on_length = OnLength(self.graph, self.sizes, self.length)
        lookups = on_length.slices()
        self.counts = {w: [*tokens.iotas(self.graph.nodes, self.sizes, w), *lookups] for w in set(self.windows)}
        on_length.positions()
        self.on_length = on_length.computed
        self.pieces = self._cut_rotaries()  # after the above, which puts other nodes in the place of positions
        if self.layouts[0].policy.renumbers:
            self._renumber()
        self.places = self._copy_places()
        chunks = [self._replace(i) for i in range(len(self.sites))]
        if self.decodes_on_gpu:
            self._leave_counting()
        return self._finish(chunks)

    def _copy_places(self) -> list[fx.Node]:
        """Copies of the slots that the layers write to, on a GPU and for policies that merge.

        Such a policy writes to K and V twice, and to the compiler the second write has read all that the first one
        did: the number of the free slot would be overwritten after it, by a kernel of its own.
        """
        if not self.decodes_on_gpu or not any(layout.policy.merges for layout in self.layouts):
            return []
        free = [nodes[NAMES.index("free")] for nodes in self.inputs]

        def function(*numbers: Tensor) -> list[Tensor]:
            return [written_out(number.clamp(min=0)) for number in numbers]  # a plain copy would be optimized away

        return self._computed(function, free, self.sites[0].call, "kvpass_places")

    def _computed(
        self, function: Callable[..., list[Tensor]], nodes: list[fx.Node], before: fx.Node, name: str
    ) -> list[fx.Node]:
        """The nodes of what a function computes from the values of nodes, spliced in before another node."""
        with compat.fake_mode() as fake:
            traced = compat.trace(function, [fake(self._example(node)) for node in nodes])
        return graphs.splice(self.gm, traced, nodes, before, name)

    def _leave_counting(self) -> None:
        """Leave the counters of all layers to whoever runs the graph, which is two launches instead of two a layer."""
        counters = [node for nodes in self.inputs for node in (nodes[5], nodes[6])]  # seen and length
        for node in counters:
            for user in list(node.users):
                if compat.mutates(user) and user.args[0] is node:
                    assert not user.users
                    self.graph.erase_node(user)
        self.counted = next(iter(self._real.values()))

    def _take_weights(self, first: fx.Node) -> list[fx.Node]:
        """New inputs for what the policy aligns rows with."""
        policy, device = self.layouts[0].policy, self.layouts[0].device
        self.weights = [] if policy.aligns == "never" else [tensor.to(device) for tensor in policy.weights()]
        with self.graph.inserting_before(first):
            nodes = [self.graph.placeholder(f"kvpass_weight_{i}") for i in range(len(self.weights))]
        for node, tensor in zip(nodes, self.weights, strict=True):
            compat.as_new_input(node, tensor, in_place=True)
        self._own.update(nodes)
        return nodes

    def _names(self, layer: int) -> list[str]:
        return self.slots[layer].names

    # -- sites -----------------------------------------------------------------------------------------

    def _replace(self, number: int) -> list[fx.Node]:
        """Splice a layer's step in, in place of its attention call, and those of the layers that share its cache."""
        site = self.sites[number]
        stored = self._rotary(number).raw if self.ranked else site.key
        new = [stored if self.decodes else site.key, site.value]
        if site.made:
            new = [self._joined(node) for node in new]
            stored = new[0]
        before = self._before(number) if site.readers and self.decodes else []
        chunk = self._splice(number, site, self.inputs[number], new)
        for reader in site.readers:
            self._splice(number, reader, before or self.inputs[number], new, first=False)
        return [stored, new[1], *chunk] if chunk and not self.decodes else []  # a reference takes its chunks in itself

    def _joined(self, node: fx.Node) -> fx.Node:
        """[B, h, q, D] as [B, 1, q, h * D], as in `kvpass.expansion.joined`."""
        if value(node).shape[1] == 1:
            return node
        with self.graph.inserting_after(node):
            turned = self.graph.call_method("transpose", (node, 1, 2))
        with self.graph.inserting_after(turned):
            flat = self.graph.call_method("flatten", (turned, 2))
        with self.graph.inserting_after(flat):
            one = self.graph.call_method("unsqueeze", (flat, 1))
        turned.meta["example_value"] = value(node).transpose(1, 2)
        flat.meta["example_value"] = value(turned).flatten(2)
        one.meta["example_value"] = value(flat).unsqueeze(1)
        return one

    def _before(self, number: int) -> list[fx.Node]:
        """The slots' metadata as it is before the step, beside K and V."""
        names, stored = self._names(number), self.slots[number].stored
        return [
            node if name in stored else self._copy(node) for name, node in zip(names, self.inputs[number], strict=True)
        ]

    def _copy(self, node: fx.Node) -> fx.Node:
        """What an input is before the first step."""
        with self.graph.inserting_after(self.length):
            copied = self.graph.call_method("clone", (node,))
        copied.meta["example_value"] = graphs.value(node)
        return copied

    def _splice(
        self, number: int, site: AttentionSite, slots: list[fx.Node], new: list[fx.Node], first: bool = True
    ) -> list[fx.Node]:
        """Splice one attention call's step in; gives the new tokens' `real` and their statistics."""
        layout = self.layouts[number]
        mask, mask_key = self._mask(site, number)
        rotary = self.pieces[number] if self.pieces else None
        pairs = self._pairs(rotary)
        expansion = cut_expansion(self.gm, site, self.sizes, mask.facts if mask else ())
        real = self._real_now(number)
        groups = {
            "slots": slots,
            "new": [site.query, *new, real],
            "mask": mask.nodes if mask else [],
            "table": self._table(rotary, layout.capacity) if rotary else [],
            "turn": rotary.turn.bound if rotary else (),
            "mixed": self._weights(rotary, pairs, layout.capacity, site) if rotary and pairs else [],
            "expand": expansion.slice.bound if expansion else (),
            "sink": [] if site.sink is None else [site.sink],
            "weights": self.on_weights,
            "place": self.places[number : number + 1],
        }
        nodes = [node for group in groups.values() for node in group]
        key = (
            layout,
            self.slots[number].capacity,
            mask_key,
            rotary and (rotary.key, pairs),
            expansion and expansion.slice.key,
            (site.scale, site.cap, site.sink is None, site.lse is None, first),
            *(str((self._shape(n), value(n).stride(), value(n).dtype, self._device(n))) for n in nodes),
        )
        if key not in self._traced:
            counts = {name: len(group) for name, group in groups.items()}
            layer = _Layer(layout, site, mask, rotary, pairs, expansion)
            self._traced[key] = self._trace(layer, nodes, counts, self.slots[number], first)
        before = self._early_enough(site, nodes)
        made = graphs.splice(self.gm, self._traced[key], nodes, before, f"kvpass_{site.call.name}")
        return [real, *self._instead(site, made)]

    def _early_enough(self, site: AttentionSite, needed: list[fx.Node]) -> fx.Node:
        """The node before which a site's step is spliced in, which comes after all that it needs.

        What the model makes of a log-sum-exp may stand before its second product.
        """
        if site.lse is None or site.call < site.lse:
            return site.call
        for node in needed:
            graphs.move_before(site.lse, node)
        return site.lse

    def _instead(self, site: AttentionSite, made: list[fx.Node]) -> list[fx.Node]:
        """Let what a step gives, in the order of `Attended`, stand for the model's own; what it gives beyond that."""
        own = [node for node in (site.call, site.lse) if node is not None]
        for theirs, ours in zip(own, made, strict=False):
            self.replaced[theirs.name] = ours
            ours.meta["example_value"] = value(theirs)
            theirs.replace_all_uses_with(ours)
        return made[len(own) :]

    def _trace(
        self, layer: _Layer, nodes: list[fx.Node], counts: dict[str, int], like: Slots, first: bool
    ) -> fx.GraphModule:
        layout, sweep = layer.layout, self.sweep
        lse = None if layer.found.lse is None else (self._shape(layer.found.lse), value(layer.found.lse).dtype)

        def given_out(attended: Attended) -> list[Tensor]:
            if lse is None or attended.lse is None:
                return [attended.output]
            shape, dtype = lse
            return [attended.output, attended.lse.view(shape).to(dtype)]

        def function(*tensors: Tensor) -> Any:
            given = _grouped(tensors, counts)
            slots = Slots.of(given["slots"], like)
            query, key, new_value, real = given["new"]
            here = layer.site(given)
            if self.decodes and first:
                return given_out(decode_step(layout, here, slots, query, key, new_value, real[:, 0], sweep))
            if self.decodes:
                return given_out(read_step(layout, here, slots, query, key, real[:, 0]))
            attended, sums = extend_step(layout, here, slots, query, key, new_value, real)
            return given_out(attended) + (sums if first else [])

        with compat.fake_mode() as fake:
            examples = [fake(self._example(n)) for n in nodes]
            return compat.trace(function, examples)

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else self.sizes.fixed(size) for size in value(node).shape)

    def _example(self, node: fx.Node) -> Tensor:
        """A tensor like the one that the node will be, strides included."""
        kind = dict(dtype=value(node).dtype, device=self._device(node))
        strides = value(node).stride()
        made_dense = node.op == "placeholder" and _loose(value(node))  # see `StepRewrite.flat`
        if made_dense or any(self.sizes.grows(stride) for stride in strides):
            return torch.empty(self._shape(node), **kind)
        return torch.empty_strided(self._shape(node), [self.sizes.fixed(stride) for stride in strides], **kind)

    def _device(self, node: fx.Node) -> torch.device:
        """Where a node's tensor is; our own inputs are where the slots are."""
        ours = value(node).device.type == "meta" or node in self._own
        return self.layouts[0].device if ours else value(node).device

    # -- masks -----------------------------------------------------------------------------------------

    def _mask(self, site: AttentionSite, number: int) -> tuple[MaskOnSlots | None, Any]:
        """The mask on the slots of a layer, and what identifies it."""
        window = self.windows[number]
        if site.mask is None:
            return None, None
        if window is None and not self.sizes.grown(value(site.mask)):
            return ColumnMask([site.mask], self.queries), "columns"
        padding = tuple(node for node in self.telling.sites[number] if node in self.telling.known)
        if (site.mask, padding) not in self._masks:
            self._choose_all(site)
            around = self._around(site, window, padding)
            self._masks[site.mask, padding] = cut_mask(self.gm, site.mask, self.sizes, around)
        piece = self._masks[site.mask, padding]
        bound = [self._beside(node) if node in piece.aside else node for node in piece.slice.bound]
        first = [] if window is None else [self._first_stored(window)]
        entries = [self._entry(number, entry) for entry in piece.entries]
        nodes = [*first, self.length, *entries, *bound]
        return SlicedMask(nodes, self.queries, piece, bool(first)), (piece.key, bool(first))

    def _around(self, site: AttentionSite, window: int | None, padding: tuple[fx.Node, ...]) -> Around:
        behind = graphs.ancestors(site.mask, [site.grown_key, site.grown_value])  # type: ignore[arg-type]
        pasts = {past for each in self.sites for past in (each.past_key, each.past_value)}
        inputs = tokens.token_inputs(behind - pasts, self.actual, self.sizes)
        return Around(
            counts=[count for count in self.counts[window] if count in behind],
            inputs={node: axis for node, axis in inputs.items() if node not in padding},
            padding=list(padding),
            stored=[site.grown_key, site.grown_value],
            lengths=self.on_length,
            first=sympy.Integer(0) if window is None else graphs.LENGTH - window,
            last=window,
        )

    def _entry(self, number: int, entry: Entry) -> fx.Node:
        """A new input: what a mask looks up for the token of each slot of a layer."""
        if (number, entry) not in self._entries:
            count = self.slots[number].capacity + self.queries
            shape = (self.rows, self.layouts[number].groups, count, *entry.rest)
            example = torch.empty(shape, dtype=value(entry.node).dtype, device="meta")
            self._entries[number, entry] = self._new_input(f"{entry.node.name}_at_{number}", example)
        return self._entries[number, entry]

    def _new_input(self, name: str, example: Tensor) -> fx.Node:
        with self.graph.inserting_after(self.holders[-1]):
            node = self.graph.placeholder(name)
        compat.as_new_input(node, example, in_place=False)
        return node

    def _choose_all(self, site: AttentionSite) -> list[Selection]:
        """The sparse indices in a site's mask, which choose all slots; the keys that they score by are dropped."""
        chosen, held = selection.find(site.mask), max(slots.capacity for slots in self.slots)
        outputs = graphs.results(self.graph)
        for each in chosen:
            each.check(held if self.decodes else held + self.queries)
            for node, dim in selection.cached(each, outputs):
                self._unread[outputs.index(node)] = (self.holders.index(graphs.past_of(node)), dim)
        return chosen

    def _first_stored(self, window: int) -> fx.Node:
        """The place in the padded sequence of the first token that the model stores."""
        if window not in self._firsts:
            with self.graph.inserting_after(self.length):
                node = self.graph.call_function(operator.sub, (self.length, window))
            node.meta["example_value"] = value(self.length)
            self._firsts[window] = node
        return self._firsts[window]

    def _column(self, holder: fx.Node) -> fx.Node:
        """A new input: the new tokens' columns of one that runs over all tokens."""
        if holder not in self._columns:
            shape = (*map(self.sizes.fixed, value(holder).shape[:-1]), self.queries)
            example = torch.empty(shape, dtype=value(holder).dtype, device="meta")
            self._columns[holder] = self._new_input(f"{holder.name}_now", example)
        return self._columns[holder]

    def _beside(self, node: fx.Node) -> fx.Node:
        """A new input: what a node, which reads all tokens, gives; it is computed beside the graph."""
        if node not in self._asides:
            example = torch.empty(self._shape(node), dtype=value(node).dtype, device="meta")
            self._asides[node] = self._new_input(f"{node.name}_aside", example)
        return self._asides[node]

    def _real_now(self, number: int) -> fx.Node:
        """bool [B, q]: which of the new tokens are not padding, for a layer."""
        telling = self.telling.sites[number]
        if telling not in self._real:
            self._real[telling] = self._emit_real([self._column(holder) for holder in telling])
        return self._real[telling]

    def _emit_real(self, columns: list[fx.Node]) -> fx.Node:
        rows, queries, device = self.rows, self.queries, self.layouts[0].device

        def function(*columns: Tensor) -> list[Tensor]:
            real = torch.ones((rows, queries), dtype=torch.bool, device=device)
            for column in columns:
                real = real & (column != 0)
            return [real]

        node: fx.Node = self._computed(function, columns, self.length.next, f"kvpass_real_{len(self._real)}")[0]
        node.meta["example_value"] = torch.empty((rows, queries), dtype=torch.bool, device="meta")
        return node

    # -- rotary embeddings -----------------------------------------------------------------------------

    def _cut_rotaries(self) -> list[RotarySlice]:
        """Cut all of them out, and only then let the queries stand where they stand among the held tokens."""
        if not self.ranked:
            return []
        self.rotaries = [rotaries.find_rotary(self.gm, site) for site in self.sites]
        pieces = [cut_rotary(self.gm, site, self._rotary(i), self.sizes) for i, site in enumerate(self.sites)]
        for position in dict.fromkeys(p for i in range(len(self.sites)) for p in self._positions(i)):
            self._rank_positions(position)
        return pieces

    def _positions(self, layer: int) -> list[fx.Node]:
        """What the layer's key and query are turned by."""
        found = rotaries.positions_of(self._rotary(layer), self.sites[layer])
        if not found:
            self._refuse_ranks(layer, rotaries.TURNED_APART)
        return found

    def _refuse_ranks(self, layer: int, why: str) -> NoReturn:
        line = graphs.source_line(self.sites[layer].call)
        raise UnsupportedGraph(f"{line}: {why}; use positions='absolute'")

    def _rotary(self, layer: int) -> rotaries.Rotary:
        rotary = self.rotaries[layer]
        if rotary is None:
            raise UnsupportedGraph(
                f"{graphs.source_line(self.sites[layer].call)}: the keys had a rotary embedding in the "
                "prompt and have none here"
            )
        return rotary

    def _table(self, rotary: RotarySlice, capacity: int) -> list[fx.Node]:
        """The nodes of the table of angles for ranks 0 .. capacity - 1, shared by the layers."""
        key = (rotary.angles.key, rotary.position, capacity)
        if key not in self._tables:
            nodes = [self.length, *rotary.angles.bound]  # the length only stands for the device
            for node in rotary.angles.bound:  # a later module of the model may make it
                graphs.move_before(self.sites[0].call, node)

            def function(length: Tensor, *bound: Tensor) -> list[Tensor]:
                return rotary.table(capacity, list(bound), length.device)

            name = f"kvpass_table_{len(self._tables)}"
            self._tables[key] = self._computed(function, nodes, self.sites[0].call, name)
        return self._tables[key]

    def _pairs(self, rotary: RotarySlice | None) -> Pairs | None:
        """What an embedding mixes, where a kernel attends and can turn the keys itself."""
        if rotary is None or not self.decodes_on_gpu:
            return None
        if rotary.key not in self._mixing:
            self._mixing[rotary.key] = rotary.pairs()
        return self._mixing[rotary.key]

    def _weights(self, rotary: RotarySlice, pairs: Pairs, capacity: int, site: AttentionSite) -> list[fx.Node]:
        """The nodes of a `Turn`'s weights for ranks 0 .. capacity - 1, shared by layers."""
        key = (rotary.key, rotary.turn.bound, capacity)
        if key not in self._tables:
            table = self._table(rotary, capacity)
            nodes = [*table, *rotary.turn.bound]

            def function(*given: Tensor) -> list[Tensor]:
                return list(rotary.weights(pairs, list(given[: len(table)]), list(given[len(table) :])))

            self._tables[key] = self._computed(function, nodes, site.call, f"kvpass_mixed_{len(self._tables)}")
        return self._tables[key]

    def _rank_positions(self, position: fx.Node) -> None:
        """Let the queries stand behind the held tokens: positions become live slots + 0, 1, ..."""
        shape, queries = self._shape(position), self.queries
        given = rotaries.reshaped(position)
        if given in self.holders:
            self.given_positions.append(self.holders.index(given))
        along = next(
            (d for d in range(len(shape) - 1, -1, -1) if shape[d] == queries and (d or len(shape) == 1)), len(shape) - 1
        )
        rows, dtype = self.rows, value(position).dtype
        padded = bool(self.telling.sites[0])
        if len(shape) == 1 and rows > 1 and padded:
            self._refuse_ranks(0, rotaries.ALIKE_IN_ALL_ROWS)
        users = self._users_but_masks(position)
        real = [self._real_now(0)] if padded and not self.decodes else []  # only real tokens count

        def function(first: Tensor, *real: Tensor) -> Tensor:
            steps = [(new.cumsum(-1) - 1).clamp(min=0) for new in real] or [torch.arange(queries, device=first.device)]
            ranks = first[:, None] + steps[0]  # [B, q]
            if len(shape) == 1:
                return ranks[0]
            full = [1] * len(shape)
            full[0], full[along] = rows, queries
            return ranks.view(full).to(dtype)

        with compat.fake_mode() as fake:
            held = [self._rank_of_first(), *real]
            traced = compat.trace(function, [fake(self._example(node)) for node in held])
        before = self.length.next if position.op == "placeholder" else position.next
        ranks = graphs.splice(self.gm, traced, held, before, f"kvpass_rank_{position.name}")[0]
        ranks.meta["example_value"] = value(position)
        for user in users:
            user.replace_input_with(position, ranks)

    def _users_but_masks(self, position: fx.Node) -> list[fx.Node]:
        """What reads positions to turn queries and keys with; a mask compares them with places, which stay."""
        calls = {each.call for site in self.sites for each in site.all}
        masks = {n for s in self.sites for each in s.all if each.mask for n in graphs.ancestors(each.mask, calls)}
        turning = {n for s in self.sites for each in s.all for n in graphs.ancestors(each.query, calls)}
        users = [user for user in self.graph.nodes if user in position.users]
        if any(user in masks and user in turning for user in users):
            self._refuse_ranks(0, "a mask reads the positions through the same operation as the rotary embedding")
        return [user for user in users if user not in masks]

    def _rank_of_first(self) -> fx.Node:
        """int64 [B]: the rank of the first new token; read before the first layer's step, which writes there."""
        if self._first_rank is None:
            held, decodes = [self.inputs[0][2], self.inputs[0][4]], self.decodes

            def function(position: Tensor, free: Tensor) -> Tensor:
                live = position[:, 0] >= 0
                gone = live.gather(-1, free[:, :1])[:, 0].long()  # the token that will be overwritten
                return live.sum(-1) - gone if decodes else live.sum(-1)

            with compat.fake_mode() as fake:
                traced = compat.trace(function, [fake(self._example(node)) for node in held])
            self._first_rank = graphs.splice(self.gm, traced, held, self.length.next, "kvpass_first_rank")[0]
            self._first_rank.meta["example_value"] = torch.empty((self.rows,), dtype=torch.int64, device="meta")
        return self._first_rank

    def _renumber(self) -> None:
        """Let position ids count held tokens, for a policy that wants that."""
        seen, length = (self.slots[0].tensors()[place] for place in (5, 6))
        found = renumber.readers(self.gm, self.sites, self.actual, renumber.fits_step(seen, length))
        held = [self.inputs[0][2], self.inputs[0][5]]
        if any(self.sites[0].call < reader.node for reader in found):
            before = self._before(0)  # the first layer's step writes there
            held = [before[2], before[5]]
        for i, reader in enumerate(found):
            with compat.fake_mode() as fake:
                examples = [fake(self._example(node)) for node in (reader.ids, *held)]
                traced = compat.trace(self._counted(reader.along), examples)
            ids = graphs.splice(self.gm, traced, [reader.ids, *held], reader.node, f"kvpass_ids_{i}")[0]
            ids.meta["example_value"] = value(reader.ids)
            reader.node.replace_input_with(reader.ids, ids)

    def _counted(self, along: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        queries, last = self.queries, self.layouts[0].policy.last_position()

        def function(ids: Tensor, position: Tensor, seen: Tensor) -> Tensor:
            return renumber.on_held(ids, along, position, seen, queries, last)

        return function

    # -- finishing -------------------------------------------------------------------------------------

    def _finish(self, chunks: list[list[fx.Node]]) -> StepRewrite:
        output = self.graph.output_node()
        originals = graphs.results(self.graph)
        caches = {place for site in self.sites for place in (site.keys_out, site.values_out)}
        lengths = {
            place: self.sizes.beyond_length(out)
            for place, out in enumerate(originals)
            if graphs.is_size(out) and self.sizes.grows(out)
        }
        grown = [
            place
            for place, out in enumerate(originals)
            if place not in caches | self._unread.keys() and graphs.is_tensor(out) and self.sizes.grown(value(out))
        ]
        gone = {*caches, *lengths, *grown, *self._unread}
        kept = [out for place, out in enumerate(originals) if place not in gone]
        places = iter(range(len(kept)))
        mapping = [None if place in gone else next(places) for place in range(len(originals))]
        chunk_places = []
        for chunk in chunks:
            chunk_places.append(list(range(len(kept), len(kept) + len(chunk))))
            kept += chunk
        real = None
        if self.counted is not None:
            real = len(kept)
            kept.append(self.counted)
        output.args = (tuple(kept),)
        self._sweep()
        inputs = [place for place, holder in enumerate(self.holders) if holder in set(placeholders(self.graph))]
        columns = [self.holders.index(holder) for holder in self._columns]
        entries, looked_in = self._looked_up()
        loose = {place for place in inputs if _loose(value(self.holders[place]))}
        self.gm.recompile()
        return StepRewrite(
            gm=self.gm,
            weights=self.weights,
            inputs=inputs,
            loose=loose,
            columns=columns,
            entries=entries,
            queries=self.queries,
            outputs=mapping,
            lengths=lengths,
            chunks=chunk_places if any(chunk_places) else [],
            beside=self._on_all_tokens(grown, looked_in) if grown or self._asides or looked_in else None,
            grown=grown,
            asides=len(self._asides),
            unread=self._unread,
            real=real,
            positions=tuple(dict.fromkeys(self.given_positions)),
        )

    def _looked_up(self) -> tuple[list[LookedUp], list[fx.Node]]:
        """Where entries are looked up, and the nodes among that which are computed beside the graph."""
        made, computed = [], list[fx.Node]()
        for layer, entry in self._entries:
            node = entry.node
            if node.op == "placeholder":
                made.append(LookedUp(self._slots_of(layer), entry, True, self.holders.index(node)))
                continue
            if node not in computed:
                computed.append(node)
            made.append(LookedUp(self._slots_of(layer), entry, False, computed.index(node)))
        return made, computed

    def _slots_of(self, layer: int) -> int | None:
        """Whose slots an entry is looked up for."""
        return layer

    def _on_all_tokens(self, places: list[int], looked_in: list[fx.Node]) -> fx.GraphModule:
        """What computes the outputs that grow with the cache, and what is read of all tokens."""
        copy, moved = compat.copy_graph_module(self.original)
        there = {node.name: node for node in moved.values()}
        outputs = graphs.results(copy.graph)
        read = [*self._asides, *looked_in]
        for node in read:
            if node.name not in there:
                self._refuse_growth(node)
        wanted = [outputs[place] for place in places] + [there[node.name] for node in read]
        copy.graph.output_node().args = (tuple(wanted),)
        needed = graphs.behind(wanted, reader=copy.graph.output_node())
        for node in reversed(list(copy.graph.nodes)):
            if node not in needed and node.op not in ("placeholder", "output"):
                copy.graph.erase_node(node)
        for writer in graphs.writers_to({node for node in needed if node.op in ("placeholder", "get_attr")}):
            self._refuse_growth(writer)  # it would be written to twice
        if {node.name for node in copy.graph.nodes} & {each.call.name for site in self.sites for each in site.all}:
            self._refuse_growth(wanted[0])
        copy.recompile()
        return copy

    def _sweep(self) -> None:
        """Remove what is dead, turn the remaining sizes into numbers, and check that nothing grows any more."""
        for node in list(self.graph.nodes):
            if compat.is_log_only(node):
                self.graph.erase_node(node)
        graphs.eliminate_dead(self.graph)
        for node in list(self.graph.nodes):
            if graphs.is_size(node) and node.users:
                if self.sizes.grows(node):
                    self._refuse_growth(node)
                number = self.sizes.fixed(node)
                for user in list(node.users):
                    user.args = _with_number(user.args, node, number)
                    user.kwargs = _with_number(user.kwargs, node, number)
        graphs.eliminate_dead(self.graph)
        for holder in self.holders:
            if not holder.users:
                self.graph.erase_node(holder)
            elif self.sizes.grown(value(holder)):
                self._refuse_growth(next(iter(holder.users)))
        self._order_inputs()

    def _order_inputs(self) -> None:
        """Slots first, then columns, then what is left of the original inputs."""
        wanted = [*(n for nodes in self.inputs for n in nodes), *self.on_weights]
        wanted += [*self._columns.values(), *self._entries.values(), *self._asides.values()]
        graphs.put_first(self.graph, wanted + [h for h in self.holders if h in set(placeholders(self.graph))])

    def _refuse_growth(self, node: fx.Node) -> None:
        raise UnsupportedGraph(
            f"{graphs.source_line(node)}: {graphs.name_of(node)!r} still depends on the length of the cache "
            f"({value(node) if graphs.is_size(node) else 'a tensor that grows with it'}); it is not a mask, a rotary "
            "embedding or position arithmetic that kvpass can express on slots"
        )


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What a layer's step is made of."""

    layout: Layout
    found: AttentionSite
    mask: MaskOnSlots | None
    rotary: RotarySlice | None
    pairs: Pairs | None
    expansion: Expansion | None

    def site(self, given: dict[str, list[Tensor]]) -> Site:
        """The site, with the tensors that its parts read."""
        mask, rotary, expansion, heads = self.mask, self.rotary, self.expansion, self.layout.heads

        def masked(index: Tensor, position: Tensor, facts: list[Tensor]) -> Tensor:
            assert mask is not None
            return mask.on_slots(index, position, heads, given["mask"], facts)

        def turned(keys: Tensor, rank: Tensor) -> list[Tensor]:
            assert rotary is not None
            return rotary.on_slots(keys, rank, given["table"], given["turn"])

        def expanded(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
            assert expansion is not None
            return expansion.on_slots(key, value, given["expand"])

        return Site(
            scale=self.found.scale,
            mask=masked if mask else None,
            rotate=turned if rotary else None,
            turn=Turn(given["mixed"][0], given["mixed"][1], self.pairs) if self.pairs else None,
            weights=tuple(given["weights"]),
            cap=self.found.cap,
            sink=given["sink"][0] if given["sink"] else None,
            expand=expanded if expansion else None,
            lse=self.found.lse is not None,
            place=given["place"][0] if given["place"] else None,
        )


def _grouped(tensors: tuple[Tensor, ...], counts: dict[str, int]) -> dict[str, list[Tensor]]:
    """Consecutive tensors by name."""
    rest = iter(tensors)
    return {name: list(itertools.islice(rest, count)) for name, count in counts.items()}


def _with_number(arguments: Any, size: fx.Node, number: int) -> Any:
    """The arguments of a node, with a number in place of a size."""
    return fx.node.map_arg(arguments, lambda node: number if node is size else node)


def _loose(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and any(isinstance(stride, torch.SymInt) for stride in tensor.stride())
