"""Read the bodies of requests: the fields of OpenAI's API that are supported; all others are refused by name.

The fields are from OpenAI's API reference for chat completions and completions.  `top_k`, `ignore_eos` and
`conversation` are additional, and `generation_config` is what `transformers chat` sends.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from kvpass.arguments import Condition, Positive, at_least, between, check_fields
from kvpass.decoding.sampling import TopP
from kvpass.errors import KVPassError, PolicyError

Fields = TypeVar("Fields", bound="SamplingFields")

MAX_CHOICES = 128  # as in OpenAI's API
MAX_STOP_TEXTS = 4  # as in OpenAI's API
MAX_NAME_LENGTH = 256  # characters of a conversation's id
ROLES = ("system", "developer", "user", "assistant")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
NEUTRAL |= dict.fromkeys(("audio", "prediction", "prompt_cache_key", "reasoning_effort", "safety_identifier"), ())
NEUTRAL |= dict.fromkeys(("verbosity", "web_search_options"), ())
"""Fields of OpenAI's API that are not supported, with the values, in addition to null, that change nothing."""

_GENERATION = {"max_new_tokens": "max_tokens"} | {name: name for name in ("temperature", "top_k", "top_p")}
"""Entries of a `generation_config` that are read, and the fields that they stand for."""
_IGNORED = ("transformers_version", "_from_model_config", "do_sample", "eos_token_id", "bos_token_id", "pad_token_id")


class ApiError(KVPassError):
    """A request over HTTP that is refused, with the status and the fields of OpenAI's error object.

    Attributes:
        status: the HTTP status.
        kind: the error's `type`.
        param: the field at fault; None for none.
        code: a short name of the reason; None for none.
        retry_after: seconds after which the client may try again; None for never.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.retry_after = status, kind, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


StopTexts = Annotated[Sequence[str], Condition(f"with up to {MAX_STOP_TEXTS}", lambda x: len(x) <= MAX_STOP_TEXTS)]


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """Options of a stream; `include_usage` asks for a last chunk with the counts of tokens."""

    include_usage: bool = False
    include_obfuscation: bool = False  # pads chunks in OpenAI's service; accepted, and never done

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class SamplingFields:
    """Fields that chat completions and completions share; None stands for the default of the server.

    Attributes:
        n: the number of choices for each prompt.
        stop: texts at which a choice ends; they are not part of it.
        seed: the seed of sampling; None for a random seed.  Choice i of a request has the seed `seed + i`.
        conversation: the id of a conversation that the request continues or begins.
        ignore_eos: whether to generate `max_tokens` tokens, also after a stop token.
        user: accepted and not used.
    """

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, between(0, 2)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, at_least(-1)] | None = None
    seed: int | None = None
    n: Annotated[int, between(1, MAX_CHOICES)] | None = None
    stop: str | StopTexts | None = None
    stream: bool | None = None
    stream_options: Any = None
    conversation: Any = None
    ignore_eos: bool | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "stream_options", _stream_options(self.stream_options))
        object.__setattr__(self, "conversation", _conversation(self.conversation))
        if self.conversation is not None and self.choices > 1:
            raise ApiError(f"n={self.n}: a conversation has one continuation: leave n out", param="n")

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def total_choices(self) -> int:
        """The number of choices of all prompts."""
        return self.choices

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts to stop at, without empty ones."""
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(filter(None, texts))


@dataclasses.dataclass(frozen=True)
class ChatFields(SamplingFields):
    """Fields of `/v1/chat/completions`; after `__post_init__` the content of every message is one string."""

    messages: Annotated[Sequence[dict[str, Any]], Condition("and at least one", bool)] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "messages", tuple(_message(message, index) for index, message in enumerate(self.messages))
        )


@dataclasses.dataclass(frozen=True)
class CompletionFields(SamplingFields):
    """Fields of `/v1/completions`; a prompt is a text, a list of token ids, or a list of either."""

    prompt: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prompt", _prompts(self.prompt))
        if self.conversation is not None and len(self.prompt) > 1:
            raise ApiError(f"prompt: a conversation takes one prompt, got {len(self.prompt)}", param="prompt")

    @property
    def total_choices(self) -> int:
        return self.choices * len(self.prompt)


def read_fields(body: bytes, fields: type[Fields]) -> Fields:
    """Return the fields of a request.

    Raises:
        ApiError: the body is not a JSON object, or a field has a value that is not allowed or is not supported.
    """
    entries = read_object(body)
    try:
        return fields(**_supported_fields(entries, {field.name for field in dataclasses.fields(fields)}))
    except PolicyError as error:
        raise ApiError(str(error), param=str(error).partition("=")[0]) from None


