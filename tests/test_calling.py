"""Test ways to call models against the uncompiled model, the same run alone, or the reference.

Tests of this file share graphs: code compiled for one way of calling serves all of them.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pathlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor

import kvpass
from kvpass.cache.handle import Handle
from kvpass.runtime.calling.compiled_call import CompiledCall
from tests import on_reference
from tests.models import Run, breaks, build, many_graphs, prompt

MODELS = pathlib.Path(__file__).parent.parent / "kvpass" / "apps" / "data"
ARCHITECTURES = ["Llama", "GPTNeoX"]
POLICIES = ["full", "streaming", "h2o"]
BUDGET, ROOM = 8, 64
PIECES = [9, *[1] * 8]

QUICK = [("Llama", "h2o"), ("GPTNeoX", "streaming")]


def over_cases(quick: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrize by architecture and policy; all cases except `quick` are slow."""
    every = itertools.product(ARCHITECTURES, POLICIES)
    marked = [pytest.param(*case, marks=[] if case in quick else pytest.mark.slow) for case in every]
    return pytest.mark.parametrize(("architecture", "policy"), marked)


cases, costly = over_cases(QUICK), over_cases(QUICK[:1])


pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module", autouse=True)
def served_again(shared_traces: None) -> Iterator[None]:
    yield
    served.cache_clear()


class Trouble(Exception):
    """A failure in the middle of a step."""


trouble: list[int] = []
"""If not empty, the next rewritten graph raises after its run."""


