"""Record the graphs of a model under a policy at every stage, and its outputs."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch import Tensor

import kvpass
from kvpass import model_access
from kvpass.backend import Backend
from kvpass.lowering import attention_tiles
from kvpass.runtime.calling.in_place import compile_in_place
from kvpass.runtime.recorder import Recorder
from tests.architectures import inputs, zoo
from tests.golden import cases, program
from tests.switch import Switch

PROMPT, STEPS, CHUNK, PADDING = 12, 4, 3, 3
TRACED_UNDER = "window"
SHOWN = 4
"""Number of logits of a row that are recorded."""
TOLERANCE = 1e-3
"""Largest accepted difference of a logit, relative to the standard deviation of all logits."""

Outputs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Recording:
    """The recording of one model under one policy.

    Attributes:
        stages: title and text of each graph, in the order in which kvpass makes them.
        outputs: tokens, a summary of the logits, and the final positions in each layer; or the class of an error.
    """

    stages: list[tuple[str, str]]
    outputs: Outputs


@dataclasses.dataclass
class StageRecorder(Recorder):
    """Records the normalised text of every graph."""

    def keep_graph_code(self, title: str, graph: fx.Graph) -> None:
        self.programs.append((title, program.text(graph)))


class RecordingBackend(Backend):
    """A backend that also records the graphs that it passes to a compiler, as it does without a recorder."""

    @property
    def compiles_at_once(self) -> bool:
        return False

    def _compile_inner(self, rewritten_gm: fx.GraphModule, *options: Any) -> Callable[..., Any]:
        if self.recorder is not None:
            self.recorder.keep_graph_code("handed to the compiler", rewritten_gm.graph)
        return super()._compile_inner(rewritten_gm, *options)


@torch.no_grad()
def record(name: str, policies: Sequence[str]) -> dict[str, Recording]:
    """Record a model under each of several policies.

    Dynamo traces the model once, always under the same policy, so that a recording depends on no other recording.
    Prompts attend by torch's kernel, so that graphs do not depend on the machine.
    """
    model, switch = cases.build(name), Switch()
    torch._dynamo.reset()
    compile_in_place(model, switch, strict=False)
    with mock.patch.object(attention_tiles, "is_faster", return_value=False):
        _record_policy(model, name, switch, TRACED_UNDER)
        return {policy: _record_policy(model, name, switch, policy) for policy in policies}


def _record_policy(model: Any, name: str, switch: Switch, policy: str) -> Recording:
    stages = StageRecorder()
    try:
        backend = cases.backend(policy, model)
        fields = {field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)}
        switch.to(RecordingBackend(**{**fields, "recorder": stages}))
        outputs = _run(model, name)
    except kvpass.KVPassError as error:
        outputs = {"refused": type(error).__name__}
    except Exception as error:
        outputs = {"failed": type(error).__name__}
    return Recording(stages.programs, outputs)


def _run(model: Any, name: str) -> Outputs:
    """Generate after a prompt, and for a decoder-only model again after a chunk of further tokens."""
    torch.manual_seed(0)
    call_inputs = inputs.of(model, PROMPT, 0 if name in zoo.UNPADDED else PADDING)
    first = _generate(model, call_inputs)
    logits, last = list(first.logits), first
    if not model.config.is_encoder_decoder:
        further = torch.randint(3, zoo.VOCABULARY, (2, CHUNK - 1), generator=torch.Generator().manual_seed(2))
        ids = torch.cat([first.sequences, further], 1)  # the last generated token is not cached
        attended = torch.ones(2, ids.shape[1] - PROMPT, dtype=torch.int64)
        mask = torch.cat([call_inputs["attention_mask"], attended], 1)
        past = model_access.cache_arguments(model, model_access.cache_of_output(first))
        last = _generate(model, dict(input_ids=ids, attention_mask=mask, **past))
        logits += last.logits
    positions = [layer.positions.tolist() for layer in kvpass.inspect(model_access.cache_of_output(last)).layers]
    return {"tokens": last.sequences.tolist(), "logits": summary(torch.stack(logits, 1)), "positions": positions}


def _generate(model: Any, call_inputs: Mapping[str, Tensor]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(
            **call_inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1,
            use_cache=True, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip


def summary(logits: Tensor) -> list[list[list[float]]]:
    """Return mean, standard deviation and the first logits of each step and row, with four digits.

    Args:
        logits: float [B, T, vocabulary].
    """
    parts = [logits.mean(-1, keepdim=True), logits.std(-1, keepdim=True), logits[..., :SHOWN]]
    return [[[float(f"{number:.4g}") for number in row] for row in step] for step in torch.cat(parts, -1).tolist()]


def close(ours: list[list[list[float]]], theirs: list[list[list[float]]]) -> bool:
    """True if two summaries of logits differ by no more than `TOLERANCE` and their last digit."""
    own, recorded = torch.tensor(ours), torch.tensor(theirs)
    if own.shape != recorded.shape:
        return False
    scale = float(recorded[..., 1].abs().max())
    return torch.allclose(own, recorded, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def digest(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
