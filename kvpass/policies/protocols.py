"""Declare the hooks that few policies have; the base class has no default for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvpass.policies.heads import HeadSharding
from kvpass.policies.types import Merge, State, Tokens


@runtime_checkable
class Scanning(Protocol):
    """A policy that computes the statistic "scan" from the probabilities of all queries."""

    def scan(
        self, probs: Iterable[Tensor], valid: Tensor, held: int, budget: int, sharding: HeadSharding | None = None
    ) -> Tensor:
        """Return `Attention.scan` from the attention of every query, where sums are not enough; never traced.

        Args:
            probs: blocks of consecutive queries, float32 [B, Hkv, G, n, s]; all blocks together have q queries.  The
                first s of the held + q keys are all that the block's queries see; s never decreases, and the last
                block has all keys.  If `Policy.scans_means`, they may be [B, 1, 1, n, s].
            valid: bool [B, q], false for padding.
            held: how many of the columns are slots.
            sharding: see `Attention`.
        """


@runtime_checkable
class Smoothing(Protocol):
    """A policy whose statistic "scan" is the highest probability of each key among the last queries."""

    def smoothed(self, probs: Tensor, valid: Tensor, held: int) -> Tensor:
        """Return probabilities as the policy compares them; never traced.

        `Attention.scan` is the highest over the last `Policy.observation_window` real queries and the G query heads.

        Args:
            probs: float32 [b, h, G, n, held + q], of n of the last queries.
            valid: bool [b, q], false for padding.
            held: how many of the columns are slots.
        """


@runtime_checkable
class Rescoring(Protocol):
    """A policy whose scores depend on the keys and values of all held tokens, unless its `Policy.rescores` is false."""

    def rescore(self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor]) -> State:
        """Return entries [B, H', N] for `Policy.score` to read in the state, which are not stored.

        It runs before every eviction: in the steps that compact, or in every step without an interval, and at the end
        of a prompt or chunk.

        Args:
            key, value: the stored vectors of the tokens, [B, Hkv, N, D] and [B, Hkv, N, Dv]; those of free slots are
                undefined.  With positions="cache" keys are without their rotary embedding.
            weights: the result of `Policy.layer_weights` for the layer, on the device of the keys.
        """


@runtime_checkable
class Projecting(Protocol):
    """A policy that weighs tokens by what their values add to the output of the layer."""

    def project(self, tokens: Tokens, value: Tensor, output: Tensor | None) -> State:
        """Return changes to the state at the end of a prompt or chunk, before the policy compacts; never traced.

        Args:
            value: the stored values of the tokens, [B, h, N, Dv]; those of free slots are undefined.
            output: the weights by which each query head's part of attention's output enters the output of the layer,
                [B or 1, h, G, Dv, E]; None for attention whose output is not projected, as in `kvpass.simulate`.
        """


@runtime_checkable
class Aligning(Protocol):
    """A policy that replaces keys and values; `Policy.aligns` says when, and `Policy.weights` with which tensors."""

    def align(
        self, tokens: Tokens, key: Tensor, value: Tensor, layer: int, weights: Sequence[Tensor], evicted: int
    ) -> tuple[Tensor, Tensor, State]:
        """Return the keys and values that attention sees in place of the stored ones, and changes to the state.

        Args:
            key, value: those of the slots, [B, Hkv, C, D] and [B, Hkv, C, Dv].
            layer: the index of the layer.
            weights: the result of `weights`, on the device of the slots.
            evicted: an upper bound of the tokens evicted since the last call, if the result is stored.
        """


@runtime_checkable
class Merging(Protocol):
    """A policy that merges evicted tokens into others, unless its `Policy.merges` is false."""

    def merge_evicted(self, tokens: Tokens, held: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        """Return how evicted tokens are merged into the slots that stay.

        Args:
            tokens: the slots, those of evicted tokens already free.
            held: the stored keys of the slots, [B, Hkv, C, D].
            evicted: the stored keys of the evicted tokens, [B, Hkv, E, D], by position.
            valid: bool [B, H', E], false for entries without a token.
        """