def fallible(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Run a graph uncompiled, and raise on demand."""

    def run(*arguments: Any) -> Any:
        result = gm.forward(*arguments)
        if trouble:
            trouble.pop()
            raise Trouble
        return result

    return run


def settings(policy: str, budget: int = BUDGET, inner: Any = fallible) -> dict[str, Any]:
    return {"policy": policy, "budget": None if policy == "full" else budget, "inner": inner}


@functools.cache
def served(architecture: str, policy: str, budget: int = BUDGET, inner: Any = fallible) -> Any:
    """Return a model compiled in place, without an end-of-sequence token."""
    return on_reference.compile(plain(architecture), **settings(policy, budget, inner))


def plain(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the uncompiled model with one layer, because tracing takes most of the time here."""
    model = build(architecture, dtype, layers=1)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def feed(
    call: Any,
    ids: Tensor,
    mask: Tensor | None = None,
    pieces: Sequence[int] = PIECES,
    cache: Any = None,
    first: int | Tensor = 0,
) -> Run:
    """Feed `ids` to a model in pieces; the mask also covers tokens that the cache has seen before.

    `first` is the position id of the first real token, of all rows or [B, 1].
    """
    mask = torch.ones_like(ids) if mask is None else mask
    position = (mask.cumsum(-1) - 1).clamp(min=0) + first
    past = mask.shape[1] - ids.shape[1]
    logits, held, done = [], [], 0
    for count in pieces:
        now = slice(done, done + count)
        done += count
        out = call(
            input_ids=ids[:, now].contiguous(),
            attention_mask=mask[:, : past + done].contiguous(),
            position_ids=position[:, past:][:, now].contiguous(),
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        logits.append(out.logits)
        if isinstance(cache.layers[0].keys, Handle):
            held.append([layer.positions for layer in kvpass.inspect(cache).layers])
    return Run(torch.cat(logits, 1), held, cache)


@torch.no_grad()
def uncompiled(architecture: str, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits of the uncompiled model in one call."""
    mask = torch.ones_like(ids) if mask is None else mask
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    return plain(architecture)(ids, attention_mask=mask, position_ids=position).logits


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    return torch.allclose(a, b, atol=tolerance, rtol=tolerance)


def bounded(cache: Any, policy: str) -> bool:
    """True if the cache is on slots, within the budget."""
    layers = kvpass.inspect(cache).layers
    return len(layers) == 1 and all(policy == "full" or layer.capacity <= BUDGET + 1 for layer in layers)


FIRST_IDS = {"one, as in PaliGemma": 1, "far": 40, "a number for each row": torch.tensor([[3], [0]])}


@pytest.mark.few(1)
@cases
@pytest.mark.parametrize("begin", FIRST_IDS)
def test_position_ids_may_begin_at_any_number(architecture: str, policy: str, begin: str) -> None:
    """Check that rotary embeddings, which see distances, give the logits and slots of ids from 0."""
    model, (ids, mask) = served(architecture, policy), prompt(2, sum(PIECES), (2, 0))
    from_zero, moved = (feed(model, ids, mask, first=first) for first in (0, FIRST_IDS[begin]))
    assert bounded(moved.cache, policy)
    assert close(moved.logits[mask.bool()], from_zero.logits[mask.bool()])
    assert all(torch.equal(a, b) for a, b in zip(moved.positions[-1], from_zero.positions[-1], strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("begin", FIRST_IDS)
def test_position_ids_must_continue_from_their_first_number(architecture: str, begin: str) -> None:
    """Check `streaming`, which numbers cached tokens by their rank."""
    model, (ids, mask) = served(architecture, "streaming"), prompt(2, 10, (2, 0))
    cache = feed(model, ids[:, :9], mask[:, :9], [9], first=FIRST_IDS[begin]).cache
    with pytest.raises(kvpass.UnsupportedGraph, match="do not increase by one over the real tokens"):
        feed(model, ids[:, 9:], mask, [1], cache)


# -- batches -----------------------------------------------------------------------------------------------

STEPS = 10
BATCHES = {
    "even": (9, 9, 9),
    "ragged": (6, 9, 8),
    "further apart than the budget": (3, 14, 20),
    "shorter than the sinks": (2, 3, 9),
    "one token": (1, 5, 9),
    "of one token each": (1, 1, 1),
}


def ragged(lengths: Sequence[int], side: str, silent: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Return padded ids and mask of prompts with these lengths, and of steps; `silent` rows have no steps."""
    width = max(lengths)
    ids, _ = prompt(len(lengths), width + STEPS, ())
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        pad = width - length
        mask[row, slice(0, pad) if side == "left" else slice(length, width)] = 0
        if row in silent:
            mask[row] = 0
    return ids, mask


def assert_rows_are_as_alone(architecture: str, policy: str, lengths: Sequence[int], side: str, **how: Any) -> None:
    """Compare the logits and cached tokens of every row that is not silent with the same row alone."""
    ids, mask = ragged(lengths, side, **how)
    width = max(lengths)
    model = served(architecture, policy)
    together = feed(model, ids, mask, [width, *[1] * STEPS])
    assert bounded(together.cache, policy)
    for row, length in enumerate(lengths):
        real = mask[row].bool()
        if not real.any():
            continue
        own = ids[row : row + 1, real]
        if policy == "full":
            assert close(together.logits[row, real], uncompiled(architecture, own)[0])
        alone = feed(model, own, None, [length, *[1] * STEPS])
        assert close(together.logits[row, real], alone.logits[0])
        place = mask[row].cumsum(-1) - 1
        for layer, (a, b) in enumerate(zip(together.positions[-1], alone.positions[-1], strict=True)):
            held = [place[index[index >= 0]].tolist() for index in a[row]]
            assert held == [index[index >= 0].tolist() for index in b[0]], f"row {row}, layer {layer}"


@pytest.mark.few(1)
@cases
@pytest.mark.parametrize("batch", BATCHES)
def test_left_padding(architecture: str, policy: str, batch: str) -> None:
    assert_rows_are_as_alone(architecture, policy, BATCHES[batch], "left")


@pytest.mark.few(1)
@cases
@pytest.mark.parametrize("batch", ["ragged", "further apart than the budget", "one token"])
def test_right_padding(architecture: str, policy: str, batch: str) -> None:
    assert_rows_are_as_alone(architecture, policy, BATCHES[batch], "right")


@pytest.mark.few(1)
@cases
def test_an_empty_row_touches_no_other(architecture: str, policy: str) -> None:
    assert_rows_are_as_alone(architecture, policy, (6, 5, 9), "left", silent=[1])


# -- pieces and conversations ------------------------------------------------------------------------------


@pytest.mark.few(1)
@cases
def test_a_prompt_in_pieces(architecture: str, policy: str) -> None:
    ids, mask = prompt(3, 20, (3, 1, 0))
    expected = uncompiled(architecture, ids, mask)
    for pieces in ([20], [10, 5, 5], [5] * 4):
        run = feed(served(architecture, policy, ROOM), ids, mask, pieces)
        assert close(run.logits[mask.bool()], expected[mask.bool()])


@pytest.mark.few(1)
@cases
def test_several_turns(architecture: str, policy: str) -> None:
    ids, mask = prompt(3, 30, (3, 1, 0))
    pieces = [10, 1, 1, 1, 5, 1, 1, 5, 5]
    mask[1, 15] = 0  # this row's second turn is shorter too
    run = feed(served(architecture, policy), ids, mask, pieces)
    literal = feed(served(architecture, policy, BUDGET, "reference"), ids, mask, pieces)
    assert close(run.logits[mask.bool()], literal.logits[mask.bool()])
    for ours, theirs in zip(run.positions, literal.positions, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    roomy = feed(served(architecture, policy, ROOM), ids, mask, pieces)
    assert close(roomy.logits[mask.bool()], uncompiled(architecture, ids, mask)[mask.bool()])


def conversations() -> list[Tensor]:
    return [prompt(3, 17 + i, ())[0][:, :17] for i in range(2)]


@pytest.mark.few(1)
@cases
def test_interleaved_conversations(architecture: str, policy: str) -> None:
    model = served(architecture, policy)
    alone = [feed(model, ids).logits for ids in conversations()]
    caches: list[Any] = [None, None]
    done = 0
    for count in PIECES:
        for i, ids in enumerate(conversations()):
            mask = torch.ones(3, done + count, dtype=torch.int64)
            run = feed(model, ids[:, done : done + count], mask, [count], caches[i])
            caches[i] = run.cache
            assert close(run.logits, alone[i][:, done : done + count], 1e-5)
        done += count


def at_once(model: Any) -> list[Any]:
    """Return the logits of conversations in separate threads, or the exceptions."""
    results: dict[int, Any] = {}
    start = threading.Barrier(2)

    def talk(i: int, ids: Tensor) -> None:
        start.wait()
        try:
            with many_graphs():
                results[i] = [feed(model, ids).logits for _ in range(2)][-1]
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=talk, args=(i, ids)) for i, ids in enumerate(conversations())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(2)]


@pytest.mark.few(1)
@cases
def test_two_threads(architecture: str, policy: str) -> None:
    model = served(architecture, policy)
    expected = [feed(model, ids).logits for ids in conversations()]
    for ours, alone in zip(at_once(model), expected, strict=True):
        assert close(ours, alone, 1e-5)


@pytest.mark.slow
@costly
def test_two_threads_from_cold(architecture: str, policy: str) -> None:
    model = kvpass.compile(plain(architecture), **settings(policy), strict=False)  # with its own backend
    expected = [feed(served(architecture, policy), ids).logits for ids in conversations()]
    for ours, alone in zip(at_once(model), expected, strict=True):
        assert close(ours, alone, 1e-5)
    for ids, alone in zip(conversations(), expected, strict=True):
        assert close(feed(model, ids).logits, alone, 1e-5)
    for ours, alone in zip(at_once(model), expected, strict=True):
        assert close(ours, alone, 1e-5)


# -- generate ----------------------------------------------------------------------------------------------


def generate(model: Any, rows: int = 3, tokens: int = 9, **how: Any) -> Any:
    """Return the full output of `generate`."""
    ids, mask = prompt(rows, tokens, (3, 1, 0) if rows > 1 else ())
    torch.manual_seed(1)
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **how}
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **how)


