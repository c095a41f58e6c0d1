"""Run graphs in lockstep: at each attention call compare their results, then continue all of them with the model's own.

So a difference shows at its layer and does not grow through later layers, and the tolerance follows from the dtypes of
one attention call (`kvpass.rewrite.validation.expected`).  Between attention calls the graphs run the same operations
on the same numbers, so queries, new keys and values, and outputs must be equal up to the last places.  Choices that a
model makes by such numbers, such as the choice of an expert or rounding to an integer, cannot differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.canonical import ATTENTION, AttentionSite
from kvpass.errors import KVPassError
from kvpass.fx import op_table, walk
from kvpass.fx.walk import example_value, refuse
from kvpass.rewrite.validation.expected import ExactAttention, attend_exactly, equal_up_to_rounding, in_result_dtype
from kvpass.rewrite.validation.interpreter import DoesNotRun, GraphRun, Visit
from kvpass.torch_private import dynamo

NOT_APPENDED = "the cache is not the past and the new tokens, one after the other"


@dataclasses.dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        seconds: its duration.
        skipped: the reason why nothing was compared; None if the graphs were run and agree.
        left_out: the synthetic calls after the first that could not be compared, each with the reason.
    """

    seconds: float
    skipped: str | None = None
    left_out: tuple[str, ...] = ()


class NotComparable(Exception):
    """A synthetic call cannot be compared, for example because the model's own graph does not run on it."""


