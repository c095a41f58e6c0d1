"""Test handles: operations on caches between forwards act on the slots or raise an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError

import kvpass
from kvpass.cache import handle as handle_module
from kvpass.cache import layer_cache
from kvpass.cache.handle import Handle
from tests.adversary.models import Small, plain
from tests.models import build, prompt, teacher_forced
from tests.test_backend import Tiny, loop

BUDGET = 8


pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("Llama")


def started(model: torch.nn.Module, tokens: int = 14, **how: object) -> tuple[object, object, torch.Tensor]:
    """Return a compiled model, a cache after evictions, and the ids that follow."""
    ids, _ = prompt(3, tokens + 6, ())
    compiled = torch.compile(model, backend=kvpass.backend("h2o", budget=BUDGET, inner="eager", **how))
    with torch.no_grad():
        out = compiled(ids[:, : tokens - 3], use_cache=True)
        for t in range(tokens - 3, tokens):
            out = compiled(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
    return compiled, out.past_key_values, ids[:, tokens:]


def test_a_handle_inside_another_object_is_refused_without_its_length(model: torch.nn.Module) -> None:
    _, cache, _ = started(model)
    handle = cache.layers[0].keys  # type: ignore[attr-defined]
    with pytest.raises(kvpass.CacheHandleError, match="sum on a cache of kvpass: its tokens live in slots"):
        torch.overrides.handle_torch_function(torch.sum, (handle,), SimpleNamespace(inner=handle))


@torch.no_grad()
def follow(compiled: object, cache: object, ids: torch.Tensor) -> torch.Tensor:
    logits = []
    for t in range(ids.shape[1]):
        out = compiled(ids[:, t : t + 1], past_key_values=cache, use_cache=True)  # type: ignore[operator]
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


def test_a_handle_has_the_shape_of_the_full_cache_and_no_data(model: torch.nn.Module) -> None:
    _, cache, _ = started(model)
    handle = cache.layers[0].keys  # type: ignore[attr-defined]
    assert isinstance(handle, Handle)
    assert handle.shape == (3, 2, 14, 16)
    assert cache.get_seq_length() == 14  # type: ignore[attr-defined]
    assert handle.stride() == (0, 0, 0, 0)  # one element, whatever the shape


def test_uncompiled_use_gives_an_error_and_not_a_plausible_answer(model: torch.nn.Module) -> None:
    _, cache, ids = started(model)
    with torch.no_grad(), pytest.raises(kvpass.CacheHandleError, match="cat on a cache of kvpass: its 14 tokens"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda past: torch.nn.functional.pad(past, (0, 0, 0, 1))[:, :, :-1],
        lambda past: torch.nn.functional.rms_norm(past, (8,)),
        lambda past: 1 - (1 - past),
    ],
    ids=["pad", "rms_norm", "rsub"],
)
def test_a_function_that_dynamo_leaves_uncompiled_is_an_error(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch._dynamo.reset()
    small = Small(plain, grow=lambda past, new: torch.cat([read(past), new], -2))
    compiled = torch.compile(small, backend=kvpass.backend("full", inner="eager"))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        _, past = compiled(ids[:, :5])
        with pytest.raises(
            kvpass.CacheHandleError, match=r"(pad|rms_norm|__rsub__) on a cache of kvpass: its 5 tokens"
        ):
            compiled(ids[:, 5:], past)
    torch._dynamo.reset()


def test_reordered_rows_go_on_as_those_rows(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    straight = follow(compiled, copy.deepcopy(cache), ids)
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)  # type: ignore[attr-defined]
    assert torch.allclose(follow(compiled, cache, ids[order]), straight[order], atol=1e-5)


def test_fewer_rows(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    straight = follow(compiled, copy.deepcopy(cache), ids)
    cache.batch_select_indices(torch.tensor([0, 2]))  # type: ignore[attr-defined]
    assert torch.allclose(follow(compiled, cache, ids[[0, 2]]), straight[[0, 2]], atol=1e-5)


def test_a_copy_goes_its_own_way(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    twin = copy.deepcopy(cache)
    first = follow(compiled, cache, ids)
    assert torch.allclose(follow(compiled, twin, ids), first, atol=1e-6)


def test_a_stale_handle_is_noticed(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    old = [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[attr-defined]
    follow(compiled, cache, ids[:, :2])
    for layer, handles in zip(cache.layers, old, strict=True):  # type: ignore[attr-defined]
        layer.keys, layer.values = handles
    with pytest.raises(kvpass.CacheHandleError, match=r"after 14 tokens, and its conversation has 16 now"):
        follow(compiled, cache, ids[:, 2:3])


TAMPERING: dict[str, tuple[Callable[[Any], object], str]] = {
    "crop": (lambda cache: cache.crop(-3), "pass crop=3 to kvpass"),
    "arithmetic": (lambda cache: cache.layers[0].keys * 2, "mul on a cache of kvpass: its 14 tokens"),
    "type": (lambda cache: cache.layers[0].keys.type(torch.float64), "cannot be converted to torch.float64"),
    "dtype": (lambda cache: cache.layers[0].keys.to(torch.float64), "cannot be converted to torch.float64"),
    "pickle": (lambda cache: pickle.dumps(cache.layers[0].keys), "cannot be pickled: kvpass.save_cache"),
    "empty index": (lambda cache: cache.layers[0].keys[()], "only whole rows"),
    "index of no dimension": (lambda cache: cache.layers[0].keys[torch.tensor(0)], "only whole rows"),
    "mask of two": (lambda cache: cache.layers[0].keys[torch.ones(3, 2, dtype=torch.bool)], "only whole rows"),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_an_unsupported_use_of_a_handle_is_refused(model: torch.nn.Module, name: str) -> None:
    _, cache, _ = started(model)
    tamper, said = TAMPERING[name]
    with pytest.raises(kvpass.CacheHandleError, match=said):
        tamper(cache)


def test_a_move_to_a_gpu_is_one_to_the_gpu_that_is_named(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache, _ = started(model)
    key = cache.layers[0].keys  # type: ignore[attr-defined]
    moves: list[object] = []
    monkeypatch.setattr(handle_module, "_to", lambda _, target: moves.append(target))
    key.cuda()
    key.cuda(1)
    key.cuda(device="cuda:2", non_blocking=True)
    key.cpu(memory_format=torch.preserve_format)
    assert moves == ["cuda", torch.device("cuda", 1), "cuda:2", "cpu"]


def test_deferred_conditions_are_read_in_order_and_none_is_left_out() -> None:
    """Check the order of deferred checks: an event may finish between two queries."""
    checks, computed = layer_cache.DeferredChecks(), [False, True]
    events = [SimpleNamespace(query=lambda number=number: computed[number]) for number in range(2)]
    error = kvpass.CacheHandleError("the first is false")
    answers = [(torch.tensor(False), error), (torch.tensor(True), kvpass.CacheHandleError("the second is false"))]
    checks.pending = [(event, *answer) for event, answer in zip(events, answers, strict=True)]  # type: ignore[misc]
    checks.raise_if_failed()
    assert len(checks.pending) == 2
    copied = checks.copy()
    computed[0] = True
    for each in (checks, checks, copied, checks.copy()):  # a caller may catch the error, and try again
        with pytest.raises(kvpass.CacheHandleError, match="the first is false"):
            each.raise_if_failed()
        assert not each.pending


def test_deferred_conditions_of_a_copy_are_its_own(model: torch.nn.Module) -> None:
    _, cache, _ = started(model)
    checks = cache.layers[0].keys.cache.deferred_checks  # type: ignore[attr-defined]
    other = copy.deepcopy(cache).layers[0].keys.cache.deferred_checks  # type: ignore[attr-defined]
    event, error = SimpleNamespace(query=lambda: True), kvpass.CacheHandleError("of the copy")
    other.pending.append((event, torch.tensor(False), error))
    checks.raise_if_failed()
    with pytest.raises(kvpass.CacheHandleError, match="of the copy"):
        other.raise_if_failed()


def test_a_row_that_was_taken_out_has_a_shape_and_no_data(model: torch.nn.Module) -> None:
    """Copy what Whisper's `generate` does: split rows, move them, and stack them into an empty cache."""
    compiled, cache, ids = started(model)
    key = cache.layers[0].keys  # type: ignore[attr-defined]
    rows = [torch.cat([torch.empty(0), key[i][None].cpu()], -2) for i in range(key.shape[0])]
    together = torch.stack(rows).squeeze(1).to("cpu")
    assert together.shape == key.shape
    assert not together[0].is_neg()  # a query, not a read of data: Dynamo makes some of these
    for read in (lambda: together * 2, lambda: torch.cat([together, together], -2), together.tolist, together.sum):
        with pytest.raises(kvpass.CacheHandleError, match="taken out of a cache"):
            read()
    cache.layers[0].keys = together  # type: ignore[attr-defined]
    with pytest.raises(kvpass.CacheHandleError, match="taken out of a cache"):
        follow(compiled, cache, ids[:, :1])