def replayed(model: Any, sequences: Tensor, repeats: int = 1) -> Tensor:
    """Return logits for the generated tokens of sequences, fed one at a time."""
    _, mask = prompt(3, 9, (3, 1, 0))
    grown = torch.nn.functional.pad(mask.repeat_interleave(repeats, 0), (0, sequences.shape[1] - 9), value=1)
    return feed(model, sequences, grown, [9, *[1] * (sequences.shape[1] - 9)]).logits[:, 8:-1]


@costly
def test_greedy(architecture: str, policy: str) -> None:
    out = generate(served(architecture, policy), output_logits=True)
    assert bounded(out.past_key_values, policy)
    assert close(torch.stack(out.logits, 1), replayed(served(architecture, policy), out.sequences))
    expected = generate(plain(architecture)).sequences
    assert torch.equal(generate(served(architecture, policy, ROOM)).sequences, expected)


@costly
def test_beam_search(architecture: str, policy: str) -> None:
    """Compare the score of a beam with its tokens fed alone, so that its slots followed every reordering."""
    out = generate(served(architecture, policy), num_beams=3, length_penalty=0.0, output_scores=True)
    assert bounded(out.past_key_values, policy)
    logits = replayed(served(architecture, policy), out.sequences).log_softmax(-1)
    scores = logits.gather(-1, out.sequences[:, 9:, None]).sum((1, 2))
    assert close(out.sequences_scores, scores, 1e-3)
    if policy == "full":
        assert torch.equal(out.sequences, generate(plain(architecture), num_beams=3, length_penalty=0.0).sequences)


