"""Arguments that are tensor subclasses, converted to what Dynamo's graph expects.

Dynamo traces through the `__torch_function__` of some classes, a handle's among them: their tensors are plain tensors
in the graph.  In that case it turns `__torch_function__` off around the graph, for all tensors.  But quantized weights
that wrap tensors define their operations in `__torch_function__`, and the graph's operations rely on that.  So the
runtime turns it on again inside, and passes tensors of the traced classes as the plain tensors that the graph expects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpass.torch_private import tensor_types


class UnwrappedSubclasses:
    """Conversion of the arguments of one graph."""

    def __init__(self, handles: Iterable[int] = ()) -> None:
        """
        Args:
            handles: the indices of arguments that are handles, which never reach the graph.
        """
        self._handles = set(handles)
        self._inlined: list[int] | None = None

    def __call__(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with tensors of classes that Dynamo traced through as plain tensors.

        The argument indices are found once, as Dynamo guards on the classes.
        """
        if self._inlined is None:
            given = enumerate(arguments)
            self._inlined = [index for index, x in given if index not in self._handles and tensor_types.was_inlined(x)]
        if not self._inlined:
            return arguments
        made = list(arguments)
        for index in self._inlined:
            made[index] = tensor_types.as_plain(made[index])
        return tuple(made)
