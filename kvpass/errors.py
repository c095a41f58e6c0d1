"""Define every error that kvpass raises, under one base class, and its warning."""

from __future__ import annotations

import torch

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Errors of any code, which say nothing about the model or the policy: never converted into another error."""


class KVPassError(Exception):
    """Base of every error that kvpass raises on purpose."""

    def reword(self, message: str) -> None:
        """Replace the message, and keep everything else."""
        self.args = (message,)


class PolicyError(KVPassError, ValueError):
    """An unknown policy, or an invalid option of a policy or argument of a function.

    Attributes:
        is_unknown_argument: whether neither the policy nor a function takes an argument.  Functions that passed it on
            add the names of their arguments to the message.
    """

    is_unknown_argument = False


class BudgetError(KVPassError, ValueError):
    """A budget that the policy cannot work with, or a budget that a policy without eviction has used up."""


class UnsupportedGraph(KVPassError):
    """An attention call whose cache update cannot be rewritten; names the line and the reason.

    Attributes:
        reason: what cannot be rewritten, and what to do.
        line: the line of the model's source, as `file:line: code`; None if it is unknown.

    The message has both.  If it lists several operations, both belong to the first.
    """

    def __init__(self, reason: str, *, line: str | None = None, message: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.line, self._message = reason, line, message

    def reword(self, message: str) -> None:
        super().reword(message)
        self._message = message

    def __str__(self) -> str:
        return self._message or (f"{self.line}: {self.reason}" if self.line else self.reason)


class ShardingError(UnsupportedGraph):
    """Heads sharded over processes such that the policy might evict other tokens than in a single process."""


class UnreadableGraph(UnsupportedGraph):
    """A graph on which reading or rewriting failed with an unexpected error."""


class CacheHandleError(KVPassError):
    """A cache that was changed, continued elsewhere, or built in a way that its slots cannot follow."""


class LookupRangeError(KVPassError, IndexError):
    """A token id or a position without a row in the model's table."""


class RequestError(KVPassError, ValueError):
    """A request that cannot be served: its prompt, its length or its name."""


class AlignerError(KVPassError, ValueError):
    """An aligner that is missing, damaged, or was trained for another model, window or policy."""


class CalibrationError(KVPassError, ValueError):
    """A calibration that is missing, damaged, or of another model, or a model that cannot be calibrated."""


class CacheFileError(KVPassError, ValueError):
    """A saved cache that is damaged, of a newer format, or was made by another model or under other settings."""


class ArtifactError(KVPassError, ValueError):
    """An exported artifact that is damaged, or was made by other versions, or for another processor, model or call."""


class CheckpointError(KVPassError):
    """A packaged checkpoint that is not installed, or is damaged."""


class KVPassWarning(UserWarning):
    """A warning of kvpass: no bound, an untested version, a skipped check, or slow code."""
