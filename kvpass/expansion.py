"""Keys and values that are computed from what is cached: multi-head latent attention.

The cache of such a layer holds a latent vector and a shared key for each token, and the model makes the keys and
values of all heads from them.  The subgraph that does so is cut out and applied to slots at read, under `vmap` as in
`kvpass.instantiate`; the slots hold what the model caches and are no larger.

Which query heads such a cache belongs to cannot be said in general, so that all its heads keep the same tokens: they
are joined into one.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import graphs
from kvpass.errors import UnsupportedGraph
from kvpass.graphs import Sizes, Slice, value
from kvpass.match import AttentionSite


def joined(rows: Tensor) -> Tensor:
    """[B, h, N, D] as [B, 1, N, h * D]."""
    return rows.transpose(1, 2).flatten(2)[:, None]


@dataclasses.dataclass(frozen=True)
class Expansion:
    """From what is cached to what is attended to.

    Attributes:
        slice: inputs are the cached pair of one token, [B, h, 1, D'] and [B, h, 1, Dv'].
        heads: h.
    """

    slice: Slice
    heads: int

    def on_slots(self, key: Tensor, value: Tensor, bound: list[Tensor]) -> tuple[Tensor, Tensor]:
        """[B, 1, N, h * D'] and [B, 1, N, h * Dv'] -> keys [B, Ha, N, D] and values [B, Ha, N, Dv] for attention."""

        def one(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            pair = [torch.unflatten(x, -1, (self.heads, -1))[:, :, None] for x in (key, value)]  # [B, h, 1, D']
            keys, values = self.slice.module(*pair, *bound)
            return keys[:, :, 0], values[:, :, 0]

        expanded: tuple[Tensor, Tensor] = torch.vmap(one, in_dims=1, out_dims=2)(key[:, 0], value[:, 0])
        return expanded


def cut_expansion(gm: fx.GraphModule, site: AttentionSite, sizes: Sizes) -> Expansion | None:
    """Cut out what computes a site's keys and values from its cache; None where they are cached as they are.

    Raises:
        UnsupportedGraph: those of one token are made from other tokens as well.
    """
    if site.made is None:
        return None
    if not sizes.grows(value(site.grown_key).shape[2]):
        raise UnsupportedGraph(
            f"{graphs.source_line(site.call)}: the model's code compares the cache's length with a number, so that a "
            "graph serves one length only; a sparse index over its tokens does that"
        )
    made, stored = list(site.made), [site.grown_key, site.grown_value]
    for node in graphs.dependent(gm.graph, graphs.behind(made, stored, site.call), stored) - set(stored):
        _check_per_token(node, sizes)

    def number(node: fx.Node) -> int:
        return 1 if sizes.is_total(node) else sizes.fixed(node)

    return Expansion(graphs.cut(gm, made, stored, number, reader=site.call), value(site.grown_key).shape[1])


_PER_TOKEN = frozenset(
    {"view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous",
     "split", "chunk", "getitem", "new_empty", "empty_like", "copy_", "setitem", "cat", "to", "float", "type_as", "add",
     "mul", "rsqrt", "pow", "neg", "clone", "repeat", "repeat_interleave"}
)  # fmt: skip
_ALONG_LAST = frozenset({"linear", "mean", "rms_norm", "layer_norm"})


def _check_per_token(node: fx.Node, sizes: Sizes) -> None:
    """Refuse what may mix tokens."""
    if not isinstance(value(node), torch.Tensor):
        return  # a size, or a tuple whose items are looked at
    name = graphs.name_of(node)
    last = [value(parent).shape[-1] for parent in node.all_input_nodes if graphs.is_tensor(parent)]
    along_features = name in _ALONG_LAST and not any(sizes.grows(size) for size in last)
    counts = [size for size in value(node).shape if sizes.grows(size)]
    if not (name in _PER_TOKEN or along_features) or len(counts) != 1 or not sizes.is_total(counts[0]):
        raise UnsupportedGraph(
            f"{graphs.source_line(node)}: keys or values are computed from the cache by {name!r}, which may look at "
            "several tokens at once and cannot be asked about one slot"
        )
