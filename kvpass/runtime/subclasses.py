"""Arguments that are tensors of classes of their own, as Dynamo's graph takes them.

Of some classes, a handle's among them, Dynamo has traced through `__torch_function__`: their tensors are plain ones in
the graph.  Then it turns `__torch_function__` off around the graph, for all tensors.  But quantised weights that wrap
tensors say themselves what an operation is, and the graph's operations are meant for them.  So it is turned on again
inside, and the former are given as the plain tensors that they are in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpass.torch_private import tensor_types


class UnwrappedSubclasses:
    """What the arguments of one graph are in it."""

    def __init__(self, handles: Iterable[int] = ()) -> None:
        """
        Args:
            handles: the places of arguments that never reach the graph.
        """
        self._handles = set(handles)
        self._inlined: list[int] | None = None

    def __call__(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, those whose class is in the graph already as plain tensors; Dynamo's guards are on classes."""
        if self._inlined is None:
            given = enumerate(arguments)
            self._inlined = [index for index, x in given if index not in self._handles and tensor_types.was_inlined(x)]
        if not self._inlined:
            return arguments
        made = list(arguments)
        for index in self._inlined:
            made[index] = tensor_types.as_plain(made[index])
        return tuple(made)
