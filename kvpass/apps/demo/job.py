"""One model and its tokens, under one policy at a time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

import kvpass
from kvpass.apps import corpus
from kvpass.apps.demo import recall, stream
from kvpass.apps.demo.pairs import PlantedPairs, Tongue
from kvpass.apps.demo.recall import RecallOutcome
from kvpass.apps.demo.settings import DemoSettings
from kvpass.apps.demo.stream import StreamRun
from kvpass.apps.models import LoadedModel, load, load_memory, read_texts
from kvpass.apps.switch import CountedCalls
from kvpass.backend import Backend, Inner, compile_in_place
from kvpass.errors import KVPassError
from kvpass.lowering.formats import KVDtype
from kvpass.policies import Policy
from kvpass.torch_private import counters

T = TypeVar("T")
Tick = Callable[[], object]


class Traces:
    """What Dynamo has traced of a model that one policy after the other calls in one way."""

    def __init__(self) -> None:
        self._way: tuple[object, ...] = ()
        self._counted = CountedCalls()

    def under(self, chosen: Backend, model: Any, *way: object) -> CountedCalls:
        """Compile the model for a backend; of a model that is called in another `way` all traces are forgotten."""
        if self._way != (model, *way) or not self._counted.serves(chosen):
            counters.forget_compiled_code()
            self._way, self._counted = (model, *way), CountedCalls()
            compile_in_place(model, self._counted, strict=True)
        self._counted.to(chosen)
        return self._counted


@dataclasses.dataclass(frozen=True)
class Job:
    """Models with their tokens.

    Attributes:
        subject: the model that text is streamed through.
        documents, stream: its text, int64 [B, T] and [1, S].
        memory: the model that is asked about what was planted.
        planted: its text; or why there is none.
        traces: what policies that are run alike share.
    """

    settings: DemoSettings
    subject: LoadedModel
    documents: Tensor
    stream: Tensor
    memory: LoadedModel
    planted: PlantedPairs | KVPassError
    traces: Traces = dataclasses.field(default_factory=Traces, compare=False, repr=False)

    @property
    def planted_pieces(self) -> int:
        """Pieces in which a text with pairs is read; 1 if there is none."""
        return 1 if isinstance(self.planted, KVPassError) else recall.pieces(self.planted.text)

    def recall(self, policy: str, tick: Tick) -> RecallOutcome | KVPassError:
        """What of the planted pairs the model recalls; uncompiled inside, which is quicker with a model this small."""
        planted = self.planted
        if isinstance(planted, KVPassError):
            return planted

        def measured(_: CountedCalls) -> RecallOutcome:
            return recall.measure(self.memory.model, planted, tick, sampled=self.settings.new_tokens)

        return self._attempt(policy, self.memory, "eager", None, measured)

    def stream_documents(self, policy: str, tick: Tick) -> StreamRun | KVPassError:
        return self._stream(policy, self.documents, tick)

    def stream_unbroken(self, policy: str, tick: Tick) -> StreamRun | KVPassError:
        return self._stream(policy, self.stream, tick)

    def _stream(self, policy: str, tokens: Tensor, tick: Tick) -> StreamRun | KVPassError:
        """Tokens [B, T]; a policy that never evicts gets T slots, which saves compiling for each doubling."""

        def streamed(counted: CountedCalls) -> StreamRun:
            model, every = self.subject.model, self.settings.every
            return stream.run(model, tokens, every=every, tick=tick, mark=counted.mark)

        return self._attempt(policy, self.subject, "inductor", tokens.shape[1], streamed)

    def _attempt(
        self,
        name: str,
        subject: LoadedModel,
        inner: Inner,
        room: int | None,
        action: Callable[[CountedCalls], T],
    ) -> T | KVPassError:
        """`action` under a policy, with what counts graphs; after others of its kind it goes on with their traces."""

        def compiled() -> T:
            policy = self.settings.policy(name)
            slots, kv_dtype = self.settings.slots(policy, room), self.settings.kv_dtype
            chosen = kvpass.backend(policy, budget=slots, inner=inner, kv_dtype=kv_dtype)
            return action(self.traces.under(chosen, subject.model, room))

        with torch.inference_mode(), _threads(self.settings.threads):
            return unless_refused(compiled)


def prepare(settings: DemoSettings) -> Job:
    """Load the model and cut the text.

    Raises:
        KVPassError: the model or the text is not what it should be.
    """
    texts = read_texts(settings.text)
    subject, memory = load(settings.model), load_memory(settings.model)
    fitted, tokens = settings.fitted(subject, memory), subject.encode(texts)
    documents = corpus.documents(tokens, fitted.documents, fitted.length, subject.bos)
    unbroken = corpus.unbroken(tokens, fitted.stream, subject.bos)
    planted = _planted(memory, texts, fitted.planted - fitted.new_tokens)  # leaves room for completions
    return Job(fitted, subject, torch.tensor(documents), torch.tensor([unbroken]), memory, planted)


def _planted(memory: LoadedModel, texts: list[str], length: int) -> PlantedPairs | KVPassError:
    tokens = [token for text in memory.encode(texts) for token in (memory.bos, *text)]
    try:
        return recall.planted(torch.tensor(tokens), memory.bos, Tongue.of(memory.tokenizer), length)
    except KVPassError as error:
        return error


def attempt(
    model: Any,
    policy: str | Policy,
    budget: int | None,
    inner: str,
    action: Callable[[], T],
    kv_dtype: KVDtype | None = None,
) -> T | KVPassError:
    """`action()` with the model compiled for the policy; the reason if kvpass refuses."""

    def compiled() -> T:
        counters.forget_compiled_code()
        kvpass.compile(model, policy=policy, budget=budget, inner=inner, kv_dtype=kv_dtype)
        return action()

    return unless_refused(compiled)


def unless_refused(action: Callable[[], T]) -> T | KVPassError:
    """What `action()` returns; the reason if kvpass refuses."""
    try:
        return action()
    except Exception as error:
        refusals = [reason for reason in _reasons(error) if isinstance(reason, KVPassError)]
        if not refusals:
            raise
        return refusals[0]


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what lies under it: Dynamo wraps what a backend raises."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """StreamRun with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
