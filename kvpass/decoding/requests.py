"""Serving of many requests on one decode graph: `DecodeLoop(model, policy, rows=R)`.

Each row of the batch belongs to one request.  A prompt runs in a batch of one row, and then its slots are copied into a
free row; the other rows continue on the same graph.  Slots have a fixed size, so there are no pages, and no row moves.

Rows have seen different numbers of tokens, but the masks of a model count positions in one padded sequence.  So rows
are treated as padded on the left: all are as long as the longest, and a row's tokens are at its end.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

import optree
import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.arguments import Condition, require
from kvpass.backend import Backend
from kvpass.cache.handle import Handle, LayerCache, caches_in, moved
from kvpass.cache.slots import AnySlots, empty_slots
from kvpass.decoding.pin_masks import Pin, pin_mask
from kvpass.decoding.prefill import are_token_ids, chunks, lengths, prefix_mask
from kvpass.decoding.sampling import RowSampling, Sampling
from kvpass.decoding.stepping import LoopSettings, LoopState, refreshed
from kvpass.errors import BudgetError, CacheHandleError, KVPassError, RequestError
from kvpass.policies.pinned_tokens import check_pinned
from kvpass.runtime.caches import even_out, free_bytes, keep_address

Reason = Literal["stop", "length", "cancelled", "error"]
ATTEMPTS = 2  # runs of a request that fails alone before it ends with an error
MOST_STOPS = 8  # stop tokens of a request
FAILS = Condition(error=RequestError)


def _is_prompt(ids: Tensor | Sequence[int]) -> bool:
    """Return whether token ids are integers and form one prompt that is not empty."""
    shape = ids.shape if isinstance(ids, Tensor) else (len(ids),)
    integral = not isinstance(ids, Tensor) or are_token_ids(ids)
    return integral and shape[-1:] > (0,) and tuple(shape[:-1]) in ((), (1,))


Prompt = Annotated[
    Tensor | Sequence[int],
    Condition(
        holds=_is_prompt,
        message="must be one prompt that is not empty: a list of whole numbers, or an integer tensor [T] or [1, T]",
        error=RequestError,
    ),
]


class RequestStatus(enum.IntEnum):
    """State of a request, with the names of transformers' continuous batching."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """Tokens of a request at one call of `DecodeLoop.step`.

    Attributes:
        request_id: the name that `DecodeLoop.add` returned.
        prompt_ids: the tokens of the prompt.
        generated_tokens: all tokens generated so far; a stop token is the last one.
        new_tokens: the tokens generated since the last output.
        status: the state of the request.
        finish_reason: "stop" for a stop token, "length" for the largest number of tokens, "cancelled" or "error"; None
            for a request that has not finished.
        error: the error message, if the status is `RequestStatus.FAILED`.
        held: the tokens in its slots at its end, the mean over layers and heads; None before its end, and for a request
            that ended without a row.
        cache: its cache at its end, if `DecodeLoop.add` was to keep it; it has seen all tokens but the last one.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]
    new_tokens: list[int]
    status: RequestStatus
    finish_reason: Reason | None = None
    error: str | None = None
    held: float | None = None
    cache: Any = None

    def is_finished(self) -> bool:
        """Return whether the request has finished or failed, so that no further output follows."""
        return self.status >= RequestStatus.FINISHED


