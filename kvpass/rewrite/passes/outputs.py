"""Remove outputs that grow, such as caches, lengths and masks; add the rows and statistics of a chunk.

    before   return logits, k_0, v_0, past + q            after    return logits, key_0, value_0, real_0, sums_0, ...

The caller returns handles, numbers from the host's count, and precomputed values in their place.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch.fx as fx

from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, shapes, splicing, walk
from kvpass.fx.walk import value
from kvpass.rewrite.context import Outputs, StepContext
from kvpass.rewrite.logs import Record
from kvpass.torch_private import fx_nodes


def bound_outputs(step: StepContext) -> Record:
    """Replace the graph's outputs."""
    step.outputs, kept = _new_outputs(step)
    step.graph.output_node().args = (tuple(kept),)
    removed = [index for index, new_index in enumerate(step.outputs.outputs) if new_index is None]
    return Record([f"output {index}" for index in removed])


def _new_outputs(step: StepContext) -> tuple[Outputs, list[Any]]:
    originals = walk.results(step.graph)
    caches = {index for site in step.sites for index in (site.keys_out, site.values_out)}
    lengths = {
        index: step.sizes.beyond_length(output)
        for index, output in enumerate(originals)
        if walk.is_size(output) and step.sizes.grows(output)
    }
    grown = [
        index
        for index, output in enumerate(originals)
        if index not in caches | step.unread.keys() and walk.is_tensor(output) and step.sizes.grown(value(output))
    ]
    removed = {*caches, *lengths, *grown, *step.unread}
    kept = [output for index, output in enumerate(originals) if index not in removed]
    order = iter(range(len(kept)))
    outputs = [None if index in removed else next(order) for index in range(len(originals))]
    starts = itertools.accumulate(map(len, step.chunks), initial=len(kept))
    chunks = [list(range(start, start + len(chunk))) for start, chunk in zip(starts, step.chunks, strict=False)]
    kept += [node for chunk in step.chunks for node in chunk]
    valid = None if step.valid_output is None else len(kept)
    kept += [] if step.valid_output is None else [step.valid_output]
    return Outputs(outputs, lengths, grown, chunks, valid), kept


def host_precomputed(step: StepContext, gather_from: list[fx.Node]) -> fx.GraphModule | None:
    """Return a graph of the outputs that grow and the inputs that read all tokens, or None.

    Args:
        gather_from: further nodes to compute, from which entries are gathered.

    Raises:
        UnsupportedGraph: such a value needs attention or the cache, or its computation writes to an input.
    """
    read = [*step.inputs.host_inputs, *gather_from]
    if not step.outputs.grown and not read:
        return None
    copy, moved = fx_nodes.copy_graph_module(step.call.gm)
    copies = {node.name: node for node in moved.values()}
    outputs = walk.results(copy.graph)
    for node in read:
        if node.name not in copies:
            step.refuse_growth(node)
    wanted = [outputs[index] for index in step.outputs.grown] + [copies[node.name] for node in read]
    copy.graph.output_node().args = (tuple(wanted),)
    needed = alias.behind(wanted, reader=copy.graph.output_node())
    _check_reads_no_cache(step, wanted, {node.name for node in needed})
    for node in reversed(list(copy.graph.nodes)):
        if node not in needed and node.op not in ("placeholder", "output"):
            copy.graph.erase_node(node)
    for writer in alias.writers_to({node for node in needed if node.op in ("placeholder", "get_attr")}):
        step.refuse_growth(writer)  # both graphs would write
    if {node.name for node in copy.graph.nodes} & {each.call.name for site in step.sites for each in site.all}:
        step.refuse_growth(wanted[0])
    copy.recompile()
    return copy


def _check_reads_no_cache(step: StepContext, wanted: list[fx.Node], needed: set[str]) -> None:
    pasts = {past.name for site in step.call.sites for past in site.pasts}
    if needed.isdisjoint(pasts):
        return
    first = next(node for node in wanted if not pasts.isdisjoint(ancestor.name for ancestor in walk.ancestors(node)))
    raise UnsupportedGraph(
        f"{walk.source_line(first)}: {walk.name_of(first)!r} has an entry for every token seen and is computed "
        "from the cache, as attention weights are, and slots do not hold every token: leave output_attentions out, or "
        "run the model uncompiled"
    )


def settle_sizes(step: StepContext) -> Record:
    """Remove dead code, and leave no size that follows the cache.

    Raises:
        UnsupportedGraph: a node still depends on the length of the cache.
    """
    for node in [node for node in step.graph.nodes if fx_nodes.is_log_only(node)]:
        step.graph.erase_node(node)
    alias.eliminate_dead(step.graph)
    settled = [node for node in step.graph.nodes if walk.is_size(node) and node.users]
    for node in settled:
        if step.sizes.grows(node):
            step.refuse_growth(_reader(node))
        if not step.sizes.settled(node):
            shapes.replace_by(node, step.size_nodes.of(step.sizes.fixed(node)))
    alias.eliminate_dead(step.graph)
    for argument in step.placeholders:
        if not argument.users and not step.size_nodes.has(argument):
            step.graph.erase_node(argument)
        elif step.sizes.grown(value(argument)):
            step.refuse_growth(next(iter(argument.users)))
    return Record([node.name for node in settled])


def _reader(size: fx.Node) -> fx.Node:
    """Return the first operation on tensors that reads a size, or a size computed from it."""
    sizes = walk.reach([size], lambda node: filter(walk.is_size, node.users))
    return min((user for node in sizes for user in node.users if not walk.is_size(user)), default=size)


def order_inputs(step: StepContext) -> Record:
    """Put the placeholders in the order in which `StepRewrite.flat` returns their values."""
    new_inputs = [*(node for nodes in step.slot_inputs for node in nodes), *step.weight_inputs, *step.inputs.nodes]
    remaining = set(walk.placeholders(step.graph))
    splicing.put_first(step.graph, [*new_inputs, *(node for node in step.placeholders if node in remaining)])
    return Record([node.name for node in walk.placeholders(step.graph)])
