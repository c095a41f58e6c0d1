"""Test the endpoints of a server with a small model: answers, streams, refusals, limits, disconnections."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import time
from typing import Any

import httpx
import pytest
import torch

import kvpass
from kvpass.apps.serving.service import Service
from tests.apps.serving.small import HOW, NAME, ROWS, TEMPLATE, OddLoop, Running, model, serving, tokenizer

PROMPT = "def main(arguments):\n    parser ="


@pytest.fixture(scope="module")
def alone(fresh_dynamo: None) -> kvpass.DecodeLoop:
    """Return a loop with the same settings, which serves one request at a time."""
    return kvpass.DecodeLoop(model(), **HOW, rows=ROWS, read_interval=4)


def events(response: Any) -> list[Any]:
    """Return the events of a stream, which must end with `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(running: Running, path: str, **fields: Any) -> list[Any]:
    with running.client() as client, client.stream("POST", path, json={"stream": True, **fields}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def generated(alone: kvpass.DecodeLoop, ids: list[int], **how: Any) -> list[int]:
    (output,) = alone.generate_batch([ids], **how).values()
    return output.generated_tokens


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_loop_generates(running: Running, alone: kvpass.DecodeLoop) -> None:
    ids = tokenizer()(PROMPT)["input_ids"]
    found = running.completion(PROMPT, max_tokens=40)
    tokens = generated(alone, ids, max_new_tokens=40, stop=[0])
    (choice,) = found["choices"]
    assert choice["text"] == tokenizer().decode(tokens, skip_special_tokens=True)
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
    assert (found["object"], found["model"]) == ("text_completion", NAME)
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert found["usage"]["completion_tokens"] == len(tokens) == 40
    assert running.completion(ids, max_tokens=40)["choices"] == found["choices"]


def test_a_chat_is_the_completion_of_its_template(running: Running) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    chat = running.post("/v1/chat/completions", messages=messages, max_tokens=12, temperature=0).json()
    text = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (choice,) = chat["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == running.completion(text, max_tokens=12)["choices"][0]["text"]
    assert chat["object"] == "chat.completion"
    pieces = streamed(
        running, "/v1/chat/completions", messages=messages, max_tokens=12, temperature=0,
        stream_options={"include_usage": True},
    )  # fmt: skip
    deltas = [each["choices"][0] for each in pieces[:-1]]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["delta"].get("content", "") for each in deltas) == choice["message"]["content"]
    assert [each["finish_reason"] for each in deltas][-2:] == [None, "length"]
    assert {each["object"] for each in pieces} == {"chat.completion.chunk"}
    assert (pieces[-1]["choices"], pieces[-1]["usage"]) == ([], chat["usage"])
    assert len({each["id"] for each in pieces}) == 1


def test_several_choices_of_several_prompts(running: Running, alone: kvpass.DecodeLoop) -> None:
    """Check that seeds are consecutive, so that each choice can be reproduced alone or in a batch."""
    how: dict[str, Any] = dict(max_tokens=9, temperature=0.8, top_p=0.9, top_k=40)
    found = running.completion(["one", "two"], n=2, seed=7, **how)["choices"]
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    for index, each in enumerate(found):
        prompt, seed = ("one", "two")[index // 2], 7 + index
        assert running.completion(prompt, seed=seed, **how)["choices"][0]["text"] == each["text"]
        ids = tokenizer()(prompt)["input_ids"]
        said = generated(alone, ids, max_new_tokens=9, temperature=0.8, top_p=0.9, top_k=40, seed=seed, stop=[0])
        assert each["text"] == tokenizer().decode(said, skip_special_tokens=True)
    pieces = streamed(running, "/v1/completions", prompt=["one", "two"], n=2, seed=7, **how)
    for each in found:
        mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == each["index"]]
        assert "".join(piece["text"] for piece in mine) == each["text"]
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == [each["finish_reason"]]


def test_a_choice_ends_at_stop_texts_and_stop_tokens(running: Running, alone: kvpass.DecodeLoop) -> None:
    whole = running.completion(PROMPT, max_tokens=40)["choices"][0]["text"]
    stop = whole[20:23]
    found = running.completion(PROMPT, max_tokens=40, stop=stop)
    assert found["choices"][0]["text"] == whole[: whole.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] < 40
    pieces = streamed(running, "/v1/completions", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop, "\0"])
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole[: whole.index(stop)]
    ids = tokenizer()(PROMPT)["input_ids"]
    end = generated(alone, ids, max_new_tokens=6)[-1]
    ends, running.service.ends = running.service.ends, [end]
    try:
        found = running.completion(PROMPT, max_tokens=40)
    finally:
        running.service.ends = ends
    tokens = generated(alone, ids, max_new_tokens=40, stop=[end])
    assert found["choices"][0]["text"] == tokenizer().decode(tokens[:-1])
    assert (found["choices"][0]["finish_reason"], found["usage"]["completion_tokens"]) == ("stop", len(tokens))


def test_defaults_are_those_of_the_api(running: Running) -> None:
    found = running.post("/v1/completions", prompt=PROMPT).json()
    assert found["usage"]["completion_tokens"] <= 16
    texts = {running.post("/v1/completions", prompt=PROMPT).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3  # at temperature 1, each from its own seed


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "status", "code", "param"),
    [
        ("/v1/completions", {"model": "gpt-4", "prompt": "a"}, 404, "model_not_found", "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}, 400,
         "unsupported_field", "logprobs"),
        ("/v1/completions", {"prompt": "word " * 600}, 400, "context_length_exceeded", "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 600}, 400, "context_length_exceeded", "prompt"),
        ("/v1/completions", {"prompt": [1, 99999]}, 400, None, "prompt"),
        ("/v1/completions", {"prompt": [[1], [2, -1]]}, 400, None, "prompt"),
        ("/v1/completions", {"prompt": ["a", [10**30]]}, 400, None, "prompt"),
        ("/v1/completions", {"prompt": "a", "n": 100}, 400, None, "n"),
        ("/v1/completions", {"prompt": "a" * 30_000}, 413, "request_too_large", None),
        ("/v1/nonsense", {}, 404, "not_found", None),
        ("/v1/models", {}, 405, "method_not_allowed", None),
    ],
)  # fmt: skip
def test_refusals_have_the_form_of_the_api(
    running: Running, path: str, fields: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    found = running.post(path, **fields)
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/load_model"])
@pytest.mark.parametrize("body", [b'{"prompt": ', b"[" * 10_000, b'{"prompt": "\\ud800"}', b"[1]"])
def test_bodies_that_are_no_json(running: Running, path: str, body: bytes) -> None:
    with running.client() as client:
        found = client.post(path, content=body)
    assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json")


def test_messages_that_the_template_refuses(running: Running) -> None:
    template = TEMPLATE + "{{ raise_exception('roles must alternate') }}"
    tokenizer().chat_template = template
    try:
        found = running.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        tokenizer().chat_template = None
        none = running.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    finally:
        tokenizer().chat_template = TEMPLATE
    assert (found.status_code, none.status_code) == (400, 400)
    assert "roles must alternate" in found.json()["error"]["message"]
    assert "no chat template" in none.json()["error"]["message"]


def test_keys(fresh_dynamo: None) -> None:
    """Check that conversations belong to their API key."""
    with serving(warm=False, api_keys=("one", "two")) as running:
        for header in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}):
            with running.client(headers=header) as client:
                found = client.get("/v1/models")
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        with running.client(headers={"Authorization": "Bearer two"}) as client:
            assert client.get("/v1/models").status_code == 200
            fields = {"prompt": "a", "max_tokens": 1, "conversation": "c"}
            assert client.post("/v1/completions", json=fields).status_code == 200
            assert client.get("/v1/conversations/c").status_code == 200
        with running.client(headers={"Authorization": "Bearer one"}) as client:
            assert client.get("/v1/conversations/c").status_code == 404
        with running.client() as client:
            assert client.get("/health").status_code == 200


# -- limits and disconnections -----------------------------------------------------------------------------------------


def test_too_many_requests_are_told_to_come_again(running: Running) -> None:
    """Send more requests than rows and queue positions: some are refused, and the others answered."""

    async def all_at_once() -> list[Any]:
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:
            fields = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "n": 2}
            return await asyncio.gather(*(client.post("/v1/completions", json=fields) for _ in range(8)))

    found = asyncio.run(all_at_once())
    refused = [each for each in found if each.status_code == 429]
    answered = [each for each in found if each.status_code == 200]
    assert len(refused) + len(answered) == 8
    assert len(answered) >= 3
    assert refused
    assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
    assert {each.json()["error"]["type"] for each in refused} == {"rate_limit_error"}
    assert len({choice["text"] for each in answered for choice in each.json()["choices"]}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "fields", "count"),
    [
        (["a"] * 4000, {"n": 128}, 512_000),
        (["a"] * 7, {}, 7),
        ([[1]] * 4, {"n": 2}, 8),
        ("a", {"n": 7}, 7),
    ],
)
def test_more_choices_than_the_server_takes_cost_nothing(
    running: Running, prompt: Any, fields: dict[str, Any], count: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that such a request is refused before any of its prompts is tokenised and any job is made."""
    made: list[Any] = []

    def record(service: Service, *given: Any) -> Any:
        made.append(given)
        return tokenise(service, *given)

    tokenise = Service._prompts
    monkeypatch.setattr(Service, "_prompts", record)
    found = running.post("/v1/completions", prompt=prompt, stream=stream, **fields)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "n")
    assert found.json()["error"]["message"] == f"{count} choices for one request; this server takes up to 6"
    assert not made


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_ends_its_request(running: Running, stream: bool) -> None:
    engine = running.service.engine
    fields = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "temperature": 0, "stream": stream}
    before = running.service.metrics.requests.labels("cancelled")._value.get()
    with running.client() as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=fields) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout, match="timed out"):
                client.post("/v1/completions", json=fields, timeout=0.3)
    end = time.monotonic() + 60
    while engine.jobs and time.monotonic() < end:
        time.sleep(0.01)
    assert not engine.jobs
    running.wait_until_idle()
    assert running.service.metrics.requests.labels("cancelled")._value.get() == before + 1


def test_health_models_and_metrics(running: Running) -> None:
    with running.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        (card,) = client.get("/v1/models").json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (NAME, "model", 512)
        assert client.get(f"/v1/models/{NAME}").json() == card
        assert client.get("/v1/models/other").status_code == 404
        loaded = client.post("/load_model", json={"model": NAME}).text
        assert '"status": "ready"' in loaded
        before = metrics(client)
        running.completion(PROMPT, max_tokens=40, ignore_eos=True)
        after = metrics(client)
    tokens = len(tokenizer()(PROMPT)["input_ids"])
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    assert gained['kvpass_tokens_total{kind="prompt"}'] == tokens
    assert gained['kvpass_tokens_total{kind="generated"}'] == 40
    assert gained['kvpass_requests_total{end="length"}'] == 1
    assert gained["kvpass_first_token_seconds_count"] == 1
    assert gained["kvpass_step_seconds_count"] > 10
    assert gained["kvpass_evicted_tokens_total"] == tokens + 39 - HOW["budget"]
    assert (after["kvpass_rows"], after["kvpass_rows_used"], after["kvpass_queue"]) == (ROWS, 0, 0)
    assert after["kvpass_slots"] == ROWS * HOW["budget"]
    assert after["kvpass_slots_held"] == 0


def metrics(client: Any) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_the_slots_of_rows_in_use_are_counted(running: Running) -> None:
    fields = {"prompt": "word " * 60, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with (
        running.slowly(),
        running.client() as client,
        client.stream("POST", "/v1/completions", json=fields) as response,
    ):
        lines = response.iter_lines()  # closes the connection when it is collected
        next(lines)
        with running.client() as other:
            found = metrics(other)
    assert found["kvpass_slots_held"] == HOW["budget"]
    assert found["kvpass_rows_used"] == 1
    running.wait_until_idle()


# -- failures and shutdown ---------------------------------------------------------------------------------------------


def test_a_failed_step_fails_its_requests_and_no_later_ones(fresh_dynamo: None) -> None:
    loop = OddLoop(model(), **HOW, rows=ROWS, read_interval=4)
    with serving(warm=False, loop=loop) as running:
        loop.broken = True
        found = running.post("/v1/completions", prompt="a", max_tokens=2)
        loop.broken = False
        assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
        assert "no step today" in found.json()["error"]["message"]
        assert running.completion("a", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert not loop.pending


def test_running_requests_are_finished_at_the_end(fresh_dynamo: None) -> None:
    """Check that later connections are refused, and that the server reports that it drains."""
    with serving(warm=False, drain=60.0) as running:
        whole = running.completion(PROMPT, max_tokens=200, ignore_eos=True)["choices"][0]["text"]
        fields = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
        with running.client() as client, client.stream("POST", "/v1/completions", json=fields) as response:
            lines = response.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            running.server.should_exit = True
            assert running.service.status() == "draining"
            rest = [line for line in lines if line.startswith("data: ")]
        with running.client() as client, pytest.raises(httpx.ConnectError, match="refused"):
            client.get("/health")
    assert rest[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in [first, *rest[:-1]]]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_outlast_the_drain_get_an_error(stream: bool, fresh_dynamo: None) -> None:
    with serving(warm=False, drain=0.3) as running, running.slowly(), concurrent.futures.ThreadPoolExecutor(5) as pool:
        running.completion(PROMPT, max_tokens=4, ignore_eos=True)
        fields: dict[str, Any] = dict(prompt=PROMPT, max_tokens=400, ignore_eos=True, stream=stream)
        # More than there are rows, so that some wait.
        answers = [pool.submit(running.post, "/v1/completions", **fields) for _ in range(5)]
        while len(running.service.engine.jobs) < 5:
            time.sleep(0.01)
        time.sleep(0.3)
        running.server.should_exit = True
        for answer in [each.result() for each in answers]:
            text = answer.text.strip().split("\n")[-1].removeprefix("data: ")
            assert json.loads(text)["error"]["code"] == "shutting_down"
            assert answer.status_code == (200 if stream else 503)


def test_a_model_that_cannot_be_compiled_ends_the_server(fresh_dynamo: None) -> None:
    class Unreadable(kvpass.DecodeLoop):
        def warm(self, rows: int = 1) -> None:
            raise kvpass.UnsupportedGraph("no attention here")

    ended: list[str] = []
    with serving(loop=Unreadable(model(), **HOW, rows=ROWS)) as running:
        running.service.engine.on_failure = lambda: ended.append("failed")
        end = time.monotonic() + 60
        while running.service.engine.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        with running.client() as client:
            health = client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "failed"})
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            loaded = client.post("/load_model", json={"model": NAME}).text
        assert '"status": "ready"' not in loaded
        assert json.loads(loaded.partition("data: ")[2]) == {
            **{"status": "error", "model": NAME},
            "message": "the server has failed: no attention here",
        }
    assert isinstance(running.service.engine.failure, kvpass.UnsupportedGraph)


def test_steps_are_as_warm_as_they_say(running: Running) -> None:
    """Check that nothing is traced after the start, for any request."""
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (2, 3, 17, 40, 60):
            found = running.completion([5] * tokens, max_tokens=3, ignore_eos=True)
            assert found["usage"]["completion_tokens"] == 3
        for tokens in (30, 3, 16, 40):  # with the last token of the answer, 16 tokens are a chunk and a token
            found = running.completion([5] * tokens, max_tokens=3, ignore_eos=True, conversation="warm")
            assert found["usage"]["completion_tokens"] == 3
