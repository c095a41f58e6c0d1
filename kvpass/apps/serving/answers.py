"""Follow the choices of one HTTP request: from tokens of the engine to pieces of text."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvpass.apps.serving.conversations import KeptConversation
from kvpass.apps.serving.engine import Engine, Job
from kvpass.apps.serving.schemas import ApiError
from kvpass.cache.model_cache import caches_in
from kvpass.decoding.requests import GenerationOutput


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """A part of the text of one choice; the last part has the reason why it ended."""

    index: int
    text: str
    reason: str | None = None


class Answer:
    """The choices of one HTTP request.

    Attributes:
        jobs: a job for each choice; they share one queue for their outputs.
        prompt_tokens: the tokens of all prompts; several choices may have the same one.
        conversation: the conversation that the only choice continues; it changes when the choice has ended.
    """

    def __init__(
        self, engine: Engine, jobs: Sequence[Job], prompt_tokens: int, conversation: KeptConversation | None
    ) -> None:
        self.engine, self.jobs, self.prompt_tokens, self.conversation = engine, jobs, prompt_tokens, conversation
        self._seen_before = 0 if conversation is None else conversation.seen

    async def begin(self) -> None:
        """Hand the jobs to the engine, and wait until it has accepted them; ApiError if it refuses one."""
        self.engine.check_room(len(self.jobs))
        for job in self.jobs:
            self.engine.submit(job)
        await asyncio.gather(*(job.added for job in self.jobs))

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """Yield the text of all choices as it comes; ApiError if one fails.

        A choice's reason comes with the last output of its job, as a client may close its connection at the reason.
        """
        outputs, unfinished = self.jobs[0].outputs, len(self.jobs)
        while unfinished:
            job, output = await outputs.get()
            if isinstance(output, ApiError):
                raise output
            if output.finish_reason == "error":
                raise ApiError(f"the request has failed: {output.error}", 500, "server_error")
            text = self._text(job, output) if job.reason is None else ""
            if output.is_finished():
                unfinished -= 1
                self._remember(job, output)
            reason = job.reason if output.is_finished() else None
            if text or reason:
                yield TextPiece(job.index, text, reason)

    def close(self) -> None:
        """End the jobs that have not finished, as nobody waits for them."""
        for job in self.jobs:
            self.engine.cancel(job)

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens so far, in OpenAI's form."""
        prompt = self._seen_before + self.prompt_tokens
        completion = sum(job.text.tokens for job in self.jobs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._seen_before},
        }

    def _text(self, job: Job, output: GenerationOutput) -> str:
        """Return the text of new tokens; the engine's request ends where a stop text is found."""
        ended = output.finish_reason == "stop"
        text = job.text.push(output.new_tokens[:-1] if ended else output.new_tokens)
        job.text.tokens += ended and not job.text.stopped  # the stop token, which has no text
        if job.text.stopped:
            job.reason = "stop"
            self.engine.cancel(job)
        elif output.is_finished():
            text += job.text.finish()
            job.reason = "length" if output.finish_reason == "length" and not job.text.stopped else "stop"
        return text

    def _remember(self, job: Job, output: GenerationOutput) -> None:
        """Continue the conversation by the tokens that the job has read and made."""
        if self.conversation is None or output.cache is None:
            return
        self.conversation.cache, self.conversation.tail = output.cache, output.generated_tokens[-1:]
        self.conversation.seen, self.conversation.evicted = caches_in(output.cache)[0].length, job.evicted
        self.conversation.ended = output.finish_reason == "stop"
