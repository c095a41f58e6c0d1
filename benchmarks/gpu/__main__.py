"""Run all checks and measurements, print a table and write JSON; stop at a wrong result or at the deadline."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import checks, layer, model
from benchmarks.gpu.bench import Bench, Row, predicted, table

CHECKS = (checks.attention, checks.prompt_scores, checks.repairs, checks.models)
FIGURES = (
    layer.bandwidth,
    layer.policies,
    layer.repairs,
    layer.caching,
    layer.prompt_scores,
    model.loops,
    model.throughput,
)


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--minutes", type=float, default=8.0, help="no section is begun that would take longer")
    parser.add_argument("--layers", type=int, default=8, help="of the 32 that an 8B has; compiling takes its time")
    parser.add_argument("--predict", action="store_true", help="count the kernels' machine code; needs no GPU")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on the CPU: nothing is measured")
    given = parser.parse_args(arguments)
    if given.predict:
        from benchmarks.gpu import predict  # needs triton, which some machines lack

        predict.main()
        return 0
    if not given.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs small sizes on the CPU")
    device = torch.device("cpu" if given.rehearse else "cuda")
    layers = 2 if given.rehearse else given.layers
    bench = Bench(device, given.rehearse, layers, time.monotonic() + 60 * given.minutes)
    return _run(bench, given.out)


def _run(bench: Bench, out: Path) -> int:
    rows: list[Row] = []
    expected = predicted(_device(bench))
    for section in CHECKS:
        rows += section(bench)
    wrong = [row for row in rows if row.met is False]
    for figure in FIGURES if not wrong else ():
        if bench.in_time(figure.__name__):
            rows += [row.beside(expected) for row in figure(bench)]
            _write(bench, rows, out)  # keeps results if the run is interrupted
    _write(bench, rows, out)
    print("\n".join(table(rows)))
    print("not run, for want of time:", ", ".join(bench.left_out) or "nothing")
    return 1 if wrong else 0


def _device(bench: Bench) -> str:
    return torch.cuda.get_device_name() if bench.device.type == "cuda" else "a rehearsal on a CPU"


def _write(bench: Bench, rows: list[Row], out: Path) -> None:
    about = {"device": _device(bench), "torch": torch.__version__, "layers": bench.layers, "rehearsal": bench.small}
    out.mkdir(parents=True, exist_ok=True)
    report = {**about, "rows": [dataclasses.asdict(row) for row in rows], "left_out": bench.left_out}
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