@costly
def test_sampled_sequences_of_one_prompt(architecture: str, policy: str) -> None:
    out = generate(served(architecture, policy), num_return_sequences=2, do_sample=True, top_k=0, output_logits=True)
    assert len(set(map(tuple, out.sequences.tolist()))) == 6
    assert close(torch.stack(out.logits, 1), replayed(served(architecture, policy), out.sequences, 2))


@costly
def test_assisted_decoding_is_refused_when_it_takes_tokens_back(architecture: str, policy: str) -> None:
    with pytest.raises(kvpass.CacheHandleError, match="to be cropped, and 0 can be: pass crop="):
        generate(served(architecture, policy), rows=1, assistant_model=plain(another(architecture)))
    with pytest.raises(kvpass.CacheHandleError, match="to be cropped, and 0 can be: pass crop="):
        generate(plain(another(architecture)), rows=1, assistant_model=served(architecture, policy))


def another(architecture: str) -> str:
    return next(other for other in ARCHITECTURES if other != architecture)


@costly
def test_prompt_lookup_is_refused_when_it_takes_tokens_back(architecture: str, policy: str) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    with pytest.raises(kvpass.CacheHandleError, match="to be cropped, and 0 can be: pass crop="):
        served(architecture, policy).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3
        )


@costly
def test_candidates_side_by_side(architecture: str, policy: str) -> None:
    """Do what contrastive search does: repeat rows for candidates, take a step, and keep one candidate."""
    model = served(architecture, policy)
    ids, mask = prompt(3, 18, ())
    first = feed(model, ids[:, :12], mask[:, :12], [9, 1, 1, 1])
    first.cache.batch_repeat_interleave(2)
    candidates = torch.stack([(ids[:, 12] + 1) % 128, ids[:, 12]], 1).flatten()[:, None]
    tried = feed(model, candidates, mask[:, :13].repeat_interleave(2, 0), [1], first.cache)
    tried.cache.batch_select_indices(torch.tensor([1, 3, 5]))
    rest = feed(model, ids[:, 13:], mask, [1] * 5, tried.cache)
    expected = feed(model, ids, mask, [9, *[1] * 9]).logits
    assert close(tried.logits[1::2, 0], expected[:, 12], 1e-5)
    assert close(rest.logits, expected[:, 13:], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
@pytest.mark.parametrize("policy", ["h2o", *POLICIES[:2]])
def test_pipeline(name: str, policy: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / name)
    texts = ["Once upon a time there was a little dog", "One day"]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"

    def written(budget: int | None) -> list[str]:
        model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
        if budget:
            kvpass.compile(model, **settings(policy, budget))
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        together = pipe(texts, batch_size=2, max_new_tokens=12, do_sample=False)
        return [answer[0]["generated_text"] for answer in together]

    assert written(ROOM) == written(None)
    short = written(BUDGET)
    assert all(answer.startswith(text) for text, answer in zip(texts, short, strict=True))


# -- ways to compile ---------------------------------------------------------------------------------------


@costly
def test_compile_config_leaves_growing_caches_alone(architecture: str, policy: str) -> None:
    """Check that the usual cache runs uncompiled: with it, `generate` compiles only fixed caches."""
    model = plain(architecture)
    expected = generate(model).sequences
    config = transformers.CompileConfig(backend=kvpass.backend(**settings(policy)))
    config._compile_all_devices = True
    out = generate(model, compile_config=config)
    assert torch.equal(out.sequences, expected)
    assert not isinstance(out.past_key_values.layers[0].keys, Handle)


@costly
def test_compile_config_with_a_static_cache_is_refused(architecture: str, policy: str) -> None:
    model = plain(architecture)
    config = transformers.CompileConfig(backend=kvpass.backend(**settings(policy)))
    config._compile_all_devices = True
    with pytest.raises(kvpass.UnsupportedGraph, match="cannot be rewritten"):
        generate(model, compile_config=config, cache_implementation="static")


@pytest.mark.few(1)
@costly
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("object", marks=pytest.mark.slow),
        "name",
        "forward",
        pytest.param("wrapped", marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_compile(architecture: str, policy: str, way: str) -> None:
    model, how = plain(architecture), settings(policy, inner="eager")
    if way == "object":
        call = model.get_compiled_call(transformers.CompileConfig(backend=kvpass.backend(**how)))
    elif way == "name":
        call = model.get_compiled_call(transformers.CompileConfig(backend="kvpass", mode=None, options=how))
    elif way == "forward":
        call = torch.compile(model.forward, backend=kvpass.backend(**how))
    else:
        call = torch.compile(model, backend=kvpass.backend(**how))
    ids, mask = prompt(3, 17, (3, 1, 0))
    run, expected = feed(call, ids, mask), feed(served(architecture, policy), ids, mask)
    assert bounded(run.cache, policy)
    assert close(run.logits[mask.bool()], expected.logits[mask.bool()], 1e-5)


@costly
def test_generate_on_a_compiled_forward(architecture: str, policy: str) -> None:
    model = plain(architecture)
    model.forward = torch.compile(model.forward, backend=kvpass.backend(**settings(policy)))
    out = generate(model)
    assert bounded(out.past_key_values, policy)
    assert torch.equal(out.sequences, generate(served(architecture, policy)).sequences)


# -- numbers and modes -------------------------------------------------------------------------------------


@pytest.mark.few(1)
@costly
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16, torch.float16])
def test_dtypes(architecture: str, policy: str, dtype: torch.dtype) -> None:
    model = plain(architecture, dtype)
    ids, mask = prompt(3, 17, (3, 1, 0))
    expected = feed(model, ids, mask).logits
    run = feed(kvpass.compile(model, **settings(policy, ROOM)), ids, mask)
    assert run.logits.dtype == run.cache.layers[0].keys.dtype == dtype
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    assert close(run.logits[mask.bool()], expected[mask.bool()], tolerance)


