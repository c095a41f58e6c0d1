"""Test conversations and requests after a prefilled prefix: they equal those that read it themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.errors import CacheHandleError, PolicyError, RequestError
from tests.models import build, prompt

HOW: dict[str, Any] = dict(policy="h2o", budget=12, inner="eager")


pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def model(shared_traces: None) -> Any:
    return build("Llama", layers=1)


@pytest.fixture(scope="module")
def loop(model: Any) -> kvpass.DecodeLoop:
    return kvpass.DecodeLoop(model, **HOW, prefill_chunk=8)


def ids_of(tokens: int, rows: int = 1) -> Tensor:
    return prompt(rows, tokens, ())[0]


def read(loop: kvpass.DecodeLoop, ids: Tensor, mask: Tensor | None = None, **pins: Any) -> Any:
    """Return the cache of a document that a loop's compiled model has read."""
    return kvpass.prefill(loop.compiled.call, ids, mask, chunk=8, **pins).past_key_values


def answer(loop: kvpass.DecodeLoop, prefix: Any, question: Tensor) -> Tensor:
    loop.branch(prefix)
    loop.prompt(question)
    return loop.generate(9)


def test_questions_behind_one_document(loop: kvpass.DecodeLoop) -> None:
    """Compare with a turn that contains the document, with its padding and pins."""
    ids, mask = prompt(2, 26, (5, 0))
    prefix = read(loop, ids, mask, pin=[(0, 2)])
    for tokens in (3, 1, 7):
        got = answer(loop, prefix, ids_of(tokens, 2))
        assert kvpass.inspect(loop).layers[0].pinned[:, 0].tolist() == [[5, 6], [0, 1]]
        whole = torch.nn.functional.pad(mask, (0, tokens), value=1)
        again = read(loop, ids, mask, pin=[(0, 2)])
        out = kvpass.prefill(loop.compiled.call, ids_of(tokens, 2), whole, chunk=8, cache=again)
        assert torch.equal(got[:, 0], out.logits[:, -1].argmax(-1))
        loop.branch(prefix)
        assert kvpass.inspect(loop).seen == 26
        loop.prompt(ids_of(tokens, 2))
        assert torch.equal(loop.generate(9), got)


def test_reset_forgets_the_prefix(loop: kvpass.DecodeLoop) -> None:
    loop.branch(read(loop, ids_of(21)))
    loop.reset()
    assert loop.cache is None
    loop.prompt(ids_of(5))
    assert kvpass.inspect(loop).seen == 5


def test_requests_behind_a_document_are_as_alone(model: Any, loop: kvpass.DecodeLoop, tmp_path: Path) -> None:
    """Mix requests with and without documents in one batch; one document is from a file, one has pins on top."""
    pytest.importorskip("safetensors")
    kvpass.save_cache(read(loop, ids_of(30)), tmp_path / "document")
    documents = [
        None,
        kvpass.load_cache(tmp_path / "document", model),
        read(loop, ids_of(21), pin=[(0, 5)], on_top=True),
    ]
    serving = kvpass.DecodeLoop(model, **HOW, prefill_chunk=8, rows=3, read_interval=4)
    asked = [(documents[i % 3], ids_of(tokens)) for i, tokens in enumerate((4, 6, 2, 17, 1, 9))]
    names = [serving.add(ids[0], max_new_tokens=9, prefix=prefix) for prefix, ids in asked]
    done = {output.request_id: output for output in serving if output.is_finished()}
    for name, (prefix, ids) in zip(names, asked, strict=True):
        if prefix is None:
            loop.reset()
            loop.prompt(ids)
            expected = loop.generate(9)
        else:
            expected = answer(loop, prefix, ids)
        assert done[name].generated_tokens == expected[0].tolist(), name
        assert done[name].prompt_ids == ids[0].tolist()


def test_an_output_of_the_model_is_a_prefix_too(model: Any, loop: kvpass.DecodeLoop) -> None:
    """Pass what `prefill` returns, which holds the cache, and a loop after a prompt, as `kvpass.inspect` takes both."""
    document, question = ids_of(21), ids_of(4)
    out = kvpass.prefill(loop.compiled.call, document, chunk=8)
    said = answer(loop, out.past_key_values, question)
    assert torch.equal(answer(loop, out, question), said)
    other = kvpass.DecodeLoop(model, **HOW, prefill_chunk=8)
    other.prompt(document)
    assert torch.equal(answer(loop, other, question), said)
    serving = kvpass.DecodeLoop(model, **HOW, prefill_chunk=8, rows=2)
    serving.add(question[0], max_new_tokens=9, prefix=out)
    (done,) = [output for output in serving if output.is_finished()]
    assert done.generated_tokens == said[0].tolist(), done.error
    after = kvpass.prefill(loop.compiled.call, question, chunk=8, cache=out)
    assert after.logits[:, -1].argmax(-1).tolist() == said[:, 0].tolist()


