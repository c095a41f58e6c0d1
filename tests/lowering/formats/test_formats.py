"""Test vectors in int8 and int4: their error, their compiled code, and their size."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.cache.layout import Layout
from kvpass.cache.slots import Slots
from kvpass.errors import PolicyError
from kvpass.lowering.formats import KV_DTYPES, EncodedVectors, KVDtype, base_of, format_of, plain
from kvpass.lowering.formats.code_products import MAX_SUM_LENGTH
from kvpass.lowering.formats.integers import transform
from kvpass.policies import resolve
from kvpass.reference.storing import store_and_read

STEP = {"int8": 1 / 127, "int4": 2 / 15}  # largest step, relative to the largest number of a row after rounding
every_format = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def layout(kv_dtype: KVDtype | None, dim: int, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout(resolve("window", {}), 8, 9, 2, 3, dim, dim, dtype, torch.device("cpu"), False, kv_dtype=kv_dtype)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Draw rows [2, 3, N, D] of many magnitudes; some are constant, or have one sign."""
    dim = draw(st.sampled_from([2, 8, 24, 32, 40, 64, 80, 96, 128, 256]))
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    made = torch.randn(2, 3, draw(st.integers(1, 5)), dim, generator=drawn) * 10.0 ** draw(st.integers(-12, 6))
    made = made + draw(st.sampled_from([0.0, 0.0, 100.0])) * made.abs().amax()
    special = draw(st.sampled_from([None, 0.0, -3.0]))
    if special is not None:
        made[0, 0] = special
    return made


@every_format
@given(given_rows=rows())
def test_decoded_codes_are_within_a_step_of_the_vectors(kv_dtype: KVDtype, given_rows: Tensor) -> None:
    here = layout(kv_dtype, given_rows.shape[-1])
    made = EncodedVectors.of(here.key_format, given_rows)
    read = made.read()
    assert torch.equal(read, store_and_read(here, given_rows))
    rounded, exact = (transform(x.double()) if here.key_format.transforms else x for x in (read, given_rows))
    half = STEP[base_of(kv_dtype)] * 0.57  # half a step, plus the rounding of a coarse scale
    most = exact.abs().amax(-1, keepdim=True) * half
    assert ((rounded - exact).abs() <= most + most.amax() * 1e-6).all()
    assert [(part.shape[-1], part.dtype) for part in made.parts] == here.key_format.part_shapes()


@pytest.mark.parametrize("kv_dtype", ["int2", "int8-walsh"])
def test_the_reference_refuses_formats_that_it_does_not_transcribe(kv_dtype: str) -> None:
    here: Any = mock.Mock(kv_dtype=kv_dtype)
    with pytest.raises(PolicyError, match=f"no rounding for kv_dtype='{kv_dtype}'"):
        store_and_read(here, torch.ones(4))


@every_format
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
@given(given_rows=rows(), seed=st.integers(0, 99), rotated=st.booleans())
@settings(max_examples=15)
def test_products_and_mixtures_are_those_of_decoded_rows(
    kv_dtype: KVDtype, capability: str, given_rows: Tensor, seed: int, rotated: bool
) -> None:
    """Test each way to load codes, which depends on the processor, and the storage order for it."""
    here = format_of(kv_dtype, given_rows.shape[-1], torch.float32, rotated=rotated)
    with loading_as(capability):
        made = EncodedVectors.of(here, given_rows)
        read, drawn = made.read().double(), torch.Generator().manual_seed(seed)
    for count in (1, 3, 17):
        query = torch.randn(2, 3, count, given_rows.shape[-1], generator=drawn)
        probs = torch.randn(2, 3, count, given_rows.shape[2], generator=drawn).softmax(-1)
        close = dict(rtol=1e-4, atol=float(read.abs().max()) * 1e-4)
        with loading_as(capability):
            products = made.format.products(query, made.parts)
            mixture = made.format.weighted_sum(probs, made.parts, torch.float32)
        torch.testing.assert_close(products.double(), query.double() @ read.transpose(-1, -2), **close)
        torch.testing.assert_close(mixture.double(), probs.double() @ read, **close)


@pytest.mark.parametrize(
    ("kv_dtype", "dim", "count"),
    [("int8", 64, 4), ("int8", 32, 4), ("int8", 80, 1), ("int4", 64, 8), ("int4", 256, 8), ("int4", 192, 1)],
)
def test_rows_that_are_rotated_when_read_come_in_sections(kv_dtype: KVDtype, dim: int, count: int) -> None:
    """Test planes: the same numbers in the same order as when decoded completely, for any writer."""
    x = torch.randn(2, 3, 5, dim)
    with loading_as("AVX2"):
        lying, plainly = (EncodedVectors.of(format_of(kv_dtype, dim, x.dtype, rotated=r), x) for r in (True, False))
        sections = lying.in_sections(x.dtype)
        assert torch.equal(lying.read(), plainly.read())
        assert torch.equal(torch.cat(sections.tensors, -1), sections.join())
    assert torch.equal(sections.join(), plainly.read())
    assert len(sections.tensors) == count
    assert torch.equal(lying.codes, plainly.codes) == (count == 1)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int4-hadamard"])
def test_rows_that_are_moved_to_another_kind_of_device_lie_as_they_do_there(kv_dtype: KVDtype) -> None:
    """Move rows in both directions, whichever device loads words."""
    made = format_of(kv_dtype, 64, torch.float32, rotated=True)
    x = torch.randn(2, 3, 5, 64)
    for here, there in (("AVX2", "DEFAULT"), ("DEFAULT", "AVX2")):
        with loading_as(here) as capability:

            def move(tensor: Tensor, there: str = there, capability: Any = capability) -> Tensor:
                capability.return_value = there
                return tensor.clone()

            rows = EncodedVectors.of(made, x)
            expected = rows.read()
            assert torch.equal(rows.to_device(move).read(), expected)


