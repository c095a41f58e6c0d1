"""The decode step, again and again, with all that it needs on the device: `LoopState` and `RepeatedStep`."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.cache.handle import Handle, LayerCache, renewed
from kvpass.decoding.prefill import Caller, growing
from kvpass.decoding.sampling import Sampling
from kvpass.errors import CacheHandleError
from kvpass.runtime import caches, steps
from kvpass.torch_private import dynamo


class ModelParts:
    """The parameters, buffers and modules of a model, as objects, to see that none was replaced by another."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.note()

    def note(self) -> None:
        """Take the model as it is now."""
        self._tables = dynamo.parts_of(self._model)
        self._known = list(self._now())

    def replaced(self) -> bool:
        """Whether an object was replaced, added or removed since the model was noted."""
        return not all(itertools.starmap(operator.is_, itertools.zip_longest(self._now(), self._known)))

    def _now(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._tables))


class LoopSettings(Protocol):
    """What a state asks of its loop; see `DecodeLoop`."""

    parts: ModelParts
    every: int
    pad: int
    stop: Tensor
    sampling: Sampling
    generator: torch.Generator
    caller: Caller


class LoopState:
    """A conversation between two looks of the host; all tensors stay where they are from step to step.

    Attributes:
        ids: int64 [B, 1], the last token of each row, which the model has not seen yet.
        position: int64 [B, 1], its place among the real tokens; of a row that has stopped that of the token before it,
            as a model may have no further positions.
        ready: tokens that the host has looked at and not handed out.
        ended: whether all conversations have, as of the host's last look.
    """

    def __init__(self, loop: LoopSettings, cache: Any, first: Tensor, position: Tensor, mask: Tensor) -> None:
        self.loop, self.cache, self.before = loop, cache, mask
        self.may_end = len(loop.stop) > 0  # whether a conversation may end before the others
        self.done = self._stops(first)
        self.ids, self.position = first[:, None].clone(), position - self.done[:, None].to(position.dtype)
        self.made = torch.full((loop.every, len(first)), loop.pad, device=first.device)
        self.made[0] = first
        self.cursor = torch.ones(1, dtype=torch.int64, device=first.device)
        self.pending = 1  # tokens in `made` that the host has not seen
        self.ready: collections.deque[Tensor] = collections.deque()
        self.ended = False
        self.finished = torch.zeros(len(first), dtype=torch.bool)  # on the host: stopped in what was handed out
        self.step: RepeatedStep | None = None

    def _stops(self, tokens: Tensor) -> Tensor:
        """bool [B]: is one of the tokens to stop at."""
        return (tokens[:, None] == self.loop.stop).any(-1)

    def mask(self) -> Tensor:
        """[B, tokens seen]: the padding mask of what the cache has seen."""
        count = self._seen() - self.before.shape[1]
        steps = torch.arange(count, device=self.before.device)
        # A row's real tokens are those of the prompts and then, up to where it stopped, one a step.
        said = self.position + self.done[:, None] - self.before.sum(-1, keepdim=True)
        return torch.cat([self.before, (steps < said).to(self.before.dtype)], 1)

    def _seen(self) -> int:
        return self.before.shape[1] if self.step is None else self.step.caches[0].seen

    def next(self, wanted: int) -> Tensor | None:
        """The next token of each row, [B]; None if all conversations have stopped.

        Args:
            wanted: how many are likely to be asked for.
        """
        if not self.ready and not self.ended:
            self.ready.extend(self._take(min(wanted, self.loop.every)))
        return self.ready.popleft() if self.ready else None

    def _take(self, count: int) -> list[Tensor]:
        """The next tokens: so many, or fewer if all conversations stop."""
        self.follow_model()
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

    def follow_model(self) -> None:
        """Go through the model again where a parameter or a module of it was replaced.

        It can only have been while the host had the tokens, so that it is enough to look between two batches of steps.
        """
        if self.step is not None and self.loop.parts.replaced():
            self.step.forget()

    def _advance(self) -> None:
        """One token for every conversation."""
        if self.step is None or not self.step.run():
            self._through_the_model()

    def _through_the_model(self) -> None:
        """A step of a kind that has not run yet: Dynamo traces it, or the runtime makes it; others repeat it."""
        mask = torch.cat([self.mask(), (~self.done)[:, None].to(self.before.dtype)], 1)
        self.settle()
        with steps.listening() as ran:
            out = self.loop.caller(self.ids, growing(mask), self.position, self.cache)
        if len(ran) != 1:
            raise CacheHandleError("the model ran its decode step in several graphs, or in none of kvpass")
        if not ran[0].repeats:
            raise CacheHandleError(
                "a mask of this model is made from all tokens anew in every step, which a decode loop does not repeat; "
                "use model.generate"
            )
        self.loop.parts.note()
        self.cache = cache_names.returned(out)
        self.step = self.step or RepeatedStep(self)
        self.step.repeat(ran[0], out.logits, mask)
        self.choose(out.logits)

    def choose(self, logits: Tensor) -> None:
        """Sample and move on, all on the device; logits [B, 1, vocabulary]."""
        drawn = self.loop.sampling.choose(logits[:, -1], self.loop.generator)
        if self.may_end:
            goes = ~self.done
            self.made.index_copy_(0, self.cursor, torch.where(goes, drawn, self.loop.pad)[None])
            self.ids.copy_(torch.where(goes[:, None], drawn[:, None], self.ids))
            self.done.logical_or_((self.ids == self.loop.stop).any(-1))
            self.position.add_((~self.done)[:, None])
        else:
            self.position.add_(1)
            self.made.index_copy_(0, self.cursor, drawn[None])
            self.ids.copy_(drawn[:, None])
        self.cursor.add_(1)

    def tell(self, mask: Tensor) -> None:
        """Say in a padding mask [B, tokens seen] which of the new tokens are real: all, without a token to stop at."""
        if self.may_end:
            mask[:, -1:] = (~self.done)[:, None]

    @property
    def variant(self) -> Any:
        """What else than the kind of step a CUDA graph of it depends on."""
        return None

    def settle(self) -> None:
        """Bring the model's own cache object up to date."""
        if self.step is not None:
            self.cache = refreshed(self.cache, self.step.taken)
            self.step.taken = 0


