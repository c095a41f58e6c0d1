"""Emissions of every policy, made once, and one interpreting process for all tests."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kvpass.testing import cuda_emission
from kvpass.testing.cuda_emission import Binary, Emission, Interpreter, Ran
from tests.models import build, prompt
from tests.strategies import ROWS
from tests.test_invariants import settings

PROMPT, STEPS = 24, 2
# Attention there is spelled out in torch, or reads rows that the policy makes anew; see docs/gpu.md.
OWN_ROWS = ("kv_align",)


@functools.cache
def emission(name: str, dtype: torch.dtype, padded: bool = True) -> Emission:
    """The decode graph of a tiny Llama of two layers with a policy that evicts in every step."""
    torch._dynamo.reset()
    given: dict[str, Any] = settings(name, "Llama", 16)
    if name not in OWN_ROWS:
        given["positions"] = "absolute"
    compiled, steps = cuda_emission.record(build("Llama", dtype), **given, inner="eager")
    ids, mask = prompt(2, PROMPT + STEPS, (3, 0) if padded else ())
    with torch.no_grad():
        out = compiled(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], use_cache=True)
        for done in range(PROMPT, PROMPT + STEPS):
            new = ids[:, done : done + 1].contiguous()
            out = compiled(new, attention_mask=mask[:, : done + 1], past_key_values=out.past_key_values, use_cache=True)
    step = next(step for step in steps if step.queries == 1 and not step.sweep and step.outputs)
    return cuda_emission.emit(step)


@functools.cache
def _interpreter() -> Interpreter:
    return Interpreter()


@functools.cache
def ran(name: str, dtype: torch.dtype) -> Ran:
    """The interpreted run of an emission."""
    return emission(name, dtype).run(_interpreter())


def call(path: str, *arguments: Any) -> Any:
    """Call "module:function" in the interpreting process."""
    return _interpreter().call(path, *arguments)


_binaries: dict[tuple[str, str], Binary] = {}


def binaries(name: str, dtype: torch.dtype, target: str) -> list[Binary]:
    """The kernels of an emission for a target; those that policies share are compiled once."""
    from kvpass.testing import binaries as machine

    made = emission(name, dtype)
    for kernel, source in made.kernels.items():
        if (source, target) not in _binaries:
            _binaries[source, target] = machine.generated({kernel: source}, [target])[0]
    return [_binaries[source, target] for source in made.kernels.values()]


EVERY = [name for name, row in ROWS.items() if not row.case]
