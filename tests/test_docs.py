"""Test the documentation: links, names, errors, and figures that README.md repeats."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import kvpass
from kvpass import errors, policies

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FIGURES = re.compile(r"^\| [^|]*(?: \| *[\d.,]+)+ \|$", re.MULTILINE)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """Return a page without its blocks of code."""
    return FENCE.sub("", text_of(path))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in HEADING.findall(prose(path)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_readme_has_at_most_150_lines():
    assert len(text_of(README).splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_point_at_files_and_headings(page: Path):
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


WITH_CODE = [page for page in PAGES if page.name != "passes.md"]  # has graphs, as a program has printed them


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_pages_is_python_and_names_what_kvpass_has(page: Path):
    trees = [ast.parse(textwrap.dedent(code)) for _, code in CODE.findall(text_of(page))]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "kvpass"}
    assert {name for name in used if not hasattr(kvpass, name)} == set()


def test_invariants_say_which_of_their_tests_are_slow():
    table = text_of(ROOT / "docs" / "design.md").partition("## Invariants")[2]
    for path, name, slow in re.findall(r"`(tests/\S+\.py)::(\w+)`( \(slow\))?", table):
        (test,) = (node for node in ast.walk(ast.parse(text_of(ROOT / path))) if getattr(node, "name", "") == name)
        marks = [ast.unparse(each) for each in test.decorator_list]
        assert any(mark in ("pytest.mark.slow", "pytest.mark.few(0)") for mark in marks) == bool(slow), name


def test_the_reference_has_every_public_name():
    reference = text_of(ROOT / "docs" / "api.md")
    assert [name for name in kvpass.__all__ if f"`kvpass.{name}`" not in reference] == []


def test_the_reference_names_definitions_that_exist():
    for module, name in re.findall(r"^::: (kvpass[\w.]*)\.(\w+)$", text_of(ROOT / "docs" / "api.md"), re.MULTILINE):
        path = ROOT / module.replace(".", "/")
        if (path / name).is_dir() or (path / f"{name}.py").is_file():
            continue
        tree = ast.parse(text_of(path.with_suffix(".py")))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("name", ["passes", "pictures", "results"])
def test_programs_that_write_pages_can_be_imported(name: str):
    pytest.importorskip("matplotlib")
    runpy.run_path(str(ROOT / "docs" / f"{name}.py"), run_name=name)


def test_every_error_has_a_section():
    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    sections = set(HEADING.findall(text_of(ROOT / "docs" / "errors.md")))
    assert [name for name in classes if name not in sections] == []


COMPOSED = {"the demo needs", "the server needs", "pip install 'kvpass[demo]'", "pip install 'kvpass[serve]'"}
COMPOSED |= {"reading and writing tensors needs safetensors", "pip install 'kvpass[save]'", "was exported with torch"}
COMPOSED |= {"cannot read an aligner from", "cannot read a calibration from", "cannot read a cache of kvpass from"}
COMPOSED |= {"kv_align needs aligner", "needs calibration", "holds no cache of kvpass"}
COMPOSED |= {"holds no calibration", "this aligner cannot be read"}
COMPOSED |= {"it holds a DecodeLoop", "it holds no DecodeLoop", "CLASS.ATTRIBUTE"}
"""Parts of messages that the code composes."""


def test_messages_on_the_page_of_errors_are_those_of_the_code():
    trees = [ast.parse(text_of(path)) for path in (ROOT / "kvpass").rglob("*.py")]
    constants = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    code = "\n".join(each.replace("`", "") for each in constants if isinstance(each, str))
    rows = re.findall(r"^\| ([^\[].*?) \|", text_of(ROOT / "docs" / "errors.md").replace("`", ""), re.MULTILINE)
    plain = [re.sub(r" \([A-Za-z_]+\)", " ", row) for row in rows]  # without the function in brackets
    parts = [part.strip(" ,.") for row in plain for part in re.split(r"\.\.\.|[;:=]", row)]
    long = [part for part in parts if len(part) >= 12 and not set(part) <= set("-: ")]
    assert len(long) > 150
    assert {part for part in long if part not in code} == COMPOSED


def test_the_example_of_a_policy_agrees_with_its_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policies, "_registered", {})
    example = types.ModuleType("landmarks")
    monkeypatch.setitem(sys.modules, "landmarks", example)  # dataclasses look up their module
    section = text_of(ROOT / "CONTRIBUTING.md").partition("## Add a policy")[2]
    exec(section.partition("```python\n")[2].partition("```")[0], vars(example))
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 40, 8, generator=drawn) for heads in (4, 2, 2))
    ours, reference = (
        kvpass.simulate("landmarks", q, k, v, prompt=20, budget=8, every=16, compiled=compiled)
        for compiled in (True, False)
    )
    assert ours.positions[-1, 0, 0].tolist() == [0, 16, 32, 35, 36, 37, 38, 39]
    assert torch.equal(ours.positions, reference.positions)


def test_every_policy_has_a_page_and_a_row():
    table = text_of(ROOT / "docs" / "policies" / "README.md")
    built_in = [name for name in policies.names() if policies.get(name).__module__.startswith("kvpass.policies.")]
    assert [name for name in built_in if f"| [{name}]({name}.md) |" not in table] == []


def test_figures_of_the_readme_stand_on_the_pages_that_are_written_by_programs():
    rows = FIGURES.findall(text_of(README))
    written = {line for page in ("demo", "performance") for line in text_of(ROOT / "docs" / f"{page}.md").splitlines()}
    assert len(rows) >= 8
    assert [row for row in rows if row not in written] == []


def test_the_environment_of_the_site_pins_what_the_extra_names():
    extra = re.search(r"^docs = \[(.*)\]$", text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    assert extra is not None
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", text_of(ROOT / "constraints-docs.txt"), re.MULTILINE))
    assert {re.split(r"[\[><=]", name)[0] for name in re.findall(r'"([^"]*)"', extra[1])} <= set(pinned)
