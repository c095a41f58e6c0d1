"""Decoding in which nothing is decided on the host: `DecodeLoop`.

Sampling, positions, counters, the policy's state and the next input live on the device.  The host looks at the
tokens every few steps; in between it only says "again".  On a GPU the step is one CUDA graph that is replayed, on
a CPU the same step is called.  Either way Dynamo and the model's own Python run twice in a conversation without
further prompts: for the prompt and for the first step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.arguments import Natural, Positive, checked
from kvpass.backend import backend
from kvpass.decoding.prefill import Caller, PaddingMask, TokenIds, check_budget, chunks, last_of, padding
from kvpass.decoding.requests import FAILS, GenerationOutput, Prompt, Requests
from kvpass.decoding.sampling import PRIME, Sampling, Seed, Temperature, TopK, TopP
from kvpass.decoding.stepping import LoopState, ModelParts
from kvpass.errors import CacheHandleError, PolicyError
from kvpass.policies.base import Policy, require
from kvpass.runtime.compiled_call import CompiledCall

CAPTURING = ("reduce-overhead", "max-autotune")


class DecodeLoop:
    """A conversation, or several in a batch, with a model whose cache is bounded.

    >>> loop = kvpass.DecodeLoop(model, policy="h2o", budget=1024, stop=[tokenizer.eos_token_id])
    >>> loop.prompt(ids)                 # ids [B, T], left-padded if an attention_mask [B, T] comes with it
    >>> for tokens in loop.stream(200):  # int64 [B] on the CPU, `pad` for a conversation that has stopped
    ...     ...
    >>> kvpass.inspect(loop)             # at any time
    >>> loop.prompt(more)                # goes on with a further prompt
    >>> loop.generate(200)               # int64 [B, n]

    With `rows` it serves requests that come and go, each in a row of its own, on one decode graph:

    >>> loop = kvpass.DecodeLoop(model, policy="h2o", budget=1024, rows=8)
    >>> name = loop.add(ids, max_new_tokens=200)
    >>> for output in loop:              # a `GenerationOutput` for each request that has made something
    ...     ...

    Attributes:
        every: after how many steps the host looks at the tokens, to hand them out and to see who has stopped.
            Steps that a stopped conversation takes until then leave its cache alone.
        generator: what tokens are drawn with; its state may be set.
    """

    @checked
    def __init__(
        self,
        model: torch.nn.Module,
        policy: str | Policy = "full",
        *,
        temperature: Temperature = 0.0,
        top_k: TopK | None = None,
        top_p: TopP | None = None,
        seed: Seed = 0,
        stop: Sequence[int] = (),
        every: Positive = 16,
        pad: int = 0,
        prefill_chunk: Positive | None = None,
        rows: Positive | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            model: takes `input_ids`, `cache` or `past_key_values`, and `use_cache`, and `attention_mask` and
                `position_ids` if prompts are padded; returns an object with `logits` and the cache under the same name.
                It is not changed.
            temperature, top_k, top_p, seed: see `Sampling`; temperature 0 is greedy.
            stop: tokens that end a conversation; they are handed out, and are in the cache of a later prompt.
            every: see the attributes.
            pad: what is handed out for conversations that have ended.
            prefill_chunk: prompts go in so many tokens at a time, see `kvpass.prefill`; None for whole ones.
            rows: for requests (`add`), how many of them are decoded together; None for a loop of prompts (`prompt`).
            settings: the others of `kvpass.backend`, the policy's options among them.

        Raises:
            PolicyError: an option that cannot be.
        """
        self.model, self.every, self.pad, self.prefill_chunk = model, every, pad, prefill_chunk
        self.sampling = Sampling(temperature, top_k, top_p, seed)
        self.chosen = backend(policy, **settings)
        mode, options, crop = self.chosen.mode, dict(self.chosen.options), self.chosen.crop
        require(mode not in CAPTURING, "mode", mode, "a DecodeLoop captures its steps itself; leave the mode out")
        require("triton.cudagraphs" not in options, "options", options, "a DecodeLoop captures its steps itself")
        require(
            not crop, "crop", crop, "nothing takes tokens back in a DecodeLoop, whose steps are repeated as they are"
        )
        if prefill_chunk is not None:
            check_budget(self.chosen.budget)
        self.compiled = CompiledCall(torch.compile(model, backend=self.chosen), self.chosen.strict, model)
        self.parts = ModelParts(model)
        self.device = next(itertools.chain(model.parameters(), model.buffers(), [torch.empty(0)])).device
        require(self.device.type != "meta", "model", type(model).__name__, "has no weights: it is on the device meta")
        self.generator = self.sampling.generator(self.device)
        self.caller = Caller.of(self.compiled, model)
        self.stop = torch.tensor(list(stop), dtype=torch.int64, device=self.device)
        self.state: LoopState | None = None
        self.requests = None if rows is None else Requests.of(self, rows)

    @property
    def cache(self) -> Any:
        """The model's own cache object as of now; None before the first prompt."""
        state = self.state if self.requests is None else self.requests.batch
        if state is None:
            return None
        state.settle()
        return state.cache

    @property
    def past_key_values(self) -> Any:
        """Return the cache under the name that transformers had for it before 5.24."""
        return self.cache

    @checked
    @torch.no_grad()
    def prompt(self, ids: TokenIds, attention_mask: PaddingMask | None = None) -> None:
        """Feed a prompt: the first one, or what follows what was said so far.

        Conversations that had stopped go on.

        Args:
            ids: int64 [B, T]; attention_mask: [B, T], 0 for padding, which comes first in each row.

        Raises:
            CacheHandleError: a further prompt has another number of rows.
            PolicyError: an argument that cannot be, a token outside of the vocabulary, or the loop is one of requests.
        """
        require(self.requests is None, "rows", self._rows, "a loop of requests takes prompts by `add`")
        ids = ids.to(self.device, torch.int64)
        mask = padding(ids, attention_mask, 0)
        if not bool(mask[:, -1].all()):
            raise PolicyError("attention_mask: a row is all padding; each must have one token at least")
        self.caller.check_known(ids)
        old = self.state
        if old is not None:
            if len(ids) != len(old.ids):
                raise CacheHandleError(f"a further prompt of {len(ids)} rows for a loop of {len(old.ids)}")
            old.settle()
            ids, mask = torch.cat([old.ids, ids], 1), torch.cat([torch.ones_like(old.ids), mask], 1)
        self.caller.check_padding(mask)
        whole = mask if old is None else torch.cat([old.mask(), mask], 1)
        out = last_of(chunks(self.caller, ids, whole, None if old is None else old.cache, self.prefill_chunk))
        first = self.sampling.choose(out.logits[:, -1], self.generator)
        self.state = LoopState(self, cache_names.returned(out), first, whole.sum(-1, keepdim=True), whole)

    @checked
    @torch.no_grad()
    def stream(self, tokens: Natural) -> Iterator[Tensor]:
        """Up to so many new tokens, int64 [B] each on the CPU, until every conversation has stopped.

        Left early, the loop may stand up to `every` tokens further on than what was handed out: the next `stream` or
        `generate` begins with these, and they are part of the conversation that a further prompt goes on with.
        """
        if self.state is None:
            raise CacheHandleError("a DecodeLoop needs a prompt before it can decode")
        for left in range(tokens, 0, -1):
            made = self.state.next(left)
            if made is None:
                return
            yield made

    @checked
    def generate(self, tokens: Natural) -> Tensor:
        """All that `stream` gives, int64 [B, n] on the CPU."""
        made = list(self.stream(tokens))
        rows = 0 if self.state is None else len(self.state.ids)
        return torch.stack(made, 1) if made else torch.zeros(rows, 0, dtype=torch.int64)

    # -- requests ----------------------------------------------------------------------------------------------------

    @checked
    def add(
        self,
        ids: Prompt,
        *,
        max_new_tokens: Annotated[Positive, FAILS] = 20,
        stop: Annotated[Sequence[int], FAILS] | None = None,
        temperature: Temperature | None = None,
        top_k: TopK | None = None,
        top_p: TopP | None = None,
        seed: Seed | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request; a row takes it in as soon as one is free.  Needs a loop with `rows`.

        Args:
            ids: the prompt, a list of token ids or int64 [T] or [1, T].
            max_new_tokens: how many tokens it makes at most, from 1 on.
            stop: up to 8 tokens that end it, the last of what it makes; None for the loop's own.
            temperature, top_k, top_p: see `Sampling`; None for the loop's own.
            seed: what is drawn depends on it and on the request alone, whatever else is in the batch; None for one that
                follows from the loop's own and the number of the request.
            request_id: a name; None for one that is made up.

        Returns:
            The name.

        Raises:
            RequestError: an empty prompt, a token outside of the vocabulary, more tokens than a budget of a policy
                that keeps them all, a name that is taken.
            PolicyError: a setting that cannot be, or a loop without rows.
        """
        requests, default = self._served(), self.sampling
        settings = (
            default.temperature if temperature is None else temperature,
            default.top_k if top_k is None else top_k,
            default.top_p if top_p is None else top_p,
            (default.seed + requests.number) % PRIME if seed is None else seed,
        )
        ends = self.stop.tolist() if stop is None else stop
        return requests.add(ids, request_id, max_new_tokens, ends, Sampling(*settings))

    @checked
    def cancel(self, request_id: str) -> bool:
        """End a request; its last output has what it made so far.  Whether it was there and had not finished."""
        return self._served().cancel(request_id)

    @property
    def pending(self) -> int:
        """Requests whose end has not been handed out."""
        return self._served().pending

    def step(self) -> list[GenerationOutput]:
        """Go on with all requests: a chunk of a prompt is read, or up to `every` tokens are made in each row.

        Returns:
            What has come since the last look, one output for each request that made something or finished.

        Raises:
            BudgetError: there is no memory for so many rows; no request is lost.
        """
        return self._served().step()

    def __iter__(self) -> Iterator[GenerationOutput]:
        """What `step` gives, until nothing is pending; requests may be added and cancelled in between."""
        while self.pending:
            yield from self.step()

    @checked
    def generate_batch(self, inputs: Sequence[Any], **how: Any) -> dict[str, GenerationOutput]:
        """Serve these prompts to their ends.

        What other requests make in the meantime comes with the next `step`.

        Args:
            inputs: as of `add`, one each; how: the other arguments of `add` but the name.

        Returns:
            The last output of each by its name, in the order of the inputs.  One that could not be taken has failed,
            and says why; the others go on.
        """
        return self._served().all_of([functools.partial(self.add, ids, **how) for ids in inputs])

    def _served(self) -> Requests:
        """Raise PolicyError for a loop without rows."""
        require(self.requests is not None, "rows", None, "requests need a loop with a number of rows")
        assert self.requests is not None
        return self.requests

    @property
    def _rows(self) -> int | None:
        return None if self.requests is None else self.requests.count
