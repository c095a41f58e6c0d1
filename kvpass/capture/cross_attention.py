"""Cross-attention: keys that are stored once, and that no later token adds to.

In a prompt such a cache looks like any other: nothing is put before new keys, and the graph returns them.  What tells
it apart are the inputs: its keys are made of what an encoder gave, and of none of the tokens that its queries are.  How
many there are says nothing, as there may be as many as queries.  Whatever grows in a step is looked at there anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.fx import alias
from kvpass.fx.alias import Writers
from kvpass.fx.walk import is_tensor
from kvpass.torch_private import dynamo

DOES_NOT_GROW = "its keys and values do not grow: they are made of other inputs than its queries"


def queries_of(calls: list[AttentionCall], writers: Writers) -> dict[fx.Node, fx.Node]:
    """Return the query of each attention call by the nodes of its results, if inputs have a part in the query.

    A query of parameters alone, as in attention over layers, says nothing: there the tokens come in as keys and values.
    """
    return {
        end: call.query
        for call in calls
        if _inputs(alias.behind([call.query], reader=call.node, writers=writers))
        for end in (call.node, call.lse)
        if end is not None
    }


def is_fixed(call: AttentionCall, queries: Mapping[fx.Node, fx.Node], writers: Writers) -> bool:
    """Whether no input that the query is a row of has a part in any key or value.

    A query of a later layer also carries what earlier attention calls gave.  Whose row it is shows along their queries.

    Args:
        queries: see `queries_of`.
        writers: of the graph.
    """
    queried = _inputs(alias.behind([call.query], reader=call.node, through=queries, writers=writers))
    attended = [_inputs(alias.behind([node], reader=call.node, writers=writers)) for node in (call.key, call.value)]
    return bool(queried) and all(made_of and queried.isdisjoint(made_of) for made_of in attended)


def _inputs(nodes: set[fx.Node]) -> set[fx.Node]:
    """The tensors that a call brings, which may differ from step to step."""
    return {node for node in nodes if node.op == "placeholder" and is_tensor(node) and not dynamo.is_of_module(node)}
