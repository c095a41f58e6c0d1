"""Measure the memory that a process holds after its first tokens, compared with the uncompiled model.

Each process loads SmolLM2-135M-Instruct and decodes thirty tokens, the first from a prompt. The first process of a
policy finds no compiled code on disk, the second one finds that of the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from benchmarks import apart, memory
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from kvpass.apps import checkpoint

TITLE = "Memory of a process after its first tokens"
UNCOMPILED, IMPORTS = "uncompiled", "uncompiled, and torch.compile of x + 1"
POLICIES = ("streaming", "h2o")
COLD, WARM = "cold", "second process"
MOST = 150.0  # MiB above the uncompiled model


def measure(settings: Settings) -> list[Row]:
    """Return a row for each process."""
    dtypes, policies = (settings.dtypes[:1], POLICIES[-1:]) if settings.quick else (settings.dtypes, POLICIES)
    pairs = [(name, dtype) for dtype in dtypes for name in (UNCOMPILED, IMPORTS, *policies)]
    return [row for pair in tqdm(pairs, unit="model", desc="footprint", dynamic_ncols=True) for row in _rows(*pair)]


def _rows(name: str, dtype: str) -> Iterator[Row]:
    given = dict(weights=str(checkpoint.folder()), dtype=dtype, policy=name if name in POLICIES else None)
    with tempfile.TemporaryDirectory() as folder:
        for caches in (COLD, WARM) if name in POLICIES else (COLD,):
            environment = {"TORCHINDUCTOR_CACHE_DIR": folder}
            more = {"compiles": name != UNCOMPILED}
            found = apart.run("benchmarks.memory:stages", environment=environment, **given, **more)
            yield {"contender": name, "dtype": dtype, "caches": caches, **found}


def tables(rows: Sequence[Row]) -> list[Table]:
    return [
        Table(
            f"Resident MiB, {dtype}, 1 thread",
            [
                {"contender": row["contender"], "compiled code": row["caches"] if row["contender"] in POLICIES else ""}
                | {name: row[name] for name in (*memory.STAGES, memory.SETTLED)}
                | {"more than uncompiled": more}
                for row, more in _compared(rows, dtype)
            ],
        )
        for dtype in dict.fromkeys(row["dtype"] for row in rows)
    ]


def _compared(rows: Sequence[Row], dtype: str) -> Iterator[tuple[Row, float]]:
    """Yield each row of a dtype with the MiB that the process finally holds above the uncompiled model."""
    chosen = [row for row in rows if row["dtype"] == dtype]
    plain = next(row for row in chosen if row["contender"] == UNCOMPILED)
    for row in chosen:
        yield row, row[memory.SETTLED] - plain[memory.SETTLED]


def targets(rows: Sequence[Row]) -> list[Target]:
    return [
        Target("footprint", f"{row['contender']}, {dtype}, {row['caches']}: MiB more than uncompiled", MOST, more)
        for dtype in dict.fromkeys(row["dtype"] for row in rows)
        for row, more in _compared(rows, dtype)
        if row["contender"] in POLICIES
    ]
