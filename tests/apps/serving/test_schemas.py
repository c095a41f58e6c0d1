"""Test fields of requests, and the refusals that name them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvpass.apps.serving.schemas import ApiError, ChatFields, CompletionFields, read_fields
from tests.apps.serving.small import NAME

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatFields:
    return read_fields(json.dumps({"model": NAME, "messages": HELLO, **fields}).encode(), ChatFields)


def completion(**fields: Any) -> CompletionFields:
    return read_fields(json.dumps({"prompt": "hello", **fields}).encode(), CompletionFields)


def test_fields_are_read() -> None:
    found = chat(
        max_completion_tokens=7, temperature=0.5, top_p=0.9, top_k=5, seed=-3, n=2, stop=["a", ""], stream=True,
        stream_options={"include_usage": True}, user="somebody",
    )  # fmt: skip
    assert (found.max_tokens, found.temperature, found.top_p, found.top_k, found.seed) == (7, 0.5, 0.9, 5, -3)
    assert (found.choices, found.stops, found.stream_options.include_usage) == (2, ("a",), True)
    assert chat().choices == 1
    assert chat(stop="a").stops == ("a",)
    assert chat(conversation={"id": "c"}).conversation == chat(conversation="c").conversation == "c"


def test_messages_become_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [{"role": "developer", "content": parts}, {"role": "assistant", "content": "c", "refusal": None}]
    assert chat(messages=given).messages == (
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "c"},
    )


@pytest.mark.parametrize("prompt", ["text", ["one", "two"], [1, 2], [[1, 2], [3]]])
def test_prompts_of_every_form(prompt: Any) -> None:
    found = completion(prompt=prompt).prompt
    assert list(found) == (prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt])


@pytest.mark.parametrize(
    "neutral",
    [
        {"logprobs": False}, {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"tools": []}, {"logit_bias": {}},
        {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"store": None}, {"parallel_tool_calls": True},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_unsupported_fields_pass_if_they_ask_for_nothing(neutral: dict[str, Any]) -> None:
    assert chat(**neutral) == chat()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"logprobs": True}, "logprobs", "is not supported by this server"),
        ({"top_logprobs": 3}, "top_logprobs", "is not supported by this server"),
        ({"tools": [{"type": "function"}]}, "tools", "is not supported by this server"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported by this server"),
        ({"presence_penalty": 0.5}, "presence_penalty", "is not supported by this server"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not supported by this server"),
        ({"nonsense": 1}, "nonsense", "is not a field of this endpoint"),
        ({"temperature": 3}, "temperature", "must be a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"top_p": 0}, "top_p", "above 0 and up to 1"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"max_tokens": 0}, "max_tokens", "of at least 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, None, "differ: 5 and 6"),
        ({"stop": [1]}, "stop", "must be a string, a list"),
        ({"stop": ["a"] * 5}, "stop", "with up to 4"),
        ({"stream": "yes"}, "stream", "must be True or False"),
        ({"stream_options": {"nonsense": 1}}, "stream_options", "nonsense is not one of include_usage, "),
        ({"stream_options": [1]}, "stream_options", "must be a JSON object, got list"),
        ({"stream_options": {"include_usage": 1}}, "stream_options", "include_usage=1: must be True or False"),
        ({"conversation": 7}, "conversation", "an id of 1 to 256 characters"),
        ({"conversation": "c", "n": 2}, "n", "a conversation has one continuation"),
        ({"messages": []}, "messages", "and at least one"),
        ({"messages": "hello"}, "messages", "must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "role 'tool' must be one of"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content must be a text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0]", "tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "type 'image_url'"),
        ({"generation_config": "{"}, "generation_config", "is not valid JSON"),
        ({"generation_config": '{"num_beams": 4}'}, "generation_config", "num_beams is not supported"),
        ({"generation_config": "null"}, "generation_config", "must be a JSON object, got NoneType"),
        ({"generation_config": [1]}, "generation_config", "must be a JSON object, got list"),
        ({"generation_config": "[" * 100_000}, "generation_config", "is not valid JSON"),
        ({"generation_config": '{"\\ud800": 1}'}, "generation_config", "is not valid JSON"),
    ],
)  # fmt: skip
def test_a_refused_field_is_named(fields: dict[str, Any], param: str | None, message: str) -> None:
    with pytest.raises(ApiError, match=re.escape(message)) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", [None, "", [], [1.5], ["a", ""], {"a": 1}, 7])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt: must be a text, a list of token ids"):
        completion(prompt=prompt)


def test_zero_logprobs_of_a_completion_ask_for_something() -> None:
    with pytest.raises(ApiError, match="logprobs: is not supported"):
        completion(logprobs=0)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b"null", b"[" * 100_000, b'{"user": "\\ud800"}'])
def test_bodies_that_are_no_objects(body: bytes) -> None:
    with pytest.raises(ApiError, match=r"the body (is not valid JSON|must be a JSON object)"):
        read_fields(body, ChatFields)


def test_the_generation_config_of_transformers_chat() -> None:
    config = {"do_sample": True, "max_new_tokens": 9, "top_k": 40, "transformers_version": "5.24.0", "eos_token_id": 2}
    found = chat(generation_config=json.dumps(config), temperature=None)
    assert (found.max_tokens, found.top_k, found.temperature) == (9, 40, None)
    assert chat(generation_config=json.dumps({"do_sample": False})).temperature == 0
    assert chat(generation_config=json.dumps(config), max_tokens=3).max_tokens == 3
