"""Run functions in separate processes, with their own threads, memory and compiler caches.

`run("benchmarks.prompt:peak", policy="h2o")` starts `python -m benchmarks.apart`, which calls the function and prints
its result as JSON. Progress bars of the function stay visible.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parents[1]


def run(function: str, *, threads: int = 1, environment: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """Return the result of `module:function` from a fresh process with `threads` threads.

    Args:
        arguments: arguments of the function; they and the result must be representable in JSON.
    """
    command = [sys.executable, "-m", "benchmarks.apart", function, str(threads), json.dumps(arguments)]
    done = subprocess.run(
        command, env=surroundings(threads, environment), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def kvpass(arguments: Sequence[str]) -> None:
    """Run the command `kvpass` on one thread in a separate process, without its output."""
    command = [sys.executable, "-m", "kvpass.apps.cli", *arguments]
    subprocess.run(command, env=surroundings(1), check=True, stdout=subprocess.DEVNULL)


def kvpass_each(commands: Sequence[Sequence[str]], name: str) -> None:
    """Run several commands `kvpass`, one on each core, with a progress bar of this name."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [pool.submit(kvpass, arguments) for arguments in commands]
        for each in tqdm(concurrent.futures.as_completed(started), total=len(started), unit="job", desc=name):
            each.result()


def surroundings(threads: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of a process with `threads` threads that imports this checkout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), **(more or {})}


def main(function: str, threads: str, arguments: str) -> None:
    import torch

    torch.set_num_threads(int(threads))
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