@pytest.mark.slow
@costly
def test_inference_mode_and_no_grad_may_change(architecture: str, policy: str) -> None:
    model = served(architecture, policy)
    ids, mask = prompt(3, 17, (3, 1, 0))
    expected = feed(model, ids, mask).logits
    for first, second in ((True, True), (True, False), (False, True)):
        with torch.inference_mode(first):
            begun = feed(model, ids[:, :12], mask[:, :12], [9, 1, 1, 1])
        with torch.inference_mode(second):
            rest = feed(model, ids[:, 12:], mask, [1] * 5, begun.cache)
        logits = torch.cat([begun.logits, rest.logits], 1)
        assert close(logits[mask.bool()], expected[mask.bool()], 1e-5)


@costly
def test_gradients_are_refused(architecture: str, policy: str) -> None:
    ids, _ = prompt(3, 9, ())
    with pytest.raises(kvpass.UnsupportedGraph, match="gradients"):
        served(architecture, policy)(ids, use_cache=True)


@costly
@pytest.mark.parametrize("change", ["rows", "dtype"])
def test_a_call_that_does_not_fit_its_cache_is_refused(architecture: str, policy: str, change: str) -> None:
    """Refuse other rows than the cache's, and weights of another dtype; the conversation goes on without them."""
    model = on_reference.compile(plain(architecture), **settings(policy))
    ids, _ = prompt(3, 17, ())
    begun, rows = feed(model, ids[:, :10], None, [9, 1]), slice(1) if change == "rows" else slice(None)
    if change == "dtype":
        model.to(torch.bfloat16)
    unfit = r"its cache, which has 3 row\(s\) in torch.float32: .*\. (.*Error\('|The call has 1 row)"
    with pytest.raises(kvpass.CacheHandleError, match=unfit):
        feed(model, ids[rows, 10:], torch.ones_like(ids)[rows], [1], begun.cache)
    model.to(torch.float32)
    rest = feed(model, ids[:, 10:], torch.ones_like(ids), [1] * 7, begun.cache)
    rounding = 1e-5 if change == "rows" else 1e-2
    assert close(rest.logits, feed(served(architecture, policy), ids).logits[:, 10:], rounding)


