"""A model that runs on a CPU, and the graphs that a GPU would have been given on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.backend import Backend, backend
from kvpass.fx import walk
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.pipeline import StepRewrite, rewrite_step
from kvpass.rewrite.step_graph import StepCall
from kvpass.torch_private import fx_nodes, symbolic_shapes
from tests.gpu import torch_private
from tests.step_settings import step_settings


@dataclasses.dataclass
class Step:
    """One step graph, rewritten for a GPU, and what it did on the CPU at its first run.

    Attributes:
        gm: the rewritten graph, all of it on a GPU.
        names: of its inputs; those of a layer's slots begin with `slots_{layer}_`.
        patches: what Inductor is configured with.
        compact: whether it is the decode graph in which the policy compacts.
        queries: new tokens.
        layers: attention layers.
        inputs: as they were before the first run on the CPU.
        after: the same tensors after it, slots overwritten in place.
        outputs: what the graph gave.
    """

    gm: fx.GraphModule
    names: list[str]
    patches: dict[str, Any]
    compact: bool
    queries: int
    layers: int
    inputs: list[Any] = dataclasses.field(default_factory=list)
    after: list[Any] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Recording(Backend):
    """A backend that runs uncompiled on the CPU and keeps each step graph as a GPU would be given it."""

    steps: list[Step] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def rewrite(self, call: StepCall) -> tuple[StepContext, StepRewrite]:
        with torch_private.pretended_gpu():
            moved, copies = on_gpu(call.gm)
            device = torch.device("cuda", 0)
            there = dataclasses.replace(
                call,
                gm=moved,
                sites=[site.in_copy(copies) for site in call.sites],
                layouts=[dataclasses.replace(layout, device=device) for layout in call.layouts],
                padding_inputs=call.padding_inputs.in_copy(copies),
            )
            rewrite = rewrite_step(StepContext(there))
        patches = step_settings(self, call.layouts[0].ranked)
        names = [node.name for node in walk.placeholders(rewrite.gm.graph)]
        self.steps.append(Step(rewrite.gm, names, patches, call.compact, rewrite.queries, len(call.sites)))
        return super().rewrite(call)

    @property
    def compiles_at_once(self) -> bool:
        return True

    def has_dynamic_sizes(self, device: torch.device) -> bool:
        return False

    def compile_step(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        ranked: bool,
        sizes: symbolic_shapes.SymbolicSizes | None,
    ) -> Callable[..., Any]:
        step, run = self.steps[-1], gm.forward

        def first(*arguments: Any) -> Any:
            if step.outputs:
                return run(*arguments)
            step.inputs = [_copied(argument) for argument in arguments]
            results = run(*arguments)
            step.after = [_copied(argument) for argument in arguments]
            step.outputs = [_copied(result) for result in results]
            return results

        return first


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def on_gpu(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of one of Dynamo's graphs as if it had been traced on a GPU, and where each node went."""
    moved, copies = fx_nodes.copy_graph_module(gm)
    for node in moved.graph.nodes:
        node.meta = {name: _there(what) if name == "example_value" else what for name, what in node.meta.items()}
        if node.op in ("call_function", "call_method"):
            node.args = fx.node.map_aggregate(node.args, _literal)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _literal)
    moved.recompile()
    return moved, copies


def _there(value: Any) -> Any:
    return torch_private.on_gpu(value) if torch_private.is_fake(value) else value


def _literal(x: Any) -> Any:
    return torch.device("cuda", 0) if isinstance(x, torch.device) or x == "cpu" else x


def record(model: torch.nn.Module, policy: Any = "full", **settings: Any) -> tuple[Callable[..., Any], list[Step]]:
    """The model on a CPU, and the list to which each of its step graphs is added as a GPU would be given it.

    The model computes with `kvpass` and uncompiled.  Takes what `kvpass.backend` takes.
    """
    made = backend(policy, **settings)
    fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    recording = Recording(**fields)
    return torch.compile(model, backend=recording), recording.steps
