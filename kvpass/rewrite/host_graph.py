"""Cut out the graph of the values that the host computes from all tokens."""

from __future__ import annotations

import torch.fx as fx

from kvpass.capture.canonical import attention_calls
from kvpass.fx import alias, splicing, walk
from kvpass.rewrite.context import StepContext


def build_host_graph(context: StepContext, gather_from: list[fx.Node]) -> fx.GraphModule | None:
    """Return a graph of the outputs, inputs and checks that read all tokens; None if there are none.

    Args:
        gather_from: other nodes to compute, from which entries are gathered.

    Raises:
        UnsupportedGraph: such a value needs attention or the cache, or its computation writes to an input.
    """
    read = [*context.inputs.host_inputs, *gather_from, *context.host_checks]
    if not context.outputs.dynamo_outputs.grown and not read:
        return None
    graph = context.given.canonical_gm.graph
    originals, outputs, end = {node.name: node for node in graph.nodes}, walk.results(graph), graph.output_node()
    for node in read:
        if node.name not in originals:
            context.refuse_growth(node)
    results = [outputs[index] for index in context.outputs.dynamo_outputs.grown] + [
        originals[node.name] for node in read
    ]
    needed = alias.ancestors_with_writes(results, reader=end)
    _check_reads_no_cache(context, results, needed)
    for writer in alias.writers_to({node for node in needed if node.op in ("placeholder", "get_attr")}):
        context.refuse_growth(writer)  # both graphs would write
    if not needed.isdisjoint(each.call for each in attention_calls(context.given.sites)):
        context.refuse_growth(results[0])
    return splicing.extract(context.given.canonical_gm, results, end)


def _check_reads_no_cache(context: StepContext, results: list[fx.Node], needed: set[fx.Node]) -> None:
    pasts = {past for site in context.given.sites for past in site.pasts}
    if needed.isdisjoint(pasts):
        return
    writers = sorted(filter(alias.writes, needed))  # a value may read the cache through a write to its memory alone
    first = next(node for node in (*results, *writers) if not pasts.isdisjoint(walk.ancestors(node)))
    reads = "reads all tokens in the cache, as attention probabilities and checks of the cache do"
    why = f"{walk.target_name(first)!r} {reads}, and slots do not hold every token"
    walk.refuse(first, f"{why}: leave that out (output_attentions), or run the model uncompiled")
