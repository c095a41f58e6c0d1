"""Look up the names of torch and transformers that kvpass uses in the installed versions.

    python -m tests.torch_private.names

The names of torch are read from the source of `kvpass.torch_private`, so that none is forgotten.  The docstring of the
function that uses a name says what its absence means.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from kvpass import torch_private

METHODS = (
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.bound_sympy",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.deserialize_symexpr",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.replace",
    "torch.fx.experimental.symbolic_shapes.SymExprPrinter.doprint",
    "torch._inductor.output_code.CompiledFxGraph.current_callable",
    "torch._inductor.output_code.CompiledFxGraph.output_strides",
    "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor",
    "torch._inductor.config.aot_inductor_mode.compile_standalone",
    "torch._inductor.config.combo_kernels",
    "torch._inductor.config.cpp_wrapper",
    "torch._inductor.config.freezing",
    "torch._inductor.config.fx_wrapper",
    "torch._inductor.config.post_grad_custom_pre_pass",
    "torch._inductor.config.realize_acc_reads_threshold",
    "torch._inductor.config.realize_opcount_threshold",
    "torch._inductor.config.realize_reads_threshold",
    "torch._inductor.config.reorder_for_locality",
    "torch._inductor.config.size_asserts",
    "torch._inductor.config.triton.cudagraphs",
)
"""Methods, fields and settings whose full names do not appear in the source of that room."""

TEXTS = {
    "torch._dynamo.eval_frame": (
        *("using FX to symbolically trace", "def compile_wrapper(", "dynamo_ctx", "_orig_mod", "callback"),
        *("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"),
    ),
    "torch._dynamo.utils": ('node.meta["example_value"] = ', '"_dynamo_static_input_type"'),
    "torch._dynamo.output_graph": ('node.meta["tensor_dict"] = ', "._dynamo_source = ", "self.compiler_fn"),
    "torch._dynamo.decorators": ("._dynamo_weak_dynamic_indices", "_dynamo_marked_constant"),
    "torch._dynamo.source": ("is_derefed_cell_contents", "ClosureSource", "DefaultsSource", "LocalCellSource"),
    "torch._inductor.compile_fx": ("compile_fx_inner",),
    "torch._inductor.cpp_builder": ('"compile_file"',),
    "torch._guards": ("def is_unspecialized_nn_module(",),
}
"""Texts in the source of torch's modules: keys and attributes that kvpass reads by name, and part of an error."""


@dataclasses.dataclass(frozen=True)
class Name:
    """A name of another package and its user in kvpass.

    Attributes:
        path: the dotted name, which begins with the package.
        user: the function or class that uses it.
        purpose: the first line of the user's docstring.
    """

    path: str
    user: str
    purpose: str

    def __str__(self) -> str:
        return f"{self.path}: not found; {self.user}: {self.purpose}"


TRANSFORMERS = (
    Name("transformers.DynamicCache", "model_access.empty_cache", "the cache that decode loops give to a model"),
    Name("transformers.GenerationMixin._supports_default_dynamic_cache", "model_access.empty_cache", "who takes it"),
    Name("transformers.cache_utils.DynamicLayer", "runtime.calling.layer_regions", "equal layers are traced once"),
)
"""The names of transformers that kvpass uses; everything else relies on the structure of objects."""


def used_names() -> list[Name]:
    """Return the names that kvpass uses."""
    names = [dataclasses.replace(n, user=f"{room}.{n.user}") for room, s in sources().items() for n in names_in(s)]
    names += [Name(path, "METHODS", "methods and fields of what torch makes") for path in METHODS]
    names += [
        Name(f"{module}:{text}", "TEXTS", "parts of torch's source") for module in TEXTS for text in TEXTS[module]
    ]
    return [*names, *TRANSFORMERS]


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
    """Return the names of torch behind local names: imports from torch, and variables for its modules."""
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
    """Return whether a dotted name is a module, an attribute or a field, or whether a module has the text after ":"."""
    module, _, text = path.partition(":")
    if text:
        return text in inspect.getsource(importlib.import_module(module))
    first, *rest = path.split(".")
    value: Any = importlib.import_module(first)
    for index, part in enumerate(rest, 1):
        inner = getattr(value, part, None)
        if inner is None and not hasattr(value, part):
            if isinstance(value, type) and part in getattr(value, "__annotations__", {}):
                return True  # a field without a default is not an attribute of its class
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


def main() -> int:
    """Print the number of names found, and each missing one; return 1 if one is missing."""
    names = used_names()
    lost = [name for name in names if not exists(name.path)]
    count = len({name.path for name in names})
    print(f"{count - len({name.path for name in lost})} of {count} names found", *lost, sep="\n")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
