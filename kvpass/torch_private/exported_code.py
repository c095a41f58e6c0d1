"""Export Inductor's code for a CPU as text and libraries, which another process loads without Inductor.

Inductor writes a Python module for each graph: kernels of machine code, each in a separate library, and a function
`call` that allocates memory and runs them.  `export_code` saves the parts that `call` needs, and `import_code`
makes `call` again.  AOTAutograd's wrapper around it is left out: without gradients the code returns all results itself.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpass.torch_private import generated_code
from kvpass.torch_private.inductor import Boxed

LIBRARY_OF_OPERATORS = "extern_kernels"
"""Inductor's name for the operators that it calls outside of its kernels."""


@dataclasses.dataclass(frozen=True)
class ExportedCode:
    """The code of one graph.

    Attributes:
        text: Python that defines `call`, which takes a list of arguments and empties it.
        kernels: for each kernel by its name in the text, the file of its library.
        constants: tensors that the text reads, by name.
        leading: arguments that precede a caller's arguments.
    """

    text: str
    kernels: dict[str, str]
    constants: dict[str, Tensor]
    leading: list[Tensor]


def export_code(run: Any) -> ExportedCode | None:
    """Return the code of a callable that Inductor made for a CPU; None if it needs more than is saved."""
    leading = list(getattr(run, "leading", ()))
    while hasattr(run, "__wrapped__"):
        run = run.__wrapped__
    run = getattr(run, "current_callable", run)
    scope = getattr(getattr(run, "__func__", run), "__globals__", {})
    if not os.path.isfile(str(scope.get("__file__"))):
        return None
    tree = ast.parse(Path(scope["__file__"]).read_text(encoding="utf-8"))
    kernels = {name: library for name, value in scope.items() if (library := generated_code.kernel_library(value))}
    kept, free = _needed_statements(tree, {*kernels, LIBRARY_OF_OPERATORS})
    constants = {name: scope[name] for name in free if isinstance(scope.get(name), Tensor)}
    known = {*kernels, *constants, LIBRARY_OF_OPERATORS, *vars(builtins)}
    if not free <= known or not _are_torch_functions(kept, scope.get(LIBRARY_OF_OPERATORS)):
        return None
    text = ast.unparse(ast.Module(kept, []))
    return ExportedCode(text, {name: kernels[name] for name in kernels if name in free}, constants, leading)


def _needed_statements(tree: ast.Module, given: set[str]) -> tuple[list[ast.stmt], set[str]]:
    """Return, in order, the statements that `call` needs, and the names that they leave unbound.

    Statements that bind `given` names are left out.
    """
    bound = {name: statement for statement in tree.body for name in _bindings(statement) if name not in given}
    wanted, seen, kept = ["call"], set[str](), set[int]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in bound and id(bound[name]) not in kept:
            kept.add(id(bound[name]))
            wanted += _names_read(bound[name])
    return [statement for statement in tree.body if id(statement) in kept], seen - bound.keys()


def _bindings(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module binds."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in statement.names)
    elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


def _names_read(statement: ast.stmt) -> set[str]:
    """Return the names that a statement reads and does not bind itself."""
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    own = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    return {node.id for node in names} - own


def _are_torch_functions(kept: Sequence[ast.stmt], library: Any) -> bool:
    """Return whether each operator that the code takes from Inductor's library is torch's own of that name."""
    used = {
        node.attr
        for statement in kept
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == LIBRARY_OF_OPERATORS
    }
    return all(getattr(library, name, None) is getattr(torch, name, library) for name in used)


def import_code(code: ExportedCode, name: str) -> Boxed:
    """Return the function `call` of exported code; `name` is the code's name in tracebacks.

    Raises:
        ImportError, OSError: a library cannot be loaded.
    """
    scope: dict[str, Any] = {"__name__": name, LIBRARY_OF_OPERATORS: torch, **code.constants}
    scope |= {kernel: _kernel(path) for kernel, path in code.kernels.items()}
    exec(compile(code.text, name, "exec"), scope)
    call: Boxed = scope["call"]
    if not code.leading:
        return call

    def with_leading(arguments: list[Any]) -> Any:
        given = [*code.leading, *arguments]
        arguments.clear()
        return call(given)

    return with_leading


def _kernel(path: str) -> Any:
    """Return the function of a kernel's library, which is a module of Python."""
    guards: Any = torch._C._dynamo.guards
    address = guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)  # which the library reads when it is loaded
    found = importlib.util.spec_from_file_location(f"{Path(path).stem}.{generated_code.KERNEL}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, generated_code.KERNEL)
