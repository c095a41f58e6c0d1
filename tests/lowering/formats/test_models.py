"""Test models on slots in int8 and int4: steps, chunks, generation, cache operations, reports and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import kvpass
from kvpass.lowering.formats import KV_DTYPES, KVDtype, base_of
from tests.lowering.formats.test_formats import loading_as
from tests.lowering.layer_dedup.test_link import compilations
from tests.models import HEADS_OF_64, build, prompt, teacher_forced
from tests.test_invariants import settings
from tests.traces import Traced

every_format = pytest.mark.parametrize(
    "kv_dtype", [pytest.param(kind, marks=[] if kind == "int4" else [pytest.mark.slow]) for kind in KV_DTYPES]
)
KINDS = {"streaming": "int4", "d2o": "int8", "kv_align": "int4", "h2o": "int4-hadamard", "buzz": "int8-hadamard"}
"""Policies that rotate, merge or repair rows, and formats that transform keys before they store them."""
GREEDY: dict[str, Any] = dict(do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [pytest.param(*kind, marks=[] if kind[0] == "h2o" else [pytest.mark.slow]) for kind in KINDS.items()],
)
def test_a_model_equals_the_reference_at_every_step(name: str, kv_dtype: KVDtype) -> None:
    """Compare with padding, a chunk in the middle, and the policy's default positions."""
    architecture = "GPT2" if name == "kv_align" else "Llama"
    steps, given = (
        [12, *[1] * 4, 4, *[1] * 3],
        settings(name, "Llama" if architecture == "Llama" else "GPTNeoX", 8, layers=1),
    )
    model, (ids, mask) = Traced(build(architecture, layers=1)), prompt(2, sum(steps), (3, 0))
    lowered, literal = (
        teacher_forced(model, ids, mask, steps, **given, kv_dtype=kv_dtype, inner=inner)
        for inner in ("eager", "reference")
    )
    for ours, theirs in zip(lowered.positions, literal.positions, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    real = mask.bool()
    # A hidden state that differs in its last bit may round to another code.
    torch.testing.assert_close(lowered.logits[real], literal.logits[real], atol=2e-3, rtol=2e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("kv_dtype", ["int4", "int8"])
@pytest.mark.parametrize("architecture", HEADS_OF_64)
def test_keys_in_planes_are_rotated_as_the_model_rotates(architecture: str, kv_dtype: KVDtype) -> None:
    """Test embeddings that mix halves of a row, which planes divide, or neighbours."""
    steps = [12, *[1] * 4, 4, *[1] * 3]
    model, (ids, mask) = Traced(build(architecture, layers=1)), prompt(2, sum(steps), (3, 0))
    given: dict[str, Any] = dict(policy="streaming", budget=8, kv_dtype=kv_dtype)
    with loading_as("AVX2"):
        ours, theirs = (
            teacher_forced(model, ids, mask, steps, **given, inner=inner) for inner in ("eager", "reference")
        )
    real = mask.bool()
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], atol=2e-3, rtol=2e-3)


@pytest.mark.slow
@every_format
def test_the_model_but_for_the_rounding_until_something_is_evicted(kv_dtype: KVDtype) -> None:
    model, (ids, mask) = Traced(build("Llama", layers=1)), prompt(2, 24, (2, 0))
    plain, stored = (
        teacher_forced(model, ids, mask, [12, *[1] * 12], policy="h2o", budget=40, kv_dtype=kind, inner="eager")
        for kind in (None, kv_dtype)
    )
    assert torch.equal(plain.logits[:, :12], stored.logits[:, :12])  # a prompt attends to exact keys and values
    apart = (plain.logits - stored.logits)[mask.bool()].abs().mean() / plain.logits.abs().mean()
    assert 0 < apart < {"int8": 0.005, "int4": 0.06}[base_of(kv_dtype)]


@pytest.mark.slow
@every_format
@torch.inference_mode()
def test_beams_copies_and_several_sequences_carry_their_scales(kv_dtype: KVDtype) -> None:
    model, (ids, mask) = build("Llama", layers=1), prompt(2, 9, (2, 0))
    kvpass.compile(model, "streaming", budget=8, kv_dtype=kv_dtype, inner="eager")
    how = dict(GREEDY, attention_mask=mask, max_new_tokens=6)
    model.generate(ids, **how, num_beams=3)
    out = model.generate(ids, **how, return_dict_in_generate=True)
    branch = copy.deepcopy(out.past_key_values)
    token, wide = out.sequences[:, -1:], torch.nn.functional.pad(mask, (0, 6), value=1)
    rest = dict(attention_mask=wide, position_ids=wide.cumsum(-1)[:, -1:] - 1)
    first, second = (model(token, past_key_values=past, **rest).logits for past in (out.past_key_values, branch))
    assert torch.equal(first, second)
    key = branch.layers[0].keys
    with_scales = key[torch.tensor([1, 0])].cache.slots
    for swapped, given in zip(with_scales.tensors(), key.cache.slots.tensors(), strict=True):
        assert torch.equal(swapped.flip(0), given)


