"""Record the step graph of a small model after every pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

import kvpass
from kvpass.backend import Backend
from kvpass.cache.handle import Handle
from kvpass.fx.walk import placeholders
from kvpass.rewrite.context import PassRecord, StepContext
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.rewrite.pipeline import StepRewrite, rewrite_step
from kvpass.rewrite.step_graph import StepRewriteInput
from kvpass.runtime import recorder
from kvpass.torch_private import fx_nodes


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step graph after a pass: the lines of its program, a runnable copy, and the record of the pass."""

    lines: list[str]
    step_gm: fx.GraphModule
    record: PassRecord


@dataclasses.dataclass(frozen=True)
class Stages(Backend):
    """A backend that records the step graphs it rewrites, pass by pass.

    Attributes:
        calls, contexts: one of each for every rewritten graph.
        slots: copies of all slot tensors at the time of each rewrite.
        stages: stages of the last graph, by the name of the pass.
    """

    calls: list[StepRewriteInput] = dataclasses.field(default_factory=list, compare=False, repr=False)
    slots: list[list[Tensor]] = dataclasses.field(default_factory=list, compare=False, repr=False)
    contexts: list[StepContext] = dataclasses.field(default_factory=list, compare=False, repr=False)
    stages: dict[str, Stage] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def rewrite(self, call: StepRewriteInput) -> tuple[StepContext, StepRewrite]:
        self.calls.append(call)
        self.slots.append([tensor.clone() for layer in call.slots for tensor in layer.tensors()])
        context = StepContext(call)
        self.contexts.append(context)

        def record_stage(record: PassRecord, graph: fx.Graph) -> None:
            copy, _ = fx_nodes.copy_graph_module(context.step_gm)
            self.stages[record.name] = Stage(body(graph), copy, record)

        rewrite_step(context, watch=record_stage)
        return super().rewrite(call)

    def before(self, name: str) -> Stage:
        """Return the stage before a pass."""
        names = [step_pass.__name__ for step_pass in STEP_PASSES]
        return self.stages[names[names.index(name) - 1]]

    def added(self, name: str) -> list[str]:
        """Return the lines that a pass added, in order."""
        old = set(self.before(name).lines)
        return [line for line in self.stages[name].lines if line not in old]

    def removed(self, name: str) -> list[str]:
        """Return the lines that a pass removed."""
        new = set(self.stages[name].lines)
        return [line for line in self.before(name).lines if line not in new]

    def inputs(self, name: str) -> list[str]:
        """Return the names of the placeholders after a pass."""
        return [node.name for node in placeholders(self.stages[name].step_gm.graph)]


def body(graph: fx.Graph) -> list[str]:
    """Return the statements of a program, without those that release values."""
    return [
        line.split(";  ")[0].strip() for line in recorder.program(graph).splitlines() if not line.startswith("def ")
    ]


@torch.no_grad()
def staged(model: torch.nn.Module, policy: str = "streaming", *, query_len: int = 1, **settings: Any) -> Stages:
    """Return the stages of the first step, or of a chunk of `queries` tokens, after a prompt of five tokens."""
    torch._dynamo.reset()
    plain = kvpass.backend(policy, **{"inner": "eager", **settings})
    stages = Stages(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})
    compiled, ids = torch.compile(model, backend=stages), torch.arange(5 + query_len)[None]
    _, past = compiled(ids[:, :5].contiguous(), None)
    compiled(ids[:, 5:].contiguous(), past)
    return stages


def with_rows(call: StepRewriteInput) -> tuple[Any, ...]:
    """Return the arguments of a call with random keys and values in place of handles, which hold none."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(tuple(argument.shape), generator=generator) if isinstance(argument, Handle) else argument
        for argument in call.arguments
    )
