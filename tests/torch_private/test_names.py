"""Check that the installed torch and transformers have every name that kvpass uses."""

from __future__ import annotations

import pytest

from tests.torch_private import names


def test_no_name_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert names.main() == 0, capsys.readouterr().out


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
    """Check that imports, attributes and patched settings are read from the source, so that no list is needed."""
    monkeypatch.setattr(names, "sources", lambda: {"dynamo": USES})
    monkeypatch.setattr(names, "METHODS", ("torch.fx.Graph.no_such_method", "torch.fx.Graph.lint"))
    assert names.main() == 1
    lost = sorted(line for line in capsys.readouterr().out.splitlines() if "not found" in line)
    assert [line.split(":")[0] for line in lost] == [
        "torch._C._dynamo.guards._no_such_name",
        "torch._dynamo.config.no_such_setting",
        "torch._no_such_module.nothing",
        "torch.fx.Graph.no_such_method",
    ]
    assert lost[0].endswith("not found; dynamo.second: Ask for a name that is there no more.")


def test_a_lost_name_of_transformers_is_reported(monkeypatch, capsys) -> None:
    monkeypatch.delattr("transformers.cache_utils.DynamicLayer")
    assert names.main() == 1
    lost = "transformers.cache_utils.DynamicLayer: not found; runtime.calling.layer_regions: equal"
    assert lost in capsys.readouterr().out


def test_a_lost_text_of_torch_is_reported(monkeypatch, capsys) -> None:
    monkeypatch.setattr(names, "TEXTS", {"torch._dynamo.utils": ("no such text", "example_value")})
    assert names.main() == 1
    assert capsys.readouterr().out.count("not found") == 1


def test_private_names_are_found_in_the_source() -> None:
    found = {name.path for source in names.sources().values() for name in names.names_in(source)}
    assert {
        "torch._dynamo.eval_frame._stance.stance",
        "torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
        "torch._dynamo.config.recompile_limit",
        "torch.fx.experimental._config.backed_size_oblivious",
        "torch._inductor.compile_fx.compile_fx",
    } <= found
    assert len(found) > 80
