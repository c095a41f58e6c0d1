"""Generate Inductor's code for rewritten graphs on an NVIDIA GPU, on a machine without one.

    compiled, steps = cuda_emission.record(model, policy="h2o", budget=256)
    out = compiled(ids, use_cache=True)  # runs on the CPU, uncompiled
    out = compiled(next_id, cache=out.cache, use_cache=True)

    emission = cuda_emission.emit(steps[0])
    emission.launches, emission.allocations  # from the code
    emission.binaries(("sm_80", "sm_90"))  # registers, spills and shared memory of every kernel
    with cuda_emission.Interpreter() as interpreter:
        ran = emission.run(interpreter)  # the module on CPU tensors, and the bytes that it accesses
        emission.check(ran)  # compares with the CPU
        print(emission.report(ran))

There are four steps, and each can be used alone.

1. *Record.* The model runs on the CPU. For every step graph the rewrite makes a second graph as on a GPU, from the
   same Dynamo graph with fake tensors on a device "cuda". A tensor on the wrong device is an error.
2. *Emit.* Inductor's pipeline runs up to the source of its module, with the configuration of `kvpass.backend`.
   Measurements on a GPU are left out (padding the operands of products).
3. *Compile.* Triton's compiler and ptxas compile every kernel, for any target of the toolchain.
4. *Interpret.* A separate process runs the unmodified module, with Triton's interpreter in place of launches.

It needs triton, and measures no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpass.diagnostics.report import table
from tests.gpu import binaries as machine
from tests.gpu import module, torch_private
from tests.gpu.binaries import TARGETS, Binary, KernelError, compiled, newer
from tests.gpu.interpreter import Interpreter, InterpreterError, StepResult, Traffic
from tests.gpu.module import Allocation, Launch
from tests.gpu.recording import Step, record

__all__ = [
    "TARGETS",
    "Allocation",
    "Binary",
    "Emission",
    "Interpreter",
    "InterpreterError",
    "KernelError",
    "Launch",
    "Step",
    "StepResult",
    "Traffic",
    "compiled",
    "emit",
    "newer",
    "record",
]

ATTEND = "split_"  # the kernel of `kvpass.lowering.attend_kernel` that reads K and V, as Inductor names it
OUTSIDE = 4  # launches outside the layers: the last norm, the head, and two that all layers share


@dataclasses.dataclass(frozen=True)
class Emission:
    """The module that Inductor generates for one step graph.

    Attributes:
        step: the step graph.
        source: source of the module.
    """

    step: Step
    source: str

    @property
    def kernels(self) -> dict[str, str]:
        """Return the Triton source of every kernel."""
        return module.kernels(self.source)

    @property
    def launches(self) -> list[Launch]:
        """Return every launch in order, including library calls such as matrix products."""
        return module.launches(self.source)

    @property
    def allocations(self) -> list[Allocation]:
        """Return every allocation on the GPU in a step."""
        return module.allocations(self.source)

    @property
    def launches_per_layer(self) -> float:
        """Return launches for each layer, without the launches of a decode graph outside its layers."""
        return (len(self.launches) - OUTSIDE) / self.step.layers

    def binaries(self, targets: Sequence[str] = TARGETS, *, configurations: int | None = 1) -> list[Binary]:
        """Compile every kernel in the first `configurations` that Inductor would try, None for all.

        Raises:
            KernelError: a kernel does not compile.
        """
        return machine.generated(self.kernels, targets, configurations=configurations)

    def run(self, interpreter: Interpreter) -> StepResult:
        """Run the module on the inputs of the CPU's first run.

        Raises:
            InterpreterError: the interpreter cannot run it.
        """
        return interpreter.run(self.source, self.step.inputs)

    def check(self, ran: StepResult, *, metadata: bool = True, **tolerance: Any) -> None:
        """Compare the module's outputs and slots with the CPU, like `torch.testing.assert_close`.

        Args:
            metadata: whether to compare positions, scores and the like. In half precision the two may evict different
                tokens if their scores are nearly equal.
        """
        for got, wanted in zip(ran.outputs, self.step.outputs, strict=False):  # the last output marks the real tokens
            torch.testing.assert_close(got, wanted, **tolerance)
        for name, got, wanted in zip(self.step.names, ran.inputs, self.step.after, strict=True):
            slot = name.startswith("slots_")
            if slot and name.endswith(("_seen", "_length")):
                continue  # on a GPU the runtime counts, for all layers at once
            if metadata or not slot or name.endswith(("_key", "_value")):
                torch.testing.assert_close(got, wanted, **tolerance, msg=partial(_named, name))

    def readers(self, ran: StepResult, name: str) -> list[str]:
        """Return the kernels that read more of the named input than one row for each head."""
        number = self.step.names.index(name)
        buffer = self.step.inputs[number]
        few = buffer.nbytes // buffer.shape[2]
        return [launch.name for launch in ran.traffic if launch.loaded.get(number, 0) > few]

    def report(self, ran: StepResult, binaries: Sequence[Binary] = ()) -> str:
        """Format bytes read and written by each launch, and the resources of compiled kernels."""
        known = {binary.name: binary for binary in binaries}
        rows = [[_short(launch.name), str(launch.read), str(launch.written), *_cells(known.get(name))]
                for launch, name in zip(ran.traffic, self._ran(), strict=False)]  # fmt: skip
        header = ["launch", "bytes read", "bytes written", "target", "registers", "spills", "shared"]
        return table(header, rows)

    def _ran(self) -> list[str]:
        return [launch.name for launch in self.launches]


def _named(name: str, text: str) -> str:
    return f"{name}: {text}"


def _short(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:30]}...{name[-15:]}"


def _cells(binary: Binary | None) -> list[str]:
    if binary is None:
        return ["", "", "", ""]
    return [binary.target, str(binary.registers), str(binary.spills), str(binary.shared)]


def emit(step: Step) -> Emission:
    """Generate the module for a step graph that has run at least once under `record`."""
    with torch_private.pretended_gpu():
        with torch_private.fake_gpu_mode():
            examples = [_fake(argument) for argument in step.inputs]
        return Emission(step, torch_private.generated(step.rewritten_gm, examples, step.patches))


def _fake(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="cuda")
