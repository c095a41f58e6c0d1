"""Check that keys and values which come from outside of a graph do not grow from call to call.

A graph that attends to keys among its inputs, and updates no cache, may be the decoder of an encoder-decoder model: its
keys stay the same for a whole conversation.  Or a cache grows before a graph break, or in a function that runs
uncompiled, and no graph shows it.  Two calls show it: the second one has the keys of the first and the new tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.cross_attention import OutsideKeys
from kvpass.errors import KVPassWarning, UnsupportedGraph
from kvpass.fx import shapes, walk
from kvpass.fx.shapes import expr
from kvpass.runtime.lru_cache import LruCache

MAX_CALLS = 16
"""The number of earlier calls, such as calls of other conversations, that a call is compared with."""


class GrowthCheck:
    """The check of one graph, with the first and last keys of earlier calls.

    Attributes:
        outside: the inputs that are checked.
        strict: whether growth is an error, and not a warning.
    """

    def __init__(self, graph: fx.Graph, outside: Sequence[OutsideKeys], strict: bool) -> None:
        self.outside, self.strict = list({each.index: each for each in outside}.values()), strict
        symbols = {symbol for each in self.outside for symbol in expr(each.query_len).free_symbols}
        self._measured = {
            expr(size): (index, dim)
            for index, node in enumerate(walk.placeholders(graph))
            for dim, size in enumerate(walk.example_value(node).shape if walk.is_tensor(node) else ())
            if expr(size) in symbols
        }
        self._seen = {each.index: LruCache[int, Tensor](MAX_CALLS) for each in self.outside}

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that checks the arguments of a call and then runs the graph on them."""

        def checked(*arguments: Any) -> Any:
            for each in self.outside:
                self._check(each, arguments)
            return run(*arguments)

        return checked if self.outside else run

    def _check(self, each: OutsideKeys, arguments: Sequence[Any]) -> None:
        """Compare an argument with the arguments of earlier calls.

        Raises:
            UnsupportedGraph: it equals the keys of an earlier call plus the new tokens.
        """
        keys, dim, seen = arguments[each.index], each.dim, self._seen[each.index]
        count = keys.shape[dim]
        if not count or seen.find(count) is not None:
            return
        before = count - self._queries(each, arguments)
        ends = seen.find(before) if before > 0 else None
        if ends is not None and torch.equal(_both_ends(keys.narrow(dim, 0, before), dim), ends):
            self._report(each)
        seen.put(count, _both_ends(keys, dim))

    def _queries(self, each: OutsideKeys, arguments: Sequence[Any]) -> int:
        """Return the number of new tokens in a call."""
        sizes = {symbol: arguments[index].shape[dim] for symbol, (index, dim) in self._measured.items()}
        return shapes.number(each.query_len, sizes)

    def _report(self, each: OutsideKeys) -> None:
        advice = ", or pass strict=False to let such a cache grow" if self.strict else ""
        refusal = UnsupportedGraph(
            "the keys or values of this attention call come from outside of the graph and grow with each call: a graph "
            "break, or a function that runs uncompiled, stands between the update of the cache and attention; find it "
            f"with TORCH_LOGS=graph_breaks{advice}",
            line=each.line,
        )
        if self.strict:
            raise refusal
        warnings.warn(f"kvpass leaves a graph unchanged, and its caches grow: {refusal}", KVPassWarning, stacklevel=3)
        self.outside.clear()


def _both_ends(keys: Tensor, dim: int) -> Tensor:
    """Return a copy of the first and the last token's keys."""
    return keys.index_select(dim, torch.tensor([0, keys.shape[dim] - 1], device=keys.device))