class RepeatedStep:
    """The decode step, again and again, without Dynamo and without the model's Python.

    Only what two steps in a row through the model ran on is repeated, as the first may have had the number of tokens
    as a constant, and only as long as all that Dynamo asked of the sizes is true.
    """

    runner: steps.StepRunner

    def __init__(self, state: LoopState) -> None:
        self.state = state
        self.taken = 0  # steps since the cache object was brought up to date
        self.known: dict[Any, Any] = {}  # kinds of step that have run, each with the slots that it is of
        self.bound: dict[Any, Callable[..., Sequence[Any]]] = {}  # by kind, and whether it sweeps
        self.settled, self.arguments = False, tuple[Any, ...]()
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self.caches: list[LayerCache] = []

    def repeat(self, ran: steps.StepResult, logits: Tensor, mask: Tensor) -> None:
        """Take over from a step that went through the model, with these logits and this padding mask."""
        self.settled = bool(self.caches) and ran.runner is self.runner
        if not self.settled:
            self.forget()
        self.runner, self.caches, self.arguments, self.mask = ran.runner, ran.caches, ran.arguments, mask
        self.lasts, self.began = ran.runner.lasts(ran), ran.caches[0].seen - 1
        self.others, self.padding = ran.others, ran.known
        self.logits_index = next(i for i, made in enumerate(ran.results) if _is_same(made, logits))
        self.known[ran.kind] = [cache.slots for cache in self.caches]

    def forget(self) -> None:
        """Repeat nothing of the steps so far, and hold none of the tensors that they were given."""
        self.settled, self.arguments = False, ()
        for kinds in (self.known, self.bound, self.graphs):
            kinds.clear()

    def run(self) -> bool:
        """One step, on a GPU by replaying it; False if it is of a kind that has not run yet."""
        for cache in self.caches:
            caches.make_room(cache, 1)
        kind = caches.kind(self.caches)
        if not self.settled or kind not in self.known or not self.lasts(self.caches[0].seen - self.began):
            return False
        if self.mask.device.type == "cuda":
            self._replay(kind)
        else:
            self._call(kind)
        self.taken += 1
        return True

    def move(self, by: int) -> None:
        """All that the tokens seen are counted by is to be that much higher, and the caches will be."""
        self.arguments = self.runner.moved(self.caches, self.arguments, by)
        self.taken += by

    def _call(self, kind: Any) -> None:
        """What a step does on the device."""
        self.state.tell(self.mask)
        self.arguments = self.runner.following(self.caches, self.arguments)
        compact, clocks = self.runner.ticked(self.caches, self.arguments)
        if (kind, compact) not in self.bound:
            how = (self.others, self.padding, compact)
            self.bound[kind, compact] = self.runner.bound(self.caches, self.arguments, *how)
        results = self.bound[kind, compact](self.arguments, clocks)
        self.state.choose(results[self.logits_index])

    def _replay(self, kind: Any) -> None:
        key = (kind, self.state.variant)
        if key in self.graphs:
            _, clocks = caches.tick(self.caches)
            caches.count(self.caches, 1, clocks)
        else:
            self.graphs[key] = self._captured(kind)  # the host's counts move on while it is captured
        self.graphs[key].replay()

    def _captured(self, kind: Any) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.state.loop.generator)
        with torch.cuda.graph(graph):
            self._call(kind)
        return graph


def _is_same(made: Any, wanted: Tensor) -> bool:
    return isinstance(made, Tensor) and (
        made is wanted or (made.shape == wanted.shape and made.data_ptr() == wanted.data_ptr())
    )


def refreshed(cache: Any, steps: int, function: Callable[[Any], Any] | None = None) -> Any:
    """A model's cache object, or nested tuples of tensors, with handles that know of later steps.

    Args:
        function: what becomes of a layer's keys and values; None for handles as of now.
    """
    become = function or _renewed
    layers = getattr(cache, "layers", None)
    if layers is None:
        nested = isinstance(cache, (tuple, list))
        return tuple(refreshed(part, steps, function) for part in cache) if nested else become(cache)
    for layer in layers:
        for name in ("keys", "values"):
            setattr(layer, name, become(getattr(layer, name, None)))
        if isinstance(getattr(layer, "cumulative_length", None), int):
            layer.cumulative_length += steps
    return cache


def _renewed(value: Any) -> Any:
    return renewed(value) if isinstance(value, Handle) else value
