"""Define the interface of a policy: pure tensor functions over the metadata of the cached tokens.

A policy knows nothing of graphs, kernels or models.  It declares which attention statistics it reads (`statistics`),
which values it keeps per token and per row (`state`, `row_state`), how attention changes them (`observe`,
`observe_chunk`), and a score per token (`score`).  The token of lowest score is evicted first.  The same function ranks
the tokens of a prompt and selects the victim of a decode step, so both always agree.  All other hooks have defaults,
or run only for policies that define them.  Properties such as `Policy.merges` tell which hooks a policy defines.

Shapes: B rows, H' = 1 (`heads = "shared"`) or Hkv (`heads = "kv"`), G query heads per KV head, N tokens.
Hooks that take tensors are traced into the decode graph, unless they say otherwise: static shapes and no host reads.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import operator
import warnings
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from kvpass.arguments import Condition, Positive, check_fields, require
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.budgets import Count, HeadClass, Plan, clamp_min
from kvpass.policies.heads import HeadSharding
from kvpass.policies.hook_checks import check_hooks, check_policy
from kvpass.policies.ranking import INT64_MAX, keep_highest
from kvpass.policies.types import Attention, Clock, Merge, State, Statistic, Tokens

__all__ = ["Attention", "Clock", "Merge", "Plan", "Policy", "State", "Statistic", "Tokens"]
"""The names that policies are written with; `kvpass.policies.types` and `budgets` define most."""

Kind = TypeVar("Kind", bound="Policy")
Starts = Annotated[
    tuple[int, ...],
    Condition("above 0, in increasing order", lambda starts: all(a < b for a, b in itertools.pairwise((0, *starts)))),
]

RENAMED_HOOKS = {
    "worth": "score",
    "sweep": "compact",
    "fold": "merge_evicted",
    "absorb": "observe_chunk",
    "arrive": "init_token_state",
    "temper": "logit_scale",
    "prompt_must_compete": "keep_prompt_refusal",
    "own_schedule": "interval_refusal",
    "own_selection": "spans_refusal",
    "own_positions": "cache_positions_refusal",
    "sees_rows": "reads_new_keys",
    "spreads": "shardable",
    "observation": "observation_window",
    "ranks": "reads_rank",
}
"""Hooks by their earlier names, which policies may use until 0.2."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base class of policies: a frozen dataclass whose fields are the policy's options.

    Attributes:
        keep_prompt: pin the tokens of prompts and chunks, so that only tokens that are generated one at a time are
            evicted (`kvpass.policies.pinned_tokens`).
        interval: how many tokens are evicted together.  A row that exceeds its budget is compacted to budget + 1 -
            interval tokens, and the next `interval` tokens are appended (`kvpass.policies.periodic`).
        spans: positions at which spans of the text begin, after the first.  At prompts, chunks and compactions each
            span keeps tokens in proportion to its length (`kvpass.policies.fair_spans`); () for no spans.

    Class attributes:
        name: the name for `kvpass.backend(policy=...)`.
        heads: "shared" if all KV heads of a layer keep the same tokens, "kv" if each head chooses its own.
        positions: the default of `positions=`; "cache" numbers the cached tokens 0..n-1 when keys are read.
        statistics: the fields of `Attention` that the policy reads.
        evicts: False for a policy that never evicts a token.
        reads_rank: maintain `Tokens.rank` in decode steps; costs two passes over the metadata.
        overwrites: choose the victim before the next token is written; the victim keeps its slot until then.
        renumbers: the model's position ids count cached tokens only; a prompt longer than the budget restarts its
            ids for its last tokens (`window_starts`).
        shardable: whether processes may share a layer's heads: "heads" if each process has KV heads with all of their
            query heads, and the policy reads other heads through `kvpass.policies.heads`; "always" if the policy
            reads positions only.  Not inherited: each class declares it.
        keep_prompt_refusal: the reason why `keep_prompt` is refused; "" if it is supported.
        interval_refusal: the reason why an `interval` above 1 is refused; "" if it is supported.
        spans_refusal: the reason why `spans` are refused; "" if they are supported.
        cache_positions_refusal: the reason why positions="cache" is refused; "" if it is supported.
        needs_weights: whether an option must be weights that were made for the model.
    """

    keep_prompt: bool = dataclasses.field(default=False, kw_only=True)
    interval: Positive = dataclasses.field(default=1, kw_only=True)
    spans: Starts = dataclasses.field(default=(), kw_only=True)
    name: ClassVar[str]
    heads: ClassVar[Literal["shared", "kv"]] = "shared"
    positions: ClassVar[Literal["absolute", "cache"]] = "absolute"
    statistics: ClassVar[frozenset[Statistic]] = frozenset()
    evicts: ClassVar[bool] = True
    reads_rank: ClassVar[bool] = False
    renumbers: ClassVar[bool] = False
    shardable: ClassVar[Literal["never", "heads", "always"]] = "never"
    keep_prompt_refusal: ClassVar[str] = ""
    interval_refusal: ClassVar[str] = ""
    spans_refusal: ClassVar[str] = ""
    cache_positions_refusal: ClassVar[str] = ""
    needs_weights: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Accept hooks by their old names, with a warning, and check the hooks of classes outside of kvpass."""
        super().__init_subclass__(**arguments)
        options = inspect.get_annotations(cls)
        for old, new in RENAMED_HOOKS.items():
            if old in cls.__dict__ or old in options:
                message = f"{cls.__qualname__}.{old}: this hook of policies is called {new!r} now"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                is_field = old in options and "ClassVar" not in str(options[old])
                setattr(cls, new, property(operator.attrgetter(old)) if is_field else cls.__dict__[old])
        if not cls.__module__.startswith("kvpass."):
            check_hooks(cls, Policy)

    def __post_init__(self) -> None:
        """Check the options, also of derived classes, against their annotations.

        Raises:
            PolicyError: an option has a value that is not allowed.
        """
        check_fields(self)
        check_policy(self, Policy)
        means_nothing = f"has no effect under policy {self.name!r}: {self.keep_prompt_refusal}"
        require(not (self.keep_prompt and self.keep_prompt_refusal), "keep_prompt", self.keep_prompt, means_nothing)
        why = self._why_no_interval if self.interval > 1 else ""
        require(not why, "interval", self.interval, f"must be 1 for {self.name!r}: {why}")
        why = self._why_no_spans if self.spans else ""
        require(not why, "spans", self.spans, f"must be () for {self.name!r}: {why}")

    def _defines(self, hook: str) -> bool:
        """Return whether the policy's class defines a hook itself; the base class has a default, or raises an error."""
        return getattr(type(self), hook) is not getattr(Policy, hook)

    def _lacks(self, hook: str) -> PolicyError:
        """Return the error for a missing hook that the policy's other hooks or attributes require."""
        return PolicyError(f"{type(self).__qualname__}: it needs the hook `{hook}`, and has none")

    @property
    def _why_no_spans(self) -> str:
        """The reason why the policy cannot select in each span of the text separately; "" if it can."""
        if self.keep_prompt:
            return "keep_prompt keeps every token of a prompt"
        return self.spans_refusal or self._why_no_interval

    @property
    def _why_no_interval(self) -> str:
        """The reason why the policy cannot evict several tokens together; "" if it can."""
        if self.interval_refusal:
            return self.interval_refusal
        one_by_one = self.overwrites or self.merges or self.aligns != "never"
        if one_by_one or self._defines("tick"):
            return "it overwrites, merges, aligns or compacts tokens on its own schedule"
        return ""

    @property
    def overwrites(self) -> bool:
        return False

    @property
    def observation_window(self) -> int:
        """The number of queries that `Attention.window` averages over."""
        return 1

    # Budgets: numbers on the host.

    def minimum_budget(self) -> int:
        """Return the fewest tokens that the policy can work with after it has evicted."""
        return 1

    def compacted(self, budget: Count) -> Count:
        """Return how many tokens a row with a budget keeps when it is compacted: the budget itself by default."""
        return budget + 1 - self.interval  # type: ignore[return-value]

    def budget_note(self, budget: int | float | None) -> str:
        """Return the meaning of a budget under the policy's interval, as text for reports; "" without an interval."""
        if self.interval == 1 or budget is None:
            return ""
        if isinstance(budget, float):
            return f"interval={self.interval}: budget + 1 - {self.interval} tokens are cached after a compaction"
        return f"interval={self.interval}: {self.compacted(budget)} to {budget} tokens are cached between compactions"

    def check_budget(self, budget: int) -> None:
        """Raise BudgetError if the policy cannot work with `budget` slots."""
        least, more = self.minimum_budget(), self.interval - 1
        if budget >= least + more:
            return
        why = f"it needs at least {least + more}"
        if more:
            why += (
                f" slots: {least} that stay after a compaction, and interval - 1 = {more}; take more slots or a "
                "smaller interval"
            )
        raise BudgetError(f"budget={budget} is too small for {self.name!r} with {self}: {why}")

    def fitting_budget(self, budget: Count) -> Count:
        """Return the largest budget up to `budget` that the policy can work with, at least its smallest budget.

        A policy that renumbers tokens also gets symbolic numbers, and int64 [B, 1] for the rows of a prompt.
        """
        return clamp_min(budget, self.minimum_budget() + self.interval - 1)

    def capacity(self, budget: int, prompt: int = 0) -> int:
        """Return the slots of a layer for a prompt of `prompt` tokens, including the slots needed beyond the budget."""
        return budget + (self.evicts and not self.overwrites)

    def for_layer(self, layer: int, layers: int) -> Policy:
        """Return the policy of one of the model's `layers` layers: `self`, or a policy that evicts nothing."""
        return self

    def plan(self, attention: Sequence[Attention], valid: Tensor, budget: int) -> list[Plan]:
        """Return the plan of each layer, from the statistics of all layers at the end of a prompt.

        The budget of a row must not depend on other rows.

        Args:
            attention: statistics of the layers that this policy governs.
            valid: bool [B, q], false for padding.
            budget: the mean over the layers.
        """
        return [Plan(budget, self.capacity(budget, valid.shape[1]))] * len(attention)

    @property
    def divides_heads(self) -> bool:
        """True if heads of a layer have different budgets, that is, if the policy has a `head_classes`."""
        return self._defines("head_classes")

    def head_classes(self, heads: int, budget: int) -> tuple[HeadClass, ...]:
        """Return classes of a layer's KV heads, from the largest budget to the smallest; () for equal budgets.

        The heads of a layer with H heads keep H * budget tokens together.  Whatever the prompt, the classes are the
        same; `head_counts` decides at its end which head is in which.

        Args:
            heads: Hkv.
            budget: the mean over the heads.

        Raises:
            PolicyError: the policy cannot divide the budget among this number of heads.
        """
        return ()

    def head_counts(self, tokens: Tokens, layer: int) -> Tensor:
        """Return a score of each KV head at the end of a prompt, [B, Hkv]: higher scores get larger budgets.

        Heads are put into the classes in the order of their scores; of equal scores the lower head comes first.

        Args:
            tokens: the tokens of the prompt, after `observe_chunk` and `rescore`; their budget is the mean.
            layer: the index of the layer; 0 unless the policy `reads_layer`.
        """
        raise self._lacks("head_counts")

    # Counts on the host, for policies that compact periodically: by default the cached tokens.

    @property
    def keeps_clock(self) -> bool:
        """True if the policy counts tokens on the host."""
        return bool(self.clock((), 1, 1 << 30))  # policies that do not count return () for any budget

    def clock(self, clock: Clock, new: int, budget: int) -> Clock:
        """Return a row's counts after a prompt or chunk with `new` real tokens; () without an interval."""
        if self.interval == 1:
            return ()
        cached = sum(clock) + new
        return (cached if cached <= budget else self.compacted(budget),)

    def tick(self, clock: Clock, budget: int) -> tuple[bool, Clock]:
        """Return whether the row's next token needs the decode graph that compacts, and the counts after it."""
        if self.interval == 1:
            return False, clock
        exceeds = clock[0] >= budget
        return exceeds, (self.compacted(budget) if exceeds else clock[0] + 1,)

    # State, and how attention changes it.

    def state(self) -> dict[str, torch.dtype]:
        """Return names and dtypes of the values of each token; they start at zero, or as `init_token_state` says."""
        return {}

    def row_state(self) -> dict[str, int | float]:
        """Return names and initial values of the values of each row and head: int64 or float32 [B, H', 1]."""
        return {}

    @property
    def reads_new_keys(self) -> bool:
        """True if the policy has an `init_token_state`, which reads new keys and values."""
        return self._defines("init_token_state")

    def init_token_state(self, key: Tensor, value: Tensor) -> State:
        """Return initial state [B, H', n] of new tokens, from their stored keys and values.

        Args:
            key: [B, Hkv, n, D]; with positions="cache" without its rotary embedding.
            value: [B, Hkv, n, Dv].
        """
        return {}

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        """Return changes to the state after one new token has attended; nothing by default."""
        return {}

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        """Return changes to the state after a prompt, chunk or compacting step; by default the changes of `observe`."""
        return self.observe(tokens, attention)

    @property
    def smooths(self) -> bool:
        """True if the statistic "scan" is the highest smoothed probability: the policy has a `smoothed`."""
        return self._defines("smoothed")

    def smoothed(self, probs: Tensor, valid: Tensor, cached_columns: int) -> Tensor:
        """Smooth probabilities before their maximum is taken, in eager code.

        `Attention.scan` is the highest over the last `observation_window` real queries and the G query heads.

        Args:
            probs: float32 [b, h, G, n, cached_columns + q], of n of the last queries.
            valid: bool [b, q], false for padding.
            cached_columns: how many of the columns are slots.
        """
        raise self._lacks("smoothed")

    @property
    def scans_means(self) -> bool:
        """Whether `scan` takes the mean over all query heads, [B, 1, 1, n, s], not each head."""
        return False

    def scan(
        self, probs: Iterable[Tensor], valid: Tensor, cached_columns: int, budget: int, sharding: HeadSharding | None
    ) -> Tensor:
        """Return `Attention.scan` from the attention of every query, where sums are not enough; never traced.

        Args:
            probs: blocks of consecutive queries, float32 [B, Hkv, G, n, s]; all blocks together have q queries.  The
                first s of the cached_columns + q keys are all that the block's queries see; s never decreases, and
                the last block has all keys.  If `scans_means`, they may be [B, 1, 1, n, s].
            valid: bool [B, q], false for padding.
            cached_columns: how many of the columns are slots.
            sharding: see `Attention`.
        """
        raise self._lacks("scan")

    @property
    def rescores(self) -> bool:
        """True if the policy has a `rescore`: scores depend on the keys and values of all cached tokens."""
        return self._defines("rescore")

    def rescore(self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor]) -> State:
        """Return entries [B, H', N] for `score` to read in the state, which are not stored.

        It runs before every eviction: in the steps that compact, or in every step without an interval, and at the end
        of a prompt or chunk.

        Args:
            key, value: the stored vectors of the tokens, [B, Hkv, N, D] and [B, Hkv, N, Dv]; vectors of free slots are
                undefined.  With positions="cache" keys are without their rotary embedding.
            weights: the result of `layer_weights` for the layer, on the device of the keys.
        """
        raise self._lacks("rescore")

    @property
    def projects(self) -> bool:
        """True if scores depend on the output projection, that is, if the policy has a `project`."""
        return self._defines("project")

    def project(self, tokens: Tokens, value: Tensor, output: Tensor | None) -> State:
        """Return changes to the state at the end of a prompt or chunk, before the policy compacts; never traced.

        Args:
            value: the stored values of the tokens, [B, h, N, Dv]; values of free slots are undefined.
            output: the weights that project each query head's part of attention's output to the output of the layer,
                [B or 1, h, G, Dv, E]; None for attention whose output is not projected, as in `kvpass.simulate`.
        """
        raise self._lacks("project")

    def layer_weights(self, layer: int) -> list[Tensor]:
        """Return the tensors that `rescore` and `align` read in a layer, which become inputs of the decode graph.

        A tensor that several layers return becomes one input.
        """
        return []

    @property
    def reads_layer(self) -> bool:
        """True if the policy depends on the layer's index, that is, if it has a `layer_weights`."""
        return self._defines("layer_weights")

    # Keys and values that are rewritten.

    @property
    def aligns(self) -> Literal["never", "read", "step", "compact"]:
        """The time when `align` runs: never, at each read of keys and values, or to store its result.

        The result is stored after every step ("step") or after compacting steps ("compact"), and after a chunk.
        """
        return "never"

    def align(
        self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor], evicted: int
    ) -> tuple[Tensor, Tensor, State]:
        """Return the keys and values that attention sees instead of the stored ones, and changes to the state.

        Args:
            key, value: the vectors of the slots, [B, Hkv, C, D] and [B, Hkv, C, Dv].
            weights: the result of `layer_weights` for the layer, on the device of the slots.
            evicted: an upper bound of the tokens evicted since the last call, if the result is stored.
        """
        raise self._lacks("align")

    def last_position(self) -> int:
        """Return the highest position id that new tokens get, for policies that renumber."""
        return INT64_MAX

    # Attention.

    @property
    def biases(self) -> bool:
        """True if the policy has a `bias`."""
        return self._defines("bias")

    def bias(self, tokens: Tokens, groups: int) -> Tensor | None:
        """Return a bias for the logits of later queries: float32, broadcastable to [B, Hkv, G = groups, N], or None."""
        return None

    @property
    def scales_logits(self) -> bool:
        """True if the policy scales logits."""
        return self.logit_scale(torch.ones(1, 1, dtype=torch.int64)) is not None

    def logit_scale(self, count: Tensor) -> Tensor | None:
        """Return a factor for the logits of queries that attend to `count` tokens, int64 of any shape; None for 1."""
        return None

    def with_plain_logits(self: Kind) -> Kind:
        """Return a copy of the policy that leaves the model's logits unchanged."""
        copied = copy.copy(self)
        kind: Any = type(self)
        object.__setattr__(copied, "__class__", _with_plain_logits(kind))
        return copied

    # Eviction.

    @property
    def merges(self) -> bool:
        """True if evicted tokens are merged into others, that is, if the policy has a `merge_evicted`."""
        return self._defines("merge_evicted")

    def merge_evicted(self, tokens: Tokens, cached_keys: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        """Return how evicted tokens are merged into the slots that stay.

        Args:
            tokens: the slots; slots of evicted tokens are already free.
            cached_keys: the stored keys of the slots, [B, Hkv, C, D].
            evicted: the stored keys of the evicted tokens, [B, Hkv, E, D], by position.
            valid: bool [B, H', E], false for entries without a token.
        """
        raise self._lacks("merge_evicted")

    def score(self, tokens: Tokens) -> Tensor:
        """Return int64 or float32 [B, H', N]: the token of lowest score is evicted first; of equals, the later one.

        Scores of free slots are ignored.
        """
        raise self._lacks("score")

    def victim(self, tokens: Tokens) -> Tensor:
        """Return the slot [B, H'] to overwrite next: by default a free slot, else the slot of the lowest score."""
        return tokens.lowest(self.score(tokens)) if self.evicts else (~tokens.live).int().argmax(-1)

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        """Return which tokens stay after a prompt, a chunk or a compacting step, bool [B, H', N], and state changes.

        By default the `budget` tokens of highest score stay.
        """
        return keep_highest(self.score(tokens), tokens.position, tokens.budget), {}


@functools.cache
def _with_plain_logits(kind: Any) -> type[Any]:
    """Return the class without logit changes, always the same: dataclasses of different classes are never equal."""
    return type(kind.__name__, (kind,), {"bias": Policy.bias, "logit_scale": Policy.logit_scale})
