"""Evaluate the model's own rotary embedding on slots.

No formula is recognised.  The subgraph that computes the cached key from positions is cut out and evaluated under
`vmap`.  Inside, every slot looks like the one traced key, so numeric sizes in the model's code stay valid.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.layer_cache import PROBED
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.rotary import Rotary, find_rotary, tables_at
from kvpass.fx import alias, splicing, walk
from kvpass.fx.precision import upcast
from kvpass.fx.shapes import SizeResolver, expr
from kvpass.fx.splicing import Subgraph
from kvpass.fx.walk import example_value
from kvpass.lowering.attend import RotaryPairs, rotary_pairs, weights_of
from kvpass.lowering.formats import Sections
from kvpass.rewrite.mask_subgraph import check_not_overwritten
from kvpass.rewrite.sections import PaddedSections, SectionInterpreter
from kvpass.torch_private import symbolic_shapes
from kvpass.torch_private.inductor import materialize

Spec = tuple[tuple[Any, ...], torch.dtype]
"""The shape and dtype of a tensor, or of a size, which may be dynamic."""


@dataclasses.dataclass(frozen=True)
class RotarySubgraph:
    """The rotary embedding as a function of the unrotated key and its position, in two parts.

    The first part, `angles`, depends on positions alone (cosines and sines, for example).  It is evaluated once for the
    ranks 0, 1, ..., which gives a table that all layers share.  The second part, `rotate`, rotates a key by an entry.

    Attributes:
        angles: from positions, shaped as `position_shape`, to the tensors with which keys are rotated.
        rotate: inputs are the key [B, Hkv, q, D] and the results of `angles`.
        position_shape: the shape of the positions that the model's code expects.
        angle_dtypes: the dtypes of the results of `angles`.
        angle_inputs: shapes and dtypes of the inputs of `angles` other than positions.
        rotate_inputs: shapes and dtypes of the inputs of `rotate` other than the results of `angles`; the key is the
            first.
        position_count: the number of positions in the tables in which the model looks up angles; None without tables.
    """

    angles: Subgraph
    rotate: Subgraph
    position_shape: tuple[Any, ...]
    angle_dtypes: tuple[torch.dtype, ...]
    angle_inputs: tuple[Spec, ...]
    rotate_inputs: tuple[Spec, ...]
    position_count: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.angles.key, self.rotate.key, str(self.position_shape), str(self.rotate_inputs[0]))

    @property
    def bound(self) -> tuple[fx.Node, ...]:
        """The nodes of the original graph that both parts read."""
        return (*self.angles.bound, *self.rotate.bound)

    @property
    def key_shape(self) -> tuple[Any, ...]:  # [B, Hkv, q, D] of the keys
        return self.rotate_inputs[0][0]

    def with_numbers(self) -> RotarySubgraph:
        """Return the subgraph for this call alone, with numbers for dynamic sizes."""

        def numbers(spec: Spec) -> Spec:
            return tuple(map(symbolic_shapes.size_hint, spec[0])), spec[1]

        position, _ = numbers((self.position_shape, torch.int64))
        angle_inputs, rotate_inputs = (tuple(map(numbers, specs)) for specs in (self.angle_inputs, self.rotate_inputs))
        inputs: dict[str, Any] = dict(angle_inputs=angle_inputs, rotate_inputs=rotate_inputs)
        return dataclasses.replace(self, position_shape=position, **inputs)

    def without_nodes(self) -> RotarySubgraph:
        """Return the subgraph without the nodes of the original graph, which would keep that graph alive."""
        angles, rotate = (dataclasses.replace(part, bound=()) for part in (self.angles, self.rotate))
        return dataclasses.replace(self, angles=angles, rotate=rotate)

    def table(self, count: int, bound: list[Tensor], device: torch.device) -> list[Tensor]:
        """Return the angles of keys at positions 0 .. count - 1, each [count, ...].

        On a CPU they are float32, so that no key converts them again.  Entries past the model's last position repeat
        its angles; a query that attends to such a key is out of range itself.
        """
        run = self.angles.module if isinstance(count, int) else PaddedSections(self.angles.module).run

        def angles_at(position: Tensor) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = run(position.expand(self.position_shape), *bound)
            return result

        position = torch.arange(count, device=device)
        if self.position_count is not None:
            position = position.clamp(max=self.position_count - 1)
        angles = torch.vmap(angles_at)(position)
        return [materialize(upcast(rows) if rows.is_floating_point() and rows.is_cpu else rows) for rows in angles]

    def probe(self, angle_inputs: Sequence[Any], rotate_inputs: Sequence[Any], device: torch.device) -> Tensor:
        """Rotate one key to a few positions: [positions, Hkv, D]; NaN if rows or tokens rotate it differently."""
        shapes = self.position_shape, self.key_shape
        position, shape = (tuple(map(symbolic_shapes.size_hint, each)) for each in shapes)
        key = torch.linspace(0.25, 1, shape[3], device=device).to(self.rotate_inputs[0][1]).expand(shape).clone()
        rotated = list[Tensor]()
        last = max(PROBED) if self.position_count is None else self.position_count - 1
        for probed in (min(probed, last) for probed in PROBED):
            angles = self.angles.run(torch.full(position, probed, device=device), *angle_inputs)
            keys = self.rotate.run(key, *angles, *rotate_inputs)
            equal = keys.shape == shape and _is_close(keys, keys[:1, :, :1].expand(shape))
            rotated.append(keys[0, :, 0].double() * (1 if equal else torch.nan))
        return torch.stack(rotated)

    def _in_traced_dtypes(self, angles: Iterable[Tensor]) -> list[Tensor]:
        """Convert angles of a table to the dtypes of the results of `angles`."""
        return [each.to(dtype) for each, dtype in zip(angles, self.angle_dtypes, strict=True)]

    def on_slots(self, keys: Sections, rank: Tensor, table: list[Tensor], bound: list[Tensor]) -> list[Tensor]:
        """Rotate keys [B, Hkv, N, D] to positions `rank` [B, H', N]; return sections [B, Hkv, N, d] of D."""
        rotate, section_count = SectionInterpreter(self.rotate.module), len(keys.tensors)
        parts = keys.tensors if keys.whole is None else (*keys.tensors, keys.whole)

        def rotate_slot(parts: tuple[Tensor, ...], rank: Tensor) -> tuple[Tensor, ...]:
            """Rotate one slot's keys [b, Hkv, .], in sections and whole, to one rank; b as in `key_shape`."""
            repeated = tuple(part[:, :, None].expand(-1, -1, self.key_shape[2], -1) for part in parts)
            key = Sections(repeated[:section_count], *repeated[section_count:])
            sections = rotate.run_on(key, *self._in_traced_dtypes(rows[rank] for rows in table), *bound)
            return tuple(section[:, :, 0] for section in sections)

        slots = torch.vmap(rotate_slot, in_dims=(2, 0), out_dims=2)  # over N
        if expr(self.key_shape[0]) == 1:
            heads = torch.vmap(lambda row, rank: slots(tuple(part[None] for part in row), rank), (None, 0))  # over H'
            return [_head_by_head(section[:, :, 0]) for section in torch.vmap(heads)(parts, rank)]
        rotated = torch.vmap(torch.vmap(lambda rank: slots(parts, rank)))(rank)
        return [_head_by_head(section.diagonal(0, 0, 2).movedim(-1, 0)) for section in rotated]

    def narrowed(self, dims: Sequence[Sequence[int]] | None) -> RotarySubgraph:
        """Return the subgraph for one row and query, given `broadcast_dims`."""
        if dims is None:
            return self
        one_key = ((1, self.key_shape[1], 1, self.key_shape[3]), self.rotate_inputs[0][1])
        return dataclasses.replace(
            self, angles=_narrow_results(self.angles, dims), rotate_inputs=(one_key, *self.rotate_inputs[1:])
        )

    def broadcast_dims(self) -> list[list[int]] | None:
        """Return the dimensions along which each result of `angles` is constant over rows and keys.

        The result is None if the subgraph is for one key already, or if random keys are not rotated independently.
        """
        if expr(self.key_shape[0]) == expr(self.key_shape[2]) == 1:
            return None
        if any(not shape for shape, _ in (*self.angle_inputs, *self.rotate_inputs)):  # it reads dynamic sizes
            return None
        return self.with_numbers()._broadcast_dims()

    def _broadcast_dims(self) -> list[list[int]] | None:
        generator = torch.Generator().manual_seed(0)
        angle_values, (keys, *rest) = (
            [_random(spec, generator) for spec in specs] for specs in (self.angle_inputs, self.rotate_inputs)
        )
        try:
            angles = self.angles.run(torch.tensor(3).expand(self.position_shape), *angle_values)
            dims = [_constant_dims(x, (self.key_shape[0], self.key_shape[2])) for x in angles]
            narrowed = [_first_entries(*each) for each in zip(angles, dims, strict=True)]
            rotated = self.rotate.run(keys, *angles, *rest)
            equal = all(
                _is_close(self.rotate.run(_key(keys, index), *narrowed, *rest), _key(rotated, index))
                for index in (0, -1)
            )
        except (RuntimeError, IndexError):  # it has numeric sizes, or needs indices and not random numbers
            return None
        return dims if equal else None

    def pairs(self) -> RotaryPairs | None:
        """Return which dimensions of a key are mixed, from unit vectors; None if kernels cannot apply the mixture.

        The result is also None if the function is not linear, for example if a norm follows the embedding, or if it
        differs between rows, heads or queries.
        """
        generator = torch.Generator().manual_seed(0)

        def random(spec: Spec) -> Tensor:
            return _random(spec, generator)

        try:
            angles = self.angles.run(torch.tensor(3).expand(self.position_shape), *map(random, self.angle_inputs))
            inputs = [*angles, *map(random, self.rotate_inputs[1:])]
            keys = torch.cat([torch.eye(self.key_shape[3]), random(((1, self.key_shape[3]), torch.float32)) * 9])
            keys = keys.to(self.rotate_inputs[0][1])
            rotated = [self.rotate.run(key.expand(self.key_shape), *inputs) for key in keys]
        except (RuntimeError, IndexError):  # it has tensors on another device, or needs indices and not random numbers
            return None
        equal_everywhere = all(torch.equal(x, x[:1, :1, :1].expand_as(x)) for x in rotated)
        matrix, actual = torch.stack([x[0, 0, 0] for x in rotated]).double().tensor_split([self.key_shape[3]])
        expected = keys[-1:].double() @ matrix
        linear = torch.allclose(actual, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
        return rotary_pairs(matrix) if equal_everywhere and linear else None

    def mixing_weights(self, pairs: RotaryPairs, table: list[Tensor], bound: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the weights of numbers and of their partners at the positions of a table, each [N, D]."""

        def rotate(key: Tensor) -> Tensor:
            rotated: Tensor = torch.vmap(
                lambda *rows: self.rotate.run(key.expand(self.key_shape), *self._in_traced_dtypes(rows), *bound)
            )(*table)
            return rotated[:, 0, 0, 0]

        return weights_of(
            rotate, pairs, torch.empty(self.key_shape[3], dtype=self.rotate_inputs[0][1], device=table[0].device)
        )


class RotaryProbe:
    """The rotation of one key by all rotary embeddings of a graph, for the arguments of a call.

    Attributes:
        indices: the arguments other than positions that the rotation reads.
    """

    def __init__(self, canonical_gm: fx.GraphModule, sites: Sequence[AttentionSite], sizes: SizeResolver) -> None:
        alias_sets, placeholders = alias.AliasSets(canonical_gm.graph), walk.placeholders(canonical_gm.graph)
        rotated = [(site, rotary) for site in sites if (rotary := find_rotary(site)) is not None]
        cuts = {(cut.key, cut.bound): cut for cut in cut_rotaries(canonical_gm, rotated, sizes, alias_sets)}
        subgraphs = [part for cut in cuts.values() for part in (cut.angles, cut.rotate)]
        bound = [node for part in subgraphs for node in part.bound]
        read = alias.ancestors_with_writes(bound, alias_sets=alias_sets) if bound else set()
        self.indices = [index for index, node in enumerate(placeholders) if node in read and walk.is_tensor(node)]
        self._inputs, self._counts = splicing.extract(canonical_gm, bound), [len(part.bound) for part in subgraphs]
        self._cuts = [cut.without_nodes() for cut in cuts.values()]

    def run(self, arguments: Sequence[Any], device: torch.device) -> Tensor | None:
        """Return `RotarySubgraph.probe` of the distinct embeddings, or None without any."""
        values = iter(self._inputs(*arguments))
        inputs = [list(itertools.islice(values, count)) for count in self._counts]
        found = zip(self._cuts, inputs[::2], inputs[1::2], strict=True)
        probes = [cut.probe(of_angles, of_rotate, device).flatten() for cut, of_angles, of_rotate in found]
        return torch.cat(probes) if probes else None


def _head_by_head(rotated: Tensor) -> Tensor:
    """Select each head at its own positions: [B, H', Hkv, N, d] to [B, Hkv, N, d]."""
    return rotated[:, 0] if rotated.shape[1] == 1 else rotated.diagonal(0, 1, 2).movedim(-1, 1)


def _random(spec: Spec, generator: torch.Generator) -> Tensor:
    shape, dtype = spec
    return torch.randn(shape, generator=generator).to(dtype)


def _key(keys: Tensor, index: int) -> Tensor:
    """Return the key of one row and query, [1, Hkv, 1, D] of [B, Hkv, q, D]."""
    return keys[index, None, :, index, None]


def _constant_dims(x: Tensor, sizes: tuple[int, ...]) -> list[int]:
    """Return the dimensions of these sizes along which a tensor is constant."""
    return [d for d, size in enumerate(x.shape) if size in sizes and bool((x == x.narrow(d, 0, 1)).all())]


def _first_entries(x: Tensor, dims: list[int]) -> Tensor:
    for d in dims:
        x = x.narrow(d, 0, 1)
    return x


def _is_close(x: Tensor, y: Tensor) -> bool:
    tolerance = 4 * torch.finfo(y.dtype).eps
    return x.shape == y.shape and torch.allclose(x, y, rtol=tolerance, atol=tolerance * float(y.abs().max()))


def _narrow_results(original: Subgraph, dims_of: Sequence[Sequence[int]]) -> Subgraph:
    """Return a subgraph whose results keep only the first entry of some dimensions."""
    graph = fx.Graph()
    results = list(graph.graph_copy(original.module.graph, {}))  # type: ignore[arg-type]
    for i, dims in enumerate(dims_of):
        for d in dims:
            results[i] = graph.call_method("narrow", (results[i], d, 0, 1))
    graph.output(tuple(results))
    return Subgraph(fx.GraphModule(original.module, graph), original.bound)


def cut_rotaries(
    gm: fx.GraphModule,
    rotated: Iterable[tuple[AttentionSite, Rotary]],
    sizes: SizeResolver,
    alias_sets: alias.AliasSets,
) -> list[RotarySubgraph]:
    """Cut out the rotary embeddings of the keys of some sites; `alias_sets` are the graph's.

    Raises:
        UnsupportedGraph: an embedding uses the cache's length as a size, or a subgraph is overwritten in place.
    """
    return for_one_key([_cut_rotary(gm, site, rotary, sizes, alias_sets) for site, rotary in rotated])


def for_one_key(cuts: Sequence[RotarySubgraph]) -> list[RotarySubgraph]:
    """Return subgraphs for one row and query if random keys are rotated independently, else unchanged.

    Rotating all rows at the positions of each row costs the square of the rows, times the new tokens, unless a compiler
    removes the results that nothing reads.
    """
    dims = {key: cut.broadcast_dims() for key, cut in {cut.key: cut for cut in cuts}.items()}
    return [cut.narrowed(dims[cut.key]) for cut in cuts]


def _cut_rotary(
    gm: fx.GraphModule, site: AttentionSite, rotary: Rotary, sizes: SizeResolver, alias_sets: alias.AliasSets
) -> RotarySubgraph:
    def resolve(node: fx.Node) -> Any:
        if sizes.grows(node):
            walk.refuse(node, f"the rotary embedding uses the cache's length, {example_value(node)}, as a size")
        return sizes.resolved_size(node)

    subgraph = alias.ancestors_with_writes([site.key], {rotary.raw}, alias_sets=alias_sets)
    moved = alias.dependents(subgraph, [rotary.raw, rotary.position], alias_sets)
    check_not_overwritten(moved, subgraph, site.key, alias_sets)
    angles = _angles(subgraph, rotary, alias_sets)
    rotate = splicing.cut(gm, [site.key], [rotary.raw, *angles], resolve, unpack=True, alias_sets=alias_sets)
    angle_subgraph = splicing.cut(gm, angles, [rotary.position], resolve, alias_sets=alias_sets)
    position, *angle_inputs = (_spec_of(node, sizes) for node in (rotary.position, *angle_subgraph.bound))
    rotate_inputs = tuple(_spec_of(node, sizes) for node in (rotary.raw, *rotate.bound))
    found = tables_at(rotary.position, subgraph)
    counts = [count for table, dim in found.items() if isinstance(count := example_value(table).shape[dim], int)]
    dtypes, inputs = tuple(example_value(node).dtype for node in angles), (tuple(angle_inputs), rotate_inputs)
    return RotarySubgraph(angle_subgraph, rotate, position[0], dtypes, *inputs, min(counts, default=None))


def _spec_of(node: fx.Node, sizes: SizeResolver) -> Spec:
    if walk.is_size(node):
        return (), torch.int64
    tensor = example_value(node)
    return tuple(sizes.resolved_size(size) for size in tensor.shape), tensor.dtype


def _angles(subgraph: set[fx.Node], rotary: Rotary, alias_sets: alias.AliasSets) -> list[fx.Node]:
    """Return the tensors of a rotation that depend on positions alone and rotate the key."""
    on_position = alias.dependents(subgraph, [rotary.position], alias_sets)
    on_key = alias.dependents(subgraph | {rotary.raw}, [rotary.raw], alias_sets)
    return sorted(n for n in on_position - on_key if any(user in on_key for user in n.users))
