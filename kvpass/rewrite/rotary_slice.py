"""The model's own rotary embedding, asked about slots.

No formula is recognised.  The subgraph that computes the cached key from positions is cut out and fed other tensors
under `vmap`: inside, every slot looks like the one key that was traced, so that whatever sizes the model's code spells
out stay valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.rotary import Rotary, find_rotary
from kvpass.capture.sites import AttentionSite
from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, splicing, walk
from kvpass.fx.precision import upcast
from kvpass.fx.shapes import Sizes, expr
from kvpass.fx.splicing import Slice
from kvpass.fx.walk import value
from kvpass.lowering.formats import Sections
from kvpass.lowering.rope import RotaryPairs, pairs_of, weights_of
from kvpass.rewrite.mask_slice import check_not_overwritten
from kvpass.rewrite.sections import PaddedSections, SectionInterpreter
from kvpass.torch_private import symbolic_shapes
from kvpass.torch_private.inductor import materialized

PROBED = (1, 5)
"""Positions at which angles of two graphs are compared."""

Like = tuple[tuple[Any, ...], torch.dtype]
"""The shape and the dtype of a tensor, or of a size, which may be open."""


@dataclasses.dataclass(frozen=True)
class RotarySlice:
    """The rotary embedding as a function of the key before it and of its position, in two parts.

    The first depends on positions alone (cosines and sines, say).  It is evaluated once for the ranks
    0, 1, ... and gives a table that all layers share; the second rotates a key with a row of the table.

    Attributes:
        angles: from positions, shaped as `position`, to what the key is rotated with.
        rotate: inputs are the key [B, Hkv, q, D] and the results of `angles`.
        position: the shape of the positions that the model's code expects.
        angle_dtypes: of the results of `angles`.
        angle_inputs: shapes and dtypes of what `angles` reads besides positions.
        rotate_inputs: and of what `rotate` gets besides the results of `angles`, the key [B, Hkv, q, D] first.
    """

    angles: Slice
    rotate: Slice
    position: tuple[Any, ...]
    angle_dtypes: tuple[torch.dtype, ...]
    angle_inputs: tuple[Like, ...]
    rotate_inputs: tuple[Like, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.angles.key, self.rotate.key, str(self.position))

    @property
    def shape(self) -> tuple[Any, ...]:
        """[B, Hkv, q, D] of the keys."""
        return self.rotate_inputs[0][0]

    def at_hand(self) -> RotarySlice:
        """The same for the call at hand alone, with numbers for open sizes."""
        position, *rest = (
            tuple(map(symbolic_shapes.size_hint, shape))
            for shape in (self.position, *(s for s, _ in (*self.angle_inputs, *self.rotate_inputs)))
        )
        likes = list(zip(rest, (dtype for _, dtype in (*self.angle_inputs, *self.rotate_inputs)), strict=True))
        count = len(self.angle_inputs)
        return dataclasses.replace(
            self, position=position, angle_inputs=tuple(likes[:count]), rotate_inputs=tuple(likes[count:])
        )

    def table(self, count: int, bound: list[Tensor], device: torch.device) -> list[Tensor]:
        """What keys at positions 0 .. count - 1 are rotated with, each [count, ...].

        On a CPU in float32, as every key of every head would convert its row anew; `on_slots` rounds what it reads.
        """

        run = self.angles.module if isinstance(count, int) else PaddedSections(self.angles.module).run

        def at(index: Tensor) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = run(index.expand(self.position), *bound)
            return result

        made = torch.vmap(at)(torch.arange(count, device=device))
        return [materialized(upcast(rows) if rows.is_floating_point() and rows.is_cpu else rows) for rows in made]

    def probe(self, bound: Sequence[Any], device: torch.device) -> Tensor:
        """Return what keys at a few positions are rotated with, once where rows or queries do not differ."""
        shape, made = tuple(map(symbolic_shapes.size_hint, self.position)), list[Tensor]()
        for index in PROBED:
            for x in self.angles.module(torch.full(shape, index, device=device), *bound):
                alike = [d for d in range(x.ndim) if bool((x == x.narrow(d, 0, 1)).all())]
                made.append(torch.view_as_real(_first(x, alike).resolve_conj()) if x.is_complex() else _first(x, alike))
        return torch.cat([x.flatten().double() for x in made])

    def _as_made(self, angles: Iterable[Tensor]) -> list[Tensor]:
        """What a table has for a position as `angles` gives it."""
        return [each.to(dtype) for each, dtype in zip(angles, self.angle_dtypes, strict=True)]

    def on_slots(self, keys: Sections, rank: Tensor, table: list[Tensor], bound: list[Tensor]) -> list[Tensor]:
        """Keys [B, Hkv, N, D] at positions [B, H', N] -> rotated, in sections [B, Hkv, N, d] of D."""
        rotate, count = SectionInterpreter(self.rotate.module), len(keys.tensors)
        given = keys.tensors if keys.whole is None else (*keys.tensors, keys.whole)

        def one(parts: tuple[Tensor, ...], index: Tensor) -> tuple[Tensor, ...]:
            """One slot's keys [b, Hkv, .], in sections and whole, at one position; b as in `shape`."""
            repeated = tuple(part[:, :, None].expand(-1, -1, self.shape[2], -1) for part in parts)
            key = Sections(repeated[:count], *repeated[count:])
            sections = rotate.run_on(key, *self._as_made(rows[index] for rows in table), *bound)
            return tuple(section[:, :, 0] for section in sections)

        slots = torch.vmap(one, in_dims=(2, 0), out_dims=2)  # over N
        if expr(self.shape[0]) == 1:
            each = torch.vmap(lambda row, index: slots(tuple(part[None] for part in row), index), (None, 0))  # over H'
            return [_head_by_head(section[:, :, 0]) for section in torch.vmap(each)(given, rank)]
        rotated = torch.vmap(torch.vmap(lambda index: slots(given, index)))(rank)
        return [_head_by_head(_row_by_row(section)) for section in rotated]

    def alone(self) -> RotarySlice:
        """The same for one row and one query, if keys are rotated each by itself, as seen on drawn ones; else as it is.

        Rotating all rows at the positions of each costs the square of the rows, times the new tokens, where no compiler
        leaves out what is not read.
        """
        if expr(self.shape[0]) == expr(self.shape[2]) == 1:
            return self
        if any(not shape for shape, _ in (*self.angle_inputs, *self.rotate_inputs)):  # it reads open sizes
            return self
        cuts = self.at_hand()._cuts()
        if cuts is None:
            return self
        one = ((1, self.shape[1], 1, self.shape[3]), self.rotate_inputs[0][1])
        return dataclasses.replace(
            self, angles=_narrowed(self.angles, cuts), rotate_inputs=(one, *self.rotate_inputs[1:])
        )

    def _cuts(self) -> list[list[int]] | None:
        """For each result of `angles` the dimensions of which one entry does for a row and query; None if none does."""
        drawn = torch.Generator().manual_seed(0)
        angled, (keys, *rest) = (
            [_drawn(like, drawn) for like in likes] for likes in (self.angle_inputs, self.rotate_inputs)
        )
        try:
            angles = self.angles.module(torch.tensor(3).expand(self.position), *angled)
            cuts = [_alike(x, (self.shape[0], self.shape[2])) for x in angles]
            narrow = [_first(*each) for each in zip(angles, cuts, strict=True)]
            rotated = self.rotate.module(keys, *angles, *rest)
            alone = all(
                _close(self.rotate.module(_one(keys, index), *narrow, *rest), _one(rotated, index)) for index in (0, -1)
            )
        except (RuntimeError, IndexError):  # it spells sizes out, or looks up what drawn numbers are not
            return None
        return cuts if alone else None

    def pairs(self) -> RotaryPairs | None:
        """Which numbers of a key are mixed, seen on unit vectors; None for what is no mixture that kernels know.

        That is also what is not linear, as a norm behind the embedding, or differs between rows, heads or queries.
        """
        generator = torch.Generator().manual_seed(0)

        def drawn(like: Like) -> Tensor:
            return _drawn(like, generator)

        try:
            angles = self.angles.module(torch.tensor(3).expand(self.position), *map(drawn, self.angle_inputs))
            rest = [*angles, *map(drawn, self.rotate_inputs[1:])]
            keys = torch.cat([torch.eye(self.shape[3]), drawn(((1, self.shape[3]), torch.float32)) * 9])
            rotated = [self.rotate.module(key.expand(self.shape), *rest) for key in keys.to(self.rotate_inputs[0][1])]
        except (RuntimeError, IndexError):  # it has tensors on another device, or looks up what drawn numbers are not
            return None
        alike = all(torch.equal(x, x[:1, :1, :1].expand_as(x)) for x in rotated)
        matrix, got = torch.stack([x[0, 0, 0] for x in rotated]).double().tensor_split([self.shape[3]])
        wanted = keys[-1:].double() @ matrix
        linear = torch.allclose(got, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))
        return pairs_of(matrix) if alike and linear else None

    def weights(self, pairs: RotaryPairs, table: list[Tensor], bound: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What numbers and their partners are multiplied with at the positions of a table, each [N, D]."""

        def rotate(key: Tensor) -> Tensor:
            rotated: Tensor = torch.vmap(
                lambda *rows: self.rotate.module(key.expand(self.shape), *self._as_made(rows), *bound)
            )(*table)
            return rotated[:, 0, 0, 0]

        return weights_of(
            rotate, pairs, torch.empty(self.shape[3], dtype=self.rotate_inputs[0][1], device=table[0].device)
        )


def probe_rotaries(
    gm: fx.GraphModule, sites: Sequence[AttentionSite], sizes: Sizes, arguments: Sequence[Any], device: torch.device
) -> Tensor | None:
    """Return `RotarySlice.probe` of each rotary embedding of a graph, for the arguments of a call, or None."""
    found: dict[tuple[fx.Node, ...], Tensor] = {}
    for site in sites:
        rotary = find_rotary(gm, site)
        angles = () if rotary is None else tuple(_angles(gm, site.key, rotary))
        if rotary is not None and angles not in found:
            cut = cut_rotary(gm, site, rotary, sizes)
            found[angles] = cut.probe(splicing.computing(gm, list(cut.angles.bound))(*arguments), device)
    return torch.cat(list(found.values())) if found else None


def _row_by_row(rotated: Tensor) -> Tensor:
    """[B, H', B, Hkv, N, d] -> [B, H', Hkv, N, d]: each row at its own positions."""
    return rotated.diagonal(0, 0, 2).movedim(-1, 0)


def _head_by_head(rotated: Tensor) -> Tensor:
    """[B, H', Hkv, N, d] -> [B, Hkv, N, d]: each head at its own positions."""
    return rotated[:, 0] if rotated.shape[1] == 1 else rotated.diagonal(0, 1, 2).movedim(-1, 1)


def _drawn(like: Like, generator: torch.Generator) -> Tensor:
    shape, dtype = like
    return torch.randn(shape, generator=generator).to(dtype)


def _one(keys: Tensor, index: int) -> Tensor:
    """The key of one row and query, [1, Hkv, 1, D] of [B, Hkv, q, D]."""
    return keys[index, None, :, index, None]


def _alike(x: Tensor, sizes: tuple[int, ...]) -> list[int]:
    """The dimensions of these sizes along which nothing changes."""
    return [d for d, size in enumerate(x.shape) if size in sizes and bool((x == x.narrow(d, 0, 1)).all())]


def _first(x: Tensor, dims: list[int]) -> Tensor:
    """The first entry of these dimensions."""
    for d in dims:
        x = x.narrow(d, 0, 1)
    return x


def _close(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal but for roundings."""
    close = 4 * torch.finfo(y.dtype).eps
    return x.shape == y.shape and torch.allclose(x, y, rtol=close, atol=close * float(y.abs().max()))


def _narrowed(whole: Slice, cuts: list[list[int]]) -> Slice:
    """A slice whose results have only the first entry of some dimensions."""
    graph = fx.Graph()
    made = list(graph.graph_copy(whole.module.graph, {}))  # type: ignore[arg-type]
    for i, dims in enumerate(cuts):
        for d in dims:
            made[i] = graph.call_method("narrow", (made[i], d, 0, 1))
    graph.output(tuple(made))
    return Slice(fx.GraphModule(whole.module, graph), whole.bound)


def cut_rotary(gm: fx.GraphModule, site: AttentionSite, rotary: Rotary, sizes: Sizes) -> RotarySlice:
    """Cut the rotary embedding of a site's key out."""

    def number(node: fx.Node) -> Any:
        if sizes.grows(node):
            raise UnsupportedGraph(f"the rotary embedding uses the cache's length, {value(node)}, as a size")
        return sizes.fixed(node)

    behind = alias.behind([site.key], {rotary.raw})
    check_not_overwritten(alias.dependent(gm.graph, behind, [rotary.raw, rotary.position]), behind, site.key)
    angles = _angles(gm, site.key, rotary)
    rotate = splicing.cut(gm, [site.key], [rotary.raw, *angles], number, unpack=True)
    cut = splicing.cut(gm, angles, [rotary.position], number)
    position, *angled = (_like(node, sizes) for node in (rotary.position, *cut.bound))
    rotated = tuple(_like(node, sizes) for node in (rotary.raw, *rotate.bound))
    dtypes = tuple(value(node).dtype for node in angles)
    return RotarySlice(cut, rotate, position[0], dtypes, tuple(angled), rotated).alone()


def _like(node: fx.Node, sizes: Sizes) -> Like:
    if walk.is_size(node):
        return (), torch.int64
    given = value(node)
    return tuple(sizes.fixed(size) for size in given.shape), given.dtype


def _angles(gm: fx.GraphModule, key: fx.Node, rotary: Rotary) -> list[fx.Node]:
    """The tensors that depend on positions alone and that the key is rotated with."""
    rest = alias.behind([key], {rotary.raw})
    on_position = alias.dependent(gm.graph, rest, [rotary.position])
    on_key = alias.dependent(gm.graph, rest | {rotary.raw}, [rotary.raw])
    return [n for n in gm.graph.nodes if n in on_position - on_key and any(user in on_key for user in n.users)]
