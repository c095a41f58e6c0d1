"""Test `kvpass doctor`, and the warning about untested versions."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import kvpass
from kvpass import versions
from kvpass.apps import cli
from kvpass.lowering import attention_tiles
from kvpass.torch_private import inductor, processor


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that sets installed versions, None for missing packages."""
    real = importlib.metadata.version

    def of(**given: str | None) -> None:
        def version(package: str) -> str:
            found = given.get(package, real(package) if package not in given else None)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    versions.warn_of_untested.cache_clear()
    yield of
    versions.warn_of_untested.cache_clear()


def test_this_installation_lacks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "MISSING" not in out
    assert "C++ compiler: " in out
    assert ("matrix tiles" in out) == processor.has_matrix_tiles()
    assert ("dot products of bfloat16" in out) == (torch.bfloat16 in processor.dot_products())


def test_it_works_without_transformers(pretend, monkeypatch, capsys) -> None:
    pretend(transformers=None)
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes its import fail
    assert cli.main(["doctor"]) == 0
    assert "transformers: not installed; no demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "MISSING C++ compiler: none found; inner='inductor' cannot compile"),
        ("false", "MISSING C++ compiler: false:"),
    ],
)
def test_a_compiler_that_does_not_compile(compiler, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: compiler)
    assert cli.main(["doctor"]) == 1
    assert said in capsys.readouterr().out


def test_an_old_version_is_missing_the_oldest_that_works(pretend, capsys) -> None:
    pretend(torch="2.9.1")
    assert cli.main(["doctor"]) == 1
    assert "MISSING torch: 2.9.1 (tested: 2.11 to" in capsys.readouterr().out


def test_newer_versions_give_one_warning_that_names_them(pretend) -> None:
    pretend(torch="9.1.0+cpu", transformers="99.0.dev0", triton=None)
    highest = versions.TESTED["torch"][1]
    with pytest.warns(
        kvpass.KVPassWarning, match=rf"torch 9\.1\.0\+cpu \(tested: 2\.11 to {highest}\), transformers 99\.0\.dev0"
    ) as seen:
        kvpass.backend("full")
    assert len(seen) == 1
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpass.backend("full")


@pytest.mark.parametrize("patch", [".0", ".7", ".3+cu132", ""])
def test_patch_releases_of_tested_versions_are_tested(pretend, patch: str) -> None:
    pretend(**{package: f"{highest}{patch}" for package, (_, highest) in versions.TESTED.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpass.backend("full")


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ({torch.bfloat16, torch.float32}, "products in bfloat16 and float32"),
        ({torch.float32}, "products in float32"),
        (set(), "by torch's operations; prompts take longer"),
    ],
)
def test_the_products_of_this_processor_are_named(runs, expected, monkeypatch, capsys) -> None:
    monkeypatch.setattr(attention_tiles, "_runs", lambda dtype: dtype in runs)
    assert cli.main(["doctor"]) == 0
    assert expected in capsys.readouterr().out