@every_format
def test_reports_say_what_is_held(kv_dtype: KVDtype) -> None:
    model = build("Llama", torch.bfloat16, layers=1)
    ids, mask = prompt(2, 40, ())
    options = dict(policy="window", budget=16, kv_dtype=kv_dtype, inner="eager")
    run = teacher_forced(model, ids, mask, [20, *[1] * 20], inspect=False, **options)
    report = kvpass.inspect(run.cache)
    rows, heads, slots, layers = 2, 2, 17, 1
    row = {"int8": 16 + 2, "int4": 8 + 2 + 1}[base_of(kv_dtype)]  # bytes of 16 numbers
    metadata = rows * slots * 3 * 8 + rows * 3 * 8
    assert report.nbytes == layers * (2 * rows * heads * slots * row + metadata)
    assert report.full_nbytes == layers * 2 * rows * heads * 40 * 16 * 2
    assert run.cache.layers[0].keys.dtype == torch.bfloat16
    assert run.logits.dtype == torch.bfloat16


@pytest.mark.slow
@every_format
def test_a_full_cache_keeps_its_rows_when_it_grows(kv_dtype: KVDtype) -> None:
    model, (ids, mask) = Traced(build("Llama", layers=1)), prompt(1, 276, ())
    steps = [10, *[1] * 266]
    grown, ample = (
        teacher_forced(model, ids, mask, steps, inspect=False, policy="full", budget=budget, kv_dtype=kv_dtype,
              inner="eager").logits
        for budget in (None, 300)
    )  # fmt: skip
    torch.testing.assert_close(grown, ample, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_loop_and_a_backend_by_name_take_kv_dtype() -> None:
    model, (ids, _) = build("Llama", layers=1), prompt(1, 12, ())
    loop = kvpass.DecodeLoop(model, "h2o", budget=8, kv_dtype="int8", inner="eager")
    loop.prompt(ids)
    made = loop.generate(6)
    options = {"policy": "h2o", "budget": 8, "kv_dtype": "int8", "inner": "eager"}
    with torch.no_grad():
        compiled = torch.compile(model, backend="kvpass", options=options)
        out = compiled(ids, use_cache=True)
        for token in made[0].tolist():
            assert int(out.logits[0, -1].argmax()) == token
            out = compiled(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    assert kvpass.inspect(loop).layers[0].nbytes == kvpass.inspect(out.past_key_values).layers[0].nbytes


def test_an_invalid_kv_dtype_is_refused() -> None:
    with pytest.raises(kvpass.PolicyError, match="kv_dtype='int3'"):
        kvpass.backend("h2o", budget=8, kv_dtype="int3")  # type: ignore[arg-type]
    model, (ids, _) = build("Llama", layers=1), prompt(1, 9, ())
    compiled, other = (
        torch.compile(model, backend=kvpass.backend("window", budget=8, inner="eager", kv_dtype=kind))
        for kind in ("int8", None)
    )
    with torch.no_grad():
        past = compiled(ids, use_cache=True).past_key_values
        with pytest.raises(kvpass.CacheHandleError, match="kv_dtype='int8'"):
            other(ids[:, :1], past_key_values=past, use_cache=True)


def test_heads_of_an_odd_size_are_refused_in_int4() -> None:
    x = torch.randn(1, 1, 6, 5)
    with pytest.raises(kvpass.KVPassError, match=r"int4.*has 5"):
        kvpass.simulate("window", x, x, x, prompt=3, budget=4, kv_dtype="int4")
    assert kvpass.simulate("window", x, x, x, prompt=3, budget=4, kv_dtype="int8").output.isfinite().all()


@pytest.mark.slow
@every_format
def test_layers_are_compiled_once_and_give_what_uncompiled_ones_do(kv_dtype: KVDtype) -> None:
    """Check that scales are operands of layers, and that a step has a prologue, one layer and an epilogue."""
    ids, mask = prompt(1, 14, ())
    given: dict[str, Any] = dict(policy="h2o", budget=8, kv_dtype=kv_dtype, inspect=False)
    expected = teacher_forced(build("Llama", layers=4), ids, mask, [10, *[1] * 4], **given, inner="eager").logits
    counters.clear()
    got = teacher_forced(build("Llama", layers=4), ids, mask, [10, *[1] * 4], **given).logits
    assert compilations() == 2 * 3
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
