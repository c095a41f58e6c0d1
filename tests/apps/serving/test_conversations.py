"""Test conversations whose slots stay between requests, in memory and in files."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import kvpass
from kvpass import tensor_files
from kvpass.apps.chat_template import first_turn, next_turn
from kvpass.apps.serving import conversations
from kvpass.apps.serving.conversations import ConversationStore, Limits
from tests.apps.serving.small import HOW, ROWS, Running, model, serving, tokenizer

TURNS = ([7] * 30, [11, 12, 13], [900] * 20, [5])
"""Prompts of a conversation; the first is longer than the budget."""
ANSWER = 9


@pytest.fixture(scope="module")
def expected(fresh_dynamo: None) -> list[str]:
    """Return the answer of a loop with one conversation in each turn."""
    loop = kvpass.DecodeLoop(model(), **HOW)
    said = []
    for turn in TURNS:
        loop.prompt(torch.tensor([turn]))
        said.append(tokenizer().decode(loop.generate(ANSWER)[0], skip_special_tokens=True))
    return said


def say(running: Running, name: str, turn: list[int], **fields: Any) -> str:
    found = running.completion(turn, conversation=name, max_tokens=ANSWER, ignore_eos=True, **fields)
    text: str = found["choices"][0]["text"]
    return text


def saved(folder: Path) -> list[Path]:
    """Return the files of a folder of conversations, except that for its lock."""
    return [path for path in folder.iterdir() if path.name != conversations.LOCK]


def test_a_conversation_goes_on_as_in_one_loop(running: Running, expected: list[str]) -> None:
    """Alternate two conversations of which one fits in memory, so that each is saved and loaded between turns."""
    store = running.service.store
    for turn, said in zip(TURNS, expected, strict=True):
        for name in ("first", "second"):
            assert say(running, name, turn) == said
        assert (store.in_memory, len(store)) == (1, 2)
    with running.client() as client:
        found = client.get("/v1/conversations/first").json()
        assert found["tokens"] == sum(map(len, TURNS)) + ANSWER * len(TURNS)
        assert found["evicted"] == found["tokens"] - 1 - HOW["budget"]
        assert not found["in_memory"]
        for name in ("first", "second"):
            assert client.delete(f"/v1/conversations/{name}").json()["deleted"]
        assert client.get("/v1/conversations/first").status_code == 404
        assert client.delete("/v1/conversations/first").status_code == 404
    assert not saved(store.folder)


def test_the_usage_of_a_turn_counts_what_was_there(running: Running) -> None:
    counts = []
    for turn in TURNS[:2]:
        found = running.completion(turn, conversation="usage", max_tokens=ANSWER, ignore_eos=True)["usage"]
        counts.append((found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]))
    before = len(TURNS[0]) + ANSWER
    assert counts == [(len(TURNS[0]), 0), (before + len(TURNS[1]), before - 1)]


def test_messages_of_a_chat_are_the_new_ones(running: Running, fresh_dynamo: None) -> None:
    """Check that a turn is the template's text after the last answer, which is closed if it was cut off."""
    loop = kvpass.DecodeLoop(model(), **HOW)
    said = []
    for content in ("hello", "and then?"):
        messages = [{"role": "user", "content": content}]
        text = next_turn(tokenizer(), messages, ["<|endoftext|>"], False) if said else first_turn(tokenizer(), messages)
        loop.prompt(torch.tensor([tokenizer()(text, add_special_tokens=False)["input_ids"]]))
        said.append(tokenizer().decode(loop.generate(ANSWER)[0], skip_special_tokens=True))
        fields: dict[str, Any] = dict(messages=messages, temperature=0, max_tokens=ANSWER, ignore_eos=True)
        found = running.post("/v1/chat/completions", conversation={"id": "chat"}, **fields).json()
        assert found["choices"][0]["message"]["content"] == said[-1]
    assert text == "<|endoftext|>\n<user>and then?<|endoftext|>\n<assistant>"


