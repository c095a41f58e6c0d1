"""List the contenders, and make their environments and the weights in their formats."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import apart, environments
from benchmarks.environments import Unavailable
from benchmarks.rivals import weights
from benchmarks.rivals.engine import Setup
from benchmarks.worker import Worker
from kvpass.apps import checkpoint
from kvpass.torch_private import processor

BUDGET = 512


@dataclasses.dataclass(frozen=True)
class Contender:
    """An engine and the bound of its cache.

    Attributes:
        adapter: the class of the engine, as `module:Class`.
        package: the key of its environment in `PACKAGES`; None for the environment of kvpass.
        budget, policy: see `Setup`.
    """

    name: str
    adapter: str
    package: str | None = None
    budget: int | None = None
    policy: str | None = None


OPENVINO, LLAMA = "openvino", "llama.cpp"
PACKAGES: dict[str, tuple[str, ...]] = {
    OPENVINO: ("openvino-genai==2026.4.1.0",),
    LLAMA: ("llama-cpp-python==0.3.36",),
}
VARIABLES = {LLAMA: {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}}  # built from source for this processor
QUANTISER = ("torchao==0.18.0",)
"""The package with torch's int8 weights, kept out of the environment of kvpass, whose tests need none."""
UNCOMPILED, STATIC = "uncompiled, DynamicCache", "torch.compile, StaticCache"
REFERENCE = "kvpass, streaming"
"""The contender that ratios are relative to."""
_HERE = "benchmarks.rivals"
ALL = (
    Contender(UNCOMPILED, f"{_HERE}.torch_models:Uncompiled"),
    Contender(STATIC, f"{_HERE}.torch_models:Static"),
    Contender("OpenVINO GenAI, full", f"{_HERE}.openvino:OpenVINO", OPENVINO),
    Contender("OpenVINO GenAI, evicting", f"{_HERE}.openvino:OpenVINO", OPENVINO, BUDGET),
    Contender("llama.cpp, full", f"{_HERE}.llama_cpp:LlamaCpp", LLAMA),
    Contender("llama.cpp, shifting", f"{_HERE}.llama_cpp:LlamaCpp", LLAMA, BUDGET),
    Contender(REFERENCE, f"{_HERE}.kvpass_engines:Forward", None, BUDGET, "streaming"),
    Contender("kvpass, h2o", f"{_HERE}.kvpass_engines:Forward", None, BUDGET, "h2o"),
    Contender("DecodeLoop, h2o", f"{_HERE}.kvpass_engines:Loop", None, BUDGET, "h2o"),
)


def named(names: Sequence[str]) -> list[Contender]:
    """Return the contenders of these names, in the order of the list."""
    return [contender for contender in ALL if contender.name in names]


def start(
    contender: Contender, precision: str, threads: int, folder: Path, variables: dict[str, str] | None = None
) -> Worker:
    """Start a contender in a separate process; make missing environments and weights.

    Args:
        folder: folder for environments, weights and logs.
        variables: further environment variables of the process.

    Raises:
        Unavailable: the environment or the weights cannot be made, or the engine does not load.
    """
    python = interpreter(contender.package, folder)
    if contender.package is None and precision == "int8":
        found = (str(apart.ROOT), str(environments.library(folder / "torchao", QUANTISER)))
        path = os.pathsep.join([*found, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"PYTHONPATH": path, **(variables or {})}
    held = _weights(contender.package, precision, python, folder)
    setup = Setup(str(held), precision, threads, contender.budget, contender.policy)
    command = [str(python), "-m", f"{_HERE}.engine", contender.adapter, json.dumps(dataclasses.asdict(setup))]
    log = folder / "logs" / f"{contender.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    return Worker(command, apart.surroundings(threads, variables), log)


def interpreter(package: str | None, folder: Path) -> Path:
    """Return the Python that a contender runs in.

    Raises:
        Unavailable: it cannot be made.
    """
    if package is None:
        return Path(sys.executable)
    return environments.python(folder / _environment(package), PACKAGES[package], VARIABLES.get(package))


def _environment(package: str) -> str:
    """Return the name of a folder; what is compiled for one processor has another one than on the next."""
    if package not in VARIABLES:
        return f"{package}-environment"
    flags = " ".join(sorted(processor.flags_of_processor()))
    return f"{package}-environment-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _weights(package: str | None, precision: str, python: Path, folder: Path) -> Path:
    if package is None:
        return checkpoint.folder()
    if package == LLAMA:
        return weights.gguf({"bfloat16": "BF16", "int8": "Q8_0"}[precision], folder)
    file = weights.gguf({"bfloat16": "F16", "int8": "Q8_0"}[precision], folder)  # its reader takes no BF16
    made = file.with_suffix("") / "openvino_model.xml"
    if not made.is_file():
        _convert(python, file, made.parent)
    return made.parent


def _convert(python: Path, file: Path, into: Path) -> None:
    """Write the IR of a GGUF file in a separate folder, because OpenVINO writes it next to the file."""
    into.mkdir(exist_ok=True)
    linked = into / file.name
    linked.unlink(missing_ok=True)
    linked.hardlink_to(file)
    command = [str(python), "-m", f"{_HERE}.openvino", str(linked)]
    done = subprocess.run(command, env=apart.surroundings(1), capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"conversion of {file.name}: {done.stderr.strip().splitlines()[-1]}")
