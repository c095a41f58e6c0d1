"""Add up the partial outputs of requests."""

from __future__ import annotations

from collections.abc import Iterable

from kvpass import GenerationOutput


def last_outputs(outputs: Iterable[GenerationOutput], parts: dict[str, list[int]]) -> dict[str, GenerationOutput]:
    """Return the last output of each request, and check that partial outputs, with earlier `parts`, add up to it."""
    last: dict[str, GenerationOutput] = {}
    for output in outputs:
        assert output.request_id not in last
        parts.setdefault(output.request_id, []).extend(output.new_tokens)
        assert parts[output.request_id] == output.generated_tokens
        if output.is_finished():
            last[output.request_id] = output
    return last
