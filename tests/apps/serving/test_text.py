"""Test the text of tokens that arrive one by one or together."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass.apps.serving.text import TextStream
from tests.apps.serving.small import tokenizer

TEXTS = ("def main():\n    return 'näïve café'\n", "日本語 \U0001f600 text 🇩🇪 end", "plain words, and more words")


def said(pieces: Sequence[Sequence[int]], stops: Sequence[str] = ()) -> tuple[str, TextStream, list[str]]:
    stream = TextStream(tokenizer(), stops)
    made = [stream.push(piece) for piece in pieces]
    return "".join([*made, stream.finish()]), stream, made


@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_pieces_add_up_to_the_text_however_tokens_come(text: str, sizes: list[int]) -> None:
    ids = tokenizer()(text)["input_ids"]
    cuts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = [ids[start : start + size] for start, size in zip(cuts, sizes, strict=True)] + [ids[sum(sizes) :]]
    whole, stream, made = said(pieces)
    assert whole == text
    assert stream.tokens == len(ids)
    assert not any("\ufffd" in piece for piece in made)


def test_a_character_that_is_never_finished_comes_at_the_end() -> None:
    ids = tokenizer()("a 日")["input_ids"]
    whole, _, made = said([[token] for token in ids[:-1]])
    assert whole.startswith("a")
    assert whole.endswith("\ufffd")
    assert "\ufffd" not in "".join(made)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "left"), [("main", "def "), ("():\n  ", "def main"), ("café", None), ("absent", None)]
)
def test_a_text_ends_before_a_stop_text(size: int, stop: str, left: str | None) -> None:
    text = TEXTS[0]
    ids = tokenizer()(text)["input_ids"]
    whole, stream, made = said([ids[i : i + size] for i in range(0, len(ids), size)], [stop, "never"])
    found = text.find(stop)
    assert whole == (text if found < 0 else text[:found])
    assert left is None or whole == left
    assert stream.stopped == (found >= 0)
    upto = text[: found + len(stop)] if found >= 0 else text
    assert stream.tokens <= len(ids)
    assert tokenizer().decode(ids[: stream.tokens]).startswith(upto.rstrip("\n"))
    assert "".join(made) in text[: found if found >= 0 else None] + "x"


@pytest.mark.parametrize("stop", ["d", "ord", " w"])
def test_a_stop_text_before_an_unfinished_character_is_found_at_the_end(stop: str) -> None:
    """Check text that the last token holds before the first bytes of a character; no bundled token is like that."""
    vocabulary = [b"a", b" word" + "\U0001f600".encode()[:2]]
    decode = SimpleNamespace(decode=lambda ids, **_: b"".join(vocabulary[i] for i in ids).decode(errors="replace"))
    for pieces in ([[0], [1]], [[0, 1]]):
        stream = TextStream(decode, [stop])
        assert "".join([*map(stream.push, pieces), stream.finish()]) == "a word".partition(stop)[0]
        assert stream.stopped


def test_special_tokens_have_no_text() -> None:
    ids = tokenizer()("word")["input_ids"]
    assert said([[0], ids, [0]])[0] == "word"


def test_a_token_without_text_does_not_begin_the_text_anew() -> None:
    """Check words after a special token: many tokenizers leave out the blank before the first word of a text."""
    vocabulary = ["", " one", " two"]
    decode = SimpleNamespace(decode=lambda ids, **_: "".join(vocabulary[i] for i in ids).removeprefix(" "))
    for pieces in ([[0], [1], [0], [0], [2], [1]], [[0, 1, 0], [0, 2, 1]]):
        stream = TextStream(decode)
        assert "".join([*map(stream.push, pieces), stream.finish()]) == "one two one"


@pytest.mark.parametrize(
    ("before", "text"), [([1, 2], " two one"), ([0, 2], " two one"), ([], "two one"), ([0], "two one")]
)
def test_a_text_that_continues_a_prompt_keeps_its_first_blank(before: list[int], text: str) -> None:
    vocabulary = ["", " one", " two"]
    decode = SimpleNamespace(decode=lambda ids, **_: "".join(vocabulary[i] for i in ids).removeprefix(" "))
    for pieces in ([[2], [1]], [[2, 1]], [[0, 2], [0, 1]]):
        stream = TextStream(decode, before=before)
        assert "".join([*map(stream.push, pieces), stream.finish()]) == text
        assert stream.tokens == sum(map(len, pieces))


@pytest.mark.parametrize("stop", ["", "never"])
def test_a_character_that_begins_in_the_prompt_is_not_lost(stop: str) -> None:
    ids = tokenizer()("a 日b")["input_ids"]
    cut = next(n for n in range(1, len(ids)) if tokenizer().decode(ids[:n]).endswith("\ufffd"))
    stream = TextStream(tokenizer(), [stop] if stop else [], ids[:cut])
    assert "".join([*map(stream.push, [[token] for token in ids[cut:]]), stream.finish()]).endswith("b")
    assert stream.tokens == len(ids) - cut