def test_another_server_goes_on_with_saved_conversations(tmp_path: Path, expected: list[str]) -> None:
    """Check that a server with other settings refuses the conversation and leaves it unchanged."""
    with serving(warm=False, folder=tmp_path) as running:
        assert say(running, "c", TURNS[0]) == expected[0]
    with serving(warm=False, folder=tmp_path) as running:
        assert say(running, "c", TURNS[1]) == expected[1]
    other = kvpass.DecodeLoop(model(), **{**HOW, "budget": 32}, rows=ROWS)
    with serving(warm=False, folder=tmp_path, loop=other) as running:
        found = running.post("/v1/completions", prompt=TURNS[2], conversation="c")
        assert found.status_code == 409
        assert "it was made under other settings" in found.json()["error"]["message"]
    with serving(warm=False, folder=tmp_path) as running:
        assert say(running, "c", TURNS[2]) == expected[2]


def test_a_folder_belongs_to_one_server_at_a_time(tmp_path: Path, expected: list[str]) -> None:
    """Check that a second server is refused before it removes a file that the first one is writing."""
    unfinished = tmp_path / f"{'0' * 64}.5.safetensors.17.unfinished"
    with serving(warm=False, folder=tmp_path) as running:
        unfinished.touch()
        with pytest.raises(kvpass.KVPassError, match=f"another server uses the folder {tmp_path}; .* --folder"):
            serving(warm=False, folder=tmp_path).__enter__()
        assert unfinished.exists()
        assert say(running, "c", TURNS[0]) == expected[0]
    with serving(warm=False, folder=tmp_path) as running:
        assert not unfinished.exists()
        assert say(running, "c", TURNS[1]) == expected[1]


def test_a_folder_is_free_when_its_server_was_killed(tmp_path: Path) -> None:
    program = "import pathlib, sys; from kvpass.apps.serving.conversations import lock_folder; "
    program += "lock = lock_folder(pathlib.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(kvpass.KVPassError, match="another server uses the folder"):
            conversations.lock_folder(tmp_path)
        process.kill()
    lock = conversations.lock_folder(tmp_path)
    assert lock is not None
    lock.close()


def test_files_that_are_damaged(tmp_path: Path, expected: list[str]) -> None:
    with serving(warm=False, folder=tmp_path) as running:
        say(running, "c", TURNS[0])
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with serving(warm=False, folder=tmp_path) as running:
        found = running.post("/v1/completions", prompt=TURNS[1], conversation="c")
        assert (found.status_code, found.json()["error"]["param"]) == (409, "conversation")
        assert "cannot read a cache of kvpass" in found.json()["error"]["message"]
        with running.client() as client:
            assert client.delete("/v1/conversations/c").json()["deleted"]
        assert not saved(tmp_path)
        assert say(running, "c", TURNS[0]) == expected[0]


NOTES: dict[str, Any] = {"tail": [5], "ended": True, "seen": 7, "evicted": 0.5}
WRONG_NOTES = [
    "[1]", "", "[" * 100_000, *(json.dumps({**NOTES, **change}) for change in (
        {"tail": 5}, {"tail": ["a"]}, {"ended": 1}, {"seen": "7"}, {"seen": 0}, {"evicted": None}, {"busy": True},
    )), json.dumps({"tail": [5]}),
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG_NOTES, ids=lambda text: text[:50])
def test_notes_that_are_damaged_name_their_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(json.dumps(NOTES))
    ConversationStore(None, tmp_path, Limits())._unlock()  # type: ignore[arg-type]
    (tmp_path / "1.json").write_text(text)
    with pytest.raises(kvpass.KVPassError, match=rf"in {tmp_path}: 1\.json: "):
        ConversationStore(None, tmp_path, Limits())  # type: ignore[arg-type]


def test_caches_that_were_exchanged_are_refused(tmp_path: Path, expected: list[str]) -> None:
    """Check that a conversation does not go on with the cache of another one."""
    with serving(warm=False, folder=tmp_path) as running:
        for name, turn in (("c", TURNS[0]), ("d", TURNS[2])):
            say(running, name, turn)
    one, other = sorted(tmp_path.glob("*.safetensors"))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with serving(warm=False, folder=tmp_path) as running:
        for name in ("c", "d"):
            found = running.post("/v1/completions", prompt=TURNS[1], conversation=name)
            assert found.status_code == 409
            assert "tokens, and its notes say" in found.json()["error"]["message"]


def test_caches_without_notes_are_removed(tmp_path: Path, expected: list[str]) -> None:
    with serving(warm=False, folder=tmp_path) as running:
        say(running, "c", TURNS[0])
    kept = {path.name for path in tmp_path.iterdir()} | {"notes.txt", "other.5.safetensors"}
    key = "0" * 64
    for name in (f"{key}.5.safetensors", f"{key}.5.safetensors.17.unfinished", f"{key}.unfinished", *kept):
        (tmp_path / name).touch()
    with serving(warm=False, folder=tmp_path) as running:
        assert {path.name for path in tmp_path.iterdir()} == kept
        assert say(running, "c", TURNS[1]) == expected[1]


