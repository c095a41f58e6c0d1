"""Decode without decisions on the host: `DecodeLoop`.

Sampling, positions, counters, the policy's state and the next input live on the device.  The host reads the tokens
every few steps, and only launches steps in between.  On a GPU the step is a CUDA graph that is replayed; on a CPU the
same step is called.  As a rule Dynamo and the model's own Python then run three times in a conversation without further
prompts: for the prompt and for the first two steps.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive, check_arguments, require
from kvpass.backend import Backend, backend
from kvpass.decoding import prefill
from kvpass.decoding.conversations import Conversations, LoopState
from kvpass.decoding.model_call import ModelCall
from kvpass.decoding.prompt_inputs import PaddingMask, Pin, TokenIds
from kvpass.decoding.requests import RAISES_REQUEST_ERROR, GenerationOutput, Prompt
from kvpass.decoding.sampling import Sampling, Seed, Temperature, TopK, TopP
from kvpass.decoding.scheduler import RequestScheduler
from kvpass.decoding.stepping import ModelFingerprint
from kvpass.decoding.synthetic_conversation import visit_graphs
from kvpass.errors import KVPassWarning
from kvpass.policies.base import Policy
from kvpass.policies.hashing import PRIME
from kvpass.runtime.calling import layer_regions
from kvpass.runtime.calling.compiled_call import CompiledCall
from kvpass.torch_private import dynamo

CAPTURING = ("reduce-overhead", "max-autotune")
ONE_BY_ONE = (
    "{} takes no `position_ids`, so it computes positions from the length of its cache, which all rows share: requests "
    "run one after the other; let its forward take `position_ids`, or pass rows=1"
)


def _check_settings(chosen: Backend) -> None:
    """Raise PolicyError for settings of a backend that repeated steps cannot have."""
    mode, options = chosen.mode, dict(chosen.options)
    require(mode not in CAPTURING, "mode", mode, "a DecodeLoop captures its steps itself; leave the mode out")
    require("triton.cudagraphs" not in options, "options", options, "a DecodeLoop captures its steps itself")
    repeated = "nothing takes tokens back in a DecodeLoop, whose steps are repeated as they are"
    require(not chosen.crop, "crop", chosen.crop, repeated)


def _around(model: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that calls a model uncompiled, so that torch also traces parts compiled by other backends."""
    return lambda *arguments, **named: dynamo.uncompiled_call(model)(*arguments, **named)


