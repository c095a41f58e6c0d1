"""Compare the graphs and outputs of many small models under all policies with the recorded ones.

python -m tests.golden                                      # compare all cases; exits with 1 if one differs
python -m tests.golden --models Llama gpt_oss --policies h2o
python -m tests.golden --write --jobs 2                     # record all cases again
python -m tests.golden --write --models Llama               # record some again; others stay unchanged
python -m tests.golden --write --missing                    # record missing cases, after an interruption
python -m tests.golden --texts out/golden                   # also write every graph to a file

Compile and step times are not measured here: `python -m benchmarks compilation step` does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvpass import policies
from tests.golden import cases, store
from tests.golden.record import Recording, record
from tests.golden.store import Case
from tests.quick import trace_quickly

SAVE_EVERY = 60
"""Seconds between saves."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record, and do not compare")
    parser.add_argument("--missing", action="store_true", help="with --write: only cases that are not recorded")
    parser.add_argument("--models", nargs="+", choices=cases.MODELS, default=cases.MODELS, metavar="MODEL")
    parser.add_argument("--policies", nargs="+", choices=policies.names(), default=policies.names(), metavar="POLICY")
    parser.add_argument("--jobs", type=int, default=1, help="how many models at a time (default: %(default)s)")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="also write the graphs of every stage there")
    options = parser.parse_args()
    stored = store.load()
    if not options.write and stored["versions"] != store.versions():
        print(f"recorded with {stored['versions']}, and these are {store.versions()}", file=sys.stderr)
        return 1
    selected = cases.cases(tuple(options.models), tuple(options.policies))
    missing = [case for case in selected if " | ".join(case) not in stored["cases"]]
    if options.missing and options.write:
        selected = missing
    elif missing and not options.write:
        print(f"{len(missing)} cases are not recorded, and left out: see --missing", file=sys.stderr)
        selected = [case for case in selected if case not in missing]
    start = time.monotonic()
    recordings = tqdm(record_cases(selected, options.jobs, options.texts), total=len(selected), disable=None)
    different = _write(recordings, stored) if options.write else _compare(recordings, stored)
    compared = "" if options.write else f", {different} different"
    print(f"{len(selected)} cases in {time.monotonic() - start:.0f} s{compared}")
    return int(different > 0)


def _write(recorded_cases: Iterable[tuple[Case, Recording]], stored: dict[str, Any]) -> int:
    """Store recordings, every few models, so that an interruption costs little; return 0."""
    recordings, saved = dict[Case, Recording](), time.monotonic()
    for case, recording in recorded_cases:
        recordings[case] = recording
        if "tokens" not in recording.outputs:
            tqdm.write(f"{' under '.join(case)}: {recording.outputs}")
        if time.monotonic() > saved + SAVE_EVERY:
            store.save(recordings, stored, quickly=True)
            saved = time.monotonic()
    print(f"{store.save(recordings, stored)} bytes in {store.FILE.name}")
    return 0


def _compare(recorded_cases: Iterable[tuple[Case, Recording]], stored: dict[str, Any]) -> int:
    """Print the differences of recordings from the stored ones, and return how many cases differ."""
    different = 0
    for case, recording in recorded_cases:
        if difference := store.difference(case, recording, stored):
            different += 1
            tqdm.write(f"{' under '.join(case)}\n{difference}\n")
    return different


def record_cases(selected: Sequence[Case], jobs: int, texts: Path | None = None) -> Iterator[tuple[Case, Recording]]:
    """Yield the recording of each case, model by model, from separate processes; write texts to a folder."""
    by_model: dict[str, list[str]] = {}
    for model, policy in selected:
        by_model.setdefault(model, []).append(policy)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=trace_quickly) as pool:
        futures = {pool.submit(record, model, names): model for model, names in by_model.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                for policy, recording in future.result().items():
                    case = (futures[future], policy)
                    if texts:
                        _write_texts(texts, case, recording)
                    yield case, recording
        finally:
            pool.shutdown(cancel_futures=True)  # after an interruption


def _write_texts(folder: Path, case: Case, recording: Recording) -> None:
    """Write each graph as a file whose name has its number alone, as titles may change."""
    case_folder = folder / re.sub(r"\W+", "-", " ".join(case))
    case_folder.mkdir(parents=True, exist_ok=True)
    for number, (_, text) in enumerate(recording.stages):
        (case_folder / f"{number:03}.txt").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
