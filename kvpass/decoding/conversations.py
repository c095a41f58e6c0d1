"""Hold the conversations of a loop of prompts: `Conversations`, and their state on the device, `LoopState`."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.cache.model_cache import caches_in
from kvpass.decoding.prefill import prefix_mask, run_chunks, run_to_last
from kvpass.decoding.prompt_inputs import Pin, padding_mask, pin_mask
from kvpass.decoding.stepping import INTERRUPTED, DecodeState, LoopContext, in_mode_of_weights
from kvpass.errors import CacheFileError, CacheHandleError, PolicyError


class Conversations:
    """The conversations of a loop of prompts, which decode together.

    Attributes:
        state: their state on the device; None before the first prompt.
        prefix: the copy of a cache that the first prompt continues; None without `DecodeLoop.branch`.
        prefix_length: the number of tokens that the prefix has seen.
    """

    def __init__(self, loop: LoopContext) -> None:
        self.loop = loop
        self.state: LoopState | None = None
        self.prefix, self.prefix_length = None, 0

    def started(self) -> LoopState:
        """Return the state of the conversations, or raise CacheHandleError before the first prompt."""
        if self.state is None:
            raise CacheHandleError("a DecodeLoop needs a prompt before it can decode")
        return self.state

    def put_back(self, tokens: list[Tensor]) -> None:
        """Make tokens that were not handed out the next ones."""
        if self.state is not None:
            self.state.ready.extendleft(reversed(tokens))

    def branch(self, cache: Any) -> None:
        """Begin with a copy of a prefix; see `DecodeLoop.branch`."""
        cache = model_access.cache_in(cache)
        length = self._prefix_mask(cache).shape[1]
        prefix = copy.deepcopy(cache)  # before anything changes, as it raises for a cache that was continued since
        self.state, self.prefix, self.prefix_length = None, prefix, length

    @in_mode_of_weights
    def prompt(self, ids: Tensor, attention_mask: Tensor | None, pin: Pin | None, on_top: bool) -> None:
        """Feed a prompt; see `DecodeLoop.prompt`."""
        call = self.loop.model_call
        ids = ids.to(self.loop.device, torch.int64, copy=True)  # in the mode of the weights, which Dynamo guards on
        mask = padding_mask(ids, attention_mask, 0)
        if not bool(mask[:, -1].all()):
            raise PolicyError("attention_mask: a row is all padding; each must have one token at least")
        call.check_vocabulary(ids)
        pinned = pin_mask(pin, on_top, mask)
        if self.state is not None:
            ids, mask, pinned = self.state.with_last_token(ids, mask, pinned)
        call.check_padding(mask)
        before, seen = self._seen(len(mask))
        whole = torch.cat([seen, mask], 1)
        size = self.loop.prefill_chunk
        out = run_to_last(run_chunks(call, ids, whole, before, size, pinned=pinned, on_top=on_top))
        state = LoopState(self.loop, model_access.cache_of_output(out), whole)
        state.sample_and_record(call.logits(out)[:, -1:])
        state.unread_count = 1
        self.state, self.prefix = state, None

    def _seen(self, rows: int) -> tuple[Any, Tensor]:
        """Return the cache that a prompt of `rows` rows continues, and the padding mask of its tokens."""
        if self.state is not None:
            return self.state.cache, self.state.mask()
        if self.prefix is None:
            return None, torch.ones(rows, 0, dtype=torch.int64, device=self.loop.device)
        seen = self._prefix_mask(self.prefix)
        if seen.shape[1] != self.prefix_length:
            raise CacheHandleError(INTERRUPTED)
        if len(seen) != rows:
            raise CacheHandleError(f"a prompt of {rows} rows after a prefix of {len(seen)}")
        return self.prefix, seen

    def _prefix_mask(self, cache: Any) -> Tensor:
        return prefix_mask(cache, self.loop.backend.cache_settings, self.loop.model)

    @property
    def cache(self) -> Any:
        """The model's cache object; see `DecodeLoop.cache`."""
        return self.prefix if self.state is None else self.state.current_cache()