class DecodeLoop:
    """A conversation, or several in a batch, with a model whose cache is bounded.

    >>> loop = kvpass.DecodeLoop(model, policy="h2o", budget=1024, stop=[tokenizer.eos_token_id])
    >>> loop.prompt(ids)                 # ids [B, T], left-padded if an attention_mask [B, T] comes with it
    >>> for tokens in loop.stream(200):  # int64 [B] on the CPU, `pad` for a conversation that has stopped
    ...     ...
    >>> kvpass.inspect(loop)             # at any time
    >>> loop.prompt(more)                # continues with another prompt
    >>> loop.generate(200)               # int64 [B, n]

    With `rows` it serves requests that come and go, each in its own row, on one decode graph:

    >>> loop = kvpass.DecodeLoop(model, policy="h2o", budget=1024, rows=8)
    >>> name = loop.add(ids, max_new_tokens=200)
    >>> for output in loop:              # a `GenerationOutput` for each request with new tokens
    ...     ...

    Calls from several threads take turns.

    Attributes:
        read_interval: the number of steps after which the host reads the tokens, to hand them out and to see which
            conversations have stopped.  A stopped conversation does not change its cache in the remaining steps.
        rows: the number of requests that are decoded together; None for a loop of prompts.
        generator: the generator of random numbers for sampling; its state may be set.
    """

    @check_arguments
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
        read_interval: Positive = 16,
        pad: int = 0,
        prefill_chunk: Positive | None = None,
        rows: Positive | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            model: takes `input_ids`, `cache` or `past_key_values`, and `use_cache`, and `attention_mask` and
                `position_ids` if prompts are padded; returns an object with logits and the cache under the same name,
                or both in a tuple.
                Its decoder layers may get a forward of `runtime.calling.layer_regions` in their `__dict__`.  Compiled
                calls then trace equal layers once, and other calls run the class's forward; nothing else is changed.
            policy: the eviction policy, see `kvpass.backend`.
            temperature, top_k, top_p, seed: see `Sampling`; temperature 0 is greedy.
            stop: tokens that end a conversation; they are handed out, and are in the cache of a later prompt.
            read_interval: see the attributes.
            pad: the token that is handed out for conversations that have stopped.
            prefill_chunk: the number of tokens in a chunk of a prompt, see `kvpass.prefill`; None for whole prompts.
            rows: the number of requests (`add`) that are decoded together; None for a loop of prompts (`prompt`).
            settings: the other arguments of `kvpass.backend`, the policy's options among them.

        Raises:
            PolicyError: an invalid option, a model without weights, or a setting that a DecodeLoop does not allow.
            BudgetError: a budget that the policy cannot work with, a share of the prompt for prompts in chunks, or
                anything but a number of slots for requests.
        """
        self.model, self.read_interval, self.pad, self.prefill_chunk = model, read_interval, pad, prefill_chunk
        self.sampling = Sampling(temperature, top_k, top_p, seed)
        self.backend = self._make_backend(policy, settings)
        _check_settings(self.backend)
        if prefill_chunk is not None:
            prefill.refuse_share(self.backend.budget)
        self.compiled = self._compile_model()
        self.fingerprint = ModelFingerprint(model)
        weight = next(itertools.chain(model.parameters(), model.buffers(), [torch.empty(0)]))
        self.device, self.in_inference_mode = weight.device, weight.is_inference()
        require(self.device.type != "meta", "model", type(model).__name__, "has no weights: it is on the device meta")
        self.generator = self.sampling.generator(self.device)
        self.model_call = ModelCall.of(self.compiled, model)
        self.stop = torch.tensor(list(stop), dtype=torch.int64, device=self.device)
        self.lock, self.rows = threading.RLock(), rows
        self.driver = self._begin()
        if rows is not None and rows > 1 and not self.takes_positions:
            warnings.warn(ONE_BY_ONE.format(self.model_call.name), KVPassWarning, stacklevel=3)

    def _make_backend(self, policy: str | Policy, settings: dict[str, Any]) -> Backend:
        return backend(policy, **settings)

    def _begin(self) -> Conversations | RequestScheduler:
        """Return the conversations or the requests of the loop, before the first prompt or request."""
        return Conversations(self) if self.rows is None else RequestScheduler(self, self.rows)

    def _compile_model(self) -> Callable[..., Any]:
        """Return the callable that the loop runs as its model."""
        called: Any = self.model
        if any(dynamo.backend_of(vars(self.model).get(name)) for name in (dynamo.COMPILED_CALL, "forward")):
            called = _around(self.model)
        compiled = torch.compile(called, backend=self.backend)
        self.backend.start_builds(self.model)
        regions = layer_regions.install_regions(self.model)
        return CompiledCall(compiled, self.backend.strict, self.model, regions=regions)

    @property
    def takes_positions(self) -> bool:
        """True if the loop passes positions to its model, which otherwise computes them from its cache's length."""
        return "position_ids" in self.model_call.parameter_names

    @check_arguments
    def warm(self, rows: Positive = 1) -> None:
        """Compile the graphs that the loop needs, before the first prompt or request.

        Synthetic prompts, shorter and longer than the budget, run through the loop: in chunks if the loop feeds prompts
        so, with steps up to the policy's compaction and another turn.  They leave no state.  They are shorter under a
        policy that evicts no token, or none of a prompt; a warning names prompts that exceed the budget.

        Args:
            rows: the number of rows in prompts; requests have the loop's `rows`.

        Raises:
            UnsupportedGraph: the model cannot be rewritten.
            BudgetError: the budget is too small for any prompt.
        """
        visit_graphs(self, rows)

    def reset(self) -> None:
        """Forget the conversation and its prefix, or all requests and their outputs; compiled code stays.

        The next prompt begins a new conversation.  The random state of `generator` stays too; requests are numbered
        from zero again, so they get the same names and seeds as in a new loop.
        """
        with self.lock:
            self.driver = self._begin()

    @property
    def cache(self) -> Any:
        """The model's current cache object; before the first prompt, the prefix of `branch` or None."""
        with self.lock:
            return self.driver.cache

    @property
    def past_key_values(self) -> Any:
        """Cache under the name that transformers used before 5.24."""
        return self.cache

    @check_arguments
    def prompt(
        self, ids: TokenIds, attention_mask: PaddingMask | None = None, *, pin: Pin | None = None, on_top: bool = False
    ) -> None:
        """Feed a prompt: the first prompt, or the next turn of the conversations.

        Conversations that had stopped continue.

        Args:
            ids: int64 [B, T].
            attention_mask: [B, T], 0 for padding, which must be on the left of each row; None for no padding.
            pin: the tokens of this prompt that are never evicted, see `kvpass.prefill`: a mask [B, T], or spans.
            on_top: cache them in addition to the budget, see `kvpass.prefill`.

        Raises:
            CacheHandleError: a later prompt has another number of rows, or an error has interrupted the prompt before.
            PolicyError: an invalid argument, a token outside of the vocabulary, a loop of requests, or pins under a
                policy that allows none.
            BudgetError: pinned tokens leave less of the budget than the policy needs.
        """
        self._conversations("takes prompts by `add`").prompt(ids, attention_mask, pin, on_top)

    @check_arguments
    def branch(self, cache: Any) -> None:
        """Begin a conversation with a prefilled prefix, which the next `prompt` continues.

        The prefix is copied, so that any number of conversations can begin with it.

        >>> prefix = kvpass.prefill(compiled, document, chunk=512).cache     # or kvpass.load_cache(...)
        >>> for question in questions:
        ...     loop.branch(prefix)
        ...     loop.prompt(question)
        ...     loop.generate(200)

        Args:
            cache: a cache of the model, made under the settings of this loop, or an output that has one.

        Raises:
            CacheHandleError: there is no cache of kvpass, it was made under other settings or by other weights, or it
                was continued since.
            PolicyError: a loop of requests, which have their prefix in `add`.
        """
        with self.lock:
            self._conversations("takes prefixes by `add`").branch(cache)

    @check_arguments
    def stream(self, tokens: Natural) -> Iterator[Tensor]:
        """Yield up to `tokens` new tokens, int64 [B] each on the CPU, until every conversation has stopped.

        If the iteration is left early, the loop may be `read_interval` tokens ahead of the last token handed out.  The
        next `stream` or `generate` begins with these tokens, and they are part of the conversation that a later
        prompt continues.

        Args:
            tokens: the largest number of tokens.

        Raises:
            CacheHandleError: there was no prompt, or an error has interrupted a prompt or a step.
            UnsupportedGraph: the model's decode step cannot be repeated.
        """
        self._state()
        for left in range(tokens, 0, -1):
            result = self._state().next(left)
            if result is None:
                return
            yield result

    @check_arguments
    def generate(self, tokens: Natural) -> Tensor:
        """Return all tokens of `stream`, int64 [B, n] on the CPU.

        If there is an error, the next `stream` or `generate` begins with the tokens before it.

        Args:
            tokens: the largest number of tokens n.

        Raises:
            CacheHandleError, UnsupportedGraph: see `stream`.
        """
        result: list[Tensor] = []
        with self.lock:  # so that no other thread takes a token in between
            conversations = self._conversations("decodes by `step`")
            try:
                result.extend(self.stream(tokens))
            except BaseException:
                conversations.put_back(result)
                raise
            rows = len(self._state().ids)
        return torch.stack(result, 1) if result else torch.zeros(rows, 0, dtype=torch.int64)

    def _state(self) -> LoopState:
        """Return the state of the conversations, or raise CacheHandleError before the first prompt."""
        return self._conversations("decodes by `step`").started()

    def _conversations(self, instead: str) -> Conversations:
        """Return the conversations of the loop, or raise PolicyError with what a loop of requests does instead."""
        require(isinstance(self.driver, Conversations), "rows", self.rows, f"a loop of requests {instead}")
        assert isinstance(self.driver, Conversations)
        return self.driver

    # -- requests ----------------------------------------------------------------------------------------------------

    @check_arguments
    def add(
        self,
        ids: Prompt,
        *,
        max_new_tokens: Annotated[Positive, RAISES_REQUEST_ERROR] = 20,
        stop: Annotated[Sequence[int], RAISES_REQUEST_ERROR] | None = None,
        temperature: Temperature | None = None,
        top_k: TopK | None = None,
        top_p: TopP | None = None,
        seed: Seed | None = None,
        request_id: str | None = None,
        pin: Pin | None = None,
        on_top: bool = False,
        prefix: Any = None,
        keep: bool = False,
    ) -> str:
        """Queue a request, which starts as soon as a row is free.

        The loop must have `rows`.

        Args:
            ids: the prompt, a list of token ids or int64 [T] or [1, T].
            max_new_tokens: the largest number of tokens to generate, at least 1.
            stop: up to 8 tokens that end the request, included in its output; None for the loop's.
            temperature, top_k, top_p: see `Sampling`; None for the loop's.
            seed: the seed of sampling, on which the tokens depend whatever other requests are in the batch; None for a
                seed that is derived from the loop's seed and the number of the request.
            request_id: the name of the request; None for a generated one.
            pin: the tokens of the prompt that are never evicted: a mask, bool [T] or [1, T], or spans (start, stop).
            on_top: cache them in addition to the budget, see `kvpass.prefill`; all rows get the slots of the largest
                request.
            prefix: a prefilled cache of one row, see `branch`, which the request continues; it is copied when the
                request starts, and must not be continued until then.
            keep: copy its slots when it ends into the `cache` of its last output, which may be the `prefix` of a later
                request.  The cache has not seen the last generated token: a prompt that continues begins with it.

        Returns:
            The name of the request.

        Raises:
            RequestError: an empty prompt, a token outside of the vocabulary, more tokens than the budget of a policy
                that keeps every token, pins that leave less of the budget than the policy needs, or a name that is in
                use.
            PolicyError: an invalid setting, or a loop without rows.
            CacheHandleError: a prefix that is not a cache of kvpass, or was made under other settings or by other
                weights.
        """
        default, ends = self.sampling, self.stop.tolist() if stop is None else stop
        with self.lock:
            requests = self._scheduler()
            settings = (
                default.temperature if temperature is None else temperature,
                default.top_k if top_k is None else top_k,
                default.top_p if top_p is None else top_p,
                (default.seed + requests.number) % PRIME if seed is None else seed,
            )
            return requests.add(ids, request_id, max_new_tokens, ends, Sampling(*settings), pin, on_top, prefix, keep)

    @check_arguments
    def cancel(self, request_id: str) -> bool:
        """End a request; its last output has the tokens generated so far.

        Args:
            request_id: the name of the request.

        Returns:
            Whether the request was known and had not finished.

        Raises:
            PolicyError: a loop without rows.
        """
        with self.lock:
            return self._scheduler().cancel(request_id)

    @property
    def pending(self) -> int:
        """Number of requests whose last output has not been handed out."""
        return self._scheduler().pending

    def step(self) -> list[GenerationOutput]:
        """Advance all requests: prefill one chunk of a prompt, and decode up to `read_interval` tokens in each row.

        After the last chunk of a prompt nothing is decoded, so that its first token is returned immediately.

        Returns:
            One output for each request that has new tokens or has finished since the last call.

        Raises:
            BudgetError: there is no memory for the rows; no request is lost.
            PolicyError: a loop without rows.
        """
        return self._scheduler().step()

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield the outputs of `step` until no request is pending; requests may be added and cancelled in between.

        If the iteration is left early, the next one, or the next `step`, begins with the outputs that are left.
        """
        while output := self._scheduler().pop_output(self.step):
            yield output

    @check_arguments
    def generate_batch(self, inputs: Sequence[Any], **options: Any) -> dict[str, GenerationOutput]:
        """Add requests and decode them until all have finished.

        The next `step` hands out the outputs of other requests in the meantime.  If there is an error or an interrupt,
        the requests are withdrawn with their generated tokens, and the loop continues without them.

        Args:
            inputs: the prompts, each as in `add`.
            options: the other arguments of `add` except the name.

        Returns:
            The last output of each request by its name, in the order of the inputs.  A request that could not be added
            has failed, and its output has the reason; the others continue.

        Raises:
            PolicyError: an invalid setting, or a loop without rows.
            BudgetError: there is no memory for the rows.
        """
        adding = [functools.partial(self.add, ids, **options) for ids in inputs]
        with self.lock:  # so that no other thread resets the loop in between
            scheduler = self._scheduler()
            names, done = scheduler.add_all(adding)
        return scheduler.run_all(names, done)

    def _scheduler(self) -> RequestScheduler:
        """Return the requests of the loop, or raise PolicyError for a loop without rows."""
        require(isinstance(self.driver, RequestScheduler), "rows", None, "requests need a loop with a number of rows")
        assert isinstance(self.driver, RequestScheduler)
        return self.driver
