"""Decode graphs on slots in int8 and int4 for a GPU: emitted, compiled, and interpreted beside the CPU."""

from __future__ import annotations

import functools

import pytest
import torch

from kvpass.storage import KVDtype
from kvpass.testing import cuda_emission
from kvpass.testing.cuda_emission import Emission
from tests.testing.shared import STEPS, recorded, run

kinds = pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("h2o", "int8"),
        ("h2o", "int4"),
        pytest.param("streaming", "int8", marks=pytest.mark.slow),
        pytest.param("d2o", "int4", marks=pytest.mark.slow),
    ],
)


@functools.cache
def emission(name: str, kv_dtype: KVDtype) -> Emission:
    positions = None if name == "streaming" else "absolute"  # keys that are turned at read
    steps = recorded(name, torch.float16, (1,) * STEPS, kv_dtype=kv_dtype, positions=positions)
    return cuda_emission.emit(next(step for step in steps if step.queries == 1 and not step.sweep))


@kinds
def test_the_interpreted_module_equals_the_cpu(name: str, kv_dtype: KVDtype) -> None:
    made = emission(name, kv_dtype)
    made.check(run(made), atol=2, rtol=1e-2)  # codes may differ by one, where a number lies between two


@kinds
def test_attention_reads_codes_by_one_kernel_that_spills_nothing(name: str, kv_dtype: KVDtype) -> None:
    made = emission(name, kv_dtype)
    buffer = made.step.inputs[made.step.names.index("slots_0_key")]
    assert buffer.dtype == {"int8": torch.int8, "int4": torch.uint8}[kv_dtype]
    ran = run(made)
    for layer in range(2):
        first, *more = made.readers(ran, f"slots_{layer}_key")
        assert first.startswith("split")
        assert not more or name == "d2o"  # which compares the token that goes with every key
    attention = [name for name in made.kernels if name.startswith(cuda_emission.ATTEND)]
    assert len(attention) == 1
    only = {name: made.kernels[name] for name in attention}
    for binary in cuda_emission.machine.generated(only, ["sm_90"]):
        assert binary.spills == 0