def never_returns(call: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function that ends the process in its call number `count`."""
    calls = itertools.count(1)

    def run(*given: Any, **more: Any) -> Any:
        if next(calls) == count:
            raise RuntimeError("the server was killed")
        return call(*given, **more)

    return run


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("owner", "name", "count", "turns"),
    [
        pytest.param(tensor_files, "finish", 1, 1, id="before the cache has its name"),
        pytest.param(Path, "write_text", 1, 1, id="between the cache and the notes"),
        pytest.param(tensor_files, "finish", 2, 1, id="before the notes have their name"),
        pytest.param(conversations, "_remove_caches", 1, 2, id="before the earlier cache is removed"),
    ],
)
def test_a_server_that_is_killed_while_it_writes(
    owner: Any, name: str, count: int, turns: int, tmp_path: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the conversation continues from a complete state, before the turn or after it."""
    with serving(warm=False, folder=tmp_path) as running:
        assert say(running, "c", TURNS[0]) == expected[0]
    with serving(warm=False, folder=tmp_path) as running:
        assert say(running, "c", TURNS[1]) == expected[1]
        monkeypatch.setattr(owner, name, never_returns(getattr(owner, name), count))
    monkeypatch.undo()
    with serving(warm=False, folder=tmp_path) as running:
        assert say(running, "c", TURNS[turns]) == expected[turns]
    assert len(saved(tmp_path)) == 2  # a cache and its notes


def test_a_full_disk_is_not_tried_for_every_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def refuse(cache: Any, notes: str, path: Path, notes_path: Path) -> None:
        tried.append(path)
        raise OSError("no space left on device")

    monkeypatch.setattr(conversations, "_write", refuse)
    monkeypatch.setattr(conversations, "MAX_FAILURES", 2)
    with serving(warm=False, folder=tmp_path, conversations=Limits(rows=1, nbytes=2**30, count=6)) as running:
        for name in ("a", "b", "c", "d"):
            tried.clear()
            say(running, name, TURNS[0])
        assert len(tried) == 2
        assert running.service.store.in_memory == 4


@pytest.mark.parametrize("error", [kvpass.CacheFileError, OSError])
def test_a_full_disk_costs_no_answer_and_no_other_conversation(
    error: type[Exception], tmp_path: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Check that conversations stay in memory if they cannot be written, and that the others are written."""
    write, full = conversations._write, ["a", "b"]

    def refuse(cache: Any, notes: str, path: Path, notes_path: Path) -> None:
        if any(path.name.startswith(conversations._key(name, "")) for name in full):
            raise error("no space left on device")
        write(cache, notes, path, notes_path)

    monkeypatch.setattr(conversations, "_write", refuse)
    with serving(warm=False, folder=tmp_path, conversations=Limits(rows=1, nbytes=2**30, count=6)) as running:
        for turn, said in zip(TURNS[:2], expected, strict=False):
            for name in ("a", "b"):
                assert say(running, name, turn) == said
        assert running.service.store.in_memory == 2
        assert "stays in memory: no space left on device" in caplog.text
        full.remove("b")
        assert say(running, "c", TURNS[0]) == expected[0]
        assert running.service.store.in_memory == 1  # only a, which cannot be written
        assert say(running, "a", TURNS[2]) == say(running, "b", TURNS[2]) == expected[2]
    with serving(warm=False, folder=tmp_path) as running:
        assert len(running.service.store) == 2
        assert say(running, "a", TURNS[0]) == expected[0]
        assert say(running, "b", TURNS[3]) == expected[3]
    with serving(warm=False, folder=tmp_path) as running:
        assert running.service.store.find("b", "").seen == sum(map(len, TURNS)) + ANSWER * len(TURNS) - 1


Then = Callable[[ConversationStore], Any]


@pytest.mark.parametrize(
    ("then", "left"),
    [(lambda store: store.delete("c", ""), 0), (lambda store: store.save(), 2), (lambda store: store.close(), 2)],
    ids=["delete", "save", "close"],
)
def test_a_request_that_is_cancelled_does_not_let_others_at_its_files(
    then: Then, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel a request while a thread writes its conversation; what comes next must wait for the thread."""
    writing, may_go_on, alone = threading.Event(), threading.Event(), threading.Lock()

    def write_slowly(cache: Any, notes: str, path: Path, notes_path: Path) -> None:
        assert alone.acquire(blocking=False)
        writing.set()
        assert may_go_on.wait(60)
        path.touch()
        notes_path.write_text(notes)
        alone.release()

    async def cancel() -> bool:
        store: Any = ConversationStore(None, tmp_path, Limits(rows=0))  # type: ignore[arg-type]

        async def turn() -> None:
            async with store.turn("c", "") as conversation:
                conversation.cache, conversation.seen = object(), 5

        task = asyncio.ensure_future(turn())
        await asyncio.to_thread(writing.wait, 60)
        task.cancel()
        await asyncio.wait([task])
        following = asyncio.ensure_future(then(store))
        await asyncio.sleep(0.1)
        waits = not following.done()
        may_go_on.set()
        await following
        await asyncio.sleep(0.1)
        return waits and task.cancelled()

    monkeypatch.setattr(conversations, "_write", write_slowly)
    assert asyncio.run(cancel())
    assert len(saved(tmp_path)) == left


def test_one_request_at_a_time_and_a_turn_whole_or_not_at_all(running: Running, expected: list[str]) -> None:
    """Check that a second request is refused, and that a turn without a connection to answer is dropped."""

    async def both() -> list[int]:
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:
            fields = {"prompt": TURNS[1], "conversation": "c", "max_tokens": 300, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=fields) as response:
                lines = response.aiter_lines()  # closes the connection when it is collected
                await anext(lines)
                other = await client.post("/v1/completions", json=fields)
                deleted = await client.delete("/v1/conversations/c")
            return [response.status_code, other.status_code, deleted.status_code]

    assert say(running, "c", TURNS[0]) == expected[0]
    with running.slowly():
        assert asyncio.run(both()) == [200, 409, 409]
    running.wait_until_idle()
    while running.service.store.find("c", "").busy:
        pass
    assert say(running, "c", TURNS[1]) == expected[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_closes_at_the_finish_reason_keeps_its_turn(running: Running, path: str) -> None:
    """Check a stop text, which the server finds while the loop still decodes, with slow steps."""
    name = f"early {path.rpartition('/')[2]}"
    prompt = {"prompt": TURNS[0]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    fields: dict[str, Any] = dict(**prompt, temperature=0, max_tokens=60, ignore_eos=True)
    choice = running.post(path, **fields).json()["choices"][0]
    whole = choice["text"] if "text" in choice else choice["message"]["content"]
    fields |= dict(stop=whole[20:23], conversation=name, stream=True)
    with running.slowly(), running.client() as client, client.stream("POST", path, json=fields) as response:
        lines = response.iter_lines()  # closes the connection when it is collected
        assert any('"finish_reason": "stop"' in line for line in lines)
    running.wait_until_idle()
    while running.service.store.find(name, "").busy:
        pass
    with running.client() as client:
        assert client.get(f"/v1/conversations/{name}").json()["tokens"] > 0
        assert client.delete(f"/v1/conversations/{name}").json()["deleted"]


def test_a_conversation_that_never_began_is_none(running: Running) -> None:
    before = len(running.service.store)
    found = running.post("/v1/completions", prompt=[1, 99999], conversation="bad")
    assert found.status_code == 400

    async def closed_before_it_ended() -> None:
        async with running.service.store.turn("bad", "") as talk:
            assert talk.busy

    asyncio.run(closed_before_it_ended())
    assert len(running.service.store) == before


def test_as_many_conversations_as_the_server_keeps(fresh_dynamo: None) -> None:
    with serving(warm=False, conversations=Limits(rows=2, nbytes=1, count=2)) as running:
        for name in ("a", "b"):
            say(running, name, TURNS[1])
        assert running.service.store.in_memory == 0  # no memory for any conversation
        found = running.post("/v1/completions", prompt=TURNS[1], conversation="c")
        assert (found.status_code, found.json()["error"]["code"]) == (429, "too_many_conversations")
        refused = running.post("/v1/completions", prompt=[99999], conversation="b")
        assert (refused.status_code, running.service.store.in_memory) == (400, 0)
        with running.client() as client:
            client.delete("/v1/conversations/a")
        say(running, "c", TURNS[1])
