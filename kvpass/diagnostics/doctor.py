"""Check an installation: package versions, the C++ compiler, and the products of prompts on this processor."""

from __future__ import annotations

import dataclasses
import subprocess
import sysconfig

from kvpass import versions
from kvpass.lowering import attention_tiles
from kvpass.torch_private import inductor, processor

MEANING = {
    "torch": "kvpass needs it",
    "triton": "no kernels for NVIDIA GPUs; CPUs do not need it",
    "transformers": "no demo, evaluation or training of aligners; other models work",
}
"""The consequence of a missing package."""

PROBE = "#include <Python.h>\n#include <omp.h>\n#include <vector>\n"
"""A C++ program that includes the headers of the code which Inductor generates for CPUs."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report on an installation: the checked part, the result, and its consequence."""

    subject: str
    state: str
    meaning: str = ""
    missing: bool = False

    def __str__(self) -> str:
        text = f"{'MISSING ' if self.missing else ''}{self.subject}: {self.state}"
        return f"{text}; {self.meaning}" if self.meaning else text


def examine_installation() -> list[Finding]:
    """Return the findings about this installation."""
    return [*map(_version, versions.TESTED), _compiler(), _processor(), _products()]


def _version(package: str) -> Finding:
    found, tested = versions.installed_version(package), f"tested: {versions.tested_range(package)}"
    if found is None:
        return Finding(package, "not installed", MEANING[package])
    if versions.outdated_version(package):
        return Finding(package, f"{found} ({tested})", f"install {versions.TESTED[package][0]} or newer", missing=True)
    if versions.untested_version(package):
        return Finding(package, f"{found} ({tested})", "newer than the tested versions")
    return Finding(package, f"{found} ({tested})")


def _compiler() -> Finding:
    """Check that Inductor's C++ compiler finds the headers that generated code includes."""
    subject = "C++ compiler"
    meaning = "inner='inductor' cannot compile for CPUs: install g++ and Python's headers, or pass inner='eager'"
    compiler = inductor.cpp_compiler()
    if compiler is None:
        return Finding(subject, "none found", meaning, missing=True)
    command = [compiler, "-fsyntax-only", "-fopenmp", "-I", sysconfig.get_paths()["include"], "-x", "c++", "-"]
    ran = subprocess.run(command, input=PROBE, capture_output=True, text=True, check=False)
    if ran.returncode:
        errors = [line for line in ran.stderr.splitlines() if "error" in line] or ran.stderr.splitlines() or ["failed"]
        return Finding(subject, f"{compiler}: {errors[0].strip()}", meaning, missing=True)
    return Finding(subject, f"{compiler} compiles with the headers of Python and OpenMP")


def _processor() -> Finding:
    """Report the instructions for products in half precision that torch finds, by which kvpass chooses kernels."""
    dots = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in processor.dot_products()))
    found = [f"dot products of {dots}"] * bool(dots) + ["matrix tiles"] * processor.has_matrix_tiles()
    return Finding("instructions of the processor", ", ".join(found) or "no products in half precision")


def _products() -> Finding:
    """Check which dtypes the C++ loops for prompts multiply on this processor."""
    dtypes = [dtype for dtype in attention_tiles.NATIVE if attention_tiles.dtype_of_products(dtype, 64) == dtype]
    subject, found = "attention of prompts on a CPU", [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if not found:
        return Finding(subject, "by torch's operations", "prompts take longer, most under policies that read attention")
    return Finding(subject, f"by loops in C++, products in {' and '.join(found)}")
