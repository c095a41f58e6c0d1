"""Select the cases to run, and reset Dynamo between tests so that they share no compiled code.

Two fixtures are exceptions. `traced` gives tests a model whose Dynamo traces they share, because they call it in the
same way. `shared_traces` keeps traces and compiled code for all tests of a file.

Modules that import torch are imported inside functions, so that the xdist controller starts without torch.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests import drawing, lanes

if TYPE_CHECKING:
    from tests.traces import Traced


EVERY = 12
LONGEST = (
    "test_ways", "test_whole",
    "test_calling", "test_pins", "test_cases", "test_loop", "test_cache_files", "test_runtime", "test_compile_ahead",
    "test_symbolic_sizes", "test_validate", "test_passes", "test_invariants", "test_agreement", "test_kernels",
    "test_rewrite", "test_architectures", "test_kv_align", "test_artifacts", "test_cuda_emission", "test_handle",
    "test_generate", "test_segments", "test_run", "test_prefill", "test_load", "test_encoder_decoders", "test_backend",
)  # fmt: skip
"""Files that run first, because they take longest: started last, one would run alone at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--some", action="store_true", help=f"of each slow test's cases every {EVERY}th, one at least")


def pytest_configure() -> None:
    """Set what property tests draw, and give processes that tests start one thread each.

    Processes of several threads on few cores would wait for each other.
    """
    drawing.load_profile()
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Order the files, and choose the cases to run.

    1. Of a test marked `few(n)`, n evenly spaced cases stay in the default run; the others are marked slow.
    2. Tests that `tests/longer.txt` lists are marked longer, except their slow cases.
    3. pytest applies the `-m` expression.
    4. `--some` keeps evenly spaced cases of each slow test, see `sampled_count`. Longer tests begin, and the order of
       files depends on `KVPASS_TESTS_SEED`, so that it is not always the same tests that a deadline leaves out.
    """
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    longer = lanes.longer_tests()
    for cases in cases_by_test(item for item in items if not item.get_closest_marker("slow")):
        few = cases[0].get_closest_marker("few")
        kept = evenly_spaced(cases, few.args[0]) if few else cases
        for item in without(cases, kept):
            item.add_marker(pytest.mark.slow)
        for item in kept if function_of(cases[0]) in longer else ():
            item.add_marker(pytest.mark.longer)
    yield
    if config.getoption("--some"):
        seed = os.environ.get("KVPASS_TESTS_SEED", "")
        items.sort(key=lambda item: random.Random(seed + item.nodeid.partition("::")[0]).random())
        items.sort(key=lambda item: item.get_closest_marker("longer") is None)
        slow = cases_by_test(item for item in items if item.get_closest_marker("slow"))
        deselected = [item for cases in slow for item in without(cases, evenly_spaced(cases, sampled_count(cases)))]
        config.hook.pytest_deselected(items=deselected)
        items[:] = without(items, deselected)


def pytest_runtest_setup() -> None:
    """Skip tests that have not started by the deadline in `KVPASS_TESTS_UNTIL`."""
    if time.time() > float(os.environ.get("KVPASS_TESTS_UNTIL", "inf")):
        pytest.skip("not run: the time for tests is up")


def cases_by_test(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """Group cases by test function."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(function_of(item), []).append(item)
    return list(cases.values())


def function_of(item: pytest.Item) -> str:
    """Return the name of a case's test function, as `tests/file.py::function`."""
    return item.nodeid.partition("[")[0]


def sampled_count(cases: list[pytest.Item]) -> int:
    """Return how many cases of a slow test `--some` runs: the argument of its mark `some`, or a twelfth."""
    marker = cases[0].get_closest_marker("some")
    return marker.args[0] if marker else math.ceil(len(cases) / EVERY)


def evenly_spaced(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return `count` evenly spaced cases of one test."""
    count = min(count, len(cases))
    return [cases[(2 * index + 1) * len(cases) // (2 * count)] for index in range(count)]


def without(items: list[pytest.Item], excluded: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items that are not in `excluded`."""
    ids = {id(item) for item in excluded}
    return [item for item in items if id(item) not in ids]


def pytest_collection_finish() -> None:
    """Set up the process that runs tests, after collection.

    The xdist controller collects nothing, so it does not import torch. Imported objects stay alive, and scanning them
    took the garbage collector a tenth of the test time.
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
        models.discard_compiled_code()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    if not shares:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def shared_traces() -> Iterator[None]:
    """Keep traces and compiled code for all tests of a file."""
    from tests import models

    with models.sharing_compiled_code():
        yield


@pytest.fixture
def traced() -> Callable[..., Traced]:
    """Return `tests.models.traced`."""
    from tests import models

    return models.traced
