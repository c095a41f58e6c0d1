"""The model's own mask and rotary embedding, asked about slots.

No formula is recognised.  The subgraph that computes the mask from the key index, and the one that
computes the cached key from positions, are cut out and fed other tensors under `vmap`: inside, every slot
looks like the one key that was traced, so that whatever sizes the model's code spells out stay valid.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass import graphs, match, selection
from kvpass.errors import UnsupportedGraph
from kvpass.graphs import Sizes, Slice, expr, value
from kvpass.lowering.attend import written_out
from kvpass.lowering.turns import Pairs, pairs_of, weights_of
from kvpass.pieces import InPieces


@dataclasses.dataclass(frozen=True)
class MaskSlice:
    """The mask as a function of the key.

    Attributes:
        slice: inputs are the key's index [1], the index to look its columns up at [1], both counted from
            the first key that the model stores, the number of real tokens up to it [1, 1], then one [B, 1]
            tensor for each of `columns`.
        columns: placeholders [B, past + new] that the mask reads, such as a padding mask.
        wide: placeholders [..., past + new] of more dimensions that it reads, such as a mask that was made elsewhere;
            among what the slice binds.
        aside: what it reads of all columns together, such as how many tokens of a row are padding; likewise.
        facts: what it reads of the key's stored rows, see `kvpass.expansion`; inputs after the columns.
    """

    slice: Slice
    columns: tuple[fx.Node, ...]
    wide: tuple[fx.Node, ...]
    aside: tuple[fx.Node, ...]
    facts: tuple[fx.Node, ...] = ()

    def on_slots(
        self,
        index: Tensor,
        position: Tensor,
        first: Tensor | int,
        heads: int,
        ones: list[Tensor],
        bound: list[Tensor],
        facts: list[Tensor],
    ) -> Tensor:
        """The mask of slots: index [B, H', N] -> [B, Hkv or 1, G or 1, q, N]; padding counts as absent.

        Args:
            position: int64 [B, H', N], the places among the real tokens.
            first: the place of the first key that the model stores, a number.
            facts: of every slot, each [N, ...].
        """

        def one(place: Tensor, position: Tensor, *facts: Tensor) -> Tensor:
            only, place = torch.zeros_like(place[None]) - first, place.clamp(min=0)  # free slots look up something too
            places = (place[None] - first, only, position[None, None] + 1)
            mask: Tensor = self.slice.module(*places, *ones, *facts, *bound)
            return mask.squeeze(-1) if mask.shape[-1] == 1 else _refuse_width(mask)  # [b, h, q]

        along, shared = torch.vmap(one), (0, 0, *[None] * len(facts))
        inner = torch.vmap(torch.vmap(along, shared), shared)(index, position, *facts)  # [B, H', N, b, h, q]
        return _by_row_and_head(inner, heads).movedim(2, -1)  # [B, Hkv or 1, G or 1, q, N]

    def of_new(
        self,
        length: Tensor,
        first: Tensor | int,
        queries: int,
        columns: list[Tensor],
        bound: list[Tensor],
        facts: list[Tensor],
    ) -> Tensor:
        """Which new tokens are real: bool [B or 1, q], the mask of each one for itself.

        Args:
            length: the tokens seen before, a number.
            columns: the new tokens' part of each of `columns`, [B, q].
            facts: of the new tokens, each [q, ...].
        """
        real = []
        for i in range(queries):
            place = (length + i)[None]
            here, only = place - first, torch.zeros_like(place) - first
            own = [*(c[:, i : i + 1] for c in columns), *(fact[i] for fact in facts)]
            mask = self.slice.module(here, only, place[None] + 1, *own, *bound)
            real.append(as_allowed(mask[:, 0, min(i, mask.shape[2] - 1), 0]))
        return torch.stack(real, -1)


def _refuse_width(mask: Tensor) -> Tensor:
    raise UnsupportedGraph(f"the attention mask of one key has {mask.shape[-1]} columns: it spells its length out")


def as_allowed(mask: Tensor) -> Tensor:
    """A mask, boolean or additive, as booleans."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _by_row_and_head(inner: Tensor, heads: int) -> Tensor:
    """[B, H', N, b, h, ...] with b in (1, B) and h in (1, Hkv, Hq) -> [B, Hkv or 1, N, G or 1, ...].

    The rows and heads that the model's code made inside and those that the slots have outside are the
    same ones, so only the diagonals are taken; a compiler computes no more than those.
    """
    rows, groups = inner.shape[:2]
    inner = inner[:, :, :, 0] if inner.shape[3] == 1 else inner.diagonal(0, 0, 3).movedim(-1, 0)  # [B, H', N, h, ...]
    assert inner.shape[0] == rows
    if inner.shape[3] == 1:
        return inner
    inner = torch.unflatten(inner, 3, (heads, -1))  # [B, H', N, Hkv, G, ...]
    if groups == 1:
        return inner[:, 0].movedim(2, 1)
    return inner.diagonal(0, 1, 3).movedim(-1, 1)


def cut_mask(
    gm: fx.GraphModule,
    mask: fx.Node,
    sizes: Sizes,
    counts: list[fx.Node],
    columns: list[fx.Node],
    wide: list[fx.Node],
    stored: list[fx.Node],
) -> MaskSlice:
    """Cut the mask out as a function of the key index, and of what the key's stored rows hold.

    Args:
        counts: the key indices that it is computed from, see `match.iotas`.
        columns, wide: the inputs that it reads and that run over all tokens, see `match.key_columns`.
        stored: the grown keys and values of its site.

    Raises:
        UnsupportedGraph: it is not a function of the key index.
    """
    chosen = selection.find(mask)
    behind = graphs.ancestors(mask, [*stored, *(each.node for each in chosen)])
    roots = [*counts, *columns, *wide]
    _check_not_overwritten(graphs.dependent(gm.graph, behind, roots), behind - set(columns), mask)
    facts = _facts(gm.graph, mask, stored, roots)
    if not roots and not facts:
        raise UnsupportedGraph("the attention mask grows with the cache but is not computed from a key index")
    cutter = _KeyCutter(gm, sizes, counts, columns, wide, facts, {expr(value(node).shape[2]) for node in stored})
    cutter.choose_all(chosen)
    return MaskSlice(cutter.cut(mask), tuple(columns), tuple(wide), tuple(cutter.aside), tuple(facts))


def _facts(graph: fx.Graph, mask: fx.Node, stored: list[fx.Node], roots: list[fx.Node]) -> list[fx.Node]:
    """The last tensors on the way to a mask that are computed from stored rows and from no key index."""
    behind = graphs.ancestors(mask, stored) | set(stored)
    own = graphs.dependent(graph, behind, stored) - graphs.dependent(graph, behind, roots)
    own = {node for node in own & behind if graphs.is_tensor(node)}
    return [n for n in graph.nodes if n in own and (n is mask or any(u in behind - own for u in n.users))]


def _check_not_overwritten(moved: set[fx.Node], behind: set[fx.Node], result: fx.Node) -> None:
    """Refuse writes in place that a copy of `moved` would miss, or that come after what is read of `behind`."""
    for writer in (graphs.overwritten(moved), graphs.overwritten(behind, since=result)):
        if writer is not None:
            raise UnsupportedGraph(
                f"{graphs.source_line(writer)}: {graphs.name_of(writer)!r} writes in place to what an attention mask "
                "or a rotary embedding is computed from, and such a computation cannot be moved onto slots"
            )


class _KeyCutter:
    """Copies the mask's subgraph, with the key index, and the cache's length standing at one key."""

    def __init__(
        self,
        gm: fx.GraphModule,
        sizes: Sizes,
        counts: list[fx.Node],
        columns: list[fx.Node],
        wide: list[fx.Node],
        facts: list[fx.Node],
        totals: set[sympy.Expr],
    ) -> None:
        self.gm, self.sizes, self.wide, self.totals = gm, sizes, set(wide), totals
        self.graph = fx.Graph()
        self.index, self.storage = self.graph.placeholder("index"), self.graph.placeholder("storage")
        self.count = self.graph.placeholder("count")
        self.places: list[dict[fx.Node, Any]] = [dict.fromkeys(counts, self.index), dict.fromkeys(counts, self.storage)]
        inputs = {node: self.graph.placeholder(node.name) for node in [*columns, *facts]}
        for env in self.places:
            env.update(inputs)
        self.columns, self.aside = set(columns), list[fx.Node]()
        self.lengthened = {node for node in gm.graph.nodes if self.lengthens(node)}
        self.on_key = {*counts, *columns, *wide, *facts, *self.lengthened}
        self.on_column, self.on_fact = {*columns, *wide}, set(facts)
        for node in gm.graph.nodes:
            for dependents in (self.on_key, self.on_column, self.on_fact):
                if dependents.intersection(node.all_input_nodes):
                    dependents.add(node)
        self.bound: list[fx.Node] = []

    def choose_all(self, chosen: list[selection.Selection]) -> None:
        for each in chosen:
            for env in self.places:
                env[each.node] = selection.everything(each, self.graph)

    def cut(self, mask: fx.Node) -> Slice:
        self.graph.output(self.copy(mask, 0))
        graphs.placeholders_first(self.graph)
        return Slice(fx.GraphModule(self.gm, self.graph), tuple(self.bound))

    def copy(self, node: fx.Node, storage: int) -> Any:
        """The node's copy; with `storage`, key indices count the columns that are at hand, which is one."""
        env = self.places[storage]
        if node in env:
            return env[node]
        if graphs.is_size(node):
            env[node] = 1 if self.sizes.is_total(node) or self.spells_total(node) else self.number(node)
        elif graphs.name_of(node) == "cumsum" and node in self.on_column:
            env[node] = self.counted(node)
        elif node in self.wide:
            env[node] = self.picked(node, storage)
        elif graphs.name_of(node) == "getitem" and node.args[0] in self.lengthened:
            env[node] = self.filled(node, storage)
        elif self.sums_up(node):
            env[node] = self.places[1 - storage][node] = self.graph.placeholder(node.name)
            self.bound.append(node)
            self.aside.append(node)
        elif node not in self.on_key and not self.sizes.grown(value(node)):
            env[node] = self.places[1 - storage][node] = self.graph.placeholder(node.name)
            self.bound.append(node)
        else:
            _check_pointwise(node)
            if graphs.name_of(node) in ("cat", "concat") and node in self.on_column:
                raise UnsupportedGraph(
                    f"{graphs.source_line(node)}: the mask moves columns, so that a key has another's"
                )
            if node.op == "placeholder":
                raise UnsupportedGraph(f"the mask is computed from {node.name!r}, which grows and is no padding mask")
            looks_up = node.target in (operator.getitem, "gather", torch.gather, "index_select", torch.index_select)
            base = node.args[0]
            into_columns = looks_up and isinstance(base, fx.Node) and base in self.on_column
            for parent in node.all_input_nodes:
                self.copy(parent, 1 if into_columns and parent is not base else storage)
            inner = self.places[1] if into_columns else env
            merged = {**env, **{p: inner[p] for p in node.all_input_nodes if p is not base and p in inner}}
            env[node] = self.graph.node_copy(node, lambda parent: merged[parent])
            if graphs.name_of(node) == "expand":
                env[node].args = _expanded(node, env[node])
        return env[node]

    def spells_total(self, node: fx.Node) -> bool:
        """Whether a size is the number of keys, which stays the same where the model stores the last few only."""
        return bool(expr(node).free_symbols) and expr(node) in self.totals

    def lengthens(self, node: fx.Node) -> bool:
        """A tensor that does not grow, lengthened along its last dimension to all keys."""
        if (
            graphs.name_of(node) != "pad"
            or not graphs.is_tensor(node)
            or not self.sizes.is_total(value(node).shape[-1])
        ):
            return False
        return not self.sizes.grown(value(node.args[0]))  # type: ignore[arg-type]

    def filled(self, node: fx.Node, storage: int) -> fx.Node:
        """A lookup in a tensor that was lengthened with some number."""
        base, places = node.args
        bound = inspect.signature(_pad).bind(*base.args, **base.kwargs)  # type: ignore[union-attr]
        bound.apply_defaults()
        x, filling = bound.arguments["input"], bound.arguments["value"]
        if not isinstance(places, tuple) or len(places) != value(x).ndim or not graphs.is_tensor(places[-1]):
            raise UnsupportedGraph(f"{graphs.source_line(node)}: a lengthened tensor is not looked up by a key index")
        *others, last = (self.copy(p, storage) if isinstance(p, fx.Node) else p for p in places)
        count = self.sizes.fixed(value(x).shape[-1])
        inside = self.graph.call_function(torch.clamp_max, (last, count - 1))
        found = self.graph.call_function(operator.getitem, (self.copy(x, storage), (*others, inside)))
        within = self.graph.call_function(operator.lt, (last, count))
        return self.graph.call_function(torch.where, (within, found, filling or 0))

    def sums_up(self, node: fx.Node) -> bool:
        """Whether a node that does not grow is made from columns that do."""
        if node not in self.on_column - self.on_fact or graphs.name_of(node) not in _MIXING:
            return False
        if self.sizes.grown(value(node)):
            return False
        return any(self.sizes.grown(value(parent)) for parent in node.all_input_nodes)

    def picked(self, node: fx.Node, storage: int) -> fx.Node:
        """The key's column of an input that has one for every key."""
        self.bound.append(node)
        columns = self.graph.placeholder(node.name)
        return self.graph.call_function(torch.index_select, (columns, -1, self.storage if storage else self.index))

    def counted(self, node: fx.Node) -> fx.Node:
        """A running sum over a padding mask, which counts the real tokens up to a key."""
        column, *dim = (*node.args, *node.kwargs.values())
        while isinstance(column, fx.Node) and graphs.name_of(column) in _CONVERSIONS:
            column = column.args[0]
        if column not in self.columns or dim[:1] not in ([-1], [1]):
            raise UnsupportedGraph(
                f"{graphs.source_line(node)}: the mask sums over the keys, and not over an input that tells padding"
            )
        return self.count

    def number(self, node: fx.Node) -> int:
        if self.sizes.grows(node):
            raise UnsupportedGraph(
                f"the mask uses the cache's length as a size, {value(node)}, at {graphs.source_line(node)}"
            )
        return self.sizes.fixed(node)


_CONVERSIONS = frozenset({"to", "long", "int", "float", "bool"})
_MIXING = frozenset(
    {"cumsum", "cumprod", "flip", "roll", "sort", "argsort", "topk", "softmax", "matmul", "bmm", "einsum", "linear",
     "diff", "triu", "tril", "pad", "sum", "mean", "amax", "amin", "any", "all", "baddbmm"}
)  # fmt: skip


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> None:
    """The signature of torch.nn.functional.pad."""


def _check_pointwise(node: fx.Node) -> None:
    """Refuse what makes the mask of one key from other keys, which are not at hand when it is asked about a slot."""
    if graphs.name_of(node) in _MIXING:
        raise UnsupportedGraph(
            f"{graphs.source_line(node)}: the attention mask is computed by {graphs.name_of(node)!r}, which looks at "
            "several keys at once and cannot be asked about one slot"
        )


def _expanded(node: fx.Node, copied: fx.Node) -> tuple[Any, ...]:
    """The arguments of a copied expand with -1 where nothing is expanded: the key dimension is one long here."""
    base, *sizes = copied.args
    sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    before, after = value(node.args[0]).shape, value(node).shape  # type: ignore[arg-type]
    added = len(after) - len(before)
    kept = [i >= added and expr(before[i - added]) == expr(size) for i, size in enumerate(after)]
    return (base, *(-1 if same else size for same, size in zip(kept, sizes, strict=True)))


Like = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a tensor."""


@dataclasses.dataclass(frozen=True)
class RotarySlice:
    """The rotary embedding as a function of the key before it and of its position, in two parts.

    The first depends on positions alone (cosines and sines, say).  It is evaluated once for the ranks
    0, 1, ... and gives a table that all layers share; the second turns a key with a row of the table.

    Attributes:
        angles: from positions, shaped as `position`, to what the key is turned with.
        turn: inputs are the key [B, Hkv, q, D] and the results of `angles`.
        position: the shape of the positions that the model's code expects.
        angled: shapes and dtypes of what `angles` reads besides positions.
        turned: and of what `turn` gets besides the results of `angles`, the key [B, Hkv, q, D] first.
    """

    angles: Slice
    turn: Slice
    position: tuple[int, ...]
    angled: tuple[Like, ...]
    turned: tuple[Like, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.angles.key, self.turn.key, self.position)

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, Hkv, q, D] of the keys."""
        return self.turned[0][0]

    def table(self, count: int, bound: list[Tensor], device: torch.device) -> list[Tensor]:
        """What keys at positions 0 .. count - 1 are turned with, each [count, ...]."""

        def at(place: Tensor) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = self.angles.module(place.expand(self.position), *bound)
            return result

        return [written_out(rows) for rows in torch.vmap(at)(torch.arange(count, device=device))]

    def on_slots(self, keys: Tensor, rank: Tensor, table: list[Tensor], bound: list[Tensor]) -> list[Tensor]:
        """Keys [B, Hkv, N, D] at positions [B, H', N] -> rotated, in pieces [B, Hkv, N, d] of D."""
        turn = InPieces(self.turn.module)

        def one(key: Tensor, place: Tensor) -> tuple[Tensor, ...]:
            """One slot's keys [B, Hkv, D] at one position."""
            repeated = key[:, :, None].expand(-1, -1, self.shape[2], -1)
            pieces = turn.run_on(repeated, *(rows[place] for rows in table), *bound)
            return tuple(piece[:, :, 0] for piece in pieces)

        slots = torch.vmap(one, in_dims=(2, 0), out_dims=2)  # over N
        turned = torch.vmap(torch.vmap(lambda place: slots(keys, place)))(rank)
        return [_diagonals(piece) for piece in turned]

    def pairs(self) -> Pairs | None:
        """Which numbers of a key are mixed, seen on unit vectors; None for what is no mixture that kernels know.

        That is also what is not linear, as a norm behind the embedding, or differs between rows, heads or queries.
        """
        drawn = torch.Generator().manual_seed(0)

        def like(given: Like) -> Tensor:
            return torch.randn(given[0], generator=drawn).to(given[1])

        try:
            angles = self.angles.module(torch.tensor(3).expand(self.position), *map(like, self.angled))
            rest = [*angles, *map(like, self.turned[1:])]
            keys = torch.cat([torch.eye(self.shape[3]), like(((1, self.shape[3]), torch.float32)) * 9])
            turned = [self.turn.module(key.expand(self.shape), *rest) for key in keys.to(self.turned[0][1])]
        except (RuntimeError, IndexError):  # it has tensors on another device, or looks up what drawn numbers are not
            return None
        alike = all(torch.equal(x, x[:1, :1, :1].expand_as(x)) for x in turned)
        matrix, got = torch.stack([x[0, 0, 0] for x in turned]).double().tensor_split([self.shape[3]])
        wanted = keys[-1:].double() @ matrix
        linear = torch.allclose(got, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))
        return pairs_of(matrix) if alike and linear else None

    def weights(self, pairs: Pairs, table: list[Tensor], bound: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What numbers and their partners are multiplied with at the positions of a table, each [N, D]."""

        def turn(key: Tensor) -> Tensor:
            turned: Tensor = torch.vmap(lambda *rows: self.turn.module(key.expand(self.shape), *rows, *bound))(*table)
            return turned[:, 0, 0, 0]

        return weights_of(turn, pairs, torch.empty(self.shape[3], dtype=self.turned[0][1], device=table[0].device))


def _diagonals(turned: Tensor) -> Tensor:
    """[B, H', B, Hkv, N, d] -> [B, Hkv, N, d]: each row and head at its own positions."""
    turned = turned.diagonal(0, 0, 2).movedim(-1, 0)  # [B, H', Hkv, N, d]
    return turned[:, 0] if turned.shape[1] == 1 else turned.diagonal(0, 1, 2).movedim(-1, 1)


def cut_rotary(gm: fx.GraphModule, site: match.AttentionSite, rotary: match.Rotary, sizes: Sizes) -> RotarySlice:
    """Cut the rotary embedding of a site's key out."""

    def number(node: fx.Node) -> int:
        if sizes.grows(node):
            raise UnsupportedGraph(f"the rotary embedding uses the cache's length, {value(node)}, as a size")
        return sizes.fixed(node)

    behind = graphs.behind([site.key], {rotary.raw})
    _check_not_overwritten(graphs.dependent(gm.graph, behind, [rotary.raw, rotary.position]), behind, site.key)
    angles = _angles(gm, site.key, rotary)
    turn = graphs.cut(gm, [site.key], [rotary.raw, *angles], number, unpack=True)
    cut = graphs.cut(gm, angles, [rotary.position], number)
    position, *angled = (_like(node, sizes) for node in (rotary.position, *cut.bound))
    turned = tuple(_like(node, sizes) for node in (rotary.raw, *turn.bound))
    return RotarySlice(cut, turn, position[0], tuple(angled), turned)


def _like(node: fx.Node, sizes: Sizes) -> Like:
    given = value(node)
    return tuple(sizes.fixed(size) for size in given.shape), given.dtype


def _angles(gm: fx.GraphModule, key: fx.Node, rotary: match.Rotary) -> list[fx.Node]:
    """The tensors that depend on positions alone and that the key is turned with."""
    rest = graphs.behind([key], {rotary.raw})
    on_position = graphs.dependent(gm.graph, rest, [rotary.position])
    on_key = graphs.dependent(gm.graph, rest | {rotary.raw}, [rotary.raw])
    return [n for n in gm.graph.nodes if n in on_position - on_key and any(user in on_key for user in n.users)]