@dataclasses.dataclass(eq=False)
class Request:
    """A request and its state on the host.

    Attributes:
        request_id: the name of the request.
        prompt: the tokens of the prompt.
        most: the largest number of tokens to generate.
        stop: the stop tokens.
        sampling: the settings of sampling.
        pinned: bool [1, T] on the CPU, the tokens of the prompt to pin; None for none.
        on_top: whether pinned tokens count beside the budget.
        prefix: the cache that the prompt continues, which is copied; None for an empty one.
        before: the number of tokens of the prefix.
        keep: whether to copy the slots of the request when it ends.
        tokens: the tokens generated so far.
        told: the tokens that have been handed out, which are more than `tokens` after a restart of the request.
        failures: how often the request has failed while no other request ran.
        suspect: the number of tokens up to which the request runs alone, because a step of several requests failed
            before that many.
        status, reason, error, slots_held, cache: as of `GenerationOutput`.
    """

    request_id: str
    prompt: list[int]
    most: int
    stop: frozenset[int]
    sampling: Sampling
    pinned: Tensor | None = None
    on_top: bool = False
    prefix: Any = None
    before: int = 0
    keep: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    told: list[int] = dataclasses.field(default_factory=list)
    failures: int = 0
    suspect: int = 0
    status: RequestStatus = RequestStatus.PENDING
    reason: Reason | None = None
    error: str | None = None
    slots_held: float | None = None
    cache: Any = None

    @property
    def held(self) -> int:
        """Number of tokens that its cache has seen: prefix, prompt and all generated tokens but the last."""
        return self.before + len(self.prompt) + len(self.tokens) - 1

    @property
    def finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    def begin(self) -> None:
        """Start or restart the request; tokens that are generated again are not handed out again."""
        self.tokens, self.status = [], RequestStatus.PREFILLING

    @property
    def runs_alone(self) -> bool:
        """True if no other request may be in the batch."""
        return len(self.tokens) < self.suspect

    def take(self, token: int) -> None:
        """Append a generated token, and end the request if it is a stop token or the last allowed token."""
        self.tokens.append(token)
        if token in self.stop:
            self.end("stop")
        elif len(self.tokens) >= self.most:
            self.end("length")

    def end(self, reason: Reason, error: str | None = None) -> None:
        self.reason, self.error = reason, error
        self.status = RequestStatus.FAILED if reason == "error" else RequestStatus.FINISHED

    def look(self) -> GenerationOutput | None:
        """Return an output with the new tokens; None if there are none and the request has not finished."""
        new = self.tokens[len(self.told) :]
        if not new and not self.finished:
            return None
        self.told += new
        named = (self.request_id, list(self.prompt), list(self.told), new)
        return GenerationOutput(*named, self.status, self.reason, self.error, self.slots_held, self.cache)


class ServingOptions(LoopSettings, Protocol):
    """Settings of a loop that serves requests; see `DecodeLoop`."""

    device: torch.device
    prefill_chunk: int | None

    @property
    def chosen(self) -> Backend: ...


