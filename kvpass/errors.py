"""Errors that kvpass raises, all derived from `KVPassError`."""

from __future__ import annotations


class KVPassError(Exception):
    """Base class of every error that kvpass raises on purpose."""


class PolicyError(KVPassError, ValueError):
    """An unknown policy, or an invalid option of a policy or of the backend."""


class BudgetError(KVPassError, ValueError):
    """A budget that the policy cannot work with, or that a policy without eviction has used up."""


class UnsupportedGraph(KVPassError):
    """An attention call whose cache update cannot be rewritten; the message names the line and the reason."""


class ShardingError(UnsupportedGraph):
    """A tensor-parallel layer for which a policy would decide differently than in a single process."""


class UnreadableGraph(UnsupportedGraph):
    """A graph for which reading or rewriting failed with an unforeseen error."""


class CacheHandleError(KVPassError):
    """A cache that was modified, continued elsewhere, or built in a way that its slots cannot follow."""


class LookupRangeError(KVPassError, IndexError):
    """A token id or a position for which the model's table has no row."""


class RequestError(KVPassError, ValueError):
    """A request that cannot be served, because of its prompt, its length or its name."""


class AlignerError(KVPassError, ValueError):
    """An aligner that is missing or damaged, or was trained for another model, window or policy."""


class CheckpointError(KVPassError):
    """A packaged checkpoint that is not installed or is damaged."""
