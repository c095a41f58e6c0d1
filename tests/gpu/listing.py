"""Analyse the machine code of a kernel: instructions, loops, waits, and programs for each multiprocessor.

Everything is counted as one warp executes it. `nvdisasm` ships with Triton.
"""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvpass.errors import KVPassError
from tests.gpu import torch_private

WARP = 32
COVERED = 300  # instructions of a warp by itself: at four cycles each about 700 ns, the latency of memory under load
_LABEL = re.compile(r"(\.L_x_\d+):")
_LINE = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)(.*)")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_BARRIER = re.compile(r"SB0, 0x([0-9a-f]+)")
_REGISTER = re.compile(r"\bR(\d+)")
_MATRIX = re.compile(r"(?:HMMA\.(?P<m>16)(?P<n>8)(?P<k>\d+)|HGMMA\.(?P<M>\d+)x(?P<N>\d+)x(?P<K>\d+))")

GLOBAL_LOADS, ASYNCHRONOUS, GLOBAL_STORES = ("LDG",), ("LDGSTS", "UBLKCP", "UTMALDG"), ("STG",)
SHARED = ("LDS", "STS", "LDSM", "STSM")
TENSOR = ("HMMA", "HGMMA", "IMMA", "IGMMA")
SPILLED = ("LDL", "STL")