class Requests:
    """The requests of a loop: queued, in prefill, or in a row."""

    def __init__(self, loop: ServingOptions, rows: int) -> None:
        self.loop, self.count = loop, rows
        self.queue: collections.deque[Request] = collections.deque()
        self.rows: dict[int, Request] = {}
        self.known: dict[str, Request] = {}
        self.filling: tuple[Request, Iterator[Any], int] | None = None
        self.kept: list[GenerationOutput] = []
        self.batch: RequestBatch | None = None
        self.number = 0

    @staticmethod
    def of(loop: ServingOptions, rows: int) -> Requests:
        """Return the requests of a loop, which must give every request the same number of slots.

        Raises:
            BudgetError: no budget, or a budget that is a share of each prompt.
            PolicyError: a policy that keeps the whole prompt until a token has attended to it.
        """
        policy, budget = loop.chosen.policy, loop.chosen.budget
        if not isinstance(budget, int):
            raise BudgetError(f"budget={budget}: rows have as many slots for every request; give their number")
        require(not policy.defers, "policy", policy, "holds a prompt whole at first, which no row has slots for")
        return Requests(loop, rows)

    # -- from outside ------------------------------------------------------------------------------------------------

    def add(
        self,
        ids: Any,
        request_id: str | None,
        most: int,
        stop: Sequence[int],
        sampling: Sampling,
        pin: Pin | None = None,
        on_top: bool = False,
        prefix: Any = None,
        keep: bool = False,
    ) -> str:
        """Queue a request; see `DecodeLoop.add`."""
        name = f"req_{self.number}" if request_id is None else request_id
        self.number += 1
        prompt = torch.as_tensor(ids).flatten().tolist()
        row = pin[None] if isinstance(pin, Tensor) and pin.ndim == 1 else pin
        pinned = pin_mask(row, on_top, torch.ones(1, len(prompt), dtype=torch.bool))
        before = 0 if prefix is None else self._length_of(prefix)
        request = Request(name, prompt, most, frozenset(stop), sampling, pinned, on_top, prefix, before, keep)
        self._check(request)
        self.known[name] = request
        self.queue.append(request)
        return name

    def _length_of(self, prefix: Any) -> int:
        """Return the tokens of a prefix, which must be one row without padding."""
        mask = prefix_mask(prefix, self.loop.chosen.family)
        if len(mask) != 1 or not bool(mask.all()):
            raise RequestError(
                f"the prefix of a request must be one row without padding: this one has {len(mask)} rows and "
                f"{int((mask == 0).sum())} tokens of padding"
            )
        return mask.shape[1]

    def _check(self, request: Request) -> None:
        name, prompt, most = f"request {request.request_id!r}", request.prompt, request.most
        if request.request_id in self.known:
            raise RequestError(f"{name} is there already")
        if len(request.stop) > MOST_STOPS:
            raise RequestError(f"{name}: {len(request.stop)} tokens to stop at; at most {MOST_STOPS} are possible")
        unknown = self.loop.caller.unknown_token(torch.tensor(prompt))
        if unknown is not None:
            raise RequestError(
                f"{name}: ids: token {unknown} is not in the vocabulary of {self.loop.caller.vocabulary}"
            )
        policy, budget = self.loop.chosen.policy, self.loop.chosen.budget
        tokens = request.before + len(prompt)
        if not policy.evicts and isinstance(budget, int) and tokens + most - 1 > budget:
            raise RequestError(
                f"{name}: {tokens} tokens and {most} new ones exceed the budget of {budget}, and policy "
                f"{policy.name!r} keeps every token"
            )
        if request.pinned is not None and not request.on_top and isinstance(budget, int):
            count = int(request.pinned.sum())
            try:
                check_pinned(policy, count, budget - count)
            except BudgetError as error:
                raise RequestError(f"{name}: {error}") from None

    def cancel(self, name: str) -> bool:
        """End a request; see `DecodeLoop.cancel`."""
        request = self.known.get(name)
        if request is None or request.finished:
            return False
        request.end("cancelled")
        return True

    @property
    def pending(self) -> int:
        """Number of requests whose last output has not been handed out."""
        return len(self.known)

    @torch.no_grad()
    def step(self) -> list[GenerationOutput]:
        """Prefill one chunk of a prompt, or decode tokens for all rows; see `DecodeLoop.step`."""
        self._sort_out()
        if not self._read_on():
            self._decode()
        self._sort_out()
        looked = [request.look() for request in self.known.values()]
        made, self.kept = [*self.kept, *(output for output in looked if output is not None)], []
        for output in made:
            if output.is_finished():
                self.known.pop(output.request_id, None)
        return made

    def all_of(self, adding: Sequence[Callable[[], str]]) -> dict[str, GenerationOutput]:
        """Add requests and decode them until all have finished; see `DecodeLoop.generate_batch`."""
        done: dict[str, GenerationOutput] = {}
        names = [self._added(add, done) for add in adding]
        kept = []
        while any(name not in done for name in names):
            for output in self.step():
                if output.request_id not in names:
                    kept.append(output)
                elif output.is_finished():
                    done[output.request_id] = output
        self.kept = kept  # outputs of other requests, for the next call of `step`
        return {name: done[name] for name in names}

    def _added(self, add: Callable[[], str], done: dict[str, GenerationOutput]) -> str:
        """Add a request and return its name; a request that is refused gets its failed output in `done`."""
        number = self.number
        try:
            return add()
        except RequestError as error:
            name, self.number = f"req_{number}", number + 1
            done[name] = GenerationOutput(name, [], [], [], RequestStatus.FAILED, "error", str(error))
            return name

    # -- rows --------------------------------------------------------------------------------------------------------

    def _sort_out(self) -> None:
        """Free the rows of finished requests, and remove finished requests from the queue."""
        for row in [row for row, request in self.rows.items() if request.finished]:
            self._leave(row)
        self.queue = collections.deque(request for request in self.queue if not request.finished)
        if self.filling is not None and self.filling[0].finished:
            self.filling = None

    def _leave(self, row: int) -> None:
        """Free the row of a request that has finished, of which a copy is kept if the request asks for it."""
        request = self.rows.pop(row)
        if self.batch is None:
            return
        request.slots_held = self.batch.held(row)
        if request.keep and request.status is RequestStatus.FINISHED:
            request.cache = self.batch.taken_out(row, request.held)
        self.batch.free(row)

    def _read_on(self) -> bool:
        """Prefill one chunk of a prompt if there is a free row; return whether a prefill has ended or failed."""
        if self.filling is None and not self._may_begin():
            return False
        request = self.queue.popleft() if self.filling is None else self.filling[0]
        try:
            _, outputs, left = self.filling or self._begun(request)
            out = next(outputs)
        except Exception as error:
            self.filling = None
            self._again([request], error)
            return True
        self.filling = (request, outputs, left - 1) if left > 1 else None
        if left == 1:
            self._admit(request, out)
        return left == 1

    def _may_begin(self) -> bool:
        """Return whether a row is free for the next request, and whether it may run together with those in rows."""
        if not self.queue or len(self.rows) == self.count:
            return False
        return not self.rows or not any(request.runs_alone for request in (self.queue[0], *self.rows.values()))

    def _begun(self, request: Request) -> tuple[Request, Iterator[Any], int]:
        request.begin()
        now = 0 if request.prefix is None else self._length_of(request.prefix)
        if now != request.before:
            raise RequestError(
                f"request {request.request_id!r}: its prefix has gone on from {request.before} to {now} tokens: leave "
                "it as it is until the request has started, or give a copy"
            )
        ids = torch.tensor([request.prompt], device=self.loop.device)
        mask = torch.ones(1, request.before + ids.shape[1], dtype=torch.int64, device=ids.device)
        how = (self.loop.caller, ids, mask, copy.deepcopy(request.prefix), self.loop.prefill_chunk)
        pinned = None if request.pinned is None else request.pinned.to(self.loop.device)
        made = chunks(*how, pinned=pinned, on_top=request.on_top)
        return request, made, len(lengths(ids.shape[1], self.loop.prefill_chunk, not request.before))

    def _again(self, requests: Sequence[Request], error: Exception) -> None:
        """Restart requests, ahead of the queue, after a step with all of them has failed.

        If there are several, each runs alone next, which shows the one at fault.  A request that fails alone for the
        second time, or with an error of kvpass, ends with the error, and the others are no longer suspects.
        """
        if len(requests) > 1:
            # The longest runs first: it is the most likely to have exceeded the positions of the model.
            for request in sorted(requests, key=lambda request: request.held):
                self._begin_later(request, suspect=len(request.tokens) + self.loop.every)
            return
        (request,) = requests
        request.failures += 1
        if request.failures < ATTEMPTS and not isinstance(error, KVPassError):
            self._begin_later(request, request.suspect)
            return
        request.end("error", "".join(traceback.format_exception_only(error)).strip())
        for other in self.queue:
            other.suspect = 0

    def _begin_later(self, request: Request, suspect: int = 0) -> None:
        """Put a request at the head of the queue."""
        request.status, request.suspect = RequestStatus.PENDING, suspect
        self.queue.appendleft(request)

    def _admit(self, request: Request, out: Any) -> None:
        """Copy the slots of a prompt into a free row.

        Raises:
            BudgetError: there is no memory for the rows; the request stays in the queue.
        """
        row = next(row for row in range(self.count) if row not in self.rows)
        cache = cache_names.returned(out)
        caches = caches_in(cache)
        try:
            _check_nothing_else(cache, self.loop.caller.begin())
            if self.batch is None:
                self.batch = RequestBatch.of(self.loop, cache, self.count)
            self.batch.check(caches)
        except CacheHandleError as error:
            request.end("error", str(error))
            return
        except Exception:
            self._begin_later(request, request.suspect)
            raise
        self.rows[row] = request
        try:
            request.take(self.batch.take_in(row, caches, request, out.logits[:, -1]))
        except Exception as error:
            self._restart(error)
            return
        request.status = max(request.status, RequestStatus.DECODING)

    def _restart(self, error: Exception) -> None:
        """Drop the batch, whose tensors a failed step has left in an unknown state, and restart its requests."""
        there = list(self.rows.values())
        self.batch, self.rows = None, {}
        self._again(there, error)

    def _decode(self) -> None:
        """Decode tokens for all rows until the host reads them next."""
        there = list(self.rows.values())
        if self.batch is None or not there:
            return
        left = [request.most - len(request.tokens) for request in there]
        try:
            self.batch.settle_on(max(request.held for request in there))
            soon = self.queue or not self.loop.chosen.policy.evicts  # without eviction, slots fit the longest row only
            exact = any(request.keep for request in there)
            columns = self.batch.run(min(self.loop.every, min(left) if soon else max(left)), exact)
        except Exception as error:
            self._restart(error)
            return
        for column in columns:
            for row, request in self.rows.items():
                if not request.finished:
                    request.take(column[row])


