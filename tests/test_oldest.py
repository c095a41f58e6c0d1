"""Check that `make oldest` installs the oldest versions that pyproject.toml allows, and the tested range."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpass.versions import TESTED

ROOT = Path(__file__).parents[1]
REQUIREMENT = re.compile(r'"([\w-]+)>=([\d.]+)')
PINNED = re.compile(r"^([\w-]+)==([\d.]+)", re.MULTILINE)


def required() -> dict[str, str]:
    """Return the lowest version of every requirement of kvpass and its tests."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = [re.search(rf"^{name} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL) for name in ("dependencies", "test")]
    return dict(found for each in lists if each for found in REQUIREMENT.findall(each[1]))


PINS = dict(PINNED.findall((ROOT / "constraints-oldest.txt").read_text()))


def test_requirements_are_found() -> None:
    assert {"torch", "triton", "transformers", "pytest"} <= required().keys()


@pytest.mark.parametrize("package", required())
def test_the_oldest_that_is_allowed_is_tested(package: str) -> None:
    """Compare the parts that `>=` names: `>=2.3` allows 2.3.0, which may never have been published."""
    lowest = required()[package].split(".")
    assert PINS[package].split(".")[: len(lowest)] == lowest


def test_the_range_that_is_named_is_the_one_that_is_tested() -> None:
    newest, usual = (dict(PINNED.findall((ROOT / f"constraints{of}.txt").read_text())) for of in ("-newest", ""))
    for package, (low, high) in TESTED.items():
        assert PINS[package].startswith(f"{low}.")
        assert newest[package].startswith(f"{high}.")
        assert version(low) <= version(usual[package]) <= version(newest[package])


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