@costly
@torch.no_grad()
def test_a_mask_with_other_rows_than_the_cache_is_refused(architecture: str, policy: str) -> None:
    model, (ids, _) = served(architecture, policy), prompt(3, 11, ())
    cache, mask = feed(model, ids[:, :10], None, [9, 1]).cache, torch.ones(2, 11, dtype=torch.int64)
    with pytest.raises(kvpass.CacheHandleError, match="the attention mask has 2 rows, and the cache has 3"):
        model(ids[:, 10:], attention_mask=mask, past_key_values=cache)


# -- operations on caches ----------------------------------------------------------------------------------


@costly
def test_a_copied_and_moved_cache_goes_on(architecture: str, policy: str) -> None:
    model = served(architecture, policy)
    ids, mask = prompt(3, 17, (3, 1, 0))
    begun = feed(model, ids[:, :12], mask[:, :12], [9, 1, 1, 1])
    twin = copy.deepcopy(begun.cache)
    for layer in begun.cache.layers:
        layer.keys, layer.values = layer.keys.to("cpu"), layer.values.cpu()
        layer.offload()
    expected = feed(model, ids, mask).logits[:, 12:]
    for cache in (begun.cache, twin):
        assert close(feed(model, ids[:, 12:], mask, [1] * 5, cache).logits, expected, 1e-5)


@pytest.mark.few(1)
@cases
def test_memory_of_a_deleted_cache_goes_away(architecture: str, policy: str) -> None:
    ids, _ = prompt(3, 17, ())
    run = feed(served(architecture, policy), ids)
    slots = [layer.keys.cache.slots for layer in run.cache.layers]
    alive = [weakref.ref(tensor) for layer in slots for tensor in layer.tensors()]
    del slots, run
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


