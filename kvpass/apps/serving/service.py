"""Share the model, the tokenizer, the engine, the conversations and the checks of requests among endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from kvpass import policies
from kvpass.apps.chat_template import first_turn, next_turn
from kvpass.apps.models import LoadedModel, stop_tokens
from kvpass.apps.serving.answers import Answer
from kvpass.apps.serving.conversations import ConversationStore, KeptConversation, Limits
from kvpass.apps.serving.engine import Engine, Job, Outputs
from kvpass.apps.serving.metrics import Metrics
from kvpass.apps.serving.schemas import ApiError, ChatFields, CompletionFields, SamplingFields
from kvpass.apps.serving.text import TextStream
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.requests import MAX_STOPS
from kvpass.errors import KVPassError

COMPLETION_TOKENS = 16  # of a completion without `max_tokens`, as in OpenAI's API
SEEDS = 2**31
ERROR_TIMEOUT = 5.0  # seconds after the drain in which the requests that it has ended send their errors


@dataclasses.dataclass(frozen=True)
class ServeSettings:
    """Settings of the endpoints.

    Attributes:
        api_keys: keys of which each request must have one, ASCII without spaces; none for no check.
        waiting: requests that may wait for a row; others get status 429.
        max_tokens: tokens of an answer if the request sets no number.
        context: the most tokens of a request, or of a conversation, with the answer; None for no limit.
        drain: seconds that running requests have to finish when the server shuts down.
        folder: where conversations are saved, for later servers too; None for a temporary folder.
    """

    api_keys: tuple[str, ...] = ()
    waiting: int = 32
    max_tokens: int = 512
    context: int | None = None
    drain: float = 30.0
    largest_body: int = 4 * 2**20
    conversations: Limits = dataclasses.field(default_factory=Limits)
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not all(key.isascii() and key.isprintable() and key and " " not in key for key in self.api_keys):
            raise KVPassError(
                "an API key is empty, or has a space or a character that is not ASCII, so that no request could send "
                "it: give another --api-key or KVPASS_API_KEY"
            )


class Service:
    """The model that the endpoints serve.

    Attributes:
        name: the name of the model in requests.
        draining: says whether the server is shutting down.
        prepare: compiles all that the loop needs before the first request comes; the loop's `warm` by default.
    """

    def __init__(self, loaded: LoadedModel, name: str, loop: DecodeLoop, rows: int, settings: ServeSettings) -> None:
        """Make the engine for a loop with so many rows.

        Raises:
            KVPassError: the conversations cannot be read, or the model has too many tokens that end an answer.
        """
        self.loaded, self.name, self.settings = loaded, name, settings
        self.ends = stop_tokens(loaded.model, loaded.tokenizer)
        if len(self.ends) > MAX_STOPS:
            raise KVPassError(
                f"{name} has {len(self.ends)} tokens that end an answer, and requests take {MAX_STOPS} at most: leave "
                "some out of `eos_token_id` in its generation config"
            )
        self.metrics = Metrics()
        self.engine = Engine(loop, rows, settings.waiting, self.metrics)
        self._temporary = tempfile.TemporaryDirectory(prefix="kvpass-") if settings.folder is None else None
        folder = settings.folder or Path(self._temporary.name if self._temporary else "")
        self.store = ConversationStore(loop, folder, settings.conversations)
        self.metrics.watch(rows, self.engine.slots, lambda: len(self.engine.jobs), self.store)
        self.draining: Callable[[], bool] = lambda: False
        self.prepare: Callable[[], object] = loop.warm
        self._created = int(time.time())

    async def start(self) -> None:
        """Start the engine, which compiles first."""
        self.engine.start(self.prepare)

    async def stop(self) -> None:
        """Stop the engine, and save the conversations if the settings name a folder."""
        try:
            await self.engine.stop()
            if self._temporary is None:
                await self.store.save()
        finally:
            await self.store.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    # -- checks ------------------------------------------------------------------------------------------------------

    def status(self) -> str:
        """Return "ok" if requests are answered immediately, else the reason why not."""
        if self.engine.failure is not None:
            return "failed"
        return "draining" if self.draining() else "ok" if self.engine.ready else "starting"

    def check_key(self, header: str) -> None:
        """Raise ApiError unless a request may use the API."""
        scheme, _, sent_key = header.partition(" ")
        matches = [hmac.compare_digest(sent_key.strip().encode(), key.encode()) for key in self.settings.api_keys]
        if matches and not (scheme.lower() == "bearer" and any(matches)):
            raise ApiError("the API key is missing or not known", 401, code="invalid_api_key")

    def owner(self, header: str) -> str:
        """Return whose conversations a request sees: those of its API key."""
        return header.partition(" ")[2].strip() if self.settings.api_keys else ""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for the name of another model."""
        if name not in (None, self.name):
            raise ApiError(f"there is no model {name!r}; this server has {self.name!r}", 404, "invalid_request_error",
                           "model", "model_not_found")  # fmt: skip

    def model_card(self) -> dict[str, Any]:
        """Return the entry of the model in `/v1/models`."""
        backend = self.engine.loop.backend
        settings = {"policy": policies.to_json(backend.policy), "budget": backend.budget, "rows": self.engine.rows}
        card = {"id": self.name, "object": "model", "created": self._created, "owned_by": "kvpass"}
        return {**card, "max_model_len": self.settings.context, "kvpass": settings}

    # -- requests ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def answer(self, name: str, fields: SamplingFields, owner: str) -> AsyncIterator[Answer]:
        """Give a request its answer, whose tokens are then made; at the end its rest is cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            self.engine.check_room(fields.total_choices)  # before prompts are tokenised and conversations are read
            conversation = None
            if fields.conversation is not None:
                conversation = await stack.enter_async_context(self.store.turn(fields.conversation, owner))
            prompts = await asyncio.to_thread(self._prompts, fields, conversation)
            answer = self._answer_to(name, fields, prompts, conversation)
            stack.callback(answer.close)
            await answer.begin()
            yield answer

    def _prompts(self, fields: SamplingFields, conversation: KeptConversation | None) -> list[list[int]]:
        """Return the token ids of the prompts of a request, after the tokens that its conversation has not seen."""
        before = [] if conversation is None else conversation.tail
        if isinstance(fields, ChatFields):
            return [[*before, *self.loaded.encode([self._render(fields, conversation)])[0]]]
        assert isinstance(fields, CompletionFields)
        known = range(self.engine.loop.model_call.vocabulary or len(self.loaded.tokenizer))
        for token in (token for prompt in fields.prompt if not isinstance(prompt, str) for token in prompt):
            if token not in known:  # the tokenizer cannot decode it either
                raise ApiError(f"prompt: token {token} is not in the vocabulary of {len(known)}", param="prompt")
        return [
            [*before, *(self._encode(prompt, not before) if isinstance(prompt, str) else prompt)]
            for prompt in fields.prompt
        ]

    def _encode(self, text: str, first: bool) -> list[int]:
        """Return the token ids of a text; at the beginning of a conversation with the ids that introduce it."""
        ids: list[int] = self.loaded.tokenizer(text, add_special_tokens=first, verbose=False)["input_ids"]
        return ids

    def _render(self, fields: ChatFields, conversation: KeptConversation | None) -> str:
        """Return the text of a chat's messages, or raise ApiError if a chat template is missing or refuses them."""
        tokenizer, messages = self.loaded.tokenizer, [dict(message) for message in fields.messages]
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(f"{self.name} has no chat template: use /v1/completions", param="messages")
        try:
            if conversation is None or not conversation.seen:
                return first_turn(tokenizer, messages)
            return next_turn(tokenizer, messages, [tokenizer.decode([end]) for end in self.ends], conversation.ended)
        except Exception as error:  # a template is a program, which may raise any error
            raise ApiError(f"messages: the chat template refuses them: {error}", param="messages") from None

    def _answer_to(
        self, name: str, fields: SamplingFields, prompts: list[list[int]], conversation: KeptConversation | None
    ) -> Answer:
        outputs: Outputs = asyncio.Queue()
        first = secrets.randbelow(SEEDS) if fields.seed is None else fields.seed
        jobs: list[Job] = []
        for prompt in prompts:
            for _ in range(fields.choices):
                options = self._options(fields, prompt, 0 if conversation is None else conversation.seen)
                options["seed"] = (first + len(jobs)) % 2**62
                before = prompt if isinstance(fields, CompletionFields) else ()  # a chat's answer is a new text
                text = TextStream(self.loaded.tokenizer, fields.stops, before)
                job = Job(f"{name}-{len(jobs)}", prompt, options, outputs, text, len(jobs))
                if conversation is not None:
                    job.options |= dict(keep=True, prefix=conversation.cache)
                    job.before, job.evicted = conversation.seen, conversation.evicted
                jobs.append(job)
        return Answer(self.engine, jobs, sum(map(len, prompts)), conversation)

    def _options(self, fields: SamplingFields, prompt: list[int], before: int) -> dict[str, Any]:
        """Return the arguments of `DecodeLoop.add` for one choice, or raise ApiError if they exceed the context."""
        chat, context, length = isinstance(fields, ChatFields), self.settings.context, before + len(prompt)
        max_new_tokens = fields.max_tokens or (self.settings.max_tokens if chat else COMPLETION_TOKENS)
        if not prompt:
            raise ApiError("the prompt has no tokens", param="messages" if chat else "prompt")
        if context is not None:
            available = context - length
            if available < (fields.max_tokens or 1):
                raise ApiError(
                    f"{length} tokens and {fields.max_tokens or 1} new ones are more than the {context} of this server",
                    param="messages" if chat else "prompt",
                    code="context_length_exceeded",
                )
            max_new_tokens = min(max_new_tokens, available)
        return dict(
            max_new_tokens=max_new_tokens,
            stop=[] if fields.ignore_eos else self.ends,
            temperature=1.0 if fields.temperature is None else fields.temperature,
            top_p=None if fields.top_p == 1 else fields.top_p,
            top_k=fields.top_k if fields.top_k and fields.top_k > 0 else None,
        )
