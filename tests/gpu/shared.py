"""Share the emissions of every policy, each made once, and one interpreter process among all tests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from tests.gpu import binaries as machine
from tests.gpu import cuda_emission
from tests.gpu.cuda_emission import Binary, Emission, Interpreter, Step, StepResult
from tests.models import build, prompt
from tests.strategies import ROWS
from tests.test_invariants import settings

PROMPT, STEPS = 24, 2
# Attention there reads rows that the policy computes; see docs/gpu.md.
OWN_ROWS = ("kv_align",)


def recorded(
    name: str, dtype: torch.dtype, steps: tuple[int, ...], architecture: str = "Llama", **given: Any
) -> list[Step]:
    """Return the step graphs of a tiny model of two layers, fed with the prompt and then with pieces."""
    torch._dynamo.reset()
    chosen: dict[str, Any] = settings(name, architecture, 16)
    if name not in OWN_ROWS:
        chosen["positions"] = "absolute"
    model = build(architecture, dtype)
    compiled, made = cuda_emission.record(model, **{**chosen, **given}, inner="eager")
    ids, mask = prompt(2, PROMPT + sum(steps), (3, 0))
    cache, done = None, 0
    with torch.no_grad():
        for count in (PROMPT, *steps):
            new, done = ids[:, done : done + count].contiguous(), done + count
            out = compiled(new, attention_mask=mask[:, :done], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
    return [step for step in made if step.outputs]


@functools.cache
def emission(name: str, dtype: torch.dtype) -> Emission:
    """Emit a policy's decode graph without compaction."""
    steps = recorded(name, dtype, (1,) * STEPS)
    return cuda_emission.emit(next(step for step in steps if step.query_len == 1 and not step.compact))


@functools.cache
def _interpreter() -> Interpreter:
    return Interpreter()


@functools.cache
def ran(name: str, dtype: torch.dtype) -> StepResult:
    """Return the interpreted run of an emission, made once."""
    return emission(name, dtype).run(_interpreter())


def run(made: Emission) -> StepResult:
    """Return the interpreted run of any emission."""
    return made.run(_interpreter())


def call(path: str, *arguments: Any) -> Any:
    """Call "module:function" in the interpreter process."""
    return _interpreter().call(path, *arguments)


_binaries: dict[tuple[str, str], Binary] = {}


def binaries(name: str, dtype: torch.dtype, target: str) -> list[Binary]:
    """Compile the kernels of an emission for a target; kernels that differ only by name are compiled once."""
    made = []
    for kernel, source in emission(name, dtype).kernels.items():
        key = (source.replace(kernel, "kernel"), target)
        if key not in _binaries:
            _binaries[key] = machine.generated({kernel: source}, [target])[0]
        made.append(dataclasses.replace(_binaries[key], name=kernel))
    return made


EVERY = [name for name, row in ROWS.items() if not row.case]
