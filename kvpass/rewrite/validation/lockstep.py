"""Graphs that go in lockstep: at every attention call their results are compared, and all go on with the model's own.

So a difference is seen where it arises, none grows on its way through the layers, and the tolerance follows from the
dtypes of one attention call (`kvpass.rewrite.validation.expected`).  Between attention calls the graphs are the same
operations on the same numbers: queries, new rows and outputs must be equal but for the last places, and no choice that
a model makes of such numbers, as of an expert, or of a whole number to round to, can differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.canonical import ATTENTION
from kvpass.capture.sites import AttentionSite, arguments
from kvpass.errors import KVPassError, UnsupportedGraph
from kvpass.fx import walk
from kvpass.fx.walk import source_line
from kvpass.rewrite.validation.expected import Expected, as_computed, expected, same
from kvpass.rewrite.validation.interpreter import DoesNotRun, GraphRun, Visit

NOT_APPENDED = "the cache is not the past and the new tokens, one after the other"


@dataclasses.dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        seconds: how long it took.
        skipped: why it was left out; None if the graphs were run and agree.
        left_out: of what was made up beyond the first, what could not be compared, and why.
    """

    seconds: float
    skipped: str | None = None
    left_out: tuple[str, ...] = ()


class MadeUpCall(Protocol):
    """A made-up call."""

    @property
    def said(self) -> str:
        """The call in a message."""
        ...


Made = TypeVar("Made", bound=MadeUpCall)


class Unfit(Exception):
    """Nothing can be said of a made-up call: the model's own graph does not run on it, or it cannot be compared."""


@contextlib.contextmanager
def own_failures(said: str) -> Iterator[None]:
    """Errors of the validation's own code say nothing about the graphs.

    Raises:
        Unfit: from any error that is not of kvpass.
    """
    try:
        yield
    except (KVPassError, Unfit):
        raise
    except Exception as error:
        raise Unfit(not_made(said, error)) from error


@contextlib.contextmanager
def leaving_out(left: list[str], said: str) -> Iterator[None]:
    """Note what cannot be compared in `left`, and go on."""
    try:
        with own_failures(said):
            yield
    except Unfit as failure:
        left.append(str(failure))


def not_made(said: str, error: Exception) -> str:
    """Why a comparison was not made, from an error of the validation's own code."""
    return f"comparing {said} failed itself with {type(error).__name__}: {error}"


