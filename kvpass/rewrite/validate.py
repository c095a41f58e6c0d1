"""Translation validation: a rewritten step graph is held against the model's own graph before anything runs on it.

Three graphs are interpreted on the same made-up conversation: Dynamo's, the canonical one and the rewritten one.  They
go in lockstep: at every attention call the results are compared, and all three go on with the model's own.  So a
difference is seen where it arises, none grows on its way through the layers, and the tolerance follows from the dtypes
of one attention call (`kvpass.rewrite.expected`).  Between attention calls the graphs are the same operations on the
same numbers, so that queries, keys and all outputs must be equal but for the last places, and no choice that a model
makes of such a number, as of an expert or of a whole number to round to, can differ.

    Dynamo's     its attention is the canonical call in exact arithmetic; its caches are past and new rows
    canonical    gives the arguments of that call: query, keys, values, mask, scale
    rewritten    its queries and new rows are the canonical ones; its attention is the same call on the rows as stored

What is proven about a graph (`kvpass.capture`) holds for all arguments; this holds for some, but assumes nothing.

A policy that changes logits (sage, buzz with `log_n`) is held against the model without that change.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NoReturn

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import compat
from kvpass.capture.canonical import ATTENTION
from kvpass.capture.sites import AttentionSite, arguments
from kvpass.errors import KVPassError, UnsupportedGraph
from kvpass.graphs import source_line, value
from kvpass.rewrite.conversation import Conversation, Step
from kvpass.rewrite.expected import Expected, expected, same
from kvpass.rewrite.walk import Visit, Walk
from kvpass.storage import Rows

TOKENS = 61
"""Most tokens of the conversation."""
FEW = 7
"""As many are made up where the call at hand has seen fewer: of one token nothing shows in which order they are."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """What came of it.

    Attributes:
        seconds: how long it took.
        skipped: why it was left out; None if the graphs were run and agree.
    """

    seconds: float
    skipped: str | None = None


class Unfit(Exception):
    """The model's own graph does not run on a made-up conversation."""


def validate(step: Step) -> Validation:
    """Run the graphs and compare.

    Raises:
        UnsupportedGraph: they differ; names the first attention call that does.
    """
    began = time.perf_counter()
    count = _tokens(step)
    why = _unfit(step, count)
    if why is None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                _Lockstep(step, Conversation(step, count)).run()
            except Unfit as failure:
                why = str(failure)
    return Validation(time.perf_counter() - began, why)


def _tokens(step: Step) -> int:
    """How many tokens there are before those of the call: as fit into the slots of every layer.

    More than there are only where no layer would leave some of them out.  Where layers store their last tokens only,
    at least so many that they have begun to.
    """
    windows = [window for window in step.context.windows if window is not None]
    if windows:
        return min(step.seen, max(windows) + FEW) if _past_lengths(step) else step.seen
    more = all(site.window is None for site in step.sites) and _serves(step, FEW)
    return min(max(step.seen, FEW) if more else step.seen, _room(step), TOKENS)


def _room(step: Step) -> int:
    """The tokens that fit into the slots of each layer whose past is held whole."""
    whole = [slots.capacity for slots, window in zip(step.slots, step.context.windows, strict=True) if window is None]
    return min(whole, default=step.seen + 1) - step.context.decodes


def _serves(step: Step, count: int) -> bool:
    """Whether Dynamo's guards leave the graph for so many tokens in every past that is held whole."""
    return all(compat.may_be(length, count) for length in _past_lengths(step))


def _past_lengths(step: Step) -> list[Any]:
    """The lengths of the layers' pasts that are held whole, as the graph has them."""
    whole = [site for site, window in zip(step.sites, step.context.windows, strict=True) if window is None]
    return [value(past).shape[2] for site in whole for past in (site.past_key, site.past_value)]  # type: ignore[arg-type]


def _unfit(step: Step, count: int) -> str | None:
    """Why a conversation of so many tokens cannot be made up."""
    for slots, window in zip(step.slots, step.context.windows, strict=True):
        if window is not None and window > slots.capacity - step.context.decodes:
            return "there are fewer slots than a layer's own window has tokens"
    if count > _room(step):
        return "a layer's own window is longer than there are slots in others"
    if count < 1 or (count != step.seen and not _serves(step, count)):
        return "the graph does not serve a length that fits into the slots"
    return None


