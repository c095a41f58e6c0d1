"""Run a model on a CPU, and record the graphs that a GPU would run."""

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
from kvpass.rewrite.step_graph import StepRewriteInput
from kvpass.torch_private import fx_nodes, symbolic_shapes
from tests.gpu import torch_private
from tests.step_settings import step_settings


@dataclasses.dataclass
class Step:
    """One step graph, rewritten for a GPU, and its first run on the CPU.

    Attributes:
        rewritten_gm: the rewritten graph, with all tensors on a GPU.
        names: names of its inputs; those of a layer's slots begin with `slots_{layer}_`.
        patches: configuration of Inductor.
        compact: whether it is the decode graph in which the policy compacts.
        query_len: number of new tokens.
        layers: number of attention layers.
        inputs: inputs before the first run on the CPU.
        after: the same tensors after it, with slots overwritten in place.
        outputs: outputs of the graph.
    """

    rewritten_gm: fx.GraphModule
    names: list[str]
    patches: dict[str, Any]
    compact: bool
    query_len: int
    layers: int
    inputs: list[Any] = dataclasses.field(default_factory=list)
    after: list[Any] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Recording(Backend):
    """A backend that runs uncompiled on the CPU and keeps each step graph as for a GPU."""

    steps: list[Step] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def rewrite(self, call: StepRewriteInput) -> tuple[StepContext, StepRewrite]:
        with torch_private.pretended_gpu():
            gpu_gm, copy_of = on_gpu(call.canonical_gm)
            device = torch.device("cuda", 0)
            gpu_call = dataclasses.replace(
                call,
                canonical_gm=gpu_gm,
                sites=[site.in_copy(copy_of) for site in call.sites],
                layouts=[dataclasses.replace(layout, device=device) for layout in call.layouts],
                padding_inputs=call.padding_inputs.in_copy(copy_of),
            )
            rewrite = rewrite_step(StepContext(gpu_call))
        patches = step_settings(self, call.layouts[0].stores_unrotated_keys)
        names = [node.name for node in walk.placeholders(rewrite.rewritten_gm.graph)]
        query_len = rewrite.signature.query_len
        self.steps.append(Step(rewrite.rewritten_gm, names, patches, call.compact, query_len, len(call.sites)))
        return super().rewrite(call)

    @property
    def compiles_at_once(self) -> bool:
        return True

    def has_dynamic_sizes(self, device: torch.device) -> bool:
        return False

    def compile_step(
        self,
        rewritten_gm: fx.GraphModule,
        examples: Sequence[Any],
        layers: Sequence[fx.Node],
        ranked: bool,
        sizes: symbolic_shapes.SymbolicSizes | None,
    ) -> Callable[..., Any]:
        step, run = self.steps[-1], rewritten_gm.forward

        def record_first_run(*arguments: Any) -> Any:
            if step.outputs:
                return run(*arguments)
            step.inputs = [_copied(argument) for argument in arguments]
            results = run(*arguments)
            step.after = [_copied(argument) for argument in arguments]
            step.outputs = [_copied(result) for result in results]
            return results

        return record_first_run


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def on_gpu(canonical_gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Copy a canonical graph as if it had been traced on a GPU, with a map from nodes to copies."""
    gpu_gm, copy_of = fx_nodes.copy_graph_module(canonical_gm)
    for node in gpu_gm.graph.nodes:
        node.meta = {
            name: _value_on_gpu(value) if name == "example_value" else value for name, value in node.meta.items()
        }
        if node.op in ("call_function", "call_method"):
            node.args = fx.node.map_aggregate(node.args, _device_on_gpu)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _device_on_gpu)
    gpu_gm.recompile()
    return gpu_gm, copy_of


def _value_on_gpu(value: Any) -> Any:
    return torch_private.on_gpu(value) if torch_private.is_fake(value) else value


def _device_on_gpu(argument: Any) -> Any:
    return torch.device("cuda", 0) if isinstance(argument, torch.device) or argument == "cpu" else argument


def record(model: torch.nn.Module, policy: Any = "full", **settings: Any) -> tuple[Callable[..., Any], list[Step]]:
    """Return the model on a CPU, and the list that collects its step graphs as for a GPU.

    The model runs with `kvpass`, uncompiled. The arguments are those of `kvpass.backend`.
    """
    plain = backend(policy, **settings)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    recording = Recording(**fields)
    return torch.compile(model, backend=recording), recording.steps