class Lockstep:
    """Dynamo's graph and its canonical form on the same arguments; what they give is held against a third graph.

    Attributes:
        gm, canonical, sites: the two graphs, and the attention calls of the latter.
        argument: makes the argument of a number.
        new: q, the number of new tokens.
        said: describes the arguments, for an error.
        last: the canonical call after which the graphs stop; None for the end.
        queries: the queries of each call that are looked at, None for all; real: bool [B, q], which are no padding.
        wanted: by the name of a canonical call its exact result.
        inputs: by the name of a canonical node the value of a query, or of new rows.
        blind: whether a query does not see its own key in some call, so that one may see none.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        canonical: fx.GraphModule,
        sites: Sequence[AttentionSite],
        argument: Callable[[int], Any],
        new: int,
        said: str,
        last: fx.Node | None = None,
        queries: Tensor | None = None,
        real: Tensor | None = None,
    ) -> None:
        self.gm, self.canonical, self.sites, self.argument, self.said = gm, canonical, sites, argument, said
        self.new, self.last, self.queries, self.real = new, last, queries, real
        self._numbers = {node: number for number, node in enumerate(walk.placeholders(canonical.graph))}
        self.caches = [index for site in sites for index in (site.keys_out, site.values_out)]
        self.calls = [(i, each) for i, site in enumerate(sites) for each in site.all]
        self.wanted: dict[str, Expected] = {}
        self.inputs: dict[str, Tensor] = {}
        self.blind = False
        self._theirs: dict[str, Tensor] = {}
        self._finite: dict[str, Tensor] = {}

    # -- Dynamo's graph ----------------------------------------------------------------------------------------------

    def run_model(self) -> list[Any]:
        """Run Dynamo's graph; its results but for caches.

        Raises:
            Unfit: it does not run.
        """
        named = {node.name: node for node in self.gm.graph.nodes}
        visits: dict[fx.Node, Visit] = {}
        for _, site in self.calls:
            for node in (site.call, site.lse):
                if node is not None:
                    visits[named[_in_model(node)]] = self._keep_result
            for node, past in ((site.grown_key, site.past_key), (site.grown_value, site.past_value)):
                visits[named[_in_model(node)]] = self._keep_new_rows(site, past)
        try:
            last = None if self.last is None else named[_in_model(self.last)]
            return GraphRun(self.gm, self.argument, visits, self.caches).run_to(last)
        except DoesNotRun as error:
            raise Unfit(f"the model's own graph does not run {self.said}: {error}") from error

    def _keep_result(self, walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        finite = result.isfinite()
        self._theirs[node.name] = result if bool(finite.all()) else result.nan_to_num(0.0, 0.0, 0.0)
        self._finite[node.name] = finite
        return self._theirs[node.name].clone()

    def _keep_new_rows(self, site: AttentionSite, past: fx.Node | None) -> Visit:
        """Keep the new tokens of a grown cache, and check that the past comes before them."""

        def visit(walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
            before = result.shape[2] - self.new
            if past is not None and not torch.equal(result[:, :, :before], self.argument(self._numbers[past])):
                self.refuse(site, NOT_APPENDED)
            self._theirs[node.name] = result[:, :, before:].clone()
            return result

        return visit

    def their(self, node: fx.Node) -> Tensor:
        """The model's own value for a canonical call."""
        return self._theirs[_in_model(node)]

    # -- the canonical graph -----------------------------------------------------------------------------------------

    def run_canonical(
        self, columns: Callable[[int], Tensor | None] = lambda _: None, rounding: Mapping[fx.Node, Visit] | None = None
    ) -> None:
        """Run the canonical graph, and note for each call what it gives on some of the keys.

        Args:
            columns: the keys that the third graph attends to in a layer, None for all.
            rounding: what is done to new rows, if the third graph attends to others than the model's; then nothing is
                compared.

        Raises:
            UnsupportedGraph: it differs, or does not run where the model's own graph does.
        """
        visits: dict[fx.Node, Visit] = {}
        for layer, site in self.calls:
            chosen = columns(layer)
            visits[site.call] = self._at_call(site, chosen, compares=rounding is None)
            if site.lse is not None:
                visits[site.lse] = self._at_call(site, chosen, compares=rounding is None)
            if rounding is None:
                visits |= {node: self._at_append(site) for node in (site.grown_key, site.grown_value)}
            for node in (site.query, site.key, site.value):
                visits.setdefault(node, self._keep_input)
        try:
            GraphRun(self.canonical, self.argument, {**visits, **(rounding or {})}, self.caches).run_to(self.last)
        except DoesNotRun as error:
            self.refuse(self.sites[0], f"the canonical graph does not run: {error}")

    def _keep_input(self, walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        self.inputs[node.name] = result.clone()
        return result

    def _at_append(self, site: AttentionSite) -> Visit:
        def visit(walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
            kept = self._theirs.get(_in_model(node))
            if kept is not None and not same(result[:, :, result.shape[2] - self.new :], kept):
                self.refuse(site, NOT_APPENDED)
            return result

        return visit

    def _at_call(self, site: AttentionSite, columns: Tensor | None, compares: bool) -> Visit:
        def visit(walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
            given = {name: walk.load(x) if isinstance(x, fx.Node) else x for name, x in arguments(node).items()}
            theirs = self._shaped(site, self.their(node), result)
            given = as_computed(given, theirs.dtype)
            made = expected(given, None if compares else columns, self.queries)
            if compares:
                self.blind = self.blind or made.hides_new_keys()
                self.check(self._excess(node, made, theirs), site, "attention is not what the model is read to compute")
            self.wanted[node.name] = made if columns is None or not compares else expected(given, columns, self.queries)
            return theirs.clone()

        return visit

    # -- the third graph ---------------------------------------------------------------------------------------------

    def at_call(self, site: AttentionSite, call: fx.Node, what: str, padded: Tensor | None = None) -> Visit:
        """Compare the third graph's result of a canonical call, and go on with the model's.

        Args:
            padded: bool [B], the rows with padding that the third graph does not hold.  There a query that sees no key
                has an unknown answer, as the model attends to padding, too.
        """

        def visit(walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
            theirs = self._shaped(site, self.their(call), result)
            self.check(self._excess(call, self.wanted[call.name], result, padded), site, what)
            return theirs.clone()

        return visit

    def at_input(self, site: AttentionSite, canonical: fx.Node) -> Visit:
        """Compare the third graph's value of a query, or of new rows."""

        def visit(walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
            if canonical.name in self.inputs and not same(result, self.inputs[canonical.name]):
                self.refuse(site, f"{canonical.name!r}, a query or new rows, has another value")
            return result

        return visit

    def compare_outputs(self, ours: Sequence[Any], theirs: Sequence[Any], left_out: Iterable[int]) -> None:
        """Compare results, as far as both have them."""
        skipped = {*self.caches, *left_out}
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if index not in skipped and our is not None and their is not None and not same(our, their):
                self.refuse(self.sites[-1], f"output {index} has another value")

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _excess(self, call: fx.Node, wanted: Expected, result: Tensor, padded: Tensor | None = None) -> float:
        """By how much a result exceeds the rounding error; of real queries for which the model has numbers."""
        finite = self._finite[_in_model(call)]
        compared = finite.reshape(*result.shape[:3], -1).all(-1)
        compared = compared if self.real is None else compared & self.real[:, None]
        result = result if call.target is ATTENTION else result.reshape(compared.shape)
        if self.queries is not None:
            result, compared = result[:, :, self.queries], compared[:, :, self.queries]
        if padded is not None:
            compared = compared & ~(padded[:, None, None] & wanted.hidden)
        if call.target is not ATTENTION:
            return wanted.lse_excess(result, compared)
        return wanted.excess(result, compared) if result.shape == wanted.output.shape else float("inf")

    def _shaped(self, site: AttentionSite, theirs: Tensor, result: Tensor) -> Tensor:
        """The model's own value in the shape of a result, which must have as many numbers."""
        if theirs.numel() != result.numel():
            self.refuse(site, f"attention has the shape {tuple(result.shape)} instead of {tuple(theirs.shape)}")
        return theirs.reshape(result.shape)

    def check(self, excess: float, site: AttentionSite, what: str) -> None:
        """Refuse a difference above the rounding error."""
        if not excess <= 1:
            self.refuse(site, f"{what}: it differs by {excess:.1e} times the rounding error")

    def refuse(self, site: AttentionSite, what: str) -> NoReturn:
        """Raises: UnsupportedGraph: the graphs differ at an attention call."""
        raise UnsupportedGraph(
            f"{source_line(site.call)}: the rewritten graph is not the model's: {self.said} {what}; the model is read "
            "wrongly by kvpass, which is a defect worth reporting; it cannot run on a bounded cache"
        )


def _in_model(node: fx.Node) -> str:
    """The name of the node of Dynamo's graph that a canonical node stands for."""
    return str(node.meta["kvpass_stands_for"])


def without_side_effects() -> contextlib.ExitStack:
    """A context in which neither gradients nor random numbers of the caller are touched."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.random.fork_rng(devices=[]))
    return stack


def validated(
    calls: Iterable[Made],
    compare: Callable[[Made], object],
    further: Callable[[Made, list[str]], None],
    kind: str,
    why: str,
) -> Validation:
    """Compare on the first call that the model's own graph runs on, then on further ones.

    Args:
        calls: made-up calls, each made when it is asked for.
        further: compares on further calls behind the first, and notes those that are left out.
        kind: the name of the calls, for notes.
        why: the reason to give if there is no call.

    Raises:
        UnsupportedGraph: the graphs differ; names the first attention call that does.
    """
    began, left = time.perf_counter(), list[str]()
    with without_side_effects():
        try:
            for made in calls:
                try:
                    with own_failures(made.said):
                        compare(made)
                except Unfit as failure:
                    why = str(failure)
                else:
                    with leaving_out(left, f"on further {kind}"):
                        further(made, left)
                    return Validation(time.perf_counter() - began, None, tuple(left))
        except KVPassError:
            raise
        except Exception as error:
            why = not_made(f"on {kind}", error)
    return Validation(time.perf_counter() - began, why)