def test_a_replaced_tensor_loses_nothing_else(model: torch.nn.Module) -> None:
    """Check that a modified cache is refused, while the model and another conversation continue."""
    compiled, cache, ids = started(model)
    other = copy.deepcopy(cache)
    expected = follow(compiled, copy.deepcopy(cache), ids)
    cache.layers[1].values = cache.layers[0].values  # type: ignore[attr-defined]
    with pytest.raises(kvpass.CacheHandleError, match="different conversations"):
        follow(compiled, cache, ids[:, :1])
    assert torch.allclose(follow(compiled, other, ids), expected, atol=1e-6)


def test_another_backend_refuses_the_cache(model: torch.nn.Module) -> None:
    _, cache, ids = started(model)
    other = torch.compile(model, backend=kvpass.backend("window", budget=BUDGET, inner="eager"))
    with pytest.raises(kvpass.CacheHandleError, match="cannot be continued by"):
        follow(other, cache, ids[:, :1])


def test_an_interrupted_step_is_noticed(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    cache.layers[1].keys.cache.interrupted = True  # type: ignore[attr-defined]
    with pytest.raises(kvpass.CacheHandleError, match="interrupted"):
        follow(compiled, cache, ids[:, :1])


@pytest.mark.slow
def test_chunk_of_another_length_on_live_slots(model: torch.nn.Module) -> None:
    """Check that each chunk length has its own graph, and equals single tokens for a window."""
    ids, mask = prompt(2, 24, ())
    whole = teacher_forced(model, ids, mask, [10, 5, 1, 3, 1, 4], policy="full", budget=32, inner="eager").logits
    with torch.no_grad():
        assert torch.allclose(whole, model(ids).logits, atol=1e-4)


def test_a_handle_answers_the_compilers_queries(model: torch.nn.Module) -> None:
    """Check queries that some versions of torch call on the tensor itself, also outside tracing."""
    _, cache, _ = started(model)
    handle = cache.layers[0].keys  # type: ignore[attr-defined]
    assert not any([handle.is_conj(), handle.is_neg(), handle._is_zerotensor()])
    assert handle.untyped_storage().nbytes() == handle.element_size()  # one element, whatever the length of the cache


def swap_parts(layers: list[object]) -> None:
    for layer in layers:
        layer.keys, layer.values = layer.values, layer.keys  # type: ignore[attr-defined]


def one_layer_twice(layers: list[object]) -> None:
    first, second = layers
    second.keys, second.values = first.keys, first.values  # type: ignore[attr-defined]


def a_copy_of_one_layer_twice(layers: list[object]) -> None:
    first, second = layers
    second.keys, second.values = copy.deepcopy((first.keys, first.values))  # type: ignore[attr-defined]


def exchange(layers: list[object]) -> None:
    first, second = layers
    kept = first.keys, first.values  # type: ignore[attr-defined]
    first.keys, first.values = second.keys, second.values  # type: ignore[attr-defined]
    second.keys, second.values = kept  # type: ignore[attr-defined]


MIXED = [
    (swap_parts, "its values were passed as its keys"),
    (one_layer_twice, "passed for two layers"),
    (a_copy_of_one_layer_twice, "passed for two layers"),
    (exchange, "exchanged"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("count", [1, 3], ids=["token", "chunk"])
@pytest.mark.parametrize(("mix", "said"), MIXED)
def test_handles_of_other_layers_are_refused(
    model: torch.nn.Module, mix: Callable[[list[object]], None], said: str, count: int
) -> None:
    compiled, cache, ids = started(model)
    other, expected = copy.deepcopy(cache), follow(compiled, copy.deepcopy(cache), ids)
    mix(cache.layers)  # type: ignore[attr-defined]
    with torch.no_grad(), pytest.raises(kvpass.CacheHandleError, match=said):
        compiled(ids[:, :count], past_key_values=cache, use_cache=True)  # type: ignore[operator]
    assert torch.allclose(follow(compiled, other, ids), expected, atol=1e-6)


def test_layers_of_two_conversations_are_told_by_their_counts(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    other = copy.deepcopy(cache)
    follow(compiled, other, ids[:, :2])
    cache.layers[1] = other.layers[1]  # type: ignore[attr-defined]
    if torch.__version__ < "2.12":  # in these versions Dynamo's sizes contradict each other before any backend runs
        refused, said = TorchRuntimeError, "scaled_dot_product_attention"
    else:
        refused, said = kvpass.CacheHandleError, r"hold \[14, 16\] tokens"
    with pytest.raises(refused, match=said):
        follow(compiled, cache, ids[:, 2:3])


class Broken(torch.nn.Module):
    """Four attention layers with graph breaks between them; the cache is a tuple of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Tiny() for _ in range(4))

    def forward(self, ids: torch.Tensor, past: tuple[object, ...] = (None,) * 4) -> tuple[torch.Tensor, object]:
        total, grown = torch.zeros(()), []
        for number, (layer, held) in enumerate(zip(self.layers, past, strict=True)):
            if number == 2:
                torch._dynamo.graph_break()
            logits, own = layer(ids, held)
            total = total + logits
            grown.append(own)
        return total, tuple(grown)


def test_layers_in_several_graphs_are_numbered_in_each() -> None:
    torch.manual_seed(0)
    model, ids = Broken().eval(), torch.randint(0, 64, (2, 12))
    compiled = torch.compile(model, backend=kvpass.backend("h2o", budget=32, inner="eager"))
    assert torch.allclose(loop(compiled, ids), loop(model, ids), atol=1e-5)
    with torch.no_grad():
        _, past = compiled(ids[:, :5])
        with pytest.raises(kvpass.CacheHandleError, match="exchanged"):
            compiled(ids[:, 5:6], (past[0], past[1], past[3], past[2]))


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_copy_of_the_model_goes_on_if_its_weights_are_equal(factor: float) -> None:
    """Check a cache that has run its prompt alone, which no step has connected to a layer."""
    model, (ids, mask) = build("Llama", layers=1), prompt(1, 6, ())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= factor
        first, second = (
            torch.compile(m, backend=kvpass.backend("h2o", budget=8, inner="eager")) for m in (model, other)
        )
        cache = first(ids, attention_mask=mask, use_cache=True).past_key_values
        if factor != 1:
            with pytest.raises(kvpass.CacheHandleError, match="a model with other weights"):
                second(ids[:, :1], past_key_values=cache)
        else:
            expected = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
            torch.testing.assert_close(second(ids[:, :1], past_key_values=cache).logits, expected)


PICKS = {
    "slice": lambda: slice(0, 2),
    "list": lambda: [0, 1],
    "mask": lambda: torch.tensor([True, True, False]),
    "index": lambda: torch.tensor([0, 1]),
}


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
def test_rows_picked_twice_alike_are_one_cache(model: torch.nn.Module, pick: Callable[[], object]) -> None:
    """Pick rows of keys and values by two equal arguments."""
    compiled, cache, ids = started(model)
    straight = follow(compiled, copy.deepcopy(cache), ids)
    for layer in cache.layers:  # type: ignore[attr-defined]
        layer.keys, layer.values = layer.keys[pick()], layer.values[pick()]
        assert layer.keys.cache is layer.values.cache
    assert torch.allclose(follow(compiled, cache, ids[:2]), straight[:2], atol=1e-5)


def test_an_index_made_anew_is_the_same_index(model: torch.nn.Module) -> None:
    _, cache, _ = started(model)
    layer = cache.layers[0]  # type: ignore[attr-defined]
    one = (
        torch.index_select(input=layer.keys, dim=0, index=torch.tensor([2, 1])),
        layer.values.index_select(0, torch.tensor([2, 1])),
    )
    assert one[0].cache is one[1].cache
    repeated = layer.keys.repeat_interleave(2, 0), layer.values.repeat_interleave(2, 0)
    assert repeated[0].cache is repeated[1].cache


def test_rows_picked_otherwise_are_another_cache(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    for layer in cache.layers:  # type: ignore[attr-defined]
        layer.keys, layer.values = layer.keys[0:2], layer.values[1:3]
        assert layer.keys.cache is not layer.values.cache
    with pytest.raises(kvpass.CacheHandleError, match="different conversations"):
        follow(compiled, cache, ids[:2])


@pytest.mark.parametrize("order", ["kvkv", "kkvv"])
def test_rows_picked_twice_are_two_copies(model: torch.nn.Module, order: str) -> None:
    _, cache, _ = started(model)
    layer = cache.layers[0]  # type: ignore[attr-defined]
    made = {"k": [], "v": []}  # type: ignore[var-annotated]
    for part in order:
        made[part].append((layer.keys if part == "k" else layer.values)[0:2].cache)
    (first, second), values = made["k"], made["v"]
    assert first is not second
    assert values[0] is first
    assert values[1] is second


def test_a_row_list_changed_between_keys_and_values_makes_two_caches(model: torch.nn.Module) -> None:
    _, cache, _ = started(model)
    layer, rows = cache.layers[0], [0, 1]  # type: ignore[attr-defined]
    keys = layer.keys[rows]
    rows[1] = 2
    assert layer.values[rows].cache is not keys.cache