class _Lockstep:
    """The three graphs of a step on one conversation.

    Attributes:
        theirs: by the name of a node of Dynamo's graph the model's own value, with zeros for what is no number.
        wanted: by the name of a canonical call its exact result on the rows as they are stored.
        inputs: by the name of a canonical node the value of a query or of new rows.
    """

    def __init__(self, step: Step, made: Conversation) -> None:
        self.step, self.made = step, made
        self.theirs: dict[str, Tensor] = {}
        self.wanted: dict[str, Expected] = {}
        self.inputs: dict[str, Tensor] = {}
        self.caches = [place for site in step.sites for place in (site.keys_out, site.values_out)]
        self.calls = [(i, each) for i, site in enumerate(step.sites) for each in site.all]

    def run(self) -> None:
        """Compare.

        Raises:
            UnsupportedGraph: the graphs differ.
            Unfit: the model's own graph does not run.
        """
        theirs = self._run_theirs()
        self._run_canonical(stores=False)
        if self._rounds:
            self._run_canonical(stores=True)
        self._compare_outputs(self._run_ours(), theirs)

    @property
    def _rounds(self) -> bool:
        """Whether the new row is attended to as it is stored, which is not as the model makes it."""
        return self.step.kv_dtype is not None and bool(self.step.context.decodes)

    # -- Dynamo's graph ----------------------------------------------------------------------------------------------

    def _run_theirs(self) -> list[Any]:
        ends = {node.meta["kvpass_stands_for"] for _, site in self.calls for node in (site.call, site.lse) if node}
        visits: dict[fx.Node, Visit] = {
            node: self._keep_theirs for node in self.step.gm.graph.nodes if node.name in ends
        }
        try:
            return Walk(self.step.gm, self.made.argument, visits, self.caches).run_to()
        except Exception as error:  # the model's own code, on arguments that are made up
            raise Unfit(f"the model's own graph does not run on a made-up conversation: {error}") from error

    def _keep_theirs(self, walk: Walk, node: fx.Node, result: Tensor) -> Tensor:
        known = result.nan_to_num(0.0, 0.0, 0.0)
        self.theirs[node.name] = known
        return known.clone()

    def _their(self, node: fx.Node) -> Tensor:
        """The model's own value for a canonical node."""
        return self.theirs[node.meta["kvpass_stands_for"]]

    # -- the canonical graph -----------------------------------------------------------------------------------------

    def _run_canonical(self, stores: bool) -> None:
        """Run it, with the new rows as they are stored if so wanted."""
        visits: dict[fx.Node, Visit] = {}
        for layer, site in self.calls:
            visits[site.call] = self._canonical_call(layer, site, stores)
            if site.lse is not None:
                visits[site.lse] = self._canonical_lse(site, stores)
            for node in (site.query, site.key, site.value):
                visits.setdefault(node, self._keep_input)
        if stores:
            visits |= self._rounding()
        Walk(self.step.canonical, self.made.argument, visits, self.caches).run_to()

    def _keep_input(self, walk: Walk, node: fx.Node, result: Tensor) -> Tensor:
        self.inputs[node.name] = result.clone()
        return result

    def _rounding(self) -> dict[fx.Node, Visit]:
        """At the nodes that make new rows: what is read of them once they are stored."""
        raw = {node.name for node in self.step.context.raw_keys}
        there = {node.name: node for node in self.step.canonical.graph.nodes}
        visits: dict[fx.Node, Visit] = {}
        for i, site in enumerate(self.step.sites):
            key = there[self.step.context.raw_keys[i].name] if raw else site.key
            layout = self.step.layouts[i]
            visits[key] = _stored_as(layout.key_format, layout.heads, layout.dtype)
            visits[site.value] = _stored_as(layout.value_format, layout.heads, layout.dtype)
        return visits

    def _canonical_call(self, layer: int, site: AttentionSite, stores: bool) -> Visit:
        def visit(walk: Walk, node: fx.Node, result: Tensor) -> Tensor:
            made = expected(_loaded(walk, node))
            theirs = self._their(node)
            if not stores:
                excess = made.excess(theirs) if theirs.shape == result.shape else float("inf")
                self._check(excess, site, "its attention is not what the model is read to compute")
            self.wanted[node.name] = made
            return theirs.clone()

        return visit

    def _canonical_lse(self, site: AttentionSite, stores: bool) -> Visit:
        def visit(walk: Walk, node: fx.Node, result: Tensor) -> Tensor:
            made = expected(_loaded(walk, node))
            theirs = self._their(node).view(result.shape)
            if not stores:
                self._check(made.lse_excess(theirs), site, "its log-sum-exp is not what the model is read to compute")
            self.wanted[node.name] = made
            return theirs.clone()

        return visit

    # -- the rewritten graph -----------------------------------------------------------------------------------------

    def _run_ours(self) -> list[Any]:
        visits: dict[fx.Node, Visit] = {}
        context, left = self.step.context, set(self.step.rewrite.gm.graph.nodes)
        moved = [each for site in context.sites for each in site.all]
        for (_, site), ours in zip(self.calls, moved, strict=True):
            for node in (site.call, site.lse):
                if node is not None and node.name in context.replaced:
                    visits[context.replaced[node.name]] = self._our_call(site, node)
            pairs = [(ours.query, site.query), (ours.key, site.key), (ours.value, site.value)]
            if not self.step.ranked or bool(self.made.valid.all()):
                visits |= {our: self._our_input(site, their) for our, their in pairs if our in left}
        try:
            return Walk(self.step.rewrite.gm, self.made.flat(), visits).run_to()
        except KVPassError:
            raise
        except Exception as error:
            raise UnsupportedGraph(
                f"{self.step.line()}: the rewritten graph does not run on a made-up conversation: {error}"
            ) from error

    def _our_call(self, site: AttentionSite, call: fx.Node) -> Visit:
        def visit(walk: Walk, node: fx.Node, result: Tensor) -> Tensor:
            wanted, theirs = self.wanted[call.name], self._their(call).view(result.shape)
            excess = (
                wanted.excess(result) if call.target is ATTENTION else wanted.lse_excess(result.view_as(wanted.lse))
            )
            self._check(excess, site, "attention on slots is not attention on the cache")
            return theirs.clone()

        return visit

    def _our_input(self, site: AttentionSite, canonical: fx.Node) -> Visit:
        def visit(walk: Walk, node: fx.Node, result: Tensor) -> Tensor:
            if canonical.name in self.inputs and not same(result, self.inputs[canonical.name]):
                self._refuse(site, f"{canonical.name!r}, a query or new row, is another one")
            return result

        return visit

    def _compare_outputs(self, ours: list[Any], theirs: list[Any]) -> None:
        made, rewrite = self.made, self.made.rewrite
        there = [None if place is None else ours[place] for place in rewrite.outputs]
        for place, beyond in rewrite.lengths.items():
            there[place] = made.count + beyond
        for place, grown in zip(rewrite.grown, rewrite.on_all_tokens(made.plain), strict=False):
            there[place] = grown
        left_out = {*self.caches, *rewrite.unread}
        for place, (our, their) in enumerate(zip(there, theirs, strict=True)):
            if place not in left_out and not same(our, their):
                self._refuse(self.step.sites[-1], f"output {place} is another one")

    # -- refusing ----------------------------------------------------------------------------------------------------

    def _check(self, excess: float, site: AttentionSite, what: str) -> None:
        if not excess <= 1:
            self._refuse(site, f"{what}: it differs by {excess:.1e} times the rounding error")

    def _refuse(self, site: AttentionSite, what: str) -> NoReturn:
        raise UnsupportedGraph(
            f"{source_line(site.call)}: the rewritten graph is not the model's: on a made-up conversation of "
            f"{self.made.count} tokens {what}; the model is read wrongly by kvpass, which is a defect worth reporting; "
            "it cannot run on a bounded cache"
        )


def _loaded(walk: Walk, node: fx.Node) -> dict[str, Any]:
    """The arguments of a canonical operator by name."""
    return {name: walk.load(x) if isinstance(x, fx.Node) else x for name, x in arguments(node).items()}


def _stored_as(format: Any, heads: int, dtype: torch.dtype) -> Visit:
    """Rows [B, h, q, D] as they are read once they are stored; of one head where keys are computed from them."""

    def visit(walk: Walk, node: fx.Node, result: Tensor) -> Tensor:
        joins = result.shape[1] != heads
        rows = result.transpose(1, 2).flatten(2)[:, None] if joins else result
        read = Rows.of(format, rows).read_as(dtype)
        return torch.unflatten(read[:, 0], -1, (result.shape[1], -1)).transpose(1, 2) if joins else read

    return visit
