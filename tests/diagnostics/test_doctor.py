"""What `kvpass doctor` finds, and the warning about versions that were not tested."""

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
from kvpass.diagnostics import doctor
from kvpass.lowering import attention_tiles
from kvpass.runtime import layer_regions
from kvpass.torch_private import inductor
from tests.models import build


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets installed versions, None for packages that are not installed."""
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


def test_it_works_without_transformers(pretend, monkeypatch, capsys) -> None:
    pretend(transformers=None)
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it is an error
    assert cli.main(["doctor"]) == 0
    assert "transformers: not installed; no demo" in capsys.readouterr().out


USES = '''
import torch.fx as fx

def first(x):
    """Ask for one name."""
    from torch._inductor import config
    return config.max_autotune, x.not_of_torch

def second(node: fx.Node):
    """Ask for a name that is there no more."""
    guards = torch._C._dynamo.guards
    return guards._no_such_name

def third():
    """Patch a setting."""
    with torch._dynamo.config.patch(recompile_limit=1, no_such_setting=2):
        from torch._no_such_module import nothing
'''


def test_a_lost_name_is_reported_with_what_it_was_for(monkeypatch, capsys) -> None:
    """Imports, attributes and patched settings are read from the source, so that none has to be listed."""
    monkeypatch.setattr(doctor, "sources", lambda: {"dynamo": USES})
    monkeypatch.setattr(doctor, "METHODS", ("torch.fx.Graph.no_such_method", "torch.fx.Graph.lint"))
    assert cli.main(["doctor"]) == 1
    lost = sorted(line for line in capsys.readouterr().out.splitlines() if line.startswith("MISSING"))
    assert [line.split(":")[0].removeprefix("MISSING ") for line in lost] == [
        "torch._C._dynamo.guards._no_such_name",
        "torch._dynamo.config.no_such_setting",
        "torch._no_such_module.nothing",
        "torch.fx.Graph.no_such_method",
    ]
    assert lost[0].endswith("not found; dynamo.second: Ask for a name that is there no more.")


def test_a_lost_name_of_transformers_is_reported(monkeypatch, capsys) -> None:
    monkeypatch.delattr("transformers.cache_utils.DynamicLayer")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "names of transformers: 2 of 3 found" in out
    assert "MISSING transformers.cache_utils.DynamicLayer: not found; kvpass.runtime.layer_regions" in out


def test_without_a_name_of_transformers_layers_are_traced_one_by_one(monkeypatch) -> None:
    monkeypatch.delattr("transformers.cache_utils.DynamicLayer")
    assert not layer_regions.install_regions(build("Llama", layers=4)).indices


def test_private_names_are_found_in_the_source() -> None:
    names = {name.path for source in doctor.sources().values() for name in doctor.names_in(source)}
    assert {
        "torch._dynamo.eval_frame._stance.stance",
        "torch._C._dynamo.guards._empty_strided_cpu",
        "torch._dynamo.config.recompile_limit",
        "torch.fx.experimental._config.backed_size_oblivious",
        "torch._inductor.compile_fx.compile_fx",
    } <= names
    assert len(names) > 80


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
        UserWarning, match=rf"torch 9\.1\.0\+cpu \(tested: 2\.11 to {highest}\), transformers 99\.0\.dev0"
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