@pytest.mark.few(2)
@cases
@pytest.mark.parametrize("pieces", [[1], [5]], ids=["token", "chunk"])
def test_an_exception_in_the_middle_of_a_step(architecture: str, policy: str, pieces: list[int]) -> None:
    model = served(architecture, policy)
    ids, mask = prompt(3, 17, ())
    for _ in range(2):  # a chunk is compiled at the second occurrence of its length
        feed(model, ids[:, : 12 + sum(pieces)], mask[:, : 12 + sum(pieces)], [9, 1, 1, 1, *pieces])
    begun, other = (feed(model, ids[:, :12], mask[:, :12], [9, 1, 1, 1]) for _ in range(2))
    trouble.append(1)
    with pytest.raises(Trouble):
        feed(model, ids[:, 12:], mask, pieces, begun.cache)
    with pytest.raises(kvpass.CacheHandleError, match="interrupted"):
        feed(model, ids[:, 12:], mask, pieces, begun.cache)
    expected = feed(model, ids, mask).logits  # a new prompt
    if policy == "full":
        assert close(expected, uncompiled(architecture, ids))
    assert close(feed(model, ids[:, 12:], mask, [1] * 5, other.cache).logits, expected[:, 12:], 1e-5)


@costly
def test_an_exception_in_a_prompt(architecture: str, policy: str) -> None:
    model = served(architecture, policy)
    ids, _ = prompt(3, 17, ())
    cache = transformers.DynamicCache(config=model.config)
    trouble.append(1)
    with pytest.raises(Trouble):
        feed(model, ids, cache=cache)
    assert close(feed(model, ids, cache=cache).logits, feed(model, ids).logits, 1e-5)


@pytest.mark.skipif(
    "reset" not in vars(transformers.cache_utils.DynamicLayer),
    reason="this version of transformers writes zeros to a cache, which is refused, and keeps its length",
)
@costly
def test_a_cache_that_was_reset_takes_a_new_prompt(architecture: str, policy: str) -> None:
    model = served(architecture, policy)
    first, second = conversations()
    cache = feed(model, first).cache
    cache.reset()
    assert close(feed(model, second, cache=cache).logits, feed(model, second).logits, 1e-5)


# -- with Inductor -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "policy"), [("Llama", "h2o"), ("GPTNeoX", "streaming")])
def test_inductor_in_two_threads(architecture: str, policy: str) -> None:
    model = kvpass.compile(plain(architecture), **settings(policy, inner="inductor"))
    expected = [feed(served(architecture, policy), ids).logits for ids in conversations()]
    for ids in conversations():  # compiled in one thread, because two would disturb each other
        thread = threading.Thread(target=feed, args=(model, ids))
        thread.start()
        thread.join()
    for ours, alone in zip(at_once(model), expected, strict=True):
        assert close(ours, alone)


@pytest.mark.slow
@cases
def test_inductor_on_padded_rows(architecture: str, policy: str) -> None:
    ids, mask = ragged(BATCHES["further apart than the budget"], "left")
    pieces = [20, *[1] * STEPS]
    ours = feed(served(architecture, policy, BUDGET, "inductor"), ids, mask, pieces)
    theirs = feed(served(architecture, policy), ids, mask, pieces)
    assert close(ours.logits[mask.bool()], theirs.logits[mask.bool()])


def test_nothing_breaks_graphs() -> None:
    assert breaks() == 0