def test_a_refused_prefix_leaves_the_one_before(loop: kvpass.DecodeLoop) -> None:
    document, question = ids_of(21), ids_of(4)
    said = answer(loop, read(loop, document), question)
    loop.branch(read(loop, document))
    cache = read(loop, ids_of(9))
    stale = copy.copy(cache)
    stale.layers = [copy.copy(layer) for layer in cache.layers]
    kvpass.prefill(loop.compiled.call, ids_of(3), chunk=8, cache=cache)
    with pytest.raises(CacheHandleError, match="is out of date"):
        loop.branch(stale)
    loop.prompt(question)
    assert torch.equal(loop.generate(9), said)


@pytest.mark.parametrize("how", ["a branch", "a request", "a copy"])
def test_a_prefix_of_other_weights_is_refused(model: Any, loop: kvpass.DecodeLoop, how: str) -> None:
    """Check too that a model of equal weights may have made the prefix."""
    prefix, other = read(loop, ids_of(20)), copy.deepcopy(model)
    if how != "a copy":
        with torch.no_grad():
            other.model.layers[0].mlp.down_proj.weight.mul_(1.1)
    made = kvpass.DecodeLoop(other, **HOW, rows=2 if how == "a request" else None)
    if how == "a copy":
        made.branch(prefix)
        assert made.cache is not None
    else:
        with pytest.raises(CacheHandleError, match="this prefix was made by other weights than the loop's"):
            made.add([5, 6], prefix=prefix) if how == "a request" else made.branch(prefix)


def test_an_invalid_prefix_is_refused(model: Any, loop: kvpass.DecodeLoop) -> None:
    serving = kvpass.DecodeLoop(model, **HOW, rows=2)
    prefix = read(loop, ids_of(9))
    with pytest.raises(PolicyError, match="takes prefixes by `add`"):
        serving.branch(prefix)
    for wrong in (None, ()):
        with pytest.raises(CacheHandleError, match=r"a prefix must be a cache of kvpass|no kvpass cache in this tuple"):
            loop.branch(wrong)
    other = kvpass.DecodeLoop(model, "h2o", budget=13, inner="eager")
    with pytest.raises(CacheHandleError, match="give the loop the same settings"):
        other.branch(prefix)
    with pytest.raises(CacheHandleError, match="give the loop the same settings"):
        kvpass.DecodeLoop(model, "h2o", budget=13, inner="eager", rows=2).add([5], prefix=prefix)
    with pytest.raises(RequestError, match="this one has 2 rows and 3 tokens of padding"):
        serving.add([5], prefix=read(loop, *prompt(2, 9, (3, 0))))
    loop.branch(prefix)
    with pytest.raises(CacheHandleError, match="a prompt of 2 rows after a prefix of 1"):
        loop.prompt(ids_of(4, 2))
    name = serving.add([5], prefix=prefix)
    kvpass.prefill(loop.compiled.call, ids_of(3), chunk=8, cache=prefix)
    (output,) = [output for output in serving if output.request_id == name]
    assert output.error is not None
    assert "its prefix was continued from 9 to 12 tokens" in output.error


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"interval": 3}, marks=pytest.mark.slow),
        pytest.param({"policy": "streaming", "kv_dtype": "int4"}, marks=pytest.mark.slow),
        pytest.param({"policy": "sage", "refresh_interval": 3}, marks=pytest.mark.slow),
        pytest.param({"policy": "d2o"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_kept_request_goes_on_as_a_conversation(given: dict[str, Any], model: Any, tmp_path: Path) -> None:
    """Compare a kept request's turns with a loop of one conversation, in a busy batch; one is from a file."""
    pytest.importorskip("safetensors")
    how = {**HOW, **given, "prefill_chunk": 8}
    single, serving = kvpass.DecodeLoop(model, **how), kvpass.DecodeLoop(model, **how, rows=3, read_interval=4)
    cache, tail = None, list[int]()
    for tokens in (30, 5, 9):
        single.prompt(ids_of(tokens))
        expected = single.generate(7)[0].tolist()
        others = [serving.add(ids_of(length)[0], max_new_tokens=11) for length in (17, 3, 21)]
        name = serving.add([*tail, *ids_of(tokens)[0].tolist()], max_new_tokens=7, prefix=cache, keep=True)
        done = {output.request_id: output for output in serving if output.is_finished()}
        assert done[name].generated_tokens == expected
        assert all(done[other].cache is None for other in others)
        cache, tail = done[name].cache, expected[-1:]
        kept, here = kvpass.inspect(cache).layers[0], kvpass.inspect(single).layers[0]
        assert torch.equal(kept.positions, here.positions)
        assert done[name].cached_tokens == pytest.approx((kept.positions >= 0).sum().item() / kept.positions.shape[1])
        kvpass.save_cache(cache, tmp_path / "talk")
        cache = kvpass.load_cache(tmp_path / "talk", serving.compiled.call)


def test_a_request_that_is_cancelled_keeps_what_it_has_seen(model: Any) -> None:
    serving = kvpass.DecodeLoop(model, **HOW, rows=2, read_interval=4)
    name = serving.add(ids_of(9)[0], max_new_tokens=40, keep=True)
    for _ in range(3):
        made = serving.step()
    serving.cancel(name)
    (output,) = serving.step()
    assert output.finish_reason == "cancelled"
    assert output.generated_tokens == made[0].generated_tokens
    assert kvpass.inspect(output.cache).seen == 9 + len(output.generated_tokens) - 1
