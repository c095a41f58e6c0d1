"""What the demo is asked to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvpass import policies
from kvpass.apps.models import ALIGNER, LoadedModel
from kvpass.lowering.formats import KVDtype
from kvpass.policies import Policy

PARTS = ("recall", "stream", "documents", "completions")


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """What to run.

    Attributes:
        model: name or path for transformers; None is the bundled model.
        policies: names; empty means all.
        parts: of `PARTS`; empty means all.
        budget: tokens kept, for every policy that evicts.
        text: a UTF-8 file; None is the held-out part of the standard library.
        aligner: networks for policies that need them; None is the bundled one, for the bundled model.
        out: the folder for tables and pictures.
        planted: tokens of a text with planted pairs, question and completion included.
        documents, length: how many documents of how many tokens.
        stream: tokens of the unbroken stream.
        new_tokens: length of a completion.
        every: steps between two snapshots of the held positions.
        threads: of torch, in each process; None leaves them as they are.
        kv_dtype: how keys and values are stored, see `kvpass.backend`.
        jobs: how many policies run at a time, each in a process of its own; 1 stays in this one.
    """

    model: str | None = None
    policies: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    budget: int = 256
    text: Path | None = None
    aligner: Path | None = None
    out: Path = Path("out")
    planted: int = 2048
    documents: int = 4
    length: int = 1024
    stream: int = 4096
    new_tokens: int = 8
    every: int = 16
    threads: int | None = None
    jobs: int = 1
    kv_dtype: KVDtype | None = None

    @property
    def chosen(self) -> list[str]:
        """The names of the policies to run, each once; all of them if none is asked for, the cheap ones first."""
        return list(dict.fromkeys(self.policies or sorted(policies.names(), key=_effort)))

    @property
    def streamed(self) -> list[str]:
        """The policies that number what they hold, and the full cache, which leaves the trained range."""
        classes = {name: policies.get(name) for name in self.chosen}
        return [name for name, policy in classes.items() if policy.positions == "cache" or not policy.evicts]

    @property
    def remembering(self) -> list[str]:
        """Those that can be asked about planted pairs; the bundled aligner is for another model than the one asked."""
        return [name for name in self.chosen if self.model or not _takes_aligner(name)]

    def policy(self, name: str) -> Policy:
        """A policy with its defaults, and the aligner if it takes one.

        Raises:
            PolicyError: there is no such policy.
            AlignerError: it needs an aligner and there is none, or that one cannot be read.
        """
        aligner = ALIGNER if self.aligner is None and self.model is None else self.aligner
        return policies.resolve(name, {"aligner": aligner} if _takes_aligner(name) else {})

    def slots(self, policy: Policy, room: int | None) -> int | None:
        """The budget of a policy; `room`, if that is known, for one that never evicts."""
        return policy.fitting_budget(self.budget) if policy.evicts else room

    def fitted(self, subject: LoadedModel, memory: LoadedModel) -> DemoSettings:
        """The same, with texts inside the models' trained range, and the stream inside a table of positions."""
        limit = subject.trained or max(self.length, self.stream)
        return dataclasses.replace(
            self,
            planted=min(self.planted, memory.trained or self.planted),
            length=min(self.length, limit),
            stream=min(self.stream, limit) if subject.tabled else self.stream,
        )


def _effort(name: str) -> tuple[object, ...]:
    """Sorts policies by what they ask for beside attention."""
    policy = policies.get(name)
    return policy.evicts, _takes_aligner(name), policy.positions == "cache", len(policy.statistics), name


def _takes_aligner(name: str) -> bool:
    return "aligner" in {field.name for field in dataclasses.fields(policies.get(name))}