class RequestBatch(LoopState):
    """The rows of a batch of requests on the device.

    Attributes:
        made_of: int64 [R], the number of tokens that each row has generated.
        most: int64 [R], the largest number of tokens for each row.
        stops: int64 [R, MOST_STOPS], the stop tokens of each row, -1 after the last.
        sampling: the settings of sampling of each row.
        caches: the cache of each layer, with R rows.
    """

    def __init__(self, loop: ServingOptions, cache: Any, rows: int) -> None:
        none = torch.zeros(rows, dtype=torch.int64, device=loop.device)
        self.stops = torch.full((rows, MOST_STOPS), -1, device=loop.device)
        super().__init__(loop, cache, none, none[:, None], none[:, None])
        self.made_of, self.most = torch.zeros_like(none), torch.zeros_like(none)
        self.sampling = RowSampling.of(rows, loop.device)
        self.caches = caches_in(cache)
        self.done.fill_(True)
        self.pending = 0
        self.cursor.zero_()

    @staticmethod
    def of(loop: ServingOptions, cache: Any, rows: int) -> RequestBatch:
        """Return free rows for requests whose caches are like `cache`, which is consumed.

        Raises:
            BudgetError: there is no memory for `rows` rows.
            CacheHandleError: the model's cache holds more than slots.
        """
        one = caches_in(cache)
        needed = rows * sum(layer.slots.nbytes for layer in one)
        free = free_bytes(loop.device)
        if free is not None and needed > free:
            raise BudgetError(
                f"rows={rows}: their slots take {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free"
            )
        wide = {id(layer): _widened(layer, rows) for layer in one}

        def widened(value: Any) -> Any:
            return moved(value, wide[id(value.cache)]) if isinstance(value, Handle) else value

        return RequestBatch(loop, refreshed(cache, 0, widened), rows)

    def check(self, caches: Sequence[LayerCache]) -> None:
        """Give a prompt's caches and the rows equally many slots, where that is possible.

        Raises:
            CacheHandleError: the caches do not fit into a row.
        """
        for layer, one in zip(self.caches, caches, strict=True):
            even_out(layer, one)
            found, here = (one.layout.capacity, one.slots.capacity), (layer.layout.capacity, layer.slots.capacity)
            if found != here:
                raise CacheHandleError(
                    f"{one.layout.policy} needs {one.slots.capacity} slots for this prompt and the rows have "
                    f"{layer.slots.capacity}: requests need a policy whose slots are as many for every prompt"
                )

    def take_in(self, row: int, caches: Sequence[LayerCache], request: Request, logits: Tensor) -> int:
        """Put a request into a row and return its first token.

        Args:
            caches: the cache of each layer, with one row.
            logits: [1, vocabulary], of the prompt's last token.
        """
        seen = caches[0].seen
        self.settle_on(max(seen, self.length))
        for layer, one in zip(self.caches, caches, strict=True):
            _put(layer, row, one)
        self.sampling.put(row, request.sampling)
        first = int(self.sampling.at(row).choose(logits, torch.zeros(1, dtype=torch.int64, device=logits.device)))
        ended = first in request.stop or request.most == 1
        self.ids[row], self.position[row], self.made_of[row], self.most[row] = first, seen - ended, 1, request.most
        self.stops[row] = torch.tensor([*request.stop, *[-1] * (MOST_STOPS - len(request.stop))])
        self.done[row] = ended
        return first

    def free(self, row: int) -> None:
        """Mark a row as free, so that steps leave it unchanged."""
        self.done[row] = True

    def held(self, row: int) -> float:
        """Return how many tokens a row's slots hold, the mean over layers and heads."""
        return float(torch.stack([_held(layer, row) for layer in self.caches]).mean())

    @torch.inference_mode(False)  # as slots are made, which steps outside of inference mode also write to
    def taken_out(self, row: int, seen: int) -> Any:
        """Return a model's cache object with a copy of one row, which has seen `seen` tokens."""
        self.settle()
        one = {id(layer): _narrowed(layer, row, seen) for layer in self.caches}

        def narrowed(value: Any) -> Any:
            return moved(value, one[id(value.cache)]) if isinstance(value, Handle) else value

        cache = copy.copy(self.cache)
        if hasattr(cache, "layers"):
            cache.layers = [copy.copy(layer) for layer in cache.layers]
        return refreshed(cache, seen - self.length, narrowed)

    @property
    def length(self) -> int:
        """Number of tokens that all rows have seen, padding included."""
        return self.caches[0].seen

    def settle_on(self, length: int) -> None:
        """Give all rows the same length by padding them on the left.

        With a policy that evicts, rows only grow; a policy that keeps every token has slots for a limited length, so
        rows shrink too.
        """
        by = length - self.length
        if by == 0 or (by < 0 and self.caches[0].layout.policy.evicts):
            return
        if self.step is not None:
            self.step.move(by)
        for layer in self.caches:
            for slots in layer.slots.parts:
                slots.index.copy_(torch.where(slots.position >= 0, (slots.index + by).clamp(min=0), slots.index))
                slots.length.add_(by)
            layer.seen += by
        if self.step is None:
            self.cache = refreshed(self.cache, by)

    def run(self, count: int, exact: bool = False) -> list[list[int]]:
        """Decode `count` tokens for each row; on a CPU, or if the steps are to be `exact`, stop as soon as a row ends.

        A policy's clocks count steps of all rows, and those of a row that is copied at its end must not run on.
        """
        self.follow_model()
        exact = exact and bool(self.caches[0].clocks)
        ended = int(self.done.sum()) if exact or self.done.device.type == "cpu" else None
        for _ in range(count):
            self._advance()
            self.pending += 1
            if ended is not None and int(self.done.sum()) > ended:
                break
        columns: list[list[int]] = self.made[: self.pending].tolist()  # waits for the device
        self.cursor.zero_()
        self.pending = 0
        return columns

    def settle(self) -> None:
        """Update the cache object as `LoopState` does, without positions of padding, as requests change in a row."""
        super().settle()
        for layer in self.caches:
            layer.absent = layer.absent[:, :0]

    def mask(self) -> Tensor:
        """Return the padding mask [R, tokens seen]; a row's own tokens are at its end, and free rows are arbitrary."""
        indices = torch.arange(self.length, device=self.done.device)
        return (indices >= self.length - self.caches[0].valid_seen[:, None]).to(torch.int64)

    @property
    def variant(self) -> Any:
        """Facts about sampling in the rows that the host decides, and that a CUDA graph depends on."""
        return self.sampling.draws, self.sampling.limits

    def tell(self, mask: Tensor) -> None:
        """Write into a padding mask which of the new tokens are real, in every column.

        The column that the graph reads depends on the length.
        """
        mask.copy_((~self.done)[:, None].expand_as(mask))

    def _stops(self, tokens: Tensor) -> Tensor:
        return (tokens[:, None] == self.stops).any(-1)

    def choose(self, logits: Tensor) -> None:
        """Sample the next tokens from logits [R, 1, vocabulary] and advance the state, all on the device."""
        drawn, goes = self.sampling.choose(logits[:, -1], self.made_of), ~self.done
        self.made_of.add_(goes)
        self.made.index_copy_(0, self.cursor, torch.where(goes, drawn, self.loop.pad)[None])
        self.ids.copy_(torch.where(goes[:, None], drawn[:, None], self.ids))
        self.done.logical_or_(self._stops(drawn) | (self.made_of >= self.most))
        self.position.add_((~self.done)[:, None])
        self.cursor.add_(1)


