"""Check conventions: tests match messages of expected errors and never return early; docstrings name real things."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from kvpass import errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvpass"
ERRORS = tuple(name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception))


def test_every_error_that_a_test_expects_is_named_by_its_words() -> None:
    """Require `match` for errors of kvpass: without it another refusal would pass for the expected one."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, tree in _test_files()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises" and call.args
        if any(name in ast.unparse(call.args[0]) for name in ERRORS)
        if not any(keyword.arg == "match" for keyword in call.keywords)
    ]
    assert found == []


def test_no_test_returns_early() -> None:
    """Require that a case without assertions is filtered from the parameters, rejected, or skipped with a reason."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in _test_files()
        for test in ast.walk(tree)
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_")
        for node in ast.walk(test)
        if isinstance(node, ast.Return) and node.value is None
    ]
    assert found == []


MAX_WORDS = 20


def test_docstrings_of_the_package_begin_with_one_short_sentence() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path, tree in _package().items()
        for line in _first_lines(tree)
        if len(line.split()) > MAX_WORDS or not line.endswith(".")
    ]
    assert found == []


VERBS = """
Admit Attend Bound Call Carry Change Check Collect Combine Compact Compile Compute Convert Count Cut Decode
Define Describe Divide Draw Drive Evaluate Export Feed Find Follow Format Hold Identify Interpret Keep Let
List Load Look Lower Make Measure Move Multiply Name Pin Predict Prefill Prove Provide Rank Read Record Reduce
Render Repeat Replace Report Retrieve Rewrite Round Run Sample Save Score Select Serve Share Show Simplify
Simulate Store Sum Train Transcribe Turn Use Validate Walk Write
"""
"""The verbs with which docstrings of modules begin."""
NO_VERB = re.compile(r"(?!Process\b)(?:The|An?|What|Which|Whether|How|If|When|True|One|Each|\w+(?:s|ing|ion))\b")
"""Matches the begin of docstrings of functions that do not begin with a verb."""


def test_docstrings_of_modules_and_functions_begin_with_a_verb() -> None:
    """Exclude properties, whose docstrings name a value, and docstrings that begin with their arguments."""
    verbs, nodes = VERBS.split(), [(path, node) for path, tree in _package().items() for node in ast.walk(tree)]
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path, node in nodes
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(node))
        if not any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", ()))
        if (text.split()[0] not in verbs if isinstance(node, ast.Module) else NO_VERB.match(text.replace("Args:", "")))
    ]
    assert found == []


def test_documented_attributes_and_arguments_exist() -> None:
    """Check that docstrings list existing attributes and arguments, so that renames reach them."""
    trees = _package()
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}
    found = [
        f"{path.relative_to(ROOT)}: {node.name}: {name}"
        for path, node in nodes
        for name in (_undocumented(node, classes) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else ())
    ]
    assert found == []


# Names that docstrings quote from torch and its operators, transformers, libc, lm-eval and DuoAttention.
FOREIGN = {"generate", "model.generate", "input_ids", "position_ids", "use_cache", "past_key_values", "memcpy"}
FOREIGN |= {"_foreach_copy_", "custom_op", "to", "dtype", "alpha", "rounding_mode", "DynamicCache.crop"}
FOREIGN |= {"lm_eval.simple_evaluate", "full_attention_heads.tsv"}


def test_names_in_docstrings_exist() -> None:
    """Check quoted names: words of the module, classes, names in the same folder, or dotted paths."""
    names = _Names(_package())
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in names.trees.items()
        for name in _quoted(tree)
        if not name.startswith("__") and name not in FOREIGN and not names.resolves(name, path)
    ]
    assert found == []


def test_errors_in_docstrings_exist() -> None:
    trees = _package()
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    known = {*dir(builtins), *(node.name for node in nodes if isinstance(node, ast.ClassDef))}
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        for text in _docstrings(tree)
        for entries in re.findall(r"Raises:\n((?: +\S.*\n)+)", text.value)
        for name in re.findall(r"^ +([A-Z][A-Za-z]+):", entries, re.MULTILINE)
        if name not in known
    ]
    assert found == []


def test_values_of_nodes_are_recorded_in_one_place() -> None:
    """`kvpass.fx.splicing.with_value` records them; the private names of torch lie below it."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in _package().items()
        if path.parent.name not in ("fx", "torch_private")
        for node in ast.walk(tree)
        for named in [*getattr(node, "targets", []), *getattr(node, "keywords", [])]
        if re.search(r"\bexample_value['\"]?(\]$|=)", ast.unparse(named))
    ]
    assert found == []


class _Names:
    """Names of the package's modules, to look up names that docstrings quote."""

    def __init__(self, trees: dict[Path, ast.Module]) -> None:
        self.trees = trees
        self.words = {path: _words(tree, path) for path, tree in trees.items()}
        self.defined = {path: set(_defined(tree)) for path, tree in trees.items()}
        nodes = [node for tree in trees.values() for node in ast.walk(tree)]
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def resolves(self, name: str, path: Path) -> bool:
        """True if a name quoted in the module at `path` exists."""
        parts = name.split(".")
        if self.words[path].issuperset(parts) or self._is_path(parts, path):
            return True
        if len(parts) == 1:
            beside = (self.defined[each] for each in self.trees if path.parent in each.parents)
            return name in self.classes or any(name in each for each in beside)
        owner = self.classes.get(parts[-2])
        return owner is not None and parts[-1] in _attributes(owner, self.classes)

    def _is_path(self, parts: list[str], path: Path) -> bool:
        """True if the parts are a module of the package followed by names of that module."""
        for start, count in itertools.product((ROOT, PACKAGE, path.parent), range(len(parts), 0, -1)):
            place = start.joinpath(*parts[:count])
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file in self.words:
                    return self.words[file].issuperset(parts[count:])
        return False


def _quoted(tree: ast.Module) -> Iterator[str]:
    """Yield the plain and dotted names between single backticks in the docstrings of a module."""
    for text in _docstrings(tree):
        yield from re.findall(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)`(?!`)", text.value)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _words(tree: ast.Module, path: Path) -> set[str]:
    """Return the words in a module's code and strings, without docstrings and comments, and the builtins."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for text in _docstrings(tree):
        lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return {*dir(builtins), *(word for line in lines for word in re.findall(r"\w+", line.partition("#")[0]))}


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the functions, classes and constants of a module."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _undocumented(node: ast.ClassDef | ast.FunctionDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names that a docstring lists but its class or function lacks."""
    if isinstance(node, ast.ClassDef):
        return _listed(node, "Attributes") - _attributes(node, classes)
    return _listed(node, "Args") - {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}


def _listed(node: ast.ClassDef | ast.FunctionDef, section: str) -> set[str]:
    _, _, text = (ast.get_docstring(node) or "").partition(f"{section}:\n")
    lines = itertools.takewhile(lambda line: not line or line.startswith("    "), text.splitlines())
    entries = [match.group(1) for line in lines if (match := re.match(r"    ([\w*][\w*, ]*):", line))]
    return {name.strip() for entry in entries for name in entry.split(",")}


def _attributes(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names that a class and its bases in the package define, or set on `self`."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    stored = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    found |= {each.attr for each in stored if isinstance(each, ast.Attribute)}
    found |= {each.id for each in stored if isinstance(each, ast.Name)}
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    return found.union(*(_attributes(classes[base], classes) for base in bases if base in classes))


def _first_lines(tree: ast.Module) -> Iterator[str]:
    """Yield the first lines of docstrings, except those that begin with their arguments."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and not text.startswith("Args:"):
            yield text.partition("\n")[0]


@functools.cache
def _package() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def _test_files() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))
