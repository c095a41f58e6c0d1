"""Record what passes do to graphs, and log it to KVPASS_LOGS, Python's logging, and torch's structured trace.

    KVPASS_LOGS=passes python ...           a line for every pass over every step graph: its rewrites and its time
    KVPASS_LOGS=passes,graphs python ...    and the program after it
    TORCH_TRACE=/tmp/trace python ...       the same programs as artifacts, for tlparse

The loggers are `kvpass.passes` and `kvpass.graphs`; a program may set their levels itself.
"""

from __future__ import annotations

import dataclasses
import logging
import os

import torch.fx as fx

from kvpass.errors import PolicyError
from kvpass.torch_private import dynamo


@dataclasses.dataclass
class Record:
    """What a pass did to one graph.

    Attributes:
        matched: the nodes that it rewrote or inserted.
        left: the nodes that it left unchanged, each with the reason.
        name: the name of the pass.
        milliseconds: its duration.
    """

    matched: list[str] = dataclasses.field(default_factory=list)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = ""
    milliseconds: float = 0.0

    def __str__(self) -> str:
        unchanged = "".join(f"; left {name}, as {why}" for name, why in self.left.items())
        return f"{self.name}: {len(self.matched)} rewritten in {self.milliseconds:.1f} ms{unchanged}"


PASSES = logging.getLogger("kvpass.passes")
GRAPHS = logging.getLogger("kvpass.graphs")


def configure() -> None:
    """Let the loggers named in KVPASS_LOGS write to stderr.

    Raises:
        PolicyError: KVPASS_LOGS contains an unknown name.
    """
    named = [name.strip() for name in os.environ.get("KVPASS_LOGS", "").split(",") if name.strip()]
    for name in named:
        if name not in ("passes", "graphs"):
            raise PolicyError(f"KVPASS_LOGS={name!r}: must be 'passes' or 'graphs'")
        logger = PASSES if name == "passes" else GRAPHS
        logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())


def note_pass(record: Record, graph: fx.Graph) -> None:
    """Log the record of a pass, and the graph after it."""
    PASSES.info("%s", record)
    note_program(f"after {record.name}", graph)


def note_program(title: str, graph: fx.Graph) -> None:
    """Log a graph under a title."""
    if GRAPHS.isEnabledFor(logging.INFO):
        GRAPHS.info("# %s\n%s", title, program(graph))
    dynamo.note_artifact(f"kvpass {title}".replace(" ", "_"), lambda: program(graph))


def program(graph: fx.Graph) -> str:
    """Return a graph as Python code, a line for every node."""
    return graph.python_code("self").src.strip()
