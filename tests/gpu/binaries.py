"""Compile Triton kernels to machine code for GPUs that are not present: registers, spills, shared memory."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpass.errors import KVPassError
from tests.gpu import torch_private
from tests.gpu.listing import PROCESSORS, Listing, disassembled

TARGETS = ("sm_80", "sm_90")
NEWER = ("sm_100", "sm_120")


class KernelError(KVPassError, RuntimeError):
    """A kernel does not compile for a target; the text is the compiler's."""


@dataclasses.dataclass(frozen=True)
class Binary:
    """One kernel, compiled for one target in one configuration.

    Attributes:
        target: such as "sm_90".
        registers: registers of each thread.
        spills: bytes of each thread in memory for lack of registers.
        shared: bytes of shared memory of a program.
        configuration: block sizes, warps and stages, as text.
        warps: warps of a program.
        cubin: the machine code.
    """

    name: str
    target: str
    registers: int
    spills: int
    shared: int
    configuration: str
    warps: int = 4
    cubin: bytes = dataclasses.field(default=b"", repr=False, compare=False)

    @functools.cached_property
    def listing(self) -> Listing:
        """Disassemble the machine code.

        Raises:
            ListingError: the disassembler rejects it.
        """
        return disassembled(self.cubin)

    @property
    def resident(self) -> int:
        """Return the number of programs that one streaming multiprocessor holds at a time."""
        return PROCESSORS[self.target].resident(self.registers, self.shared, self.warps)


def newer() -> list[str]:
    """Return the targets beyond `TARGETS` that this toolchain assembles for."""
    return [target for target in NEWER if _knows(target)]


def _knows(target: str) -> bool:
    tool = torch_private.assembler(int(target[3:]))
    try:
        options_text = subprocess.run([tool, "--help"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return f"'{target}'" in options_text or target in options_text


def compiled(
    function: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    target: str,
    *,
    attributes: Any = None,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Binary:
    """Compile a `triton.jit` function for a target.

    Args:
        signature: type of every argument, such as "*bf16", "i32" or "constexpr".
        constants: values of the constexpr arguments.
        attributes: assumptions of Triton about arguments, such as divisibility by 16.

    Raises:
        KernelError: the function does not compile.
    """
    capability = int(target.removeprefix("sm_"))
    options = dict(num_warps=num_warps, num_stages=num_stages)
    fused = dict(options, enable_fp_fusion=True)  # triton 3.10 changes the default
    try:
        with torch_private.pretended_gpu():
            ptx, cubin, shared = torch_private.cubin(function, signature, constants, attributes, capability, **fused)
    except Exception as error:
        raise KernelError(f"{function.__name__} for {target} with {constants}: {error}") from error
    registers, spills = _assembled(ptx, capability)
    text = _text({**constants, **options})
    return Binary(function.__name__, target, registers, spills, shared, text, num_warps, cubin)


def _text(configuration: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in configuration.items())


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Return the registers of each thread and the bytes spilled that ptxas reports."""
    architecture = re.search(r"\.target (\w+)", ptx)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            torch_private.assembler(capability),
            "-v",
            f"--gpu-name={architecture[1]}",
            str(path),
            "-o",
            "/dev/null",
        ]
        stderr = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", stderr), re.search(r"(\d+) bytes spill stores", stderr)
    assert registers is not None, stderr
    return int(registers[1]), int(spills[1]) if spills else 0


def generated(
    sources: dict[str, str], targets: Sequence[str] = TARGETS, *, configurations: int | None = 1
) -> list[Binary]:
    """Compile the kernels of a generated module.

    Args:
        sources: result of `module.kernels`.
        configurations: number of Inductor's configurations to compile, from the first; None for all.

    Raises:
        KernelError: a kernel does not compile.
    """
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in sources.items():
            with torch_private.pretended_gpu():
                tuned = torch_private.tuned(source, name, folder)
            for target in targets:
                for config in tuned.configs[:configurations]:
                    binary = _of_config(tuned, config, target)
                    made.append(dataclasses.replace(binary, name=name))
    return made


def _of_config(tuned: Any, config: Any, target: str) -> Binary:
    signature = dict(tuned.triton_meta["signature"])
    constants = {**tuned.triton_meta.get("constants", {}), **config.kwargs}
    constants = {name: value for name, value in constants.items() if name in signature}
    kinds = {name: "constexpr" if name in constants else kind for name, kind in signature.items()}
    attributes = tuned.triton_meta["configs"][0] if tuned.triton_meta.get("configs") else None
    how = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    return compiled(tuned.fn, kinds, constants, target, attributes=attributes, **how)
