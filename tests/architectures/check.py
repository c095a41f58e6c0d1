"""Classify one architecture: rewritten with equal outputs, refused with a reason, or defective."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.fx as fx
from torch import Tensor

import kvpass
from kvpass.backend import Backend
from kvpass.capture.capture import capture
from kvpass.fx import shapes
from kvpass.runtime.calling.in_place import compile_in_place
from kvpass.runtime.recorder import Recorder
from kvpass.torch_private import regions
from tests import on_reference
from tests.architectures import images, inputs, zoo
from tests.switch import Switch

PROMPT, STEPS, BUDGET = 12, 8, 10
PADDING = 3
POLICIES: tuple[tuple[str, int | None], ...] = (("full", None), ("streaming", BUDGET), ("h2o", BUDGET))
TOLERANCE = 2e-4

Given = Mapping[str, Tensor]
"""Arguments of a model's `generate`."""

Word = Literal["rewritten", "refused", "wrong", "error", "no cache", "not built"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of examining one architecture.

    Attributes:
        name: the model type.
        word: "rewritten" if the outputs under every policy are right; "refused" if kvpass raised an error with a
            reason; "wrong" and "error" are defects; "no cache" and "not built" have nothing to rewrite.
        reason: why the model is not rewritten, or which inputs the examination left out.
        found, rewritten: numbers of attention sites in the prompt and decode graphs of `full`.
        graphs: number of Dynamo's graphs under `full`.
    """

    name: str
    word: Word
    reason: str = ""
    found: int = 0
    rewritten: int = 0
    graphs: int = 0

    @property
    def acceptable(self) -> bool:
        return self.word not in ("wrong", "error")


class Different(Exception):
    """Two runs that must be equal differ."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Tokens [B, T] and logits [B, steps, vocabulary] of a greedy generation, and the cache after it."""

    tokens: Tensor
    logits: Tensor
    cache: Any


def examine(name: str, padding: int = 0, canonical: bool = True, table: str = "causal") -> Verdict:
    """Run an architecture uncompiled, under every policy, and under every policy's reference.

    Args:
        canonical: whether to also run its graphs next to their canonical form.
        table: key of `zoo.TABLES`.
    """
    padding = 0 if name in zoo.UNPADDED else padding
    if zoo.attends_to_another(name, table):
        return Verdict(name, "no cache", "it attends to the keys and values of the model that it assists")
    try:
        model = zoo.build(name, table)
    except Exception as error:
        return Verdict(name, "not built", _brief(error))
    try:
        given = inputs.of(model, PROMPT, padding)
        expected = generate(model, None, given)
    except Exception as error:
        blind = Verdict(name, "not built", _brief(error))
        return _seeing(blind, model, padding) if table == "images" else blind
    if not _grows(expected.cache):
        return Verdict(name, "no cache", f"it keeps {type(expected.cache).__name__}")
    verdict = _against(name, model, expected, given, canonical)
    unseen = table == "images" and model.main_input_name == "input_ids"
    return _seeing(verdict, model, padding) if unseen and verdict.word == "rewritten" else verdict


def _seeing(blind: Verdict, model: torch.nn.Module, padding: int) -> Verdict:
    """Examine a model with images, after it was rewritten with text alone or did not run with it."""
    try:
        given = inputs.with_images(model, PROMPT, padding)
        expected = generate(model, None, given)
    except images.NoForm:
        reason = "no form of an image was found that it takes"
    except Exception as error:
        reason = f"uncompiled, it says of an image {_brief(error)}"
    else:
        return _against(blind.name, model, expected, given, canonical=False)
    return dataclasses.replace(blind, reason=f"text alone: {reason}") if blind.word == "rewritten" else blind


def _grows(cache: Any) -> bool:
    """True if any layer of the cache holds keys."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or []
    return any(getattr(layer, "keys", None) is not None for layer in layers)


def _against(name: str, model: torch.nn.Module, expected: Run, given: Given, canonical: bool) -> Verdict:
    recorder, switch = Recorder(), Switch()
    counts = (0, 0, 0)
    torch._dynamo.reset()
    try:
        for policy, budget in POLICIES:
            ours = generate(model, switch.to(backend(policy, budget, "eager", recorder)), given)
            if policy == "full":
                _check_equal(ours, expected, "uncompiled")
                counts = _counts(recorder)
                if name not in zoo.TAKEN_APART:
                    kvpass.inspect(ours.cache)
            else:
                theirs = generate(model, switch.to(backend(policy, budget, "reference", recorder)), given)
                _check_equal(ours, theirs, f"{policy} reference")
        if canonical:
            _check_canonical(model, given)
    except kvpass.KVPassError as error:
        return Verdict(name, "refused", _cause(error, recorder), *(_counts(recorder)))
    except Different as error:
        return Verdict(name, "wrong", str(error), *counts)
    except Exception as error:
        return Verdict(name, "error", f"{type(error).__name__}: {_brief(error)}", *counts)
    if counts[0] != counts[1]:
        return Verdict(name, "wrong", "some sites were left alone", *counts)
    return Verdict(name, "rewritten", "", *counts)


def _check_canonical(model: torch.nn.Module, given: Given) -> None:
    """Compare the canonical graphs of a prompt and of steps on an ordinary cache with the model's graphs."""
    beside = Beside()
    generate(model, beside, given, steps=3)
    if beside.worst > TOLERANCE or not beside.graphs:
        raise Different(
            f"{beside.graphs} canonical graphs differ from the model's by {beside.worst:.1e} of the largest"
        )


class Beside:
    """A backend that runs each graph next to its canonical form, and returns the graph's outputs.

    Attributes:
        graphs: number of graphs with attention on a cache.
        worst: largest difference of any output, relative to its largest number, or absolute if that is below 1.
    """

    def __init__(self) -> None:
        self.graphs, self.worst = 0, 0.0

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        copy = regions.inline_regions(gm)
        shapes.fix_floats(copy.graph)
        captured = capture(copy, [False] * len(examples))
        if not captured.sites:
            return gm.forward
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            own = [x.clone() if type(x) is Tensor else x for x in arguments]  # graphs may write to their inputs
            ours, theirs = captured.canonical_gm(*own), copy(*arguments)
            self.worst = max([self.worst, *map(_apart, ours, theirs)])
            return theirs

        return run


def _apart(ours: Any, theirs: Any) -> float:
    if not isinstance(theirs, Tensor) or not theirs.is_floating_point() or not theirs.numel():
        return 0.0
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    known = theirs.isfinite()
    worst = (ours - theirs)[known].abs().max() / theirs[known].abs().max().clamp(min=1.0) if known.any() else 0.0
    return float(worst) if torch.equal(known, ours.isfinite()) else float("inf")


def backend(policy: str, budget: int | None, inner: str, recorder: Recorder) -> Backend:
    return dataclasses.replace(on_reference.backend(policy, budget=budget, inner=inner), recorder=recorder)


def _counts(recorder: Recorder) -> tuple[int, int, int]:
    involved = [site for site in recorder.sites if site.verdict != "left alone"]
    return len(involved), sum(site.verdict == "rewritten" for site in involved), len(recorder.graphs)


def _cause(error: kvpass.KVPassError, recorder: Recorder) -> str:
    """Return the reason and the source line of a refusal; of several refusals the first."""
    refused = [site for site in recorder.sites if site.verdict == "refused"]
    line, why = (refused[0].line, refused[0].reason) if refused else ("", str(error))
    placed = re.match(r"(\S+\.py:\d+: ?)(.*)", line or why, re.DOTALL)
    if not refused and placed:
        line, why = placed.groups()
    place = f" ({line.split(': ')[0]})" if line else ""
    return _brief(why + place)


def _brief(said: object) -> str:
    """Return a text in one line, with paths relative to site-packages; cut last, so that no partial path remains."""
    return re.sub(r"[^\s(]*/site-packages/", "", " ".join(str(said).split()))[:400]


def _check_equal(ours: Run, theirs: Run, whose: str) -> None:
    scale = theirs.logits.abs().max().clamp(min=1.0)
    worst = float(((ours.logits - theirs.logits).abs().max() / scale).nan_to_num(nan=1e9))
    if worst > TOLERANCE:
        raise Different(f"logits differ from those of {whose} by {worst:.1e} of the largest")


@contextlib.contextmanager
def compiled(model: Any, chosen: Backend | Beside | Switch | None) -> Iterator[None]:
    """Compile the model in place inside the context; a `Switch` keeps its earlier traces."""
    if not isinstance(chosen, Switch):
        torch._dynamo.reset()
    if chosen is not None:
        compile_in_place(model, chosen, strict=False)
    try:
        with torch._dynamo.config.patch(recompile_limit=64):  # only backends of kvpass set the limit themselves
            yield
    finally:
        for module in model.modules():  # the language model of BLIP-2 is compiled apart from the whole
            module._compiled_call_impl = None


@torch.no_grad()
def generate(model: Any, chosen: Backend | Beside | Switch | None, given: Given, steps: int = STEPS) -> Run:
    """Generate a few tokens greedily."""
    with compiled(model, chosen), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            **given, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, num_beams=1,
            use_cache=True, output_logits=True, return_dict_in_generate=True, num_return_sequences=1,
        )  # fmt: skip
    if out.logits is None:
        raise ValueError("its generate does not go token by token: it returns no logits of single steps")
    return Run(out.sequences, torch.stack(out.logits, 1), out.past_key_values)
