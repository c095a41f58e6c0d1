"""Decoding in which nothing is decided on the host: `DecodeLoop`.

Sampling, positions, counters, the policy's state and the next input live on the device.  The host looks at the
tokens every few steps; in between it only says "again".  On a GPU the step is one CUDA graph that is replayed, on
a CPU the same step is called.  Either way Dynamo and the model's own Python run twice in a conversation without
further prompts: for the prompt and for the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import runtime
from kvpass.backend import backend
from kvpass.errors import CacheHandleError
from kvpass.guarded import Guarded
from kvpass.handle import Handle, LayerCache, renewed
from kvpass.policies.base import Policy, require
from kvpass.prefill import Caller, check_budget, chunks, last_of
from kvpass.sampling import Sampling

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

    Attributes:
        every: after how many steps the host looks at the tokens, to hand them out and to see who has stopped.
            Steps that a stopped conversation takes until then leave its cache alone.
        generator: what tokens are drawn with; its state may be set.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: str | Policy = "full",
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[int] = (),
        every: int = 16,
        pad: int = 0,
        prefill_chunk: int | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            model: takes `input_ids`, `past_key_values` and `use_cache`, and `attention_mask` and `position_ids` if
                prompts are padded; returns an object with `logits` and `past_key_values`.  It is not changed.
            temperature, top_k, top_p, seed: see `Sampling`; temperature 0 is greedy.
            stop: tokens that end a conversation; they are handed out, and are in the cache of a later prompt.
            every: see the attributes.
            pad: what is handed out for conversations that have ended.
            prefill_chunk: prompts go in so many tokens at a time, see `kvpass.prefill`; None for whole ones.
            settings: the others of `kvpass.backend`, the policy's options among them.

        Raises:
            PolicyError: an option that cannot be.
        """
        mode = settings.get("mode")
        require(mode not in CAPTURING, "mode", mode, "a DecodeLoop captures its steps itself; leave the mode out")
        options = settings.get("options") or {}
        require("triton.cudagraphs" not in options, "options", options, "a DecodeLoop captures its steps itself")
        require(every >= 1, "every", every, "is a number of steps from 1 on")
        chunk = prefill_chunk
        require(chunk is None or chunk >= 1, "prefill_chunk", chunk, "is a number of tokens from 1 on, or None")
        self.model, self.every, self.pad, self.prefill_chunk = model, every, pad, chunk
        self.sampling = Sampling(temperature, top_k, top_p, seed)
        chosen = backend(policy, **settings)
        if chunk is not None:
            check_budget(chosen.budget)
        self.compiled = Guarded(torch.compile(model, backend=chosen), chosen.strict)
        self.device = next(model.parameters()).device
        self.generator = self.sampling.generator(self.device)
        self.caller = Caller.of(self.compiled, model)
        self.stop = torch.tensor(list(stop), dtype=torch.int64, device=self.device)
        self.state: _State | None = None

    @property
    def past_key_values(self) -> Any:
        """The model's own cache object as of now; None before the first prompt."""
        if self.state is None:
            return None
        self.state.settle()
        return self.state.cache

    @torch.no_grad()
    def prompt(self, ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Feed a prompt: the first one, or what follows what was said so far.

        Conversations that had stopped go on.

        Args:
            ids: int64 [B, T]; attention_mask: [B, T], 0 for padding, which comes first in each row.

        Raises:
            CacheHandleError: a further prompt has another number of rows.
        """
        ids = ids.to(self.device)
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(self.device, ids.dtype)
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
        self.state = _State(self, out.past_key_values, first, whole.sum(-1, keepdim=True), whole)

    @torch.no_grad()
    def stream(self, tokens: int) -> Iterator[Tensor]:
        """Up to so many new tokens, int64 [B] each on the CPU, until every conversation has stopped.

        Left early, the loop may stand up to `every` tokens further on than what was handed out.
        """
        if self.state is None:
            raise CacheHandleError("a DecodeLoop needs a prompt before it can decode")
        while tokens > 0 and not self.state.ended:
            chunk = self.state.take(min(tokens, self.every))
            yield from chunk
            tokens -= len(chunk)

    def generate(self, tokens: int) -> Tensor:
        """All that `stream` gives, int64 [B, n] on the CPU."""
        made = list(self.stream(tokens))
        rows = 0 if self.state is None else len(self.state.ids)
        return torch.stack(made, 1) if made else torch.zeros(rows, 0, dtype=torch.int64)


class _State:
    """A conversation between two looks of the host; all tensors stay where they are from step to step.

    Attributes:
        ids: int64 [B, 1], the last token of each row, which the model has not seen yet.
        position: int64 [B, 1], its place among the real tokens.
        ended: whether all conversations have, as of the host's last look.
    """

    def __init__(self, loop: DecodeLoop, cache: Any, first: Tensor, position: Tensor, mask: Tensor) -> None:
        self.loop, self.cache, self.before = loop, cache, mask
        self.ids, self.position = first[:, None].clone(), position.clone()
        self.done = self._stops(first)
        self.made = torch.full((loop.every, len(first)), loop.pad, device=first.device)
        self.made[0] = first
        self.cursor = torch.ones(1, dtype=torch.int64, device=first.device)
        self.pending = 1  # tokens in `made` that the host has not seen
        self.ended = False
        self.finished = torch.zeros(len(first), dtype=torch.bool)  # on the host: stopped in what was handed out
        self.step: _Step | None = None

    def _stops(self, tokens: Tensor) -> Tensor:
        """bool [B]: is one of the tokens to stop at."""
        return (tokens[:, None] == self.loop.stop).any(-1)

    def mask(self) -> Tensor:
        """[B, tokens seen]: the padding mask of what the cache has seen."""
        count = self._seen() - self.before.shape[1]
        steps = torch.arange(count, device=self.before.device)
        # A row's real tokens are those of the prompts and then, up to where it stopped, one a step.
        said = self.position - self.before.sum(-1, keepdim=True)
        return torch.cat([self.before, (steps < said).to(self.before.dtype)], 1)

    def _seen(self) -> int:
        return self.before.shape[1] if self.step is None else self.step.caches[0].seen

    def take(self, count: int) -> list[Tensor]:
        """The next tokens: so many, or fewer if all conversations stop."""
        while self.pending < count:
            self._advance()
            self.pending += 1
        columns = self.made[: self.pending].to("cpu", copy=True)  # the host looks
        self.cursor.zero_()
        self.pending = 0
        return list(columns[: self._used(columns)])

    def _used(self, columns: Tensor) -> int:
        """How many of the steps [n, B] gave anything to a row that had not stopped before."""
        stops = torch.isin(columns, self.loop.stop.cpu()) | self.finished
        over = stops.cumsum(0) > 0
        self.finished = over[-1]
        self.ended = bool(over[-1].all())
        return 1 + int((~over[:-1]).any(-1).sum())

    def _advance(self) -> None:
        """One token for every conversation."""
        if self.step is None or not self.step.run():
            self._through_the_model()

    def _through_the_model(self) -> None:
        """A step of a kind that has not run yet: Dynamo traces it, or the runtime makes it; others repeat it."""
        mask = torch.cat([self.mask(), (~self.done)[:, None].to(self.before.dtype)], 1)
        self.settle()
        with runtime.listening() as ran:
            out = self.loop.caller(self.ids, mask, self.position, self.cache)
        if len(ran) != 1:
            raise CacheHandleError("the model ran its decode step in several graphs, or in none of kvpass")
        if not ran[0].repeats:
            raise CacheHandleError(
                "a mask of this model is made from all tokens anew in every step, which a decode loop does not repeat; "
                "use model.generate"
            )
        self.cache = out.past_key_values
        self.step = self.step or _Step(self)
        self.step.repeat(ran[0], out.logits, mask)
        self.choose(out.logits)

    def choose(self, logits: Tensor) -> None:
        """Sample and move on, all on the device; logits [B, 1, vocabulary]."""
        drawn = self.loop.sampling.choose(logits[:, -1], self.loop.generator)
        self.position.add_((~self.done).long()[:, None])
        self.made.index_copy_(0, self.cursor, torch.where(self.done, self.loop.pad, drawn)[None])
        self.ids.copy_(torch.where(self.done[:, None], self.ids, drawn[:, None]))
        self.done.logical_or_(self._stops(self.ids[:, 0]))
        self.cursor.add_(1)

    def settle(self) -> None:
        """Bring the model's own cache object up to date."""
        if self.step is not None:
            self.cache = refreshed(self.cache, self.step.taken)
            self.step.taken = 0


class _Step:
    """The decode step, again and again, without Dynamo and without the model's Python."""

    def __init__(self, state: _State) -> None:
        self.state = state
        self.taken = 0  # steps since the cache object was brought up to date
        self.known: dict[Any, Any] = {}  # kinds of step that have run, each with the slots that it is of
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self.caches: list[LayerCache] = []

    def repeat(self, ran: runtime.Ran, logits: Tensor, mask: Tensor) -> None:
        """Take over from a step that went through the model, with these logits and this padding mask."""
        self.runner, self.caches, self.arguments, self.mask = ran.runner, ran.caches, ran.arguments, mask
        self.others, self.padding = ran.others, ran.known
        self.place = next(i for i, made in enumerate(ran.results) if _is_same(made, logits))
        self.known[ran.kind] = [cache.slots for cache in self.caches]

    def run(self) -> bool:
        """One step, on a GPU by replaying it; False if it is of a kind that has not run yet."""
        for cache in self.caches:
            runtime.make_room(cache, 1)
        kind = runtime.kind(self.caches)
        if kind not in self.known:
            return False
        if self.mask.device.type == "cuda":
            self._replay(kind)
        else:
            self._call()
        self.taken += 1
        return True

    def _call(self) -> None:
        """What a step does on the device."""
        self.mask[:, -1:] = (~self.state.done)[:, None]
        self.arguments = self.runner.following(self.caches, self.arguments)
        _, results, _ = self.runner.advance(self.caches, self.arguments, self.others, self.padding)
        self.state.choose(results[self.place])

    def _replay(self, key: Any) -> None:
        if key in self.graphs:
            _, clocks = runtime.tick(self.caches)
            runtime.count(self.caches, 1, clocks)
        else:
            self.graphs[key] = self._captured()  # the host's counts move on while it is captured
        self.graphs[key].replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.state.loop.generator)
        with torch.cuda.graph(graph):
            self._call()
        return graph


def _is_same(made: Any, wanted: Tensor) -> bool:
    return isinstance(made, Tensor) and (
        made is wanted or (made.shape == wanted.shape and made.data_ptr() == wanted.data_ptr())
    )


def refreshed(cache: Any, steps: int) -> Any:
    """A model's cache object, or nested tuples of tensors, with handles that know of later steps."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return tuple(refreshed(part, steps) for part in cache) if isinstance(cache, (tuple, list)) else _renewed(cache)
    for layer in layers:
        for name in ("keys", "values"):
            setattr(layer, name, _renewed(getattr(layer, name, None)))
        if isinstance(getattr(layer, "cumulative_length", None), int):
            layer.cumulative_length += steps
    return cache


def _renewed(value: Any) -> Any:
    return renewed(value) if isinstance(value, Handle) else value