def _check_nothing_else(cache: Any, empty: Any) -> None:
    """Raise CacheHandleError for a model's cache object that holds more than slots, such as recurrent states.

    A tensor without dimensions that was the same before any token belongs to the model and not to a row.

    Args:
        empty: the cache that the model's prompts begin with, None if the model makes its cache itself.
    """
    begun = itertools.chain(getattr(empty, "layers", ()), itertools.repeat(None))
    for number, (layer, before) in enumerate(zip(getattr(cache, "layers", ()), begun, strict=False)):
        held = {name: _tensors(value) for name, value in vars(layer).items()}
        other = [
            name for name, found in held.items() if not _are_constants(found, _tensors(getattr(before, name, None)))
        ]
        if other:
            raise CacheHandleError(
                f"layer {number} of the model's cache, a {type(layer).__name__}, holds {', '.join(other)} beside keys "
                "and values; requests need a cache of slots alone: use DecodeLoop without rows, or model.generate"
            )


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers that are not handles."""
    return [x for x in optree.tree_leaves(value) if isinstance(x, Tensor) and not isinstance(x, Handle)]


def _are_constants(found: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Return whether tensors have no dimensions and are equal to those before; true for no tensors."""
    if len(found) != len(before):
        return not found
    return all(x.ndim == 0 and torch.equal(x, was.to(x.device)) for x, was in zip(found, before, strict=True))