def read_object(text: str | bytes, param: str | None = None) -> dict[str, Any]:
    """Return the JSON object of a body, or of the field `param`.

    Raises:
        ApiError: the text is not a JSON object, or has a string that is not Unicode text.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair, which JSON can escape
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{param or 'the body'} is not valid JSON: {error}", param=param, code="invalid_json") from None
    return _object(value, param)


def _object(value: Any, param: str | None) -> dict[str, Any]:
    """Return a value that was read from JSON if it is an object, else raise ApiError."""
    if not isinstance(value, dict):
        message = f"{param or 'the body'} must be a JSON object, got {type(value).__name__}"
        raise ApiError(message, param=param, code="invalid_json")
    return value


def _supported_fields(entries: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the supported fields, under their own names, or raise ApiError if another field asks for something."""
    fields = {name: value for name, value in entries.items() if value is not None}
    for name, value in _generation(fields.pop("generation_config", None)).items():
        fields.setdefault(name, value)
    newer = fields.pop("max_completion_tokens", None)
    if newer is not None and fields.setdefault("max_tokens", newer) != newer:
        raise ApiError(f"max_tokens and max_completion_tokens differ: {fields['max_tokens']!r} and {newer!r}")
    wrong = [name for name, value in fields.items() if name not in names and not _changes_nothing(name, value)]
    if wrong:
        complaint = "is not supported by this server" if wrong[0] in NEUTRAL else "is not a field of this endpoint"
        raise ApiError(f"{wrong[0]}: {complaint}; leave it out", param=wrong[0], code="unsupported_field")
    return {name: value for name, value in fields.items() if name in names}


def _changes_nothing(name: str, value: Any) -> bool:
    """Return whether a field that is not supported asks for nothing; 0 and False are different, as in JSON."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ())
    )


def _generation(text: Any) -> dict[str, Any]:
    """Return the fields of a request that a `generation_config`, JSON text of transformers, sets."""
    if text is None:
        return {}
    name = "generation_config"
    config = read_object(text, name) if isinstance(text, str) else _object(text, name)
    options = {name: value for name, value in config.items() if value is not None and name not in _IGNORED}
    wrong = sorted(options.keys() - _GENERATION.keys())
    if wrong:
        raise ApiError(f"generation_config: {wrong[0]} is not supported by this server", param="generation_config")
    fields = {_GENERATION[name]: value for name, value in options.items()}
    return {**fields, "temperature": 0} if config.get("do_sample") is False else fields


def _stream_options(options: Any) -> StreamOptions:
    if options is None:
        return StreamOptions()
    name = "stream_options"
    entries, known = _object(options, name), [field.name for field in dataclasses.fields(StreamOptions)]
    if unknown := [entry for entry in entries if entry not in known]:
        raise ApiError(f"{name}: {unknown[0]} is not one of {', '.join(known)}; leave it out", param=name)
    try:
        return StreamOptions(**entries)
    except PolicyError as error:
        raise ApiError(f"{name}: {error}", param=name) from None


def _conversation(value: Any) -> str | None:
    """Return the id of a conversation, which OpenAI's API also writes as an object with an id."""
    name = value.get("id") if isinstance(value, dict) else value
    if value is not None and (not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH):
        raise ApiError(f"conversation: must be an id of 1 to {MAX_NAME_LENGTH} characters", param="conversation")
    return name


def _message(message: Mapping[str, Any], index: int) -> dict[str, str]:
    """Return a message with its role and its text."""
    param = f"messages[{index}]"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ApiError(f"{param}: role {role!r} must be one of {', '.join(ROLES)}", param=param)
    asks = [name for name in ("tool_calls", "function_call", "audio") if message.get(name)]
    if asks:
        raise ApiError(f"{param}: {asks[0]} is not supported by this server", param=param, code="unsupported_field")
    return {"role": "system" if role == "developer" else role, "content": _text(content, param)}


def _text(content: Any, param: str) -> str:
    """Return the content of a message, a text or a list of parts of type "text", as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ApiError(f"{param}: content must be a text or a list of parts of type 'text'", param=param)
    for part in content:
        part_type = part.get("type") if isinstance(part, dict) else type(part).__name__
        if part_type != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                f"{param}: a part of type {part_type!r} is not supported", param=param, code="unsupported_field"
            )
    return "".join(part["text"] for part in content)


def _prompts(value: Any) -> tuple[Any, ...]:
    """Return the prompts of a completion, each a text or a list of token ids."""
    prompts = (
        value
        if isinstance(value, list) and value and all(isinstance(entry, (str, list)) for entry in value)
        else [value]
    )
    for prompt in prompts:
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            raise ApiError(
                "prompt: must be a text, a list of token ids, or a list of these; none empty", param="prompt"
            )
    return tuple(prompts)
