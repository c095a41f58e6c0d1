"""One trace for many backends: Dynamo, which takes most of a small model's time, sees each way of calling it once."""

from __future__ import annotations

from typing import Any

import torch

from kvpass.backend import Backend
from tests.switch import Switch


class Traced:
    """A model compiled in place with a `Switch`; what was compiled before is forgotten."""

    def __init__(self, model: Any) -> None:
        torch._dynamo.reset()
        self.model, self.switch = model, Switch()
        model.compile(backend=self.switch)

    @property
    def graphs(self) -> int:
        """How many Dynamo made."""
        return self.switch.graphs

    def under(self, chosen: Backend) -> Any:
        """The model, which from now on runs what this backend makes of its graphs."""
        self.switch.to(chosen)
        return self.model
