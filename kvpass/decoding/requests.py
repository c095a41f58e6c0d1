"""Define the requests of a `DecodeLoop`: what a caller adds, the state of each on the host, and the outputs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from torch import Tensor

from kvpass.arguments import Condition
from kvpass.decoding.prompt_inputs import are_token_ids
from kvpass.decoding.sampling import Sampling
from kvpass.errors import RequestError

Reason = Literal["stop", "length", "cancelled", "error"]
MAX_STOPS = 8  # stop tokens of a request
RAISES_REQUEST_ERROR = Condition(error=RequestError)


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
        cause: the exception that caused it, without a traceback.
        cached_tokens: the tokens in its slots at its end, the mean over layers and heads; None before its end, and for
            a request that ended without a row.
        cache: its cache at its end, if `DecodeLoop.add` was to keep it; it has seen all tokens but the last one.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]
    new_tokens: list[int]
    status: RequestStatus
    finish_reason: Reason | None = None
    error: str | None = None
    cached_tokens: float | None = None
    cache: Any = None
    cause: Exception | None = None

    def is_finished(self) -> bool:
        """Return whether the request has finished or failed, so that no other output follows."""
        return self.status >= RequestStatus.FINISHED


@dataclasses.dataclass(eq=False)
class Request:
    """A request and its state on the host.

    Attributes:
        output: the output that was handed out last, with the present state of the request.
        pinned: bool [1, T] on the CPU, the tokens of the prompt to pin; None for none.
        on_top: whether pinned tokens are in addition to the budget.
        prefix: the cache that the prompt continues, which is copied; None for an empty one.
        prefix_length: the number of tokens of the prefix.
        keep: whether to copy the slots of the request when it ends.
        tokens: the tokens generated since the start or the last restart; after a restart, fewer than in `output`.
        failures: how often the request has failed while no other request ran.
        runs_alone_until: the number of tokens up to which the request runs alone, because a step of several requests
            failed before that many.
    """

    output: GenerationOutput
    max_new_tokens: int
    stop: frozenset[int]
    sampling: Sampling
    pinned: Tensor | None = None
    on_top: bool = False
    prefix: Any = None
    prefix_length: int = 0
    keep: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    failures: int = 0
    runs_alone_until: int = 0

    @property
    def request_id(self) -> str:
        return self.output.request_id

    @property
    def prompt(self) -> list[int]:
        return self.output.prompt_ids

    @property
    def finished(self) -> bool:
        return self.output.is_finished()

    @property
    def seen_tokens(self) -> int:
        """Number of tokens that its cache has seen: prefix, prompt and all generated tokens but the last."""
        return self.prefix_length + len(self.prompt) + len(self.tokens) - 1

    def update(self, **changes: Any) -> None:
        """Change fields of the output."""
        self.output = dataclasses.replace(self.output, **changes)

    def begin(self) -> None:
        """Start or restart the request; tokens that are generated again are not handed out again."""
        self.tokens = []
        self.update(status=RequestStatus.PREFILLING)

    @property
    def runs_alone(self) -> bool:
        """True if no other request may be in the batch."""
        return len(self.tokens) < self.runs_alone_until

    def append(self, token: int) -> None:
        """Append a generated token, and end the request if it is a stop token or the last allowed token."""
        self.tokens.append(token)
        if token in self.stop:
            self.end("stop")
        elif len(self.tokens) >= self.max_new_tokens:
            self.end("length")

    def fail(self, error: Exception, message: str) -> None:
        """End the request with an error; the exception loses its traceback, which would keep tensors alive."""
        self.end("error", error=message, cause=error.with_traceback(None))

    def end(self, reason: Reason, **facts: Any) -> None:
        status = RequestStatus.FAILED if reason == "error" else RequestStatus.FINISHED
        self.update(status=status, finish_reason=reason, **facts)

    def next_output(self) -> GenerationOutput | None:
        """Return an output with the new tokens; None if there are none and the request has not finished."""
        new = self.tokens[len(self.output.generated_tokens) :]
        if not new and not self.finished:
            return None
        delivered = [*self.output.generated_tokens, *new]
        self.update(generated_tokens=delivered, new_tokens=new)
        # The caller may change the lists that it gets.
        return dataclasses.replace(self.output, prompt_ids=list(self.prompt), generated_tokens=list(delivered))