@dataclasses.dataclass
class Lockstep:
    """Run Dynamo's graph and its canonical form on the same arguments, and compare a third graph with them.

    Attributes:
        dynamo_gm, canonical_gm, sites: the two graphs, and the attention calls of the canonical graph.
        argument: creates the argument of an index.
        new_tokens: q, the number of new tokens.
        label: describes the arguments, for an error.
        last_call: the canonical call after which the graphs stop; None for the end.
        queries: the queries of each call that are compared, None for all.
        real_tokens: bool [B, q], false for padding.
        exact_results: the exact result of each canonical call, by its name.
        inputs: the values of queries and of new keys and values, by the name of the canonical node.
        may_see_no_key: whether the mask of some call hides a query's own key, so that the query may see no key at all.
    """

    dynamo_gm: fx.GraphModule
    canonical_gm: fx.GraphModule
    sites: Sequence[AttentionSite]
    argument: Callable[[int], Any]
    new_tokens: int
    label: str
    last_call: fx.Node | None = None
    queries: Tensor | None = None
    real_tokens: Tensor | None = None
    exact_results: dict[str, ExactAttention] = dataclasses.field(default_factory=dict, init=False)
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict, init=False)
    may_see_no_key: bool = dataclasses.field(default=False, init=False)
    _model_values: dict[str, Tensor] = dataclasses.field(default_factory=dict, init=False)
    _finite: dict[str, Tensor] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._indices = {node: index for index, node in enumerate(walk.placeholders(self.canonical_gm.graph))}
        self.caches = [index for site in self.sites for index in (site.keys_out, site.values_out)]
        self.calls = [(i, each) for i, site in enumerate(self.sites) for each in site.attention_calls]

    # -- Dynamo's graph ----------------------------------------------------------------------------------------------

    def run_model(self) -> list[Any]:
        """Run Dynamo's graph and return its results except caches.

        Raises:
            NotComparable: it does not run.
        """
        named = {node.name: node for node in self.dynamo_gm.graph.nodes}
        visits: dict[fx.Node, Visit] = {}
        for _, site in self.calls:
            visits |= {named[_in_model(node)]: self._keep_result for node in site.results}
            for node, past in ((site.grown_key, site.past_key), (site.grown_value, site.past_value)):
                visits[named[_in_model(node)]] = functools.partial(self._keep_new_vectors, site, past)
        try:
            last_node = None if self.last_call is None else named[_in_model(self.last_call)]
            return GraphRun(self.dynamo_gm, self.argument, visits, self.caches).run_to(last_node)
        except DoesNotRun as error:
            raise NotComparable(f"the model's own graph does not run {self.label}: {error}") from error

    def _keep_result(self, run: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        finite = result.isfinite()
        # All graphs continue with this value, and a NaN would spread to later layers; `_excess` skips these entries.
        self._model_values[node.name] = result if bool(finite.all()) else result.nan_to_num(0.0, 0.0, 0.0)
        self._finite[node.name] = finite
        return self._model_values[node.name].clone()

    def _keep_new_vectors(
        self, site: AttentionSite, past: fx.Node | None, run: GraphRun, node: fx.Node, result: Tensor
    ) -> Tensor:
        """Visit a grown cache: keep its new tokens, and check that the past precedes them."""
        before = result.shape[2] - self.new_tokens
        if past is not None and not torch.equal(result[:, :, :before], self.argument(self._indices[past])):
            self.refuse(site, NOT_APPENDED)
        new_vectors = result[:, :, before:]
        # Without a past the model may fill them in place after this node; nothing writes after attention reads them.
        self._model_values[node.name] = new_vectors if past is None else new_vectors.clone()
        return result

    # -- the canonical graph -----------------------------------------------------------------------------------------

    def run_canonical(
        self,
        key_indices: Callable[[int], Tensor | None] = lambda _: None,
        rounding: Mapping[fx.Node, Visit] | None = None,
    ) -> None:
        """Run the canonical graph, and record for each call its exact result on some of the keys.

        Args:
            key_indices: returns the keys that the third graph attends to in a layer, None for all.
            rounding: visits that round new keys and values, if the third graph attends to rounded ones; then nothing
                is compared.

        Raises:
            UnsupportedGraph: it differs, or does not run where the model's own graph does.
        """
        visits: dict[fx.Node, Visit] = {}
        for layer, site in self.calls:
            at_call = functools.partial(self._compare_with_model, site, key_indices(layer), rounding is None)
            visits |= dict.fromkeys(site.results, at_call)
            if rounding is None:
                at_append = functools.partial(self._check_append, site)
                visits |= dict.fromkeys((site.grown_key, site.grown_value), at_append)
            for node in (site.query, site.key, site.value):
                visits.setdefault(node, self._keep_input)
        run = GraphRun(self.canonical_gm, self.argument, {**visits, **(rounding or {})}, self.caches)
        self.run("canonical", run, self.last_call)

    def run(self, name: str, run: GraphRun, last: fx.Node | None) -> list[Any]:
        """Return the results of a graph other than Dynamo's, which must run; `name` is for the error."""
        try:
            return run.run_to(last)
        except DoesNotRun as error:
            self.refuse(self.sites[0], f"the {name} graph does not run: {error}")

    def _keep_input(self, run: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        self.inputs[node.name] = result.clone()
        return result

    def _check_append(self, site: AttentionSite, run: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        """Visit an append: compare its new keys or values with the model's."""
        new_vectors, before = self._model_values.get(_in_model(node)), result.shape[2] - self.new_tokens
        if new_vectors is not None and not equal_up_to_rounding(result[:, :, before:], new_vectors):
            self.refuse(site, NOT_APPENDED)
        return result

    def _compare_with_model(
        self,
        site: AttentionSite,
        key_indices: Tensor | None,
        compares: bool,
        run: GraphRun,
        node: fx.Node,
        result: Tensor,
    ) -> Tensor:
        """Visit a canonical call: keep its exact result, compare the model's, and continue with the model's."""
        call = {
            name: run.load(x) if isinstance(x, fx.Node) else x for name, x in op_table.named_arguments(node).items()
        }
        model_value = self._reshape_like(site, self._model_values[_in_model(node)], result)
        call = in_result_dtype(call, model_value.dtype)
        exact = attend_exactly(call, None if compares else key_indices, self.queries)
        if compares:
            self.may_see_no_key = self.may_see_no_key or exact.hides_new_keys()
            self.check(self._excess(node, exact, model_value), site, "attention differs from the canonical form")
            exact = exact if key_indices is None else attend_exactly(call, key_indices, self.queries)
        self.exact_results[node.name] = exact
        return model_value.clone()

    # -- the third graph ---------------------------------------------------------------------------------------------

    def at_call(self, site: AttentionSite, call: fx.Node, problem: str, padded: Tensor | None = None) -> Visit:
        """Return a visit that compares the third graph's result of a canonical call, and continues with the model's.

        Args:
            problem: the meaning of a difference, for the error.
            padded: bool [B], the rows with padding, which the third graph does not cache.  In these rows the result of
                a query without visible keys is unknown, because the model also attends to padding.
        """

        def visit(run: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
            model_value = self._reshape_like(site, self._model_values[_in_model(call)], result)
            self.check(self._excess(call, self.exact_results[call.name], result, padded), site, problem)
            return model_value.clone()

        return visit

    def at_input(self, site: AttentionSite, canonical: fx.Node) -> Visit:
        """Return a visit that compares the third graph's value of a query or of new keys or values."""

        def visit(run: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
            if canonical.name in self.inputs and not equal_up_to_rounding(result, self.inputs[canonical.name]):
                self.refuse(site, f"{canonical.name!r}, a query or a new key or value, has another value")
            return result

        return visit

    def compare_outputs(self, actual: Sequence[Any], expected: Sequence[Any], left_out: Iterable[int]) -> None:
        """Compare the results that both graphs have."""
        skipped = {*self.caches, *left_out}
        for index, (x, y) in enumerate(zip(actual, expected, strict=True)):
            if index not in skipped and x is not None and y is not None and not equal_up_to_rounding(x, y):
                self.refuse(self.sites[-1], f"output {index} has another value")

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _excess(self, call: fx.Node, expected: ExactAttention, result: Tensor, padded: Tensor | None = None) -> float:
        """Return the error as a multiple of the allowed error, over real queries with finite results of the model."""
        finite = self._finite[_in_model(call)]
        compared = finite.reshape(*result.shape[:3], -1).all(-1)
        compared = compared if self.real_tokens is None else compared & self.real_tokens[:, None]
        result = result if call.target is ATTENTION else result.reshape(compared.shape)
        if self.queries is not None:
            result, compared = result[:, :, self.queries], compared[:, :, self.queries]
        if padded is not None:
            compared = compared & ~(padded[:, None, None] & expected.hidden)
        if call.target is not ATTENTION:
            return expected.lse_excess(result, compared)
        return expected.excess(result, compared) if result.shape == expected.output.shape else float("inf")

    def _reshape_like(self, site: AttentionSite, model_value: Tensor, result: Tensor) -> Tensor:
        """Return the model's own value in the shape of a result, which must have as many elements."""
        if model_value.numel() != result.numel():
            self.refuse(site, f"attention has the shape {tuple(result.shape)} instead of {tuple(model_value.shape)}")
        return model_value.reshape(result.shape)

    def check(self, excess: float, site: AttentionSite, problem: str) -> None:
        """Raise UnsupportedGraph for an error above the rounding error."""
        if not excess <= 1:
            self.refuse(site, f"{problem}: it differs by {excess:.1e} times the rounding error")

    def refuse(self, site: AttentionSite, problem: str) -> NoReturn:
        """Raise UnsupportedGraph: the graphs differ at an attention call."""
        differs = f"the rewritten graph is not the model's: {self.label} {problem}"
        misread = "kvpass misread the model's graph, so it refuses to run it on a bounded cache; please report this bug"
        refuse(site.call, f"{differs}; {misread}")


def _in_model(node: fx.Node) -> str:
    """Return the name of the node of Dynamo's graph that a canonical node stands for."""
    return str(node.meta["kvpass_stands_for"])


MAX_WEIGHTS = 1 << 28
"""The most elements of a model's weights for which a validation runs on one thread."""


@contextlib.contextmanager
def on_few_threads(graph: fx.Graph) -> Iterator[None]:
    """Run operations of a small model on one thread; callers hold the lock of compilations.

    Each operation is short and ends at a barrier, where all threads wait if another process interrupts one of them.
    """
    weights = [
        example_value(node) for node in walk.placeholders(graph) if dynamo.is_of_module(node) and walk.is_tensor(node)
    ]
    threads = torch.get_num_threads()
    try:
        if sum(weight.numel() for weight in weights) <= MAX_WEIGHTS:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def run_validation(
    calls: Iterable[Any],
    further: Callable[[Any], Iterator[Any]],
    compare: Callable[[Any, bool], object],
    kind: str,
    why: str,
) -> Validation:
    """Compare on the first call that the model's own graph runs on, then on other calls.

    Args:
        calls: synthetic calls, each created on demand, with a `label` for messages.
        further: returns calls like these to compare on after the first.
        compare: compares the graphs on one call; if its flag is true, in one layer of each kind only.
        kind: the name of the calls, for notes.
        why: the reason to report if there is no call.

    Raises:
        UnsupportedGraph: the graphs differ; the message names the first attention call that does.
    """
    start = time.perf_counter()
    # The caller's random numbers stay as they are.
    with torch.no_grad(), torch.random.fork_rng(range(len(torch.cuda.default_generators))):
        for call, failure in _compare_each(calls, compare, False, f"on {kind}"):
            if failure is None:
                others = _compare_each(further(call), compare, True, f"on further {kind}")
                left_out = tuple(reason for _, reason in others if reason is not None)
                return Validation(time.perf_counter() - start, None, left_out)
            why = failure
    return Validation(time.perf_counter() - start, why)


def _compare_each(
    calls: Iterable[Any], compare: Callable[[Any, bool], object], one_of_each: bool, label: str
) -> Iterator[tuple[Any, str | None]]:
    """Compare on each call, and yield it with the reason why it cannot be compared, None if the graphs agree.

    Errors of the validation's own code, also while it creates a call, say nothing about the graphs.
    """
    remaining = iter(calls)
    while True:
        call = failure = None
        try:
            if (call := next(remaining, None)) is None:
                return
            compare(call, one_of_each)
        except KVPassError:
            raise
        except NotComparable as error:
            failure = str(error)
        except Exception as error:
            failure = f"the comparison {getattr(call, 'label', label)} failed with {type(error).__name__}: {error}"
        yield call, failure
