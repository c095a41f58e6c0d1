"""Check of an installation: package versions, the C++ compiler, and names of torch and transformers that kvpass uses.

The names of torch are read from the source of `kvpass.torch_private`, so that none is forgotten.  The docstring of the
function that uses a name says what its absence means.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sysconfig
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from kvpass import torch_private, versions
from kvpass.lowering import attention_tiles
from kvpass.torch_private import METHODS, inductor

MEANING = {
    "torch": "kvpass needs it",
    "triton": "no kernels for NVIDIA GPUs; CPUs do not need it",
    "transformers": "no demo, evaluation or training of aligners; other models work",
}
"""The consequence of a missing package."""

TRANSFORMERS = {
    "transformers.DynamicCache": "kvpass.cache_names.empty_cache: the cache that decode loops give to a model",
    "transformers.GenerationMixin._supports_default_dynamic_cache": "kvpass.cache_names.empty_cache: who takes it",
    "transformers.cache_utils.DynamicLayer": "kvpass.runtime.layer_regions: equal layers are traced once",
}
"""The names of transformers that kvpass uses, by their user and purpose; the rest goes by the structure of objects."""

PROBE = "#include <Python.h>\n#include <omp.h>\n#include <vector>\n"
"""A C++ program that includes the headers of the code which Inductor generates for CPUs."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report on an installation.

    Attributes:
        subject: the package, compiler or name that was checked.
        state: the result of the check.
        meaning: the consequence of the result, "" if there is none.
        missing: whether kvpass needs something that is missing.
    """

    subject: str
    state: str
    meaning: str = ""
    missing: bool = False

    def __str__(self) -> str:
        text = f"{'MISSING ' if self.missing else ''}{self.subject}: {self.state}"
        return f"{text}; {self.meaning}" if self.meaning else text


@dataclasses.dataclass(frozen=True)
class Name:
    """A name of torch and its user in kvpass.

    Attributes:
        path: the dotted name, which begins with the module torch.
        user: the function or class of `kvpass.torch_private`.
        purpose: the first line of the user's docstring.
    """

    path: str
    user: str
    purpose: str


def examine_installation() -> list[Finding]:
    """Return the findings about this installation."""
    return [*map(_version, versions.TESTED), _compiler(), _products(), *_names(), *_transformers_names()]


def _version(package: str) -> Finding:
    found, tested = versions.installed_version(package), f"tested: {versions.tested_range(package)}"
    if found is None:
        return Finding(package, "not installed", MEANING[package])
    if versions.outdated_version(package):
        return Finding(package, f"{found} ({tested})", f"install {versions.TESTED[package][0]} or newer", missing=True)
    if versions.untested_version(package):
        return Finding(package, f"{found} ({tested})", "newer than what was tested")
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


def _products() -> Finding:
    """Check which dtypes the C++ loops for prompts multiply on this processor."""
    dtypes = [dtype for dtype in attention_tiles.NATIVE if attention_tiles.dtype_of_products(dtype, 64) == dtype]
    subject, found = "attention of prompts on a CPU", [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if not found:
        return Finding(subject, "by torch's operations", "prompts take longer, most under policies that read attention")
    return Finding(subject, f"by loops in C++, products in {' and '.join(found)}")


def _names() -> list[Finding]:
    names = [dataclasses.replace(n, user=f"{room}.{n.user}") for room, s in sources().items() for n in names_in(s)]
    names += [Name(path, "METHODS", "methods and fields of what torch makes") for path in METHODS]
    lost = [name for name in names if not exists(name.path)]
    count = len({name.path for name in names})
    found = Finding("names of torch", f"{count - len({name.path for name in lost})} of {count} found")
    return [found, *(Finding(n.path, "not found", f"{n.user}: {n.purpose}", missing=True) for n in lost)]


def _transformers_names() -> list[Finding]:
    if versions.installed_version("transformers") is None:
        return []
    lost = [path for path in TRANSFORMERS if not exists(path)]
    found = Finding("names of transformers", f"{len(TRANSFORMERS) - len(lost)} of {len(TRANSFORMERS)} found")
    return [found, *(Finding(path, "not found", TRANSFORMERS[path], missing=True) for path in lost)]


def sources() -> dict[str, str]:
    """Return the source of each module of `kvpass.torch_private`, by the module's name."""
    found = [module.name for module in pkgutil.iter_modules(torch_private.__path__)]
    return {name: inspect.getsource(importlib.import_module(f"kvpass.torch_private.{name}")) for name in found}


def names_in(source: str) -> list[Name]:
    """Return the names of torch in a module's source, each name once per function or class."""
    tree = ast.parse(source)
    everywhere = _aliases([node for node in tree.body if not isinstance(node, _UNITS)])
    found: dict[tuple[str, str], Name] = {}
    for unit in tree.body:
        user = unit.name if isinstance(unit, _UNITS) else "(module)"
        purpose = (ast.get_docstring(unit) or "").partition("\n")[0] if isinstance(unit, _UNITS) else "import of kvpass"
        aliases = everywhere | _aliases([unit])
        for path in _paths(unit, aliases):
            found.setdefault((user, path), Name(path, user, purpose))
    return list(found.values())


_UNITS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _aliases(nodes: list[Any]) -> dict[str, str]:
    """Return the names of torch that local names refer to: by imports of torch, and by variables for its modules."""
    known = {"torch": "torch"}
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            of_torch = [alias for alias in node.names if alias.name.startswith("torch.")]
            known |= {alias.asname: alias.name for alias in of_torch if alias.asname}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and (path := _chain(node.value, known)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= {target.id: path for target in targets if isinstance(target, ast.Name)}
    return known


def _paths(unit: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Yield the dotted names of torch in a function: imports, attributes, and patched settings."""
    for node in ast.walk(unit):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (path := _chain(node, aliases)):
            yield path
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "patch":
            holder = _chain(node.func.value, aliases)
            yield from (f"{holder}.{word.arg}" for word in node.keywords if holder and word.arg)


def _chain(node: ast.AST | None, aliases: dict[str, str]) -> str | None:
    """Return the dotted name of an expression, if it begins with a name of torch."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        inner = _chain(node.value, aliases)
        return f"{inner}.{node.attr}" if inner else None
    return None


def exists(path: str) -> bool:
    """Return whether a dotted name is a module, an attribute or a field."""
    first, *rest = path.split(".")
    value: Any = importlib.import_module(first)
    for index, part in enumerate(rest, 1):
        inner = getattr(value, part, None)
        if inner is None and not hasattr(value, part):
            if isinstance(value, type) and part in getattr(value, "__annotations__", {}):
                return True  # a field without a default is no attribute of its class
            inner = _submodule(".".join([first, *rest[:index]])) if isinstance(value, ModuleType) else None
            if inner is None:
                return False
        value = inner
    return True


def _submodule(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