class ListingError(KVPassError, ValueError):
    """The machine code has an unexpected form."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction with its modifiers, such as "LDG.E.128", and its operands as text."""

    name: str
    operands: str = ""

    @property
    def kind(self) -> str:
        """Return the name without modifiers."""
        return self.name.partition(".")[0]

    @property
    def width(self) -> int:
        """Return the bytes that a memory access moves for each thread; 0 for other instructions."""
        parts = self.name.split(".")
        if self.kind in ("LDSM", "STSM"):
            return 4 * int(parts[-1]) if parts[-1].isdigit() else 4  # number of matrices of 8 by 8 halves
        if self.kind not in (*GLOBAL_LOADS, "LDGSTS", *GLOBAL_STORES, *SHARED, *SPILLED):
            return 0
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        return next((sizes[part] for part in parts[1:] if part in sizes), 4)

    @property
    def writes(self) -> set[int]:
        """Return the registers that a load fills."""
        first = _REGISTER.match(self.operands)
        return set(range(int(first[1]), int(first[1]) + max(1, self.width // 4))) if first else set()

    @property
    def reads(self) -> set[int]:
        """Return the registers after the first operand, or all if that is no register; of ranges the first."""
        named = [int(number) for number in _REGISTER.findall(self.operands)]
        return set(named[1:] if _REGISTER.match(self.operands) else named)

    @property
    def left(self) -> int | None:
        """Return how many groups of asynchronous copies may be pending after it; None if it does not wait for them."""
        found = _BARRIER.match(self.operands) if self.kind == "DEPBAR" else None
        return int(found[1], 16) if found else None

    @property
    def flops(self) -> int:
        """Return the operations of a warp on tensor cores; four warps share one product of HGMMA."""
        found = _MATRIX.match(self.name)
        if found is None:
            return 0
        if found["m"]:
            return 2 * int(found["m"]) * int(found["n"]) * int(found["k"])
        return 2 * int(found["M"]) * int(found["N"]) * int(found["K"]) // 4


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often a warp executes each instruction; fractional for averages over loops."""

    times: dict[Instruction, float]

    @property
    def instructions(self) -> float:
        return sum(self.times.values())

    def of(self, *kinds: str) -> float:
        """Return the number of instructions of some kinds, such as "MUFU"."""
        return sum(n for x, n in self.times.items() if x.kind in kinds)

    def moved(self, *kinds: str) -> float:
        """Return the bytes that a warp moves with instructions of some kinds, with all threads active."""
        return sum(WARP * x.width * n for x, n in self.times.items() if x.kind in kinds)

    def widths(self, *kinds: str) -> dict[str, float]:
        """Return the number of accesses by name, such as {"LDGSTS.E.BYPASS.128": 16}."""
        named: dict[str, float] = {}
        for x, n in self.times.items():
            if x.kind in kinds:
                named[x.name] = named.get(x.name, 0) + n
        return named

    @property
    def flops(self) -> float:
        return sum(x.flops * n for x, n in self.times.items())


@dataclasses.dataclass(frozen=True)
class Loop:
    """Instructions from `start` to the branch back at `stop` - 1."""

    start: int
    stop: int

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop


@dataclasses.dataclass(frozen=True)
class Listing:
    """The instructions of a kernel in order, and its loops by their beginnings, outer ones first."""

    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]

    @property
    def innermost(self) -> list[Loop]:
        """Return the loops that contain no other loop."""
        return [loop for loop in self.loops if not any(x.start in loop and x != loop for x in self.loops)]

    def inside(self, loop: Loop) -> Counts:
        """Count one iteration of a loop."""
        return _counted((x, 1) for x in self.instructions[loop.start : loop.stop])

    def often(self, turns: Sequence[float]) -> list[float]:
        """Return the executions of each instruction, given the iterations of each loop each time it is entered.

        Raises:
            ListingError: the number of loops differs.
        """
        if len(turns) != len(self.loops):
            raise ListingError(f"{len(self.loops)} loops in the machine code, and turns were given for {len(turns)}")
        around = list(zip(self.loops, turns, strict=True))
        return [
            math.prod(turn for loop, turn in around if index in loop) for index in range(len(self.instructions))
        ]  # fmt: skip

    def executed(self, turns: Sequence[float]) -> Counts:
        """Count a complete run."""
        return _counted(zip(self.instructions, self.often(turns), strict=True))

    def moved(self, turns: Sequence[float]) -> float:
        """Return the bytes that a warp moves from and to global memory.

        Asynchronous copies before a loop belong to its first iteration; its last iteration has them predicated off.
        """
        often = zip(range(len(self.instructions)), self.instructions, self.often(turns), strict=True)
        counted = _counted((x, n) for index, x, n in often if x.kind not in ASYNCHRONOUS or self._looped(index))
        return counted.moved(*GLOBAL_LOADS, *ASYNCHRONOUS, *GLOBAL_STORES)

    def _looped(self, index: int) -> bool:
        return any(index in loop for loop in self.loops)

    def waited(self, turns: Sequence[float]) -> float:
        """Return the number of consecutive global memory latencies in a complete run; see `waits`."""
        often = self.often(turns)
        outside = [x for index, x in enumerate(self.instructions) if not self._looped(index)]
        return _Clock().waited(outside) + sum(self.waits(loop) * often[loop.start] for loop in self.innermost)

    def waits(self, loop: Loop) -> float:
        """Return the global memory latencies, or fractions of them, that a warp by itself waits for in an iteration.

        It waits where it reads a register with a pending load, and for asynchronous copies. `COVERED` instructions
        between request and wait take as long as one latency.
        """
        clock = _Clock()
        turn = self.instructions[loop.start : loop.stop]
        counted = [clock.waited(turn) for _ in range(3)]  # the requests are for later iterations
        return counted[2]


class _Clock:
    """Follows a warp instruction by instruction."""

    def __init__(self) -> None:
        self.now = 0
        self.coming: dict[int, int] = {}  # registers, and the time of their request
        self.copies: list[int] = []  # completion time of each group of copies

    def waited(self, instructions: Iterable[Instruction]) -> float:
        """Return the latencies waited for; meanwhile time passes for all pending requests."""
        total = 0
        for instruction in instructions:
            self.now += 1
            awaited = [self.coming.pop(register) for register in instruction.reads & self.coming.keys()]
            awaited += self._finished(instruction)
            late = max([0, *(when + COVERED - self.now for when in awaited)])
            total, self.now = total + late, self.now + late
            if instruction.kind in GLOBAL_LOADS:
                self.coming |= dict.fromkeys(instruction.writes, self.now)
            elif instruction.kind == "LDGDEPBAR":
                self.copies.append(self.now)
        return total / COVERED

    def _finished(self, instruction: Instruction) -> list[int]:
        """Return the youngest group of copies that an instruction waits for."""
        left = instruction.left
        if left is None or len(self.copies) <= left:
            return []
        done = self.copies[-1 - left]
        self.copies = self.copies[len(self.copies) - left :] if left else []
        return [done]


def _counted(times: Iterable[tuple[Instruction, float]]) -> Counts:
    counted: dict[Instruction, float] = {}
    for instruction, often in times:
        counted[instruction] = counted.get(instruction, 0) + often
    return Counts(counted)


def parsed(text: str) -> Listing:
    """Parse the listing that `nvdisasm -c` prints.

    Raises:
        ListingError: the listing has no instructions.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            instructions.append(Instruction(found[1], found[2].strip()))
    if not instructions:
        raise ListingError("no instructions in what the disassembler printed")
    return Listing(tuple(instructions), tuple(_loops(instructions, labels)))


def _loops(instructions: Iterable[Instruction], labels: dict[str, int]) -> list[Loop]:
    """Find loops by branches to earlier instructions, except the self-branch after the end of a kernel."""
    ends: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        target = _TARGET.search(instruction.operands) if instruction.kind == "BRA" else None
        start = labels.get(target[1], index) if target else index
        if start < index:
            ends[start] = max(index + 1, ends.get(start, 0))
    return [Loop(start, ends[start]) for start in sorted(ends)]


def disassembled(cubin: bytes) -> Listing:
    """Disassemble a binary.

    Raises:
        ListingError: the disassembler rejects it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run(
            [torch_private.disassembler(), "-c", str(path)], capture_output=True, text=True, check=False
        )
    if said.returncode:
        raise ListingError(f"nvdisasm: {said.stderr}")
    return parsed(said.stdout)


@dataclasses.dataclass(frozen=True)
class Processor:
    """Limits of one streaming multiprocessor (CUDA programming guide, table of technical specifications)."""

    registers: int = 64 << 10
    warps: int = 64
    programs: int = 32
    shared: int = 228 << 10

    def resident(self, registers: int, shared: int, warps: int) -> int:
        """Return the number of resident programs, given registers of a thread, bytes of shared memory and warps.

        Registers are allocated to warps in units of 8 for each thread, a quarter of the warps to each of four
        partitions. Each program takes one more KiB of shared memory.
        """
        of_warp = -(-registers // 8) * 8 * WARP
        by_registers = self.registers // 4 // of_warp * 4 // warps
        return min(by_registers, self.warps // warps, self.programs, self.shared // (shared + 1024))


PROCESSORS = {"sm_80": Processor(shared=164 << 10), "sm_90": Processor()}