def test_beyond_the_recompile_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that torch warns before it stops compiling, and that no slots are continued wrongly.

    With strict=True, the default, there is an error instead (`tests/runtime/calling/test_entries.py`).
    """
    torch._dynamo.reset()
    monkeypatch.setattr("kvpass.torch_private.dynamo.MAX_GRAPHS", {"recompile_limit": 1})
    ids, mask = prompt(3, 10, ())
    model = torch.compile(plain("Llama"), backend=kvpass.backend(**settings("h2o"), strict=False))
    with torch._dynamo.config.patch(recompile_limit=1):
        with pytest.warns(kvpass.KVPassWarning, match="last graph .*recompile_limit"):
            begun = feed(model, ids[:, :9], mask[:, :9], [9])
        assert bounded(begun.cache, "h2o")
        with pytest.raises(kvpass.CacheHandleError, match="cat on a cache of kvpass: its 9 tokens"):
            feed(model, ids[:, 9:], mask, [1], begun.cache)
        assert not isinstance(feed(model, ids, mask, [10]).cache.layers[0].keys, Handle)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [8, 1])
def test_a_model_compiled_by_kvpass_has_room_for_more_graphs(limit: int) -> None:
    torch._dynamo.reset()
    model = kvpass.compile(plain("Llama"), **settings("h2o"))
    with torch._dynamo.config.patch(recompile_limit=limit):
        for count in range(1, limit + 3):
            ids, mask = prompt(1 + count % 2, 9 + count, ())
            assert bounded(feed(model, ids, mask, [9, count]).cache, "h2o")


def test_a_model_beyond_the_recompile_limit_returns_no_growing_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    ids, mask = prompt(3, 10, ())
    monkeypatch.setattr("kvpass.torch_private.dynamo.MAX_GRAPHS", {"recompile_limit": 1})
    strict, lax = (kvpass.compile(plain("Llama"), **settings("h2o"), strict=how) for how in (True, False))
    with torch._dynamo.config.patch(recompile_limit=1):
        with pytest.warns(kvpass.KVPassWarning, match="last graph"):
            feed(strict, ids[:, :9], mask[:, :9], [9])
        with pytest.raises(kvpass.UnsupportedGraph, match="made its maximum of graphs of the model"):
            feed(strict, ids[:1], mask[:1], [10])
        assert not isinstance(feed(lax, ids, mask, [10]).cache.layers[0].keys, Handle)
    with torch.compiler.set_stance("force_eager"), pytest.raises(kvpass.UnsupportedGraph, match="would run uncompiled"):
        feed(strict, ids, mask, [10])


@pytest.mark.parametrize("cache", ["returned", "given"])
def test_an_ordinary_cache_that_grows_is_an_error_wherever_it_is(cache: str) -> None:
    kept = transformers.DynamicCache()

    def uncompiled(_: Tensor, other: Any = None) -> Any:
        kept.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
        return (torch.ones(1), kept) if cache == "returned" else torch.ones(1)

    with pytest.raises(kvpass.UnsupportedGraph, match="ordinary cache, which grows"):
        CompiledCall(uncompiled, strict=True, model=torch.nn.Identity())(torch.ones(1), kept)
    assert CompiledCall(uncompiled, strict=False, model=torch.nn.Identity())(torch.ones(1), kept) is not None


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace streams, which offloaded caches create and CUDA builds of torch refuse without a GPU."""
    monkeypatch.setattr(torch, "Stream", lambda: None)


@pytest.mark.usefixtures("no_streams")
def test_an_offloaded_cache_is_an_error_that_says_what_to_do() -> None:
    model, (ids, mask) = build("Llama"), prompt(2, 9, (2, 0))
    kvpass.compile(model, "h2o", budget=16, inner="eager")
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="leave out cache_implementation='offloaded'"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, cache_implementation="offloaded", pad_token_id=0)


@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("around", [lambda cache: cache, lambda cache: transformers.EncoderDecoderCache(cache, cache)])
def test_an_unsupported_cache_is_found_in_any_argument(around: Callable[[Any], Any]) -> None:
    guarded = CompiledCall(lambda *_: pytest.fail("the model was called"), strict=True, model=torch.nn.Identity())
    with pytest.raises(kvpass.UnsupportedGraph, match="leave out cache_implementation='offloaded'"):
        guarded(None, around(transformers.DynamicCache(offloading=True)))


def test_output_attentions_is_refused() -> None:
    """Check the error: transformers warns that this attention returns none, which breaks the graph."""
    torch._dynamo.reset()
    model, (ids, mask) = build("Llama", layers=1), prompt(2, 9, (2, 0))
    kvpass.compile(model, "h2o", budget=16, inner="eager")
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="output_attentions=True, leave that out"):
        model(ids, attention_mask=mask, output_attentions=True)


def test_a_quantized_cache_is_an_error_that_says_what_to_do() -> None:
    class QuantizedCache:
        layers: ClassVar[list[Any]] = []

    model = build("Llama")
    kvpass.compile(model, "h2o", budget=16, inner="eager")
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="kv_dtype='int8'"):
        model(prompt(1, 5, ())[0], past_key_values=QuantizedCache())
