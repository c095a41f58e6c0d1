"""Return the configuration with which a backend passes a step graph to Inductor."""

from __future__ import annotations

from typing import Any

from kvpass.runtime import backend_base


def step_settings(backend: backend_base.BackendBase, ranked: bool = False) -> dict[str, Any]:
    return backend._patches(backend._step_settings(ranked), backend_base._prepare_step_graph, None)
