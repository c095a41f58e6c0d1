"""Model the time of a launch from counts of its machine code.

A launch takes as long as the slowest of its resources: memory, the second-level cache, instruction issue, one of the
pipes, or the latencies that a program cannot hide. The model assumes perfect overlap, no bank conflicts and even work.
So a real run can only be slower; measurements show by how much.
"""

from __future__ import annotations

import dataclasses
import math

from tests.gpu.listing import SHARED, Counts

REACHED = 0.92  # share of the memory's bandwidth that copies and reads reach
LATENCY = 700e-9  # seconds from a load to its arrival, from memory under load
NEAR = 300e-9  # seconds from a load to its arrival, from the second-level cache
LAUNCH = 2e-6  # seconds until a queued kernel has programs running, and until its end is noticed
ALONE = 4  # cycles from one instruction of a warp to the next if it has a scheduler alone
ALU = (
    "LOP3",
    "PRMT",
    "IADD3",
    "VIADD",
    "ISETP",
    "SEL",
    "SHF",
    "FMNMX",
    "FSEL",
    "FSETP",
    "LEA",
    "F2FP",
    "PLOP3",
    "SGXT",
)
ALU = (*ALU, "I2FP", "I2F", "F2F", "F2I", "IMNMX", "VIADDMNMX", "P2R", "R2P", "IABS", "MOV")
FMA = ("FFMA", "FMUL", "FADD", "HADD2", "HMUL2", "HFMA2")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Specifications of a GPU by its maker, except the second-level cache, which is an assumption.

    Attributes:
        memory, cache: bytes per second.
        clock: cycles per second that are held under load.
        tensor: operations of a multiprocessor in a cycle in half precision, by HGMMA.
        warp_tensor: the share of these that HMMA reaches, whose operands come from registers.
    """

    name: str
    memory: float
    cache: float = 5.5e12
    processors: int = 132
    clock: float = 1.7e9
    tensor: int = 4096
    warp_tensor: float = 0.62


GPUS = (Gpu("H100", 3.35e12), Gpu("H200", 4.8e12))


@dataclasses.dataclass(frozen=True)
class Work:
    """Counts of one launch.

    Attributes:
        programs: number of programs.
        warps: warps of each program.
        resident: programs of each multiprocessor at a time.
        memory, cache: bytes that all programs move from and to either.
        counts: instructions that a warp executes from first to last.
        waits: consecutive latencies in one program.
        latency: seconds of each latency.
    """

    programs: int
    warps: int
    resident: int
    memory: float
    cache: float
    counts: Counts
    waits: float
    latency: float = LATENCY


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of a launch, and of each limit alone."""

    total: float
    limits: dict[str, float]

    @property
    def bound(self) -> str:
        """Return the limit that takes longest."""
        return max(self.limits, key=lambda name: self.limits[name])


def cycles(gpu: Gpu, counts: Counts, warps: int) -> dict[str, float]:
    """Return the cycles of a multiprocessor that one program keeps each of its parts busy.

    Throughputs are those of compute capability 9.0 in the CUDA programming guide: a scheduler issues one instruction in
    each cycle, the integer pipe takes one every two, the special functions one every eight.
    """
    tensor = sum(x.flops * n / (1 if x.kind == "HGMMA" else gpu.warp_tensor) for x, n in counts.times.items())
    halved = sum(x.flops * n for x, n in counts.times.items() if "TF32" in x.name)  # at half the rate
    return {
        "issue": counts.instructions * warps / 4,
        "integers": 2 * counts.of(*ALU) * warps / 4,
        "floats": (counts.of(*FMA) + 2 * counts.of("IMAD")) * warps / 4,
        "functions": 8 * counts.of("MUFU") * warps / 4,
        "shared memory": max(counts.moved(*SHARED) / 128, counts.of(*SHARED, "SHFL")) * warps,
        "tensor cores": (tensor + halved / gpu.warp_tensor) * warps / gpu.tensor,
    }


def seconds(gpu: Gpu, work: Work) -> Time:
    """Return the time of a launch: as many programs at a time as the GPU holds, wave after wave."""
    cap = gpu.processors * work.resident
    waves = [cap] * (work.programs // cap) + [work.programs % cap] * (work.programs % cap > 0)
    busy = cycles(gpu, work.counts, work.warps)
    alone = work.waits * work.latency + ALONE * work.counts.instructions / gpu.clock
    limits: dict[str, float] = {}
    total = LAUNCH
    for running in waves:
        share = running / work.programs
        each = {name: math.ceil(running / gpu.processors) * x / gpu.clock for name, x in busy.items()}
        each |= {"memory": share * work.memory / (gpu.memory * REACHED), "cache": share * work.cache / gpu.cache}
        each["latency"] = alone
        total += max(each.values())
        limits = {name: limits.get(name, 0.0) + x for name, x in each.items()}
    return Time(total, limits)
