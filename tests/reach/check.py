"""Classify one row: it works, kvpass refuses it with a reason, or there is a defect."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

import kvpass
from kvpass.runtime.calling.in_place import compile_in_place
from tests import on_reference
from tests.reach.rows import Row
from tests.switch import Switch

STEPS, BUDGET = 8, 8
TOLERANCE = 2e-4
"""Largest accepted difference of logits, relative to the largest logit."""
OF_ROUNDING = 2.0
"""Factor on the difference between two attention kernels that a model with rounded activations may reach."""

Word = Literal["works", "refused", "wrong", "error", "not built"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of examining one row.

    Attributes:
        word: "works" if `full` equals the uncompiled model and `h2o` its reference; "refused" if kvpass raised an error
            with a reason; "wrong" and "error" are defects; "not built" if the model could not be built.
        graphs: number of Dynamo's graphs under both policies together.
    """

    group: str
    name: str
    word: Word
    graphs: int = 0
    reason: str = ""

    @property
    def acceptable(self) -> bool:
        return self.word not in ("wrong", "error")


class Forced(transformers.LogitsProcessor):
    """Makes `generate` choose tokens [B, n] regardless of the logits, so that runs can be compared."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.chosen = tokens, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, self.chosen, None]
        self.chosen += 1
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


@torch.no_grad()
def generate(model: Any, row: Row) -> tuple[Tensor, Any]:
    """Return the logits [B, steps, vocabulary] of a forced generation, and the cache after it."""
    given = row.given()
    rows = next(iter(given.values())).shape[0]
    tokens = torch.randint(3, 120, (rows, STEPS), generator=torch.Generator().manual_seed(5))
    guesses = bool({"assistant_model", "prompt_lookup_num_tokens"} & given.keys())
    forced = {} if guesses else {"logits_processor": [Forced(tokens)]}
    out = model.generate(
        **given, **forced, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(out.logits, 1), out.past_key_values


def examine(row: Row) -> Verdict:
    """Run a row uncompiled, under `full`, under `h2o`, and under the reference of `h2o`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = row.build()
        except Exception as error:
            return Verdict(row.group, row.name, "not built", reason=_brief(error))
        return _against(row, model)


def _against(row: Row, model: Any) -> Verdict:
    expected, room = _uncompiled(model, row)
    switch = Switch()
    torch._dynamo.reset()
    try:
        compile_in_place(model, switch, strict=True)
        why = _difference(row, model, switch, expected, room)
    except kvpass.KVPassError as error:
        return Verdict(row.group, row.name, "refused", switch.graphs, _cause(error))
    except Exception as error:
        return Verdict(row.group, row.name, "error", switch.graphs, f"{type(error).__name__}: {_brief(error)}")
    return Verdict(row.group, row.name, "wrong" if why else "works", switch.graphs, why or "")


def _difference(row: Row, model: Any, switch: Switch, expected: Tensor | Exception, room: float) -> str | None:
    """Describe the first wrong result, or return None."""
    switch.to(kvpass.backend("full", inner="eager"))
    ours, cache = generate(model, row)
    kvpass.inspect(cache)
    if isinstance(expected, Exception):
        return f"the uncompiled model does not run: {_brief(expected)}"
    if apart(ours, expected) > room:
        return f"logits differ from the uncompiled model's by {apart(ours, expected):.1e}"
    runs = []
    for inner in ("eager", "reference"):
        switch.to(on_reference.backend("h2o", budget=BUDGET, inner=inner))
        runs.append(generate(model, row))
    held = max(layer.capacity for layer in kvpass.inspect(runs[0][1]).layers)
    if held > BUDGET + 1:
        return f"the cache has {held} slots"
    if apart(runs[0][0], runs[1][0]) > room:
        return f"h2o's logits differ from its reference's by {apart(runs[0][0], runs[1][0]):.1e}"
    return None


def _uncompiled(model: Any, row: Row) -> tuple[Tensor | Exception, float]:
    """Return the uncompiled model's logits or its exception, and the tolerance for other logits."""
    try:
        expected, _ = generate(model, row)
    except Exception as error:
        return error, TOLERANCE
    if not row.rounds:
        return expected, TOLERANCE
    model.set_attn_implementation("eager")
    other, _ = generate(model, row)
    model.set_attn_implementation("sdpa")
    return expected, max(TOLERANCE, OF_ROUNDING * apart(other, expected))


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float(((ours - theirs).abs().max() / theirs.abs().max()).nan_to_num(nan=1e9))


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _cause(error: kvpass.KVPassError) -> str:
    """Return an error's class and message without folders of packages; of several refusals the first."""
    lines = str(error).splitlines()
    said = " ".join(lines[1:3] if lines[0].endswith("cannot be rewritten:") else lines)
    return f"`{type(error).__name__}`: " + re.sub(r"[^\s(]*/site-packages/", "", " ".join(said.split()))