def _widened(one: LayerCache, rows: int) -> LayerCache:
    """Return a cache like `one` with `rows` empty rows."""
    layout = dataclasses.replace(one.layout, batch=rows)
    if not isinstance(one.slots, AnySlots):
        raise CacheHandleError("requests on a cache that runs with inner='reference'")
    slots = empty_slots(layout)
    keep_address(slots)
    for part in slots.parts:
        part.length.fill_(one.seen)
    none = one.absent.new_zeros(rows, 0)
    fresh: dict[str, Any] = dict(absent=none, first=None, _picked=[])
    fresh |= dict(limits=one.limits * rows, clocks=one.clocks * rows)
    return dataclasses.replace(one, layout=layout, slots=slots, **fresh)


def _narrowed(layer: LayerCache, row: int, seen: int) -> LayerCache:
    """Return a copy of one row of a cache, which has seen `seen` tokens; `_put` is the inverse."""
    one = layer.rebuilt("getitem", lambda tensor: tensor[row : row + 1].clone())
    for part in one.slots.parts:
        part.index.copy_(torch.where(part.position >= 0, part.index - (layer.seen - seen), part.index))
        part.length.fill_(seen)
    one.seen, one.absent = seen, layer.absent.new_zeros(1, 0)
    one.limits, one.clocks = layer.limits[row : row + 1], layer.clocks[row : row + 1]
    keep_address(one.slots)
    return one


def _held(layer: LayerCache, row: int) -> Tensor:
    """Return how many tokens a row's slots hold, the mean over the heads."""
    return torch.stack([(part.position[row] >= 0).sum() for part in layer.slots.parts]).sum() / layer.layout.groups


def _put(layer: LayerCache, row: int, one: LayerCache) -> None:
    """Copy the only row of a cache into a row of a wider cache, replacing all of that row."""
    shift = layer.seen - one.seen
    for there, here in zip(layer.slots.tensors(), one.slots.tensors(), strict=True):
        there[row].copy_(here[0])
    for part in layer.slots.parts:
        index, position = part.index[row], part.position[row]
        index.copy_(torch.where(position >= 0, index + shift, index))
        part.length[row] = layer.seen
    layer.limits = (*layer.limits[:row], *one.limits, *layer.limits[row + 1 :])
    layer.clocks = (*layer.clocks[:row], *one.clocks, *layer.clocks[row + 1 :])
