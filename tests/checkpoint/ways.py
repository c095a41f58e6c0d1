"""Decode with the checkpoint in several ways; each function returns its answers to fixed conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvpass
from kvpass.decoding.prefill import chunk_lengths
from tests.checkpoint import conversations
from tests.checkpoint.subject import Answer, Subject

NEW = 12
"""Tokens of an answer. With 8, the logits of d2o's third turn differ from its reference by 0.02.

The reason is a tie: its chunk evicts tokens that are equally far from two equal tokens. In the first layer both have
the same cosine up to rounding (4e-9 and 4e-8 in float64), and the choice of merge target changes later results.
"""
GREEDY: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
MEDIUM, LONG = 160, 1500
CHUNK = 48

Way = Callable[[Subject, dict[str, Any]], list[Answer]]


def generate(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Call `generate` after `kvpass.compile`, with a prompt of 20 tokens and one of 160."""
    model = subject.under(**settings)
    return [answer_of(model, ids) for ids in (short(subject), medium(subject))]


def generate_long(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Call `generate` with a prompt of 1,500 tokens."""
    return [answer_of(subject.under(**settings), conversations.of_length(subject.tokenizer, LONG))]


def turns(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Decode three turns of a chat, each with the cache of the previous turn."""
    model, tokenizer = subject.under(**settings), subject.tokenizer
    ids = torch.tensor([conversations.chat(tokenizer, conversations.QUESTIONS[0])])
    out = _generated(model, ids)
    said = [_answer(ids, out)]
    for question in conversations.QUESTIONS[1:]:
        fed = said[-1].fed
        ids = torch.cat([out.sequences, conversations.next_turn(tokenizer, question)], 1)
        out = _generated(model, ids, past_key_values=out.past_key_values)
        said.append(_answer(ids, out, pieces=(*fed, ids.shape[1] - sum(fed))))
    return said


def padded(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Decode three questions of different lengths, padded on the left."""
    ids, mask = conversations.padded(subject.tokenizer, "Hi", conversations.SHORT, " ".join(conversations.QUESTIONS))
    out = _generated(subject.under(**settings), ids, mask)
    return [_answer(ids, out, mask=mask)]


def beams(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Search with two beams."""
    return [beam_search(subject.under(**settings), medium(subject))]


def bare_loop(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Call the compiled model token by token."""
    model, ids = subject.under(**settings), medium(subject)
    return [_continued(model, ids, model(ids, use_cache=True, logits_to_keep=1))]


def chunked(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Prefill a prompt in chunks, and then decode token by token."""
    model, ids = subject.under(**settings), medium(subject)
    pieces = tuple(chunk_lengths(MEDIUM, CHUNK, True))
    return [_continued(model, ids, kvpass.prefill(model, ids, chunk=CHUNK), pieces=pieces)]


def decode_loop(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Decode with `DecodeLoop`, with a further prompt."""
    loop = kvpass.DecodeLoop(subject.plain, **settings, read_interval=4)
    ids, more = medium(subject), torch.tensor([conversations.chat(subject.tokenizer, conversations.SHORT)])
    loop.prompt(ids)
    first = Answer(ids, loop.generate(NEW))
    loop.prompt(more)
    context = torch.cat([ids, first.tokens, more], 1)
    return [first, Answer(context, loop.generate(NEW), pieces=(*first.fed, 1 + more.shape[1]))]


def requests(subject: Subject, settings: dict[str, Any]) -> list[Answer]:
    """Decode three requests in two rows."""
    loop = kvpass.DecodeLoop(subject.plain, **settings, rows=2, read_interval=4)
    prompts = [short(subject), medium(subject), conversations.of_length(subject.tokenizer, 90)]
    done = loop.generate_batch(prompts, max_new_tokens=NEW).values()
    assert [output.error for output in done] == [None] * len(prompts)
    made = [torch.tensor([output.generated_tokens]) for output in done]
    return [Answer(ids, tokens) for ids, tokens in zip(prompts, made, strict=True)]


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (generate, turns, padded, beams, bare_loop, chunked, decode_loop, requests, generate_long)
}


def answer_of(model: Any, ids: Tensor) -> Answer:
    """Return the greedy answer of `generate`."""
    return _answer(ids, _generated(model, ids))


def beam_search(model: Any, ids: Tensor) -> Answer:
    """Return the answer of `generate` with two beams, without logits, because they cover all beams."""
    out = _generated(model, ids, num_beams=2, output_scores=True)
    return Answer(ids, out.sequences[:, ids.shape[1] :], score=float(out.sequences_scores))


def short(subject: Subject) -> Tensor:
    """Return a prompt, int64 [1, 20]."""
    return torch.tensor([conversations.chat(subject.tokenizer, "Hi there, you")])


def medium(subject: Subject) -> Tensor:
    """Return a prompt, int64 [1, 160]."""
    return conversations.of_length(subject.tokenizer, MEDIUM)


def _generated(model: Any, ids: Tensor, mask: Tensor | None = None, **how: Any) -> Any:
    """Return the output of `generate`.

    The mask is always passed: otherwise `generate` derives one from the padding token, which also ends messages.
    """
    return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **GREEDY, **how)


def _answer(context: Tensor, out: Any, **more: Any) -> Answer:
    return Answer(context, out.sequences[:, context.shape[1] :], torch.stack(out.logits, 1).float(), **more)


def _continued(model: Any, context: Tensor, out: Any, **more: Any) -> Answer:
    """Decode greedily after a prompt, with one call for each token."""
    logits = [out.logits[:, -1]]
    for _ in range(NEW - 1):
        out = model(logits[-1].argmax(-1, keepdim=True), past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, -1])
    made = torch.stack(logits, 1).float()
    return Answer(context, made.argmax(-1), made, **more)