def test_slots_move_keys_and_values_by_their_format() -> None:
    here = dataclasses.replace(layout("int8", 64), stores_unrotated_keys=True)
    slots = Slots.empty(here)
    with mock.patch.object(EncodedVectors, "to_device", autospec=True, side_effect=EncodedVectors.to_device) as moved:
        slots.map_tensors(torch.clone)
        assert not moved.called
        assert slots.map_tensors(lambda tensor: tensor.to("meta")).key.device.type == "meta"
    assert moved.call_count == 2  # keys and values


def loading_as(capability: str) -> Any:
    """Simulate a processor that loads codes with vectors of this kind."""
    return mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value=capability)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kv_dtype", "dim", "filling"),
    [
        ("int8", 64, True),
        ("int4", 64, True),
        ("int4", 32, False),
        pytest.param("int8", 32, True, marks=slow),
        pytest.param("int8", 80, False, marks=slow),
        pytest.param("int4", 128, True, marks=slow),
    ],
)
def test_codes_that_fill_vectors_are_loaded_in_words(kv_dtype: KVDtype, dim: int, filling: bool) -> None:
    """Check that compiled products use no cascade sum, for each way to load codes."""
    made, count = format_of(kv_dtype, dim, torch.bfloat16), MAX_SUM_LENGTH + 1
    parts = EncodedVectors.of(made, torch.randn(1, 1, count, dim).to(torch.bfloat16)).parts
    query, probs = torch.randn(1, 1, 2, dim).to(torch.bfloat16), torch.randn(1, 1, 2, count).softmax(-1)

    def attended(query: Tensor, probs: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return made.products(query, parts), made.weighted_sum(probs, parts, torch.float32)

    with loading_as("AVX2"):
        expected = attended(query, probs, *parts)
        graph = make_fx(attended, tracing_mode="fake")(query, probs, *parts)
        found, code = run_and_get_code(torch.compile(graph), query, probs, *parts)
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)
    views = [node for node in graph.graph.nodes if node.target is torch.ops.aten.view.dtype]
    assert bool(views) == filling
    assert "cascade_sum_combine" not in "".join(code)


@pytest.mark.few(2)
@every_format
@pytest.mark.parametrize("dim", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_the_compiler_makes_the_same_codes(kv_dtype: KVDtype, dim: int) -> None:
    """Check that the compiler has no conversion to a narrow dtype and back that it could drop."""
    made, x = format_of(kv_dtype, dim, torch.bfloat16), torch.randn(2, 2, 50, dim).to(torch.bfloat16)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        parts = made.encode(x)
        return (*parts, made.decode(parts))

    for got, expected in zip(torch.compile(function, fullgraph=True)(x), function(x), strict=True):
        assert torch.equal(got, expected)


@every_format
def test_rows_that_are_not_numbers_stay_so(kv_dtype: KVDtype) -> None:
    x = torch.zeros(1, 1, 2, 8)
    x[..., 0, 3] = torch.nan
    read = EncodedVectors.of(format_of(kv_dtype, 8, torch.float32), x).read()
    assert read[0, 0, 0].isnan().all()
    assert (read[0, 0, 1] == 0).all()


@pytest.mark.parametrize(
    ("kv_dtype", "dim", "share"),
    [("int8", 64, 0.52), ("int8", 128, 0.51), ("int4", 32, 0.30), ("int4", 64, 0.30), ("int4", 128, 0.30)],
)
def test_rows_take_the_share_of_bfloat16_that_they_should(kv_dtype: KVDtype, dim: int, share: float) -> None:
    slots, wide = (Slots.empty(layout(x, dim, torch.bfloat16)) for x in (kv_dtype, None))
    size = [sum(part.nbytes for x in (each.key, each.value) for part in x.parts) for each in (slots, wide)]
    assert size[0] <= share * size[1]
    assert slots.nbytes - size[0] == wide.nbytes - size[1]  # no other tensor is larger


@every_format
def test_slots_are_the_same_after_their_tensors_went_round(kv_dtype: KVDtype) -> None:
    slots = Slots.empty(layout(kv_dtype, 8))
    again = slots.with_tensors(slots.tensors())
    assert all(a is b for a, b in zip(slots.tensors(), again.tensors(), strict=True))
    assert len(slots.names) == len(set(slots.names)) == len(slots.tensors())
    shapes = dict(zip(slots.names, slots.tensors(), strict=True))
    assert all(shapes[name].shape[:3] == (2, 3, 9) for name in slots.kv_names)


@every_format
def test_rows_that_are_not_replaced_keep_their_codes(kv_dtype: KVDtype) -> None:
    x = torch.randn(2, 3, 9, 8)
    made, before = (EncodedVectors.of(format_of(kv_dtype, 8, torch.float32), x) for _ in range(2))
    only = torch.rand(2, 3, 9) > 0.5
    made.replace(x * 2, only)
    for part, old in zip(made.parts, before.parts, strict=True):
        assert torch.equal(part[~only], old[~only])
    assert not torch.equal(made.read()[only], before.read()[only])
    assert torch.equal(plain(x).read(), x)


def test_int4_refuses_an_odd_head_dimension() -> None:
    with pytest.raises(PolicyError, match=r"kv_dtype='int4'.*has 5"):
        format_of("int4", 5, torch.float32)
