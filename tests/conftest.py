"""No compiled code is carried from test to test.

Tests that ask for `traced` are the exception: they share what Dynamo traces of a model that they call in the same way.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import models
from tests.quick import trace_quickly
from tests.traces import Traced

trace_quickly()


EVERY = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--some", action="store_true", help=f"of each slow test's cases every {EVERY}th, one at least")


@pytest.hookimpl(trylast=True)  # when the others have been left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--some"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {id(item) for items in cases.values() for item in spread(items)}
    left = [item for items in cases.values() for item in items if id(item) not in chosen]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def spread(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Some of the cases of one test, at even distances; `some` says how many, if it has that mark."""
    asked = cases[0].get_closest_marker("some")
    count = asked.args[0] if asked else math.ceil(len(cases) / EVERY)
    return [cases[(2 * place + 1) * len(cases) // (2 * count)] for place in range(count)]


def pytest_collection_finish() -> None:
    """What imports have made stays, and looking through everything again and again took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    shares = "traced" in request.fixturenames
    if not shares:
        models.forget()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    if not shares:
        torch._dynamo.reset()


@pytest.fixture
def traced() -> Callable[..., Traced]:
    """See `tests.models.traced`."""
    return models.traced
