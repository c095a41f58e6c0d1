"""Test that caches belong to layers, which are identified by their tensors."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

from kvpass.runtime.model_identity import (
    belongs_to_other_layer,
    differences,
    method_digests,
    module_settings,
    settings_of,
    weak_references,
)

RUN: dict[str, Any] = dict(check=True, capture_output=True, text=True, timeout=120)


def test_a_cache_of_another_layer_is_recognised() -> None:
    here, there, bias = (torch.nn.Parameter(x) for x in (torch.ones(2, 2), torch.eye(2), torch.zeros(2)))
    copied = torch.nn.Parameter(torch.ones(2, 2))
    angles = torch.ones(4, 2)
    assert belongs_to_other_layer(weak_references([there]), [here])
    assert belongs_to_other_layer(weak_references([there, bias]), [here, torch.nn.Parameter(torch.zeros(2))])
    assert belongs_to_other_layer(weak_references([there, angles]), [here, angles.clone()])
    assert not belongs_to_other_layer(weak_references([there, here]), [here])  # an adapter
    assert not belongs_to_other_layer(weak_references([copied, there]), [here])  # a copy of the model
    gone = weak_references([torch.nn.Parameter(torch.eye(2))])
    assert not belongs_to_other_layer(gone, [here])
    assert not belongs_to_other_layer((), [here])


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"rope": {"theta": 5e5, "dtype": "float16"}}, "rope.theta is 500000.0, not 10000.0"),
        ({"layer_types": ("full", "sliding")}, "layer_types.1 is 'sliding', not 'full'"),
        ({"text": {"rope": [{"theta": 3}], "_name": "b"}}, "text.rope.0.theta is 3, not 2"),
        ({"dtype": "float16", "_name": "b", "size": 2, "new": 1}, "size is 2, not 1"),
    ],
    ids=str,
)
def test_configurations_are_compared_at_any_depth(change: dict[str, Any], difference: str) -> None:
    entries = {
        "size": 1, "dtype": "float32", "rope": {"theta": 1e4}, "layer_types": ["full", "full"],
        "text": {"rope": [{"theta": 2}], "_name": "a"},
    }  # fmt: skip
    one, other = (
        settings_of(types.SimpleNamespace(config=types.SimpleNamespace(to_dict=lambda each=each: each)))
        for each in (entries, entries | change)
    )
    assert differences(one, other) == [difference]


def window(i: int, j: int) -> bool:
    return j <= i < j + 4


def causal() -> Any:
    """Return a mask function, a new one in each call."""
    return lambda i, j: j <= i


def sliding(size: int) -> Any:
    """Return a mask function that has its window in its closure."""
    return lambda i, j: j <= i < j + size


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("full", "sliding", id="text"),
        pytest.param(causal(), window, id="function"),
        pytest.param(causal(), lambda i, j: j < i, id="code"),
        pytest.param(lambda i, j: i - j < 4, lambda i, j: i - j < 8, id="constant"),
        pytest.param(lambda i, j: i in (1, 2), lambda i, j: i in (1, 3), id="tuple"),
        pytest.param(lambda i, j: i in {1, "a"}, lambda i, j: i in {1, "b"}, id="set"),
        pytest.param(lambda i: (lambda j: j * 2)(i), lambda i: (lambda j: j * 3)(i), id="nested"),
        pytest.param(lambda i, size=2: i < size, lambda i, size=3: i < size, id="default"),
        pytest.param(lambda i, *, size=2: i < size, lambda i, *, size=3: i < size, id="keyword-default"),
        pytest.param(sliding(2), sliding(3), id="closure"),
        pytest.param(functools.partial(window, j=1), functools.partial(window, j=2), id="partial"),
        pytest.param(functools.partial(gelu, approximate="tanh"), functools.partial(gelu), id="partial-of-built-in"),
        pytest.param(types.MethodType(window, 1), types.MethodType(causal(), 1), id="method"),
        pytest.param(torch.tanh, torch.relu, id="built-in"),
        pytest.param(torch.float16, torch.bfloat16, id="dtype"),
        pytest.param([1.0, [2.0]], [1.0, [3.0]], id="list"),
        pytest.param({"scale": (1, 2)}, {"scale": (1, 4)}, id="dictionary"),
    ],
)
def test_values_and_functions_of_modules_are_settings(before: Any, after: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Identity())
    module[0].mask = before
    saved = module_settings(module)
    module[0].mask, module.name_or_path = after, "elsewhere"  # type: ignore[assignment]
    (difference,) = differences(saved, module_settings(module))
    assert difference.startswith(("0.mask is ", "0.mask."))


def registering() -> Any:
    """Return a function whose closure holds the function."""
    functions: dict[str, Any] = {}

    def mask(i: int, j: int) -> bool:
        return functions["mask"] is mask and j <= i

    functions["mask"] = mask
    return mask


@pytest.mark.parametrize("make", [causal, registering])
def test_a_function_that_is_made_anew_is_the_same_setting(make: Callable[[], Any]) -> None:
    settings = []
    for _ in range(2):
        module = torch.nn.Identity()
        module.mask = make()
        settings.append(module_settings(module))
    assert settings[0]["mask"] == settings[1]["mask"]
    assert not differences(*settings)


def scaled(factor: float) -> type[torch.nn.Module]:
    """Return a class of modules with a factor in a method that `forward` calls."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale(x)

        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    return Scaled


def test_a_class_of_the_same_name_with_other_methods_is_another_one() -> None:
    saved, same, other = (method_digests(torch.nn.Sequential(scaled(factor)())) for factor in (2.0, 2.0, 3.0))
    assert not differences(saved, same)
    (difference,) = differences(saved, other)
    assert difference.startswith("methods of Scaled is '")


def test_settings_are_the_same_in_another_process() -> None:
    """Hashes of texts differ among processes, and with them the order of sets."""
    program = """
import torch
from kvpass.runtime.model_identity import method_digests, module_settings
class Mine(torch.nn.Module):
    def forward(self, x):
        return x if self.kind in {"a", "b", "c", "d"} else -x
model = Mine()
model.kinds = {"e", "f", "g"}
print(module_settings(model), method_digests(model))
"""
    results = [
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, **RUN).stdout
        for seed in "12"
    ]
    assert results[0] == results[1]
    assert "kinds" in results[0]
