"""Provide each site's mask on slots."""

from __future__ import annotations

import dataclasses
import operator

import torch.fx as fx
from torch import Tensor

from kvpass.capture import key_axis, sparse_index
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.key_axis import MaskContext
from kvpass.fx import op_table, splicing, walk
from kvpass.fx.walk import example_value
from kvpass.lowering.attention_blocks import by_group
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.mask_subgraph import MaskSubgraph, cut_mask


class Masks:
    """The masks of a step graph, each cut out once; `dropped_outputs` is as in `AttentionResults`."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.dropped_outputs: dict[int, tuple[int, int]] = {}
        self._cut: dict[tuple[object, ...], MaskSubgraph] = {}
        self._firsts: dict[int, fx.Node] = {}

    def for_site(self, site: AttentionSite, layer: int) -> MaskOnSlots | None:
        """Return the mask on the slots of a layer."""
        context, window = self._context, self._context.windows[layer]
        if site.mask is None:
            return None
        if window is None and not context.sizes.growing_dims(example_value(site.mask)):
            return ColumnMask([site.mask], context.query_len)
        padding = tuple(
            node for node in context.padding_inputs.by_layer[layer] if node in context.padding_inputs.ones_for_cached
        )
        above = walk.ancestors(site.mask)
        key = site.mask, padding, window, *(node for node in (site.grown_key, site.grown_value) if node in above)
        if key not in self._cut:
            self._drop_sparse_indices(site.mask)
            mask_context = self._mask_context(site, window, padding)
            self._cut[key] = cut_mask(context.step_gm, site.mask, context.sizes, mask_context)
        cut = self._cut[key]
        bound = [context.inputs.host_input(node) if node in cut.host_values else node for node in cut.subgraph.bound]
        first = [] if window is None else [self._first_stored(window)]
        entries = [context.inputs.entry(layer, entry) for entry in cut.entries]
        return dataclasses.replace(cut, nodes=[*first, context.length, *entries, *bound])

    def _mask_context(self, site: AttentionSite, window: int | None, padding: tuple[fx.Node, ...]) -> MaskContext:
        context = self._context
        nodes = walk.ancestors(site.mask, [site.grown_key, site.grown_value])  # type: ignore[arg-type]
        pasts = {past for each in context.sites for past in each.pasts}
        inputs = key_axis.token_inputs(nodes - pasts, context.argument_of, context.sizes)
        indices = context.lengths.key_indices[window]
        return MaskContext(
            key_indices=[n for n in indices if n in nodes and op_table.counts_exactly(example_value(n).dtype)],
            inputs={node: axis for node, axis in inputs.items() if node not in padding},
            padding=list(padding),
            stored=[site.grown_key, site.grown_value],
            length=context.length,
            length_nodes=context.lengths.nodes,
            window=window,
        )

    def _drop_sparse_indices(self, mask: fx.Node) -> None:
        """Check that a mask's sparse indices select all slots, and drop the outputs of their scoring keys."""
        context = self._context
        capacity, outputs = max(context.capacities), walk.results(context.graph)
        for index in sparse_index.sparse_indices(mask):
            index.check(capacity if context.decodes else capacity + context.query_len)
            for node, dim in sparse_index.cached_scoring_keys(index, outputs):
                past = context.placeholders.index(node.all_input_nodes[0])
                self.dropped_outputs[outputs.index(node)] = (past, dim)

    def _first_stored(self, window: int) -> fx.Node:
        """Return the node of the index in the padded sequence of the first token that the model stores."""
        if window not in self._firsts:
            context = self._context
            with context.graph.inserting_after(context.length):
                self._firsts[window] = splicing.emit(context.graph, operator.sub, context.length, window)
        return self._firsts[window]


@dataclasses.dataclass(frozen=True)
class ColumnMask:
    """A mask whose size does not grow, because the length was traced as a number: its columns are gathered."""

    nodes: list[fx.Node]
    query_len: int
    key = ("columns",)
    key_features = ()
    entries = ()

    def on_slots(
        self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor], key_features: list[Tensor]
    ) -> Tensor:
        mask = tensors[0]  # [B or 1, Hq or 1, q, S]
        rows, index_heads, _ = index.shape
        mask = by_group(mask.expand(rows, -1, self.query_len, -1), heads)  # [B, h, g, q, S]
        mask = mask.expand(-1, max(mask.shape[1], index_heads), -1, -1, -1)
        columns = index.clamp(0, mask.shape[-1] - 1).expand(-1, mask.shape[1], -1)[:, :, None, None]
        return mask.gather(-1, columns.expand(-1, -1, mask.shape[2], self.query_len, -1))


MaskOnSlots = MaskSubgraph | ColumnMask
