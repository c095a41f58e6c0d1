"""What a policy is: pure tensor functions over the metadata of the held tokens.

A policy knows nothing of graphs, kernels or models.  It says what it needs (`statistics`, `heads`), what
it remembers (`state`, `row_state`), how it learns from attention (`observe`, `observe_chunk`) and what each held
token is worth (`score`).  The token that is worth least goes first; the same function ranks the tokens of
a prompt and names the victim of a decode step, so a policy cannot disagree with itself.  The other hooks
have defaults that most policies leave alone.

Shapes: B rows, H' = 1 (`heads = "shared"`) or Hkv (`heads = "kv"`), G query heads per KV head, N tokens.
All hooks that take tensors but `scan` are traced into the decode graph: static shapes, no host reads.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import ClassVar, Literal, TypeVar

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
"""What the host knows of one row from counting tokens; () before the first."""

LATE = torch.iinfo(torch.int64).max
PINNED = "pinned"
"""What the state of a policy with `keep_prompt` calls tokens that stay."""
ROW_BUDGET = "row_budget"
"""What the state calls the budget of each row, int64 [B, H', 1], where rows have budgets of their own."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """What the newest queries paid to each token; a field is None unless the policy asked for it.

    All but `scan` are float32 [B, Hkv, G, N].  In a decode step there is one query, and the fields coincide.

    Attributes:
        total: probabilities summed over the queries.
        squares: squared probabilities summed over the queries.
        last: the probabilities of the last real query of each row.
        window: probabilities averaged over the last `Policy.observation` real queries.
        logits: the scaled logits of the last real query, the model's mask included, the policy's bias not.
        scan: float32 [B, H', N], what `Policy.scan` made of the rows; None in a decode step.
        queries: int64 [B, 1, 1], how many real queries there were.
        spread: where the other heads of the layer are, None if all are here; see `kvpass.policies.heads`.
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
    """The tokens that a policy judges.

    Attributes:
        position: int64 [B, H', N], the token's place among the real tokens of its row; -1 is a free slot.
        seen: int64 [B, 1, 1], real tokens seen so far, the newest included.
        state: what the policy remembers, by name: each [B, H', N], or [B, H', 1] for its `row_state`.
        budget: tokens to keep between steps: a number, or int64 [B, H', 1] where rows or layers have their own.
        held: how many of the N places are slots; the others are the new tokens of a prompt (held = 0) or chunk.
        pinned_count: tokens that stay whatever they are worth and are not among these; a number or int64 [B, H', 1].
        rank: int64 [B, H', N], the place among the live tokens, if it is kept up.
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
        """bool [B, H', N]: holds a token."""
        return self.position >= 0

    @property
    def order(self) -> Tensor:
        """int64 [B, H', N]: the place among the live tokens, 0 for the earliest; means nothing on free slots."""
        return rank_of(self.position) if self.rank is None else self.rank

    def newest(self, count: int | Tensor) -> Tensor:
        """bool [B, H', N]: among the last `count` real tokens seen."""
        return self.position >= self.seen - count

    def updated(self, changes: State) -> Tokens:
        """The same tokens with part of the state replaced."""
        return dataclasses.replace(self, state={**self.state, **changes})

    @property
    def pinned(self) -> Tensor:
        """bool [B, H', N]: stays because it came with a prompt or chunk; see `Policy.keep_prompt`."""
        return self.state[PINNED] & self.live

    @property
    def competing(self) -> Tokens:
        """Those that are not given, as if the others were none."""
        given = self.pinned
        pinned_count = self.pinned_count + given.sum(-1, keepdim=True)
        return dataclasses.replace(
            self, position=torch.where(given, -1, self.position), rank=None, pinned_count=pinned_count
        )


@dataclasses.dataclass(frozen=True)
class Merge:
    """How E tokens that go live on in slots that stay, K and V alike.

    A slot's row x becomes (own * x + sum of weight * x_gone) / (own + sum of share) over the tokens merged into it.

    Attributes:
        into: int64 [B, H', E], the slot that each is merged into.
        weight, share: float32 [B, H', E]; a share of zero leaves the slot as it was.
        own: the slot's own weight.
        state: changes to the policy's state.
    """

    into: Tensor
    weight: Tensor
    share: Tensor
    own: float
    state: State


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one layer gets.

    Attributes:
        budget: tokens between steps, of the row that keeps most.
        capacity: slots for them.
        rows: tokens between steps of each row, if rows get different ones.
        max_capacity: slots that the layer needs for any prompt, if that depends on the prompt.
    """

    budget: int
    capacity: int
    rows: tuple[int, ...] = ()
    max_capacity: int = 0

    def budgets_of_rows(self, rows: int) -> tuple[int, ...]:
        """Tokens between steps of each of so many rows; what `Policy.clock` and `tick` are told of each."""
        return self.rows or (self.budget,) * rows

    def differs(self, budget: int) -> bool:
        """Whether budgets are to be remembered by row, as they may not be the one that users gave."""
        return bool(self.rows) or self.budget != budget

    @property
    def with_max_capacity(self) -> Plan:
        """The same with slots for any prompt, where each number of slots would be compiled for itself."""
        return dataclasses.replace(self, capacity=max(self.capacity, self.max_capacity))


def by_rows(plans: Mapping[int, Plan], budgets: Sequence[int]) -> Plan:
    """Return a layer's plan in which each row gets what the plan for its own budget gives it."""
    if len(plans) == 1:
        return next(iter(plans.values()))
    rows = tuple(plans[budget].budgets_of_rows(len(budgets))[row] for row, budget in enumerate(budgets))
    capacity, most = (max(getattr(plan, name) for plan in plans.values()) for name in ("capacity", "max_capacity"))
    return Plan(max(rows), capacity, rows, most)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of every policy: a frozen dataclass whose fields are its options.

    Attributes:
        keep_prompt: only generated tokens compete, those that come one at a time; what a prompt or a chunk brings
            stays.  The policy is asked about the others alone, with what is left of the budget.

    Class attributes:
        name: what `kvpass.backend(policy=...)` calls it.
        heads: "shared" when all KV heads of a layer keep the same tokens, "kv" when each chooses its own.
        positions: the default of `positions=`; "cache" numbers the held tokens 0..n-1 at read.
        statistics: the fields of `Attention` that the policy reads.
        evicts: False for a policy that never lets go of a token.
        ranks: keep `Tokens.rank` up in decode steps; costs two passes over the metadata.
        overwrites: the victim is chosen before the next token is written, and keeps its slot until then.
        renumbers: the ids that a model looks positions up with, or rotates keys with, count held tokens and no
            others; a prompt longer than the budget starts again for its last tokens (`window_starts`).
        spreads: whether a layer's heads may be spread over processes: "heads" if each has KV heads with all of their
            query heads, and what the policy asks about other heads goes through `kvpass.policies.heads`; "always" if
            it looks at positions alone.  Each class says so of itself: it is not inherited.
        prompt_must_compete: why `keep_prompt` means nothing for the policy; "" if it does.
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

    def __post_init__(self) -> None:
        """Check the options, those of derived classes too, against their annotations.

        Raises:
            PolicyError: a value cannot be.
        """
        check_fields(self)
        means_nothing = f"means nothing for {self.name!r}: {self.prompt_must_compete}"
        require(not (self.keep_prompt and self.prompt_must_compete), "keep_prompt", self.keep_prompt, means_nothing)

    @property
    def overwrites(self) -> bool:
        return False

    @property
    def defers(self) -> bool:
        """Whether a prompt is held whole until the next token has attended to it."""
        return False

    @property
    def observation(self) -> int:
        """How many queries `Attention.window` averages over."""
        return 1

    # Budgets: whole numbers on the host.

    def minimum_budget(self) -> int:
        """The smallest budget that makes sense."""
        return 1

    def check_budget(self, budget: int) -> None:
        """Raise BudgetError when the policy cannot work with `budget` slots."""
        least = self.minimum_budget()
        if budget < least:
            raise BudgetError(f"budget={budget} is too small for {self.name!r} with {self}: it needs at least {least}")

    def fitting_budget(self, budget: int) -> int:
        """The largest budget up to `budget` that the policy can work with, at least its smallest."""
        return max(budget, self.minimum_budget())

    def capacity(self, budget: int, prompt: int = 0) -> int:
        """Slots of a layer, those that attention needs beyond the budget included, for a prompt of that length."""
        return budget + (self.evicts and not self.overwrites)

    def for_layer(self, layer: int, layers: int) -> Policy:
        """The policy of one of the model's layers."""
        return self

    def plan(
        self, attention: Sequence[Attention], valid: Tensor, budget: int, earlier: Sequence[Plan] | None = None
    ) -> list[Plan]:
        """What each layer gets, once the statistics of all of them are known at the end of a prompt.

        What a row gets must not depend on the others.

        Args:
            attention: of the layers that this policy governs.
            valid: bool [B, q], false for padding.
            budget: the mean over the layers.
            earlier: what an earlier prompt on the same model was given, if any.
        """
        return [Plan(budget, self.capacity(budget, valid.shape[1]))] * len(attention)

    # The host's count of steps, for work that is done once in a while.

    def clock(self, clock: Clock, new: int, budget: int) -> Clock:
        """What the host knows of a row after a prompt or chunk with `new` real tokens."""
        return ()

    def tick(self, clock: Clock, budget: int) -> tuple[bool, Clock]:
        """Whether the next token of a row needs the decode graph with the `compact`, and the clock after it."""
        return False, clock

    # What is remembered, and how attention changes it.

    def state(self) -> dict[str, torch.dtype]:
        """Names and dtypes of what is remembered for each token; a new token starts at zero, but see `init_token_state`."""
        return {}

    def row_state(self) -> dict[str, int | float]:
        """Names and first values of what is remembered for each row and head: int64 or float32 [B, H', 1]."""
        return {}

    @property
    def sees_rows(self) -> bool:
        """Whether `init_token_state` gives anything, and new tokens' rows are to be read for it."""
        return type(self).init_token_state is not Policy.init_token_state

    def init_token_state(self, key: Tensor, value: Tensor) -> State:
        """First values [B, H', n] of the state of new tokens, from their stored rows.

        Args:
            key: [B, Hkv, n, D]; with positions by rank before its rotary embedding.
            value: [B, Hkv, n, Dv].
        """
        return {}

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        """What changes in the state after one new token has attended; by default nothing."""
        return {}

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        """What changes after a prompt or chunk, or in a step with the sweep; by default as `observe` has it."""
        return self.observe(tokens, attention)

    def scan(
        self, rows: Iterable[Tensor], valid: Tensor, held: int, budget: int, spread: HeadSharding | None = None
    ) -> Tensor:
        """`Attention.scan` from attention rows, for what sums over queries cannot say; never traced.

        Args:
            rows: consecutive queries, float32 [B, Hkv, G, n, s]; all blocks together have q queries.  The s of the
                held + q keys are all that any of the block sees: all of them in the last, and never fewer than before.
            valid: bool [B, q], false for padding.
            held: how many of the columns are slots.
            spread: as of `Attention`.
        """
        raise NotImplementedError

    # Rows that are rewritten.

    @property
    def aligns(self) -> Literal["never", "read", "step", "compact"]:
        """When `align` is asked for the held rows: never, whenever they are read, or to be stored.

        They are stored after every step ("step") or after those with the sweep ("compact"), and after a chunk.
        """
        return "never"

    def weights(self) -> list[Tensor]:
        """What `align` works with; these tensors become inputs of the decode graph."""
        return []

    def align(
        self, tokens: Tokens, key: Tensor, value: Tensor, layer: int, weights: Sequence[Tensor], evicted: int
    ) -> tuple[Tensor, Tensor, State]:
        """The rows that attention is to see instead of those that are stored, and what changes in the state.

        Args:
            key, value: the slots' [B, Hkv, C, D] and [B, Hkv, C, Dv].
            layer: which of the model's layers they belong to.
            weights: those of `weights`, on the device of the slots.
            evicted: at most so many tokens have gone since the last time, if the rows are to be stored.
        """
        raise NotImplementedError

    def last_position(self) -> int:
        """The highest position id that new tokens get; for policies that renumber."""
        return LATE

    # Attention.

    @property
    def biases(self) -> bool:
        """Whether `bias` may give anything."""
        return type(self).bias is not Policy.bias

    def bias(self, tokens: Tokens, groups: int) -> Tensor | None:
        """Added to the logits of later queries: float32, broadcastable to [B, Hkv, G = groups, N]."""
        return None

    @property
    def scales_logits(self) -> bool:
        """Whether `logit_scale` gives anything."""
        return self.logit_scale(torch.ones(1, 1, dtype=torch.int64)) is not None

    def logit_scale(self, count: Tensor) -> Tensor | None:
        """Multiplies the logits of queries that attend to `count` tokens, int64 of any shape; None for one."""
        return None

    def with_plain_logits(self: Kind) -> Kind:
        """The same policy, but that attention is to the held tokens what the model makes it."""
        copied, here = copy.copy(self), type(self)
        plain = type(here.__name__, (here,), {"bias": Policy.bias, "logit_scale": Policy.logit_scale})
        object.__setattr__(copied, "__class__", plain)
        return copied

    # Who goes.

    @property
    def merges(self) -> bool:
        """Whether tokens that go live on in others: whether the policy has a `merge_evicted`."""
        return type(self).merge_evicted is not Policy.merge_evicted

    def score(self, tokens: Tokens) -> Tensor:
        """[B, H', N] int64 or float32: the token worth least is evicted first; of two equals the later one.

        What it says about free slots does not matter.
        """
        raise NotImplementedError

    def victim(self, tokens: Tokens) -> Tensor:
        """The slot [B, H'] to be overwritten next: by default a free one, else that of the token worth least.

        Where rows have budgets of their own, a row that holds more than its budget has no free slot to give.
        """
        if not self.evicts:
            return (~tokens.live).int().argmax(-1)
        worth = self.protected_score(tokens)
        free: float | Tensor = lowest(worth.dtype)
        if isinstance(tokens.budget, Tensor):  # a full row has free slots where another row's budget is larger
            full = tokens.live.sum(-1, keepdim=True) > tokens.budget
            free = torch.where(full, topmost(worth.dtype), free).to(worth.dtype)
        return latest_of_least(torch.where(tokens.live, worth, free), tokens)

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        """Who stays after a prompt or chunk, or a step with the sweep, bool [B, H', N], and what else changes.

        By default the `budget` tokens worth most.
        """
        return highest(self.score(tokens), tokens.position, self.unpinned_budget(tokens)), {}

    def merge_evicted(self, tokens: Tokens, held: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        """Where the tokens that go live on; called if a policy has it.

        Args:
            tokens: the slots, with those that go already freed.
            held: the stored keys of the slots [B, Hkv, C, D].
            evicted: the stored keys of the tokens that go [B, Hkv, E, D], by position.
            valid: bool [B, H', E], false where there is none.
        """
        raise NotImplementedError

    # What is asked of a policy: the above, with tokens set aside that stay whatever it says.

    def remembered(self) -> dict[str, torch.dtype]:
        """`state`, and which tokens were given."""
        return {**self.state(), PINNED: torch.bool} if self.keep_prompt else self.state()

    def observe_unpinned(self, tokens: Tokens, attention: Attention) -> State:
        """`observe_chunk`, and which tokens were given.

        Raises:
            BudgetError: they leave less of the budget than the policy needs.
        """
        changes, indices = self.observe_chunk(tokens, attention), tokens.position.shape[-1]
        if not self.keep_prompt or tokens.held == indices:
            return changes
        came = torch.arange(indices, device=tokens.position.device) >= tokens.held
        given = tokens.state[PINNED] | (came & tokens.live)
        left = self.unpinned_budget(tokens.updated({**changes, PINNED: given}).competing)
        self.check_pinned(int(given.sum(-1).max()), int(torch.as_tensor(left).min()))
        return {**changes, PINNED: given}

    def check_pinned(self, given: int, left: int) -> None:
        """Raise BudgetError when tokens that stay leave less of a budget than the policy needs."""
        least = self.minimum_budget()
        if left < least:
            raise BudgetError(
                f"the budget is too small for {self.name!r} with keep_prompt=True: {given} tokens are to stay, which "
                f"leaves {max(left, 0)} of it for others, and {self} needs at least {least}"
            )

    def unpinned_budget(self, tokens: Tokens) -> int | Tensor:
        """How many of these tokens may stay, a number or int64 [B, H', 1]."""
        return tokens.budget - tokens.pinned_count

    def protected_score(self, tokens: Tokens) -> Tensor:
        """`score`, with those that were given above all others."""
        if not self.keep_prompt:
            return self.score(tokens)
        worth = self.score(tokens.competing)
        below, top = (torch.finfo(worth.dtype).max, torch.inf) if worth.is_floating_point() else (LATE - 1, LATE)
        return torch.where(tokens.pinned, top, worth.clamp(max=below))

    def keep_mask(self, tokens: Tokens) -> tuple[Tensor, State]:
        """`compact`, and those that were given."""
        if not self.keep_prompt:
            return self.compact(tokens)
        stays, changes = self.compact(tokens.competing)
        return stays | tokens.pinned, changes

    def merge_unpinned(self, tokens: Tokens, held: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        """`merge_evicted`, but into none of those that were given."""
        return self.merge_evicted(tokens.competing if self.keep_prompt else tokens, held, evicted, valid)


def lowest(dtype: torch.dtype) -> float | int:
    """The least value of a dtype."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def topmost(dtype: torch.dtype) -> float | int:
    """The greatest value of a dtype."""
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def latest_of_least(worth: Tensor, tokens: Tokens) -> Tensor:
    """The slot [B, H'] of least worth; of equals a free one, else the one that holds the latest token."""
    least = worth == worth.amin(-1, keepdim=True)
    age = torch.where(tokens.live, tokens.position, LATE)
    return torch.where(least, age, -1).argmax(-1)


def rank_of(position: Tensor) -> Tensor:
    """The place of each token among the live ones of `position` [..., N]; free slots come last."""
    by_position = torch.where(position < 0, LATE, position).argsort(dim=-1, stable=True)
    return _inverse(by_position)


def rows_in_order(position: Tensor) -> Tensor:
    """The places of the tokens of `position` [..., N] sorted by position, free ones last."""
    return torch.where(position < 0, LATE, position).argsort(-1)


def highest(score: Tensor, position: Tensor, count: int | Tensor) -> Tensor:
    """bool [..., N]: the `count` live tokens of highest score; of two equals the earlier one is taken."""
    order = rows_in_order(position)
    score = torch.where(position < 0, lowest(score.dtype), score).gather(-1, order)
    order = order.gather(-1, score.argsort(dim=-1, descending=True, stable=True))
    dead = (position < 0).gather(-1, order)
    order = order.gather(-1, dead.int().argsort(dim=-1, stable=True))
    return (_inverse(order) < count) & (position >= 0)


def _inverse(order: Tensor) -> Tensor:
    indices = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, indices)


def window_starts(valid: Tensor, unpinned_budget: int | Tensor) -> Tensor:
    """Where each token of a prompt starts to count, for policies that renumber: int64 [B, q].

    The last `unpinned_budget` real tokens of a row make one window, which nothing before it is seen from; those before
    it make windows of `unpinned_budget` tokens from the first one on.  The entry is the number of real tokens before the
    token's window, zero for all of a prompt that fits.

    Args:
        valid: bool [B, q], false for padding.
        unpinned_budget: a number, or int64 [B, 1].
    """
    index = (valid.long().cumsum(-1) - 1).clamp(min=0)
    last = (valid.long().sum(-1, keepdim=True) - unpinned_budget).clamp(min=0)  # [B, 1]
    return torch.where(index < last, index // unpinned_budget * unpinned_budget, last)


def share_of(count: Count, fraction: float) -> Count:
    """floor(fraction * count), exact for the fraction as it is written: 0.29 of 100 is 29 and not 28."""
    share = Fraction(str(fraction))
    whole = count * share.numerator // share.denominator  # whole numbers: the count may be an open size
    return whole  # type: ignore[return-value]  # of what the count is


def require(condition: bool, option: str, value: object, why: str) -> None:
    """Raise a PolicyError that names the option unless `condition` holds."""
    if not condition:
        raise PolicyError(f"{option}={value!r}: {why}")
