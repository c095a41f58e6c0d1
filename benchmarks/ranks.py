"""Compute what a decode step exchanges when the heads of a model are sharded over processes.

    python -m benchmarks.ranks
    python -m benchmarks.ranks --layers 32 --heads 32 --hidden 4096 --rows 8 --budget 2048 --ranks 2 4 8

In a ring all-reduce of S bytes, each of n processes sends and receives 2 (n - 1) / n S bytes. The model has two in
each layer, after attention and after the MLP, of [rows, 1, hidden] in half precision. Those of a policy are float32;
tests/distributed compares them with the graphs. docs/distributed.md has the table.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from kvpass.policies import Policy, resolve
from kvpass.policies.cascade import Cascade
from kvpass.policies.d2o import D2O
from kvpass.policies.tova import Tova

HALF, SINGLE = 2, 4  # bytes


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model and a batch: layers, query heads, width, rows, and tokens kept."""

    layers: int = 80
    heads: int = 64
    hidden: int = 8192
    rows: int = 1
    budget: int = 1024


SHOWN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tova", {}),
    ("cascade", {}),
    ("cascade", {"reduce": "median"}),
    ("cascade", {"heads": "kv"}),
    ("d2o", {}),
    ("d2o", {"merge": "official"}),
    ("h2o", {}),
    ("random", {}),
    ("streaming", {}),
)


def exchanged(policy: Policy, model: Model) -> int:
    """Return the count of numbers in a policy's all-reduce of one layer and step; 0 for none."""
    slots = model.rows * policy.capacity(model.budget)
    if isinstance(policy, Tova):
        return slots
    if isinstance(policy, Cascade) and policy.heads == "shared":
        return slots * (model.heads if policy.reduce == "median" else 1)
    if isinstance(policy, D2O) and policy.merge == "official":
        return model.rows
    return 0


def sent(count: int, size: int, layers: int, ranks: int) -> float:
    """Return the bytes that a process sends in a step for an all-reduce of `count` numbers in each layer."""
    return 2 * (ranks - 1) / ranks * count * size * layers


def table(model: Model, ranks: Sequence[int]) -> str:
    """Return kilobytes that each process sends in a step, for policies and the model itself, as Markdown."""
    head = ["policy", "all-reduces of a layer", *(f"{n} processes, kB" for n in ranks)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    own = [sent(2 * model.rows * model.hidden, HALF, model.layers, n) for n in ranks]
    lines.append(["the model itself", "2", *(f"{each / 1e3:,.1f}" for each in own)])
    for name, options in SHOWN:
        count = exchanged(resolve(name, dict(options)), model)
        told = ", ".join(f"{option}={given!r}" for option, given in options.items())
        more = [f"{sent(count, SINGLE, model.layers, n) / 1e3:,.1f}" for n in ranks]
        lines.append([f"{name}({told})" if told else name, str(int(count > 0)), *more])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Model):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    given = vars(parser.parse_args(arguments))
    ranks = given.pop("ranks")
    print(table(Model(**given), ranks))


if __name__ == "__main__":
    main()
