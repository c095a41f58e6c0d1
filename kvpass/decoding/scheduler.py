"""Serve many requests on one decode graph: `DecodeLoop(model, policy, rows=R)`.

Each row of the batch belongs to one request.  Requests wait in a queue, are prefilled one after the other, and then
decode in a row together with the others.
"""

from __future__ import annotations

import collections
import copy
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.cache.model_cache import caches_in
from kvpass.decoding.prefill import chunk_lengths, prefix_mask, run_chunks
from kvpass.decoding.prompt_inputs import Pin, pin_mask
from kvpass.decoding.request_batch import RequestBatch, check_holds_only_slots
from kvpass.decoding.requests import MAX_STOPS, GenerationOutput, Request, RequestStatus
from kvpass.decoding.sampling import Sampling
from kvpass.decoding.stepping import LoopContext, in_mode_of_weights
from kvpass.errors import BudgetError, CacheHandleError, KVPassError, RequestError
from kvpass.policies.pinned_tokens import check_pinned

ATTEMPTS = 2  # runs of a request that fails alone before it ends with an error


class RequestScheduler:
    """The requests of a loop: queued, in prefill, or in a row.

    Attributes:
        count: the number of rows.
        budget: the number of slots that every request has.
        rows: the request in each row that is not free.
        known: the requests whose last output has not been handed out, by name.
        prefilling: the request in prefill, the outputs for its chunks, and the number of chunks left.
        undelivered: outputs for the next call of `step`.
        batch: the rows on the device; None before the first request.
        number: how many requests have been added.
    """

    def __init__(self, loop: LoopContext, rows: int) -> None:
        """Check that the loop gives every request the same number of slots.

        Raises:
            BudgetError: no budget, or a budget that is a share of each prompt.
        """
        budget = loop.backend.budget
        if not isinstance(budget, int):
            raise BudgetError(f"budget={budget}: rows have equally many slots for every request; give their number")
        self.loop, self.count, self.budget = loop, rows, budget
        self.queue: collections.deque[Request] = collections.deque()
        self.rows: dict[int, Request] = {}
        self.known: dict[str, Request] = {}
        self.prefilling: tuple[Request, Iterator[Any], int] | None = None
        self.undelivered: list[GenerationOutput] = []
        self.batch: RequestBatch | None = None
        self.number = 0

    # -- from outside ------------------------------------------------------------------------------------------------

    def add(
        self,
        ids: Any,
        request_id: str | None,
        max_new_tokens: int,
        stop: Sequence[int],
        sampling: Sampling,
        pin: Pin | None = None,
        on_top: bool = False,
        prefix: Any = None,
        keep: bool = False,
    ) -> str:
        """Queue a request; see `DecodeLoop.add`."""
        number = self.number if request_id is not None else self._unused_number()
        name = _generated_name(number) if request_id is None else request_id
        prompt = torch.as_tensor(ids).flatten().tolist()
        row = pin[None] if isinstance(pin, Tensor) and pin.ndim == 1 else pin
        pinned = pin_mask(row, on_top, torch.ones(1, len(prompt), dtype=torch.bool))
        prefix = model_access.cache_in(prefix)
        before = 0 if prefix is None else self._prefix_length(prefix)
        output = GenerationOutput(name, prompt, [], [], RequestStatus.PENDING)
        request = Request(output, max_new_tokens, frozenset(stop), sampling, pinned, on_top, prefix, before, keep)
        self._check(request)
        self.known[name], self.number = request, number + 1
        self.queue.append(request)
        return name

    def _unused_number(self) -> int:
        """Return the next number whose generated name no request with undelivered outputs has."""
        taken = self._taken_names()
        return next(number for number in itertools.count(self.number) if _generated_name(number) not in taken)

    def _taken_names(self) -> set[str]:
        """Return the names of requests whose outputs are not all handed out."""
        return {*self.known, *(output.request_id for output in self.undelivered)}

    def _prefix_length(self, prefix: Any) -> int:
        """Return the tokens of a prefix, which must be one row without padding."""
        mask = prefix_mask(prefix, self.loop.backend.cache_settings, self.loop.model)
        if len(mask) != 1 or not bool(mask.all()):
            raise RequestError(
                f"the prefix of a request must be one row without padding: this one has {len(mask)} rows and "
                f"{int((mask == 0).sum())} tokens of padding"
            )
        return mask.shape[1]

    def _check(self, request: Request) -> None:
        name, prompt, most = f"request {request.request_id!r}", request.prompt, request.max_new_tokens
        if request.request_id in self._taken_names():
            raise RequestError(f"{name} exists already")
        if len(request.stop) > MAX_STOPS:
            raise RequestError(f"{name}: {len(request.stop)} tokens to stop at; at most {MAX_STOPS} are possible")
        unknown = self.loop.model_call.unknown_token(torch.tensor(prompt))
        if unknown is not None:
            known = self.loop.model_call.vocabulary
            raise RequestError(f"{name}: ids: token {unknown} is not in the vocabulary of {known}")
        policy, budget = self.loop.backend.policy, self.budget
        tokens = request.prefix_length + len(prompt)
        if not policy.evicts and tokens + most - 1 > budget:
            raise RequestError(
                f"{name}: {tokens} tokens and {most} new ones exceed the budget of {budget}, and policy "
                f"{policy.name!r} keeps every token"
            )
        if request.pinned is not None and not request.on_top:
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
    def cache(self) -> Any:
        """The cache object of all rows; None before the first request."""
        return None if self.batch is None else self.batch.current_cache()

    @property
    def pending(self) -> int:
        """Number of requests whose last output has not been handed out."""
        return len(self._taken_names())

    @in_mode_of_weights
    def step(self) -> list[GenerationOutput]:
        """Prefill one chunk of a prompt, then decode unless that ended the prompt; see `DecodeLoop.step`."""
        try:
            self._drop_finished()
            if not self._prefill():
                self._decode()
            self._drop_finished()
        except Exception:
            raise
        except BaseException:  # such as KeyboardInterrupt, in the middle of anything
            self.batch, self.rows, self.prefilling = None, {}, None
            self.queue = collections.deque(request for request in self.known.values() if not request.finished)
            raise
        outputs = [request.next_output() for request in self.known.values()]
        result, self.undelivered = [*self.undelivered, *(output for output in outputs if output is not None)], []
        for output in result:
            if output.is_finished():
                self.known.pop(output.request_id, None)
        return result

    def pop_output(self, step: Callable[[], list[GenerationOutput]]) -> GenerationOutput | None:
        """Return the next output, for which `step` is called as often as it takes; None if no request is pending."""
        with self.loop.lock:
            while self.pending and not self.undelivered:
                self.undelivered = step()
            return self.undelivered.pop(0) if self.undelivered else None

    def add_all(self, adding: Sequence[Callable[[], str]]) -> tuple[list[str], dict[str, GenerationOutput]]:
        """Add requests and return their names, and the failed outputs of refused requests."""
        done: dict[str, GenerationOutput] = {}
        names: list[str] = []
        try:
            for add in adding:
                names.append(self._add_or_fail(add, done))
        except BaseException:
            self._withdraw(names)
            raise
        return names, done

    def run_all(self, names: Sequence[str], done: dict[str, GenerationOutput]) -> dict[str, GenerationOutput]:
        """Decode added requests until all have finished; see `DecodeLoop.generate_batch`."""
        try:
            while any(name not in done for name in names):
                with self.loop.lock:
                    outputs = self.step()
                    self.undelivered += [each for each in outputs if each.request_id not in names]
                done |= {each.request_id: each for each in outputs if each.request_id in names and each.is_finished()}
        except BaseException:
            self._withdraw(names)
            raise
        return {name: done[name] for name in names}

    def _add_or_fail(self, add: Callable[[], str], done: dict[str, GenerationOutput]) -> str:
        """Add a request and return its name; a request that is refused gets its failed output in `done`."""
        try:
            return add()
        except RequestError as error:
            number = self._unused_number()
            name, self.number = _generated_name(number), number + 1
            done[name] = GenerationOutput(name, [], [], [], RequestStatus.FAILED, "error", str(error), cause=error)
            return name

    def _withdraw(self, names: Sequence[str]) -> None:
        """Drop requests and their outputs, which nobody would read; the next step frees their rows."""
        with self.loop.lock:
            for request in [self.known.pop(name) for name in names if name in self.known]:
                request.keep = False
                request.end("cancelled")
            self.queue = collections.deque(request for request in self.queue if not request.finished)
            self.undelivered = [output for output in self.undelivered if output.request_id not in names]

    # -- rows --------------------------------------------------------------------------------------------------------

    def _drop_finished(self) -> None:
        """Free the rows of finished requests, and remove finished requests from the queue."""
        for row in [row for row, request in self.rows.items() if request.finished]:
            self._release_row(row)
        self.queue = collections.deque(request for request in self.queue if not request.finished)
        if self.prefilling is not None and self.prefilling[0].finished:
            self.prefilling = None

    def _release_row(self, row: int) -> None:
        """Free the row of a finished request; keep a copy of its slots if `request.keep` is true."""
        request = self.rows.pop(row)
        if self.batch is None:
            return
        request.update(cached_tokens=self.batch.cached_tokens(row))
        if request.keep and request.output.status is RequestStatus.FINISHED:
            request.update(cache=self.batch.extract(row, request.seen_tokens))
        self.batch.stopped[row] = True  # steps leave a free row unchanged

    def _prefill(self) -> bool:
        """Prefill one chunk of a prompt if there is a free row; return whether a prefill has ended or failed."""
        if self.prefilling is None and not self._can_start():
            return False
        request = self.queue.popleft() if self.prefilling is None else self.prefilling[0]
        try:
            _, outputs, left = self.prefilling or self._start(request)
            out = next(outputs)
        except Exception as error:
            self.prefilling = None
            self._retry([request], error)
            return True
        self.prefilling = (request, outputs, left - 1) if left > 1 else None
        if left == 1:
            self._admit(request, out)
        return left == 1

    def _can_start(self) -> bool:
        """Return whether a row is free for the next request, and whether it may run together with those in rows."""
        if not self.queue or len(self.rows) == self.count:
            return False
        alone = any(request.runs_alone for request in (self.queue[0], *self.rows.values()))
        return not self.rows or (self.loop.takes_positions and not alone)

    def _start(self, request: Request) -> tuple[Request, Iterator[Any], int]:
        """Start a prefill: return the request, an iterator that runs its chunks, and their number."""
        request.begin()
        now = 0 if request.prefix is None else self._prefix_length(request.prefix)
        if now != request.prefix_length:
            raise RequestError(
                f"request {request.request_id!r}: its prefix was continued from {request.prefix_length} to {now} tokens"
                ": leave it unchanged until the request has started, or give a copy"
            )
        ids = torch.tensor([request.prompt], device=self.loop.device)
        mask = torch.ones(1, request.prefix_length + ids.shape[1], dtype=torch.int64, device=ids.device)
        pinned = None if request.pinned is None else request.pinned.to(self.loop.device)
        prefix, size = copy.deepcopy(request.prefix), self.loop.prefill_chunk
        chunks = run_chunks(self.loop.model_call, ids, mask, prefix, size, pinned=pinned, on_top=request.on_top)
        return request, chunks, len(chunk_lengths(ids.shape[1], size, not request.prefix_length))

    def _retry(self, requests: Sequence[Request], error: Exception) -> None:
        """Restart requests, ahead of the queue, after a step with all of them has failed.

        If there are several, each runs alone next, which shows which of them fails.  A request that fails alone for the
        second time, or with a KVPassError, ends with that error; the others run together again.
        """
        if len(requests) > 1:
            # The longest runs first: it is the most likely to have exceeded the positions of the model.
            for request in sorted(requests, key=lambda request: request.seen_tokens):
                self._requeue(request, suspect=len(request.tokens) + self.loop.read_interval)
            return
        (request,) = requests
        request.failures += 1
        if request.failures < ATTEMPTS and not isinstance(error, KVPassError):
            self._requeue(request, request.runs_alone_until)
            return
        request.fail(error, "".join(traceback.format_exception_only(error)).strip())
        for other in self.queue:
            other.runs_alone_until = 0

    def _requeue(self, request: Request, suspect: int) -> None:
        """Put a request at the head of the queue."""
        request.update(status=RequestStatus.PENDING)
        request.runs_alone_until = suspect
        self.queue.appendleft(request)

    def _admit(self, request: Request, out: Any) -> None:
        """Copy the slots of a prompt into a free row; without memory for the rows it stays in the queue."""
        row = next(row for row in range(self.count) if row not in self.rows)
        cache = model_access.cache_of_output(out)
        caches = caches_in(cache)
        try:
            check_holds_only_slots(cache, self.loop.model_call.empty_cache())
            if self.batch is None:
                self.batch = RequestBatch.of(self.loop, cache, self.count)
            self.batch.fit_slots(caches)
            self.rows[row] = request
            request.append(self.batch.insert(row, caches, request, self.loop.model_call.logits(out)[:, -1]))
        except Exception as error:
            # Without its row nothing is written to the batch yet: these two errors concern this request alone.
            if row not in self.rows and isinstance(error, CacheHandleError):
                request.fail(error, str(error))
                return
            if row not in self.rows and isinstance(error, BudgetError):
                self._requeue(request, request.runs_alone_until)
                raise
            self.rows[row] = request  # so that the failure counts as one of the request, and it does not run forever
            self._restart_batch(error)
            return
        request.update(status=max(request.output.status, RequestStatus.DECODING))

    def _restart_batch(self, error: Exception) -> None:
        """Drop the batch, whose tensors a failed step has left in an unknown state, and restart its requests."""
        requests, self.batch, self.rows = list(self.rows.values()), None, {}
        self._retry(requests, error)

    def _decode(self) -> None:
        """Decode tokens for all rows until the host reads them next."""
        requests = self.rows.values()
        if self.batch is None or not requests:
            return
        left = [request.max_new_tokens - len(request.tokens) for request in requests]
        try:
            self.batch.set_length(max(request.seen_tokens for request in requests))
            soon = self.queue or not self.loop.backend.policy.evicts  # without eviction, slots fit the longest row only
            exact = any(request.keep for request in requests)
            columns = self.batch.run(min(self.loop.read_interval, min(left) if soon else max(left)), exact)
        except Exception as error:
            self._restart_batch(error)
            return
        for column in columns:
            for row, request in self.rows.items():
                if not request.finished:
                    request.append(column[row])


def _generated_name(number: int) -> str:
    return f"req_{number}"
