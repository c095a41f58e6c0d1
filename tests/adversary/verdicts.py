"""Record which rows of the adversary equal the uncompiled model, so that none is refused unnoticed.

python -m tests.adversary.verdicts    # five minutes
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("held.txt")


def recorded() -> frozenset[str]:
    """Return the names of the rows that were equal when the file was written."""
    return frozenset(FILE.read_text(encoding="utf-8").split())


def main() -> None:
    """Judge all rows under the policy `full`, and write the names of those that are equal."""
    from tests.adversary.oracle import judge
    from tests.adversary.test_cases import ROWS

    verdicts = {row.name: judge(row.make()) for row in ROWS}
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict.kind}", flush=True)
    FILE.write_text("".join(f"{name}\n" for name, each in verdicts.items() if each.kind == "held"), encoding="utf-8")


if __name__ == "__main__":
    main()
