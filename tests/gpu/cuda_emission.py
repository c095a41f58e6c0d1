"""What Inductor makes of a rewritten graph for an NVIDIA GPU, on a machine that has none.

    compiled, steps = cuda_emission.record(model, policy="h2o", budget=256)
    out = compiled(ids, use_cache=True)  # runs on the CPU, uncompiled
    out = compiled(next_id, cache=out.cache, use_cache=True)

    emission = cuda_emission.emit(steps[0])
    emission.launches, emission.allocations  # from the code
    emission.binaries(("sm_80", "sm_90"))  # registers, spills and shared memory of every kernel
    with cuda_emission.Interpreter() as interpreter:
        ran = emission.run(interpreter)  # the whole module on CPU tensors, and the bytes that it touched
        emission.check(ran)  # the same as the CPU's
        print(emission.report(ran))

Four steps, each of which can be used alone.

1. *Record.*  The model runs on the CPU.  Beside every step graph the rewrite makes a second one as it would on a
   GPU, from the same graph of Dynamo's with fake tensors on a device "cuda".  A tensor that policies or lowerings
   leave on the wrong device is an error here.
2. *Emit.*  Inductor's whole pipeline, with the configuration that `kvpass.backend` gives it, up to the module's
   source; what would need a GPU to measure is left out (padding the operands of products).
3. *Compile.*  Every kernel by Triton's compiler and ptxas, for any target that the toolchain has.
4. *Interpret.*  The unmodified module, with Triton's interpreter in place of its launches, in a process of its own.

Needs triton.  Nothing here can say how fast anything is.
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
OUTSIDE = 4  # launches of a decode graph outside its layers: the last norm, the head, and two that they share


@dataclasses.dataclass(frozen=True)
class Emission:
    """The module that Inductor generated for one step graph.

    Attributes:
        step: what it was generated from.
        source: the module.
    """

    step: Step
    source: str

    @property
    def kernels(self) -> dict[str, str]:
        """Triton's source of every kernel."""
        return module.kernels(self.source)

    @property
    def launches(self) -> list[Launch]:
        """Every launch, in order; library calls, such as those for matrix products, included."""
        return module.launches(self.source)

    @property
    def allocations(self) -> list[Allocation]:
        """Everything that is allocated on the GPU in a step."""
        return module.allocations(self.source)

    @property
    def launches_per_layer(self) -> float:
        """Launches, without the few that a decode graph has outside its layers, divided by the layers."""
        return (len(self.launches) - OUTSIDE) / self.step.layers

    def binaries(self, targets: Sequence[str] = TARGETS, *, configurations: int | None = 1) -> list[Binary]:
        """Compile every kernel; `configurations` of those that Inductor would try, None for all.

        Raises:
            KernelError: one does not compile.
        """
        return machine.generated(self.kernels, targets, configurations=configurations)

    def run(self, interpreter: Interpreter) -> StepResult:
        """Run the module on the inputs that the CPU had.

        Raises:
            InterpreterError: the interpreter cannot run it.
        """
        return interpreter.run(self.source, self.step.inputs)

    def check(self, ran: StepResult, *, metadata: bool = True, **tolerance: Any) -> None:
        """Compare what the module gave, and what it left in the slots, with the CPU; as torch.testing.assert_close.

        Args:
            metadata: compare positions, scores and the like too.  In half precision the two may disagree on
                which of two tokens is worth less when they are worth nearly the same.
        """
        for got, wanted in zip(ran.outputs, self.step.outputs, strict=False):  # the last says which tokens are real
            torch.testing.assert_close(got, wanted, **tolerance)
        for name, got, wanted in zip(self.step.names, ran.inputs, self.step.after, strict=True):
            slot = name.startswith("slots_")
            if slot and name.endswith(("_seen", "_length")):
                continue  # on a GPU the runtime counts, for all layers at once
            if metadata or not slot or name.endswith(("_key", "_value")):
                torch.testing.assert_close(got, wanted, **tolerance, msg=partial(_named, name))

    def readers(self, ran: StepResult, name: str) -> list[str]:
        """The kernels that read more of the input of that name than one row for each head."""
        number = self.step.names.index(name)
        buffer = self.step.inputs[number]
        few = buffer.nbytes // buffer.shape[2]
        return [launch.name for launch in ran.traffic if launch.loaded.get(number, 0) > few]

    def report(self, ran: StepResult, binaries: Sequence[Binary] = ()) -> str:
        """Launch by launch: bytes read and written, and of the kernels that were compiled what they need."""
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
    """Generate the module for a step graph that `record` has run at least once."""
    with torch_private.pretended_gpu():
        with torch_private.fake_gpu_mode():
            examples = [_fake(argument) for argument in step.inputs]
        return Emission(step, torch_private.generated(step.gm, examples, step.patches))


def _fake(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="cuda")