class LoopState(DecodeState):
    """State of the conversations of a loop.

    Attributes:
        prompt_mask: the padding mask of the prompts, [B, tokens seen before the first step].
        ready: tokens that the host has read and not handed out.
        all_stopped: whether all conversations had stopped when the host read the tokens last.
        stopped_on_host: bool [B], the rows that had stopped then.
        has_generated: whether the caller has asked for tokens; until then the first one is not in the conversation.
    """

    def __init__(self, loop: LoopContext, cache: Any, mask: Tensor) -> None:
        """Begin at the last token of the prompts, whose padding mask is int64 [B, tokens seen]."""
        super().__init__(loop, cache, mask.sum(-1, keepdim=True) - 1)
        self.prompt_mask, self.can_stop = mask, len(loop.stop) > 0
        self.ready: collections.deque[Tensor] = collections.deque()
        self.all_stopped, self.stopped_on_host = False, torch.zeros(len(mask), dtype=torch.bool)
        self.has_generated = False

    def with_last_token(self, ids: Tensor, mask: Tensor, pinned: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a later prompt, its padding mask and its pins, begun by the last token of the conversations, if any.

        Raises:
            CacheHandleError: another number of rows, or an error has interrupted the conversations.
        """
        if len(ids) != len(self.ids):
            raise CacheHandleError(f"a later prompt of {len(ids)} rows for a loop of {len(self.ids)}")
        self.check_not_interrupted()
        self.refresh_cache_object()
        last = self.ids[:, : int(self.has_generated)]
        ids, mask = torch.cat([last, ids], 1), torch.cat([torch.ones_like(last), mask], 1)
        return ids, mask, None if pinned is None else torch.nn.functional.pad(pinned, (last.shape[1], 0))

    def _stops(self, tokens: Tensor) -> Tensor:
        return (tokens[:, None] == self.loop.stop).any(-1)

    def mask(self) -> Tensor:
        steps = torch.arange(self.seen - self.prompt_mask.shape[1], device=self.prompt_mask.device)
        # A row's real tokens are its prompts' and then one per step, up to the step where it stopped.
        generated = self.position + self.stopped[:, None] - self.prompt_mask.sum(-1, keepdim=True)
        return torch.cat([self.prompt_mask, (steps < generated).to(self.prompt_mask.dtype)], 1)

    @in_mode_of_weights
    def to_saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return plain values and tensors from which `from_saved` makes this state again."""
        self.check_not_interrupted()
        if self.unread_count:
            self._read_tokens()
        ready = torch.stack(list(self.ready)) if self.ready else torch.zeros(0, len(self.ids), dtype=torch.int64)
        tensors = dict(ids=self.ids, position=self.position, stopped=self.stopped, mask=self.mask(), ready=ready)
        tensors |= dict(stopped_on_host=self.stopped_on_host, random=self.loop.generator.get_state())
        return {"all_stopped": self.all_stopped, "has_generated": self.has_generated}, tensors

    @staticmethod
    @in_mode_of_weights
    def from_saved(
        loop: LoopContext, cache: Any, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> LoopState:
        """Return the state that `to_saved` has described, for a loop whose generator gets the saved state."""
        layer, wanted = caches_in(cache)[0], torch.int64
        rows, seen = layer.layout.batch, layer.length
        shapes: dict[str, Any] = dict.fromkeys(("ids", "position"), ((rows, 1), wanted))
        shapes |= dict.fromkeys(("stopped", "stopped_on_host"), ((rows,), torch.bool))
        shapes["mask"] = ((rows, seen), wanted)
        wrong = [name for name, how in shapes.items() if (tuple(tensors[name].shape), tensors[name].dtype) != how]
        if wrong or tensors["ready"].dtype != wanted or tensors["ready"].shape[1:] != (rows,):
            raise CacheFileError(f"its {', '.join(wrong) or 'ready'} cannot belong to {rows} conversations")
        outside = (tensors["position"] < 0) | (tensors["position"] > seen)
        if loop.model_call.unknown_token(tensors["ids"]) is not None or bool(outside.any()):
            raise CacheFileError(f"its last tokens or their positions do not fit {seen} tokens of this model")
        state = LoopState(loop, cache, tensors["mask"].to(loop.device))
        for name, mine in {"ids": state.ids, "position": state.position, "stopped": state.stopped}.items():
            mine.copy_(tensors[name])
        state.all_stopped, state.has_generated = bool(values["all_stopped"]), bool(values["has_generated"])
        state.can_stop |= bool(state.stopped.any())  # a loop without `stop` leaves these rows stopped
        state.ready.extend(tensors["ready"])
        state.stopped_on_host = tensors["stopped_on_host"]
        loop.generator.set_state(tensors["random"])
        return state

    @in_mode_of_weights
    def next(self, wanted: int) -> Tensor | None:
        """Return the next token of each row, [B], of about `wanted`; None if all conversations have stopped."""
        self.has_generated = True
        if not self.ready and not self.all_stopped:
            self.invalidate_if_model_changed()
            while self.unread_count < min(wanted, len(self.token_buffer)):
                self.advance()
            self._read_tokens()
        return self.ready.popleft() if self.ready else None

    def _read_tokens(self) -> None:
        """Make the tokens that the host has not read `ready`, without steps before which every row had stopped."""
        columns = self.unread_tokens()
        over = (torch.isin(columns, self.loop.stop.cpu()) | self.stopped_on_host).cumsum(0) > 0
        used, ended = columns[: 1 + int((~over[:-1]).any(-1).sum())], bool(over[-1].all())
        ready = collections.deque([*self.ready, *used])
        # in one statement, so that an interrupt neither loses nor repeats a token
        self.ready, self.unread_count, self.stopped_on_host, self.all_stopped = ready, 0, over[-1], ended

    def sample_and_record(self, logits: Tensor) -> None:
        self._record(self.loop.sampling.sample(logits[:, -1], self.loop.generator))
