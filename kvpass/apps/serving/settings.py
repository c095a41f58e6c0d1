"""Settings of the server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvpass.apps.serving.conversations import Limits


@dataclasses.dataclass(frozen=True)
class ServeSettings:
    """Settings of the endpoints.

    Attributes:
        api_keys: keys of which each request must have one; none for no check.
        waiting: requests that may wait for a row; others get status 429.
        max_tokens: tokens of an answer if the request does not say.
        context: the most tokens of a request, or of a conversation, with the answer; None for no limit.
        drain: seconds that running requests have to finish when the server shuts down.
        largest_body: bytes of a request.
        conversations: how many conversations are kept.
        folder: where conversations are saved, for later servers too; None for a temporary folder.
    """

    api_keys: tuple[str, ...] = ()
    waiting: int = 32
    max_tokens: int = 512
    context: int | None = None
    drain: float = 30.0
    largest_body: int = 4 * 2**20
    conversations: Limits = dataclasses.field(default_factory=Limits)
    folder: Path | None = None
