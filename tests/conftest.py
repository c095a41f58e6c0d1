"""One thread (two on a shared machine are slower than one), and no compiled code carried from test to test.

Tests that ask for `traced` are the exception: they share what Dynamo traces of a model that they call in the same way.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import models
from tests.traces import Traced

torch.set_num_threads(1)


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
