"""One model and its tokens, under one policy at a time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

import kvpass
from kvpass.demo import corpus, meter, stream
from kvpass.demo.settings import Settings
from kvpass.demo.stream import Run
from kvpass.demo.subject import Subject, load, read_texts
from kvpass.errors import KVPassError
from kvpass.policies import Policy
from kvpass.storage import KVDtype

T = TypeVar("T")
Tick = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Job:
    """A model with its tokens: documents int64 [B, T] and one stream int64 [1, S]."""

    settings: Settings
    subject: Subject
    documents: Tensor
    stream: Tensor

    @property
    def prompt(self) -> Tensor:
        """[1, P], the end of the stream: two budgets long if that fits, so that something is evicted."""
        limit = self.subject.trained or self.stream.shape[1]
        count = max(1, min(2 * self.settings.budget, limit - self.settings.new_tokens))
        return self.stream[:, -count:]

    def stream_documents(self, policy: str, tick: Tick) -> Run | KVPassError:
        return self._stream(policy, self.documents, tick)

    def stream_unbroken(self, policy: str, tick: Tick) -> Run | KVPassError:
        return self._stream(policy, self.stream, tick)

    def _stream(self, policy: str, tokens: Tensor, tick: Tick) -> Run | KVPassError:
        """Tokens [B, T]; a policy that never evicts gets T slots, which saves compiling for each doubling."""

        def streamed() -> Run:
            return stream.run(self.subject.model, tokens, every=self.settings.every, tick=tick)

        return self._attempt(policy, "inductor", tokens.shape[1], streamed)

    def complete(self, policy: str, tick: Tick) -> str | KVPassError:
        """What `generate` adds to the prompt.

        Inductor would take half a minute per policy for the few tokens of a completion.
        """
        return self._attempt(policy, "eager", None, self._completion)

    def _completion(self) -> str:
        prompt, tokenizer = self.prompt, self.subject.tokenizer
        ids = self.subject.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.settings.new_tokens,
            do_sample=False,
            pad_token_id=self.subject.bos,
        )
        completion: str = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        return completion

    def _attempt(self, name: str, inner: str, room: int | None, action: Callable[[], T]) -> T | KVPassError:
        try:
            policy = self.settings.policy(name)
        except KVPassError as error:
            return error
        with torch.inference_mode(), _threads(self.settings.threads):
            slots = self.settings.slots(policy, room)
            return attempt(self.subject.model, policy, slots, inner, action, self.settings.kv_dtype)


def prepare(settings: Settings) -> Job:
    """Load the model and cut the text.

    Raises:
        KVPassError: the model or the text is not what it should be.
    """
    texts = read_texts(settings.text)
    subject = load(settings.model)
    fitted, tokens = settings.fitted(subject), subject.encode(texts)
    documents = corpus.documents(tokens, fitted.documents, fitted.length, subject.bos)
    unbroken = corpus.unbroken(tokens, fitted.stream, subject.bos)
    return Job(fitted, subject, torch.tensor(documents), torch.tensor([unbroken]))


def attempt(
    model: Any,
    policy: str | Policy,
    budget: int | None,
    inner: str,
    action: Callable[[], T],
    kv_dtype: KVDtype | None = None,
) -> T | KVPassError:
    """`action()` with the model compiled for the policy; the reason if kvpass refuses."""
    meter.forget_compiled_code()
    try:
        kvpass.compile(model, policy=policy, budget=budget, inner=inner, kv_dtype=kv_dtype)
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
    """Run with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
