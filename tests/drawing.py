"""Set how many examples property tests draw, for all of them alike: `conftest.py` calls `load_profile`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("KVPASS_EXAMPLES", "10"))  # `make slow` draws more cases, with other seeds


def load_profile() -> None:
    """Let tests draw `EXAMPLES` without a deadline, always the same ones unless the number is set from outside."""
    settings.register_profile(
        "kvpass",
        deadline=None,
        max_examples=EXAMPLES,
        derandomize="KVPASS_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("kvpass")
