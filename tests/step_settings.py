"""The configuration with which a backend gives a step graph to Inductor."""

from __future__ import annotations

from typing import Any

from kvpass.runtime import compiler


def step_settings(backend: compiler.Compiler, ranked: bool = False) -> dict[str, Any]:
    return backend._patches(backend._step_settings(ranked), compiler._prepare_step_graph, None)
