"""Define the interface of a policy: pure tensor functions over the metadata of the cached tokens.

A policy knows nothing of graphs, kernels or models.  It declares which attention statistics it reads (`statistics`),
which values it keeps per token and per row (`state`, `row_state`), how attention changes them (`observe`,
`observe_chunk`), and a score per token (`score`).  The token of lowest score is evicted first.  The same function ranks
the tokens of a prompt and selects the victim of a decode step, so both always agree.  All other hooks have defaults.

Shapes: B rows, H' = 1 (`heads = "shared"`) or Hkv (`heads = "kv"`), G query heads per KV head, N tokens.
All hooks that take tensors, except `scan`, are traced into the decode graph: static shapes and no host reads.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from kvpass.arguments import check_fields
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.heads import HeadSharding

Statistic = Literal["total", "squares", "last", "window", "logits", "scan"]
State = dict[str, Tensor]
Kind = TypeVar("Kind", bound="Policy")
Count = TypeVar("Count", bound="int | Tensor")
Clock = tuple[int, ...]
"""Counts that the host keeps for one row; () before the first token."""

LATE = torch.iinfo(torch.int64).max
PINNED = "pinned"
"""The entry of the state that marks pinned tokens, for a policy with `keep_prompt`."""
ROW_BUDGET = "row_budget"
"""The entry of the state that holds each row's budget, int64 [B, H', 1], if rows have different budgets."""
RENAMED_HOOKS = {
    "worth": "score",
    "sweep": "compact",
    "fold": "merge_evicted",
    "absorb": "observe_chunk",
    "arrive": "init_token_state",
    "temper": "logit_scale",
}
"""Hooks by their names before 0.2, which policies may still use."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """Statistics of the newest queries' attention to each token; a field is None unless the policy lists it.

    All fields except `scan` are float32 [B, Hkv, G, N].  A decode step has one query, so its fields coincide.

    Attributes:
        total: probabilities summed over the queries.
        squares: squared probabilities summed over the queries.
        last: the probabilities of the last real query of each row.
        window: probabilities averaged over the last `Policy.observation` real queries.
        logits: the scaled logits of the last real query, the model's mask included, the policy's bias not.
        scan: float32 [B, H', N], the result of `Policy.scan`; None in a decode step.
        queries: int64 [B, 1, 1], the number of real queries.
        spread: where the layer's other heads are, None if all are in this process; see `kvpass.policies.heads`.
    """

    total: Tensor | None = None
    squares: Tensor | None = None
    last: Tensor | None = None
    window: Tensor | None = None
    logits: Tensor | None = None
    scan: Tensor | None = None
    queries: Tensor | None = None
    spread: HeadSharding | None = None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Metadata of the tokens that a policy chooses among.

    Attributes:
        position: int64 [B, H', N], the token's position among the real tokens of its row; -1 marks a free slot.
        seen: int64 [B, 1, 1], the number of real tokens so far, the newest included.
        state: the policy's values by name: each [B, H', N], or [B, H', 1] for `row_state`.
        budget: tokens to keep between steps: a number, or int64 [B, H', 1] if rows or layers have different budgets.
        held: how many of the N entries are slots; the others are the new tokens of a prompt (held = 0) or chunk.
        pinned_count: pinned tokens that are not among these; a number or int64 [B, H', 1].
        rank: int64 [B, H', N], the index among the live tokens by position, if it is maintained.
        spread: as of `Attention`.
    """

    position: Tensor
    seen: Tensor
    state: State
    budget: int | Tensor
    held: int = 0
    rank: Tensor | None = None
    spread: HeadSharding | None = None
    pinned_count: int | Tensor = 0

    @property
    def live(self) -> Tensor:
        """bool [B, H', N]: whether the slot holds a token."""
        return self.position >= 0

    @property
    def order(self) -> Tensor:
        """int64 [B, H', N]: the index among the live tokens, 0 for the earliest; undefined for free slots."""
        return rank_of(self.position) if self.rank is None else self.rank

    def newest(self, count: int | Tensor) -> Tensor:
        """Return bool [B, H', N]: whether the token is among the last `count` real tokens."""
        return self.position >= self.seen - count

    def updated(self, changes: State) -> Tokens:
        """Return these tokens with some entries of the state replaced."""
        return dataclasses.replace(self, state={**self.state, **changes})

    @property
    def pinned(self) -> Tensor:
        """bool [B, H', N]: whether the token came with a prompt or chunk and stays; see `Policy.keep_prompt`."""
        return self.state[PINNED] & self.live

    @property
    def competing(self) -> Tokens:
        """The tokens without pinned ones, whose slots count as free."""
        pinned = self.pinned
        count = self.pinned_count + pinned.sum(-1, keepdim=True)
        return dataclasses.replace(self, position=torch.where(pinned, -1, self.position), rank=None, pinned_count=count)


@dataclasses.dataclass(frozen=True)
class Merge:
    """How E evicted tokens are merged into slots that stay, for keys and values alike.

    A slot's row x becomes (own * x + sum(weight * evicted)) / (own + sum(share)) over the tokens merged into it.

    Attributes:
        into: int64 [B, H', E], the slot that each token is merged into.
        weight, share: float32 [B, H', E]; a share of zero leaves the slot unchanged.
        own: the weight of the slot's own row.
        state: changes to the policy's state.
    """

    into: Tensor
    weight: Tensor
    share: Tensor
    own: float
    state: State


@dataclasses.dataclass(frozen=True)
class Plan:
    """The budget and the slots of one layer.

    Attributes:
        budget: tokens kept between steps, the largest over the rows.
        capacity: slots of the layer.
        rows: tokens kept between steps for each row, if rows have different budgets.
        max_capacity: slots that the layer needs for any prompt, if that depends on the prompt.
    """

    budget: int
    capacity: int
    rows: tuple[int, ...] = ()
    max_capacity: int = 0

    def budgets_of_rows(self, rows: int) -> tuple[int, ...]:
        """Return the budget of each of `rows` rows, which `Policy.clock` and `tick` receive."""
        return self.rows or (self.budget,) * rows

    def differs(self, budget: int) -> bool:
        """Return whether slots must store budgets by row, because they can differ from the user's `budget`."""
        return bool(self.rows) or self.budget != budget

    @property
    def with_max_capacity(self) -> Plan:
        """The plan with slots for any prompt, for compilers that specialise on the number of slots."""
        return dataclasses.replace(self, capacity=max(self.capacity, self.max_capacity))


def by_rows(plans: Mapping[int, Plan], budgets: Sequence[int]) -> Plan:
    """Combine plans for different budgets into one in which each row has the budget of its own plan."""
    if len(plans) == 1:
        return next(iter(plans.values()))
    rows = tuple(plans[budget].budgets_of_rows(len(budgets))[row] for row, budget in enumerate(budgets))
    capacity, most = (max(getattr(plan, name) for plan in plans.values()) for name in ("capacity", "max_capacity"))
    return Plan(max(rows), capacity, rows, most)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base class of policies: a frozen dataclass whose fields are the policy's options.

    Attributes:
        keep_prompt: pin the tokens of prompts and chunks, so that only tokens that are generated one at a time are
            evicted.  The hooks then see unpinned tokens, with the rest of the budget.

    Class attributes:
        name: the name for `kvpass.backend(policy=...)`.
        heads: "shared" if all KV heads of a layer keep the same tokens, "kv" if each head chooses its own.
        positions: the default of `positions=`; "cache" numbers the cached tokens 0..n-1 when keys are read.
        statistics: the fields of `Attention` that the policy reads.
        evicts: False for a policy that never evicts a token.
        ranks: maintain `Tokens.rank` in decode steps; costs two passes over the metadata.
        overwrites: choose the victim before the next token is written; the victim keeps its slot until then.
        renumbers: the model's position ids count cached tokens only; a prompt longer than the budget restarts its
            ids for its last tokens (`window_starts`).
        spreads: whether processes may share a layer's heads: "heads" if each process has KV heads with all of their
            query heads, and the policy reads other heads through `kvpass.policies.heads`; "always" if the policy
            reads positions only.  Not inherited: each class declares it.
        prompt_must_compete: the reason why `keep_prompt` is refused; "" if it is supported.
    """

    keep_prompt: bool = dataclasses.field(default=False, kw_only=True)
    name: ClassVar[str]
    heads: ClassVar[Literal["shared", "kv"]] = "shared"
    positions: ClassVar[Literal["absolute", "cache"]] = "absolute"
    statistics: ClassVar[frozenset[Statistic]] = frozenset()
    evicts: ClassVar[bool] = True
    ranks: ClassVar[bool] = False
    renumbers: ClassVar[bool] = False
    spreads: ClassVar[Literal["never", "heads", "always"]] = "never"
    prompt_must_compete: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept hooks by their old names, with a warning."""
        super().__init_subclass__(**options)
        for old, new in RENAMED_HOOKS.items():
            if old in cls.__dict__:
                message = f"{cls.__qualname__}.{old}: this hook of policies is called {new!r} now"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                setattr(cls, new, cls.__dict__[old])

    def __post_init__(self) -> None:
        """Check the options, those of derived classes too, against their annotations.

        Raises:
            PolicyError: an option has a value that is not allowed.
        """
        check_fields(self)
        means_nothing = f"means nothing for {self.name!r}: {self.prompt_must_compete}"
        require(not (self.keep_prompt and self.prompt_must_compete), "keep_prompt", self.keep_prompt, means_nothing)

    @property
    def overwrites(self) -> bool:
        return False

    @property
    def defers(self) -> bool:
        """Whether a prompt stays whole until the next token has attended to it."""
        return False

    @property
    def observation(self) -> int:
        """The number of queries that `Attention.window` averages over."""
        return 1

    # Budgets: numbers on the host.

    def minimum_budget(self) -> int:
        """Return the smallest budget that the policy can work with."""
        return 1

    def check_budget(self, budget: int) -> None:
        """Raise BudgetError if the policy cannot work with `budget` slots."""
        least = self.minimum_budget()
        if budget < least:
            raise BudgetError(f"budget={budget} is too small for {self.name!r} with {self}: it needs at least {least}")

    def fitting_budget(self, budget: int) -> int:
        """Return the largest budget up to `budget` that the policy can work with, at least its minimum."""
        return max(budget, self.minimum_budget())

    def capacity(self, budget: int, prompt: int = 0) -> int:
        """Return the slots of a layer for a prompt of `prompt` tokens, including those needed beyond the budget."""
        return budget + (self.evicts and not self.overwrites)

    def for_layer(self, layer: int, layers: int) -> Policy:
        """Return the policy of one of the model's `layers` layers."""
        return self

    def plan(
        self, attention: Sequence[Attention], valid: Tensor, budget: int, earlier: Sequence[Plan] | None = None
    ) -> list[Plan]:
        """Return the plan of each layer, from the statistics of all layers at the end of a prompt.

        The budget of a row must not depend on other rows.

        Args:
            attention: statistics of the layers that this policy governs.
            valid: bool [B, q], false for padding.
            budget: the mean over the layers.
            earlier: the plans of an earlier prompt on the same model, if any.
        """
        return [Plan(budget, self.capacity(budget, valid.shape[1]))] * len(attention)

    # Counts on the host, for policies that compact periodically.

    def clock(self, clock: Clock, new: int, budget: int) -> Clock:
        """Return a row's counts after a prompt or chunk with `new` real tokens."""
        return ()

    def tick(self, clock: Clock, budget: int) -> tuple[bool, Clock]:
        """Return whether the row's next token needs the decode graph that compacts, and the counts after it."""
        return False, clock

    # State, and how attention changes it.

    def state(self) -> dict[str, torch.dtype]:
        """Return names and dtypes of the values of each token; they start at zero, or as `init_token_state` says."""
        return {}

    def row_state(self) -> dict[str, int | float]:
        """Return names and initial values of the values of each row and head: int64 or float32 [B, H', 1]."""
        return {}

    @property
    def sees_rows(self) -> bool:
        """Whether the policy has an `init_token_state`, which reads new keys and values."""
        return type(self).init_token_state is not Policy.init_token_state

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
        """Return changes to the state after a prompt, chunk or compacting step; by default those of `observe`."""
        return self.observe(tokens, attention)

    def scan(
        self, rows: Iterable[Tensor], valid: Tensor, held: int, budget: int, spread: HeadSharding | None = None
    ) -> Tensor:
        """Return `Attention.scan` from the attention of every query, where sums are not enough; never traced.

        Args:
            rows: blocks of consecutive queries, float32 [B, Hkv, G, n, s]; all blocks together have q queries.  The
                first s of the held + q keys are all that the block's queries see; s never decreases, and the last
                block has all keys.
            valid: bool [B, q], false for padding.
            held: how many of the columns are slots.
            spread: as of `Attention`.
        """
        raise NotImplementedError

    # Keys and values that are rewritten.

    @property
    def aligns(self) -> Literal["never", "read", "step", "compact"]:
        """When `align` runs: never, whenever keys and values are read, or to store its result.

        It stores after every step ("step") or after compacting steps ("compact"), and after a chunk.
        """
        return "never"

    def weights(self) -> list[Tensor]:
        """Return the tensors that `align` uses, which become inputs of the decode graph."""
        return []

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
        raise NotImplementedError

    def last_position(self) -> int:
        """Return the highest position id that new tokens get, for policies that renumber."""
        return LATE

    # Attention.

    @property
    def biases(self) -> bool:
        """Whether the policy has a `bias`."""
        return type(self).bias is not Policy.bias

    def bias(self, tokens: Tokens, groups: int) -> Tensor | None:
        """Return a bias for the logits of later queries: float32, broadcastable to [B, Hkv, G = groups, N], or None."""
        return None

    @property
    def scales_logits(self) -> bool:
        """Whether the policy scales logits."""
        return self.logit_scale(torch.ones(1, 1, dtype=torch.int64)) is not None

    def logit_scale(self, count: Tensor) -> Tensor | None:
        """Return a factor for the logits of queries that attend to `count` tokens, int64 of any shape; None for 1."""
        return None

    def with_plain_logits(self: Kind) -> Kind:
        """Return a copy of the policy that leaves the model's logits unchanged."""
        copied, here = copy.copy(self), type(self)
        plain = type(here.__name__, (here,), {"bias": Policy.bias, "logit_scale": Policy.logit_scale})
        object.__setattr__(copied, "__class__", plain)
        return copied

    # Eviction.

    @property
    def merges(self) -> bool:
        """Whether evicted tokens are merged into others: whether the policy has a `merge_evicted`."""
        return type(self).merge_evicted is not Policy.merge_evicted

    def score(self, tokens: Tokens) -> Tensor:
        """Return int64 or float32 [B, H', N]: the token of lowest score is evicted first; of equals, the later one.

        Scores of free slots are ignored.
        """
        raise NotImplementedError

    def victim(self, tokens: Tokens) -> Tensor:
        """Return the slot [B, H'] to overwrite next: by default a free one, else that of the token of lowest score.

        If rows have different budgets, a row that holds more than its budget takes none of its free slots.
        """
        if not self.evicts:
            return (~tokens.live).int().argmax(-1)
        score = self.protected_score(tokens)
        free: float | Tensor = lowest(score.dtype)
        if isinstance(tokens.budget, Tensor):  # a full row has free slots if another row's budget is larger
            full = tokens.live.sum(-1, keepdim=True) > tokens.budget
            free = torch.where(full, topmost(score.dtype), free).to(score.dtype)
        return latest_of_least(torch.where(tokens.live, score, free), tokens)

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        """Return which tokens stay after a prompt, a chunk or a compacting step, bool [B, H', N], and state changes.

        By default the `budget` tokens of highest score stay.
        """
        return highest(self.score(tokens), tokens.position, self.unpinned_budget(tokens)), {}

    def merge_evicted(self, tokens: Tokens, held: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        """Return how evicted tokens are merged into the slots that stay; optional.

        Args:
            tokens: the slots, those of evicted tokens already free.
            held: the stored keys of the slots, [B, Hkv, C, D].
            evicted: the stored keys of the evicted tokens, [B, Hkv, E, D], by position.
            valid: bool [B, H', E], false for entries without a token.
        """
        raise NotImplementedError

    # What the cache calls: the hooks above, with pinned tokens kept out of them.

    def remembered(self) -> dict[str, torch.dtype]:
        """Return `state`, and the entry for pinned tokens."""
        return {**self.state(), PINNED: torch.bool} if self.keep_prompt else self.state()

    def observe_unpinned(self, tokens: Tokens, attention: Attention) -> State:
        """Return the changes of `observe_chunk`, and pin the new tokens.

        Raises:
            BudgetError: pinned tokens leave less of the budget than the policy needs.
        """
        changes, count = self.observe_chunk(tokens, attention), tokens.position.shape[-1]
        if not self.keep_prompt or tokens.held == count:
            return changes
        new = torch.arange(count, device=tokens.position.device) >= tokens.held
        pinned = tokens.state[PINNED] | (new & tokens.live)
        left = self.unpinned_budget(tokens.updated({**changes, PINNED: pinned}).competing)
        self.check_pinned(int(pinned.sum(-1).max()), int(torch.as_tensor(left).min()))
        return {**changes, PINNED: pinned}

    def check_pinned(self, pinned: int, left: int) -> None:
        """Raise BudgetError if pinned tokens leave less of a budget than the policy needs."""
        least = self.minimum_budget()
        if left < least:
            raise BudgetError(
                f"the budget is too small for {self.name!r} with keep_prompt=True: {pinned} tokens are to stay, which "
                f"leaves {max(left, 0)} of it for others, and {self} needs at least {least}"
            )

    def unpinned_budget(self, tokens: Tokens) -> int | Tensor:
        """Return how many of these tokens may stay, a number or int64 [B, H', 1]."""
        return tokens.budget - tokens.pinned_count

    def protected_score(self, tokens: Tokens) -> Tensor:
        """Return `score`, with pinned tokens above all others."""
        if not self.keep_prompt:
            return self.score(tokens)
        score = self.score(tokens.competing)
        below, top = (torch.finfo(score.dtype).max, torch.inf) if score.is_floating_point() else (LATE - 1, LATE)
        return torch.where(tokens.pinned, top, score.clamp(max=below))

    def keep_mask(self, tokens: Tokens) -> tuple[Tensor, State]:
        """Return the result of `compact`, with pinned tokens kept."""
        if not self.keep_prompt:
            return self.compact(tokens)
        keep, changes = self.compact(tokens.competing)
        return keep | tokens.pinned, changes

    def merge_unpinned(self, tokens: Tokens, held: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        """Return the result of `merge_evicted`, with no token merged into a pinned one."""
        return self.merge_evicted(tokens.competing if self.keep_prompt else tokens, held, evicted, valid)


def lowest(dtype: torch.dtype) -> float | int:
    """Return the least value of a dtype."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def topmost(dtype: torch.dtype) -> float | int:
    """Return the greatest value of a dtype."""
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def latest_of_least(score: Tensor, tokens: Tokens) -> Tensor:
    """Return the slot [B, H'] of lowest score; of equals a free one, else the one with the latest token."""
    least = score == score.amin(-1, keepdim=True)
    age = torch.where(tokens.live, tokens.position, LATE)
    return torch.where(least, age, -1).argmax(-1)


def rank_of(position: Tensor) -> Tensor:
    """Return each token's index among the live tokens of `position` [..., N]; free slots come last."""
    by_position = torch.where(position < 0, LATE, position).argsort(dim=-1, stable=True)
    return _inverse(by_position)


def rows_in_order(position: Tensor) -> Tensor:
    """Return the slots of `position` [..., N] sorted by position, free ones last."""
    return torch.where(position < 0, LATE, position).argsort(-1)


def highest(score: Tensor, position: Tensor, count: int | Tensor) -> Tensor:
    """Return bool [..., N]: the `count` live tokens of highest score; of equals, the earlier ones."""
    order = rows_in_order(position)
    score = torch.where(position < 0, lowest(score.dtype), score).gather(-1, order)
    order = order.gather(-1, score.argsort(dim=-1, descending=True, stable=True))
    dead = (position < 0).gather(-1, order)
    order = order.gather(-1, dead.int().argsort(dim=-1, stable=True))
    return (_inverse(order) < count) & (position >= 0)


def _inverse(order: Tensor) -> Tensor:
    indices = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, indices)


def window_starts(valid: Tensor, size: int | Tensor) -> Tensor:
    """Return where each token of a prompt starts to count, for policies that renumber: int64 [B, q].

    The last `size` real tokens of a row form one window, whose tokens see nothing before it.  The tokens before it form
    windows of `size` tokens, counted from the first token.  The result is the number of real tokens before the token's
    window; it is zero for a prompt that fits.

    Args:
        valid: bool [B, q], false for padding.
        size: a number, or int64 [B, 1].
    """
    index = (valid.long().cumsum(-1) - 1).clamp(min=0)
    last = (valid.long().sum(-1, keepdim=True) - size).clamp(min=0)  # [B, 1]
    return torch.where(index < last, index // size * size, last)


def share_of(count: Count, fraction: float) -> Count:
    """Return floor(fraction * count), exact for the decimal fraction: 0.29 of 100 is 29, not 28."""
    share = Fraction(str(fraction))
    whole = count * share.numerator // share.denominator  # integers, because the count may be symbolic
    return whole  # type: ignore[return-value]  # of what the count is


def require(condition: bool, option: str, value: object, why: str) -> None:
    """Raise a PolicyError that names the option unless `condition` holds."""
    if not condition:
        raise PolicyError(f"{option}={value!r}: {why}")
