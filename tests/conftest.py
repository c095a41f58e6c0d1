"""No compiled code is carried from test to test.

Tests that ask for `traced` are the exception: they share what Dynamo traces of a model that they call in the same way.
So do the tests of a file that uses `shared_traces`.

What imports torch is imported where it is needed: the process that only hands tests to others starts without it.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.traces import Traced


EVERY = 12
LONGEST = (
    "test_ways", "test_whole",
    "test_calling", "test_pins", "test_cases", "test_loop", "test_cache_files", "test_runtime", "test_warm",
    "test_symbolic_sizes", "test_validate", "test_passes", "test_invariants", "test_agreement", "test_kernels",
    "test_rewrite", "test_architectures", "test_kv_align", "test_artifacts", "test_cuda_emission", "test_handle",
    "test_generate", "test_segments", "test_run", "test_prefill", "test_load", "test_encoder_decoders", "test_backend",
)  # fmt: skip
"""The files whose tests take longest begin, so that none of them is what one process does at the end alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--some", action="store_true", help=f"of each slow test's cases every {EVERY}th, one at least")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Of tests marked `few` all but so many cases are slow; then the marks choose; then `--some` does of slow ones."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    for cases in by_test(item for item in items if not item.get_closest_marker("slow")):
        if few := cases[0].get_closest_marker("few"):
            for item in left_out(cases, spread(cases, few.args[0])):
                item.add_marker(pytest.mark.slow)
    yield
    if config.getoption("--some"):
        slow = by_test(item for item in items if item.get_closest_marker("slow"))
        left = [item for cases in slow for item in left_out(cases, spread(cases, wanted(cases)))]
        config.hook.pytest_deselected(items=left)
        items[:] = left_out(items, left)


def pytest_runtest_setup() -> None:
    """Where there is a time by which tests must end, those that have not begun by then are skipped, and it is said."""
    if time.time() > float(os.environ.get("KVPASS_TESTS_UNTIL", "inf")):
        pytest.skip("not run: the time for tests is up")


def by_test(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each test."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(cases.values())


def wanted(cases: list[pytest.Item]) -> int:
    """How many cases of a slow test `--some` runs; `some` says it, if it has that mark."""
    marker = cases[0].get_closest_marker("some")
    return marker.args[0] if marker else math.ceil(len(cases) / EVERY)


def spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the cases of one test, at even distances."""
    count = min(count, len(cases))
    return [cases[(2 * place + 1) * len(cases) // (2 * count)] for place in range(count)]


def left_out(items: list[pytest.Item], chosen: list[pytest.Item]) -> list[pytest.Item]:
    """All but those."""
    taken = {id(item) for item in chosen}
    return [item for item in items if id(item) not in taken]


def pytest_collection_finish() -> None:
    """Set up what runs tests, not what hands them out.

    What imports have made stays, and looking through everything again and again took a tenth of the time.
    """
    from tests.quick import trace_quickly

    trace_quickly()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    import torch

    from tests import models

    shares = not {"traced", "shared_traces"}.isdisjoint(request.fixturenames)
    if not shares:
        models.forget()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    if not shares:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def shared_traces() -> Iterator[None]:
    """The tests of a file that uses this share what is traced and compiled."""
    from tests import models

    with models.lasting():
        yield


@pytest.fixture
def traced() -> Callable[..., Traced]:
    """See `tests.models.traced`."""
    from tests import models

    return models.traced
