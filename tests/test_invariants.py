"""Test invariants of every policy in whole models; a row of `tests.strategies.TABLE` adds a policy.

While nothing is evicted the model equals the uncompiled one, and afterwards the eager reference at every step. There
are two Dynamo graphs, which all policies share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvpass
from tests.aligners import random_aligner
from tests.calibrations import CALIBRATED, made_for_model
from tests.models import build, prompt, teacher_forced
from tests.strategies import ROWS, TABLE, fitting_budget
from tests.traces import Traced

ONE_ROW, PADDED = (1, ()), (3, (3, 1, 0))  # numbers of rows, and of padding tokens before each
# Llama has grouped heads and a full rotary embedding, GPT-NeoX single heads and a partial one.
every_policy = pytest.mark.parametrize("name", [row.name for row in TABLE if row.name not in ("kv_align", *CALIBRATED)])
every_model = pytest.mark.parametrize(
    ("architecture", "rows", "padding"),
    [
        pytest.param("Llama", *PADDED, id="Llama-padded"),
        pytest.param("GPTNeoX", *ONE_ROW, id="GPTNeoX-one-row"),
        pytest.param("Llama", *ONE_ROW, id="Llama-one-row", marks=pytest.mark.slow),
        pytest.param("GPTNeoX", *PADDED, id="GPTNeoX-padded", marks=pytest.mark.slow),
    ],
)


KV_HEADS = {"Llama": 2, "GPTNeoX": 4}


def settings(name: str, architecture: str, budget: int, layers: int = 2) -> dict[str, Any]:
    """Return the arguments of `kvpass.backend` for a policy, with a budget of at least `budget`."""
    shape = dict(layers=layers, heads=KV_HEADS.get(architecture, 2), dim=16)  # for options made for one model
    options = ROWS[name].fixed | made_for_model(name, **shape)
    if name == "kv_align":
        options["aligner"] = random_aligner("direct", **shape)
    policy = kvpass.policies.resolve(name, options)
    return {"policy": name, "budget": fitting_budget(policy, budget) if policy.evicts else 64, **options}


@pytest.mark.few(1)
@every_policy
@every_model
def test_the_uncompiled_model_until_something_is_evicted(
    traced: Callable[..., Traced], architecture: str, name: str, rows: int, padding: tuple[int, ...]
) -> None:
    model, (ids, mask) = traced(architecture, rows, "generates"), prompt(rows, 9, padding)
    how = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    how |= dict(return_dict_in_generate=True, output_logits=True)
    with torch.inference_mode():
        expected = build(architecture).generate(ids, **how)
        given = settings(name, architecture, 40)
        given |= ROWS[name].lossless_at(given["budget"])
        chosen = kvpass.backend(**given, inner="eager")
        got = model.under(chosen).generate(ids, **how)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert len(kvpass.inspect(got.past_key_values).layers) == 2  # it ran on slots
    assert model.graphs == 2  # a prompt and a step, for any policy


@pytest.mark.few(6)
@every_policy
@every_model
def test_the_reference_at_every_step(
    traced: Callable[..., Traced], architecture: str, name: str, rows: int, padding: tuple[int, ...]
) -> None:
    held, mask = compare(traced(architecture, rows, "is fed"), rows, padding, settings(name, architecture, 8))
    assert ((held >= 0).sum(-1) < mask.sum(-1)[:, None]).all() or name == "full"  # tokens of every row were evicted


OPTIONS = [
    ("cascade", 8, {"select": False}),
    ("buzz", 8, {"old_stride": 2}),
    ("d2o", 8, {"merge": "none", "density": "query"}),
    ("d2o", 6, {"layers": "paper", "gate": 2.872, "alpha": 1.5}),  # one layer is above the gate and one below
    ("d2o", 6, {"layers": "gate", "gate": 2.872}),
    ("sage", 15, {"select_at": "overflow"}),  # in a different step for each row
    ("random", 15, {"keep_prompt": True}),
    ("h2o", 9, {"interval": 3}),
    ("streaming", 15, {"interval": 4}),  # in a different step for each row, with keys rotated at read
    ("roco", 18, {"interval": 3, "keep_prompt": True}),
    ("d2o", 18, {"keep_prompt": True}),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "budget", "options"), OPTIONS, ids=lambda value: str(value))
def test_the_reference_at_every_step_with_options(
    traced: Callable[..., Traced], name: str, budget: int, options: dict[str, object]
) -> None:
    compare(traced("Llama", 3, "is fed"), *PADDED, {"policy": name, "budget": budget, **options})


def compare(
    model: Traced, rows: int, padding: tuple[int, ...], chosen: dict[str, object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare a prompt and steps on slots with the reference.

    Return the tokens that the first layer holds, [B, Hkv, C], and the mask.
    """
    steps = [12, *[1] * 9]
    ids, mask = prompt(rows, sum(steps), padding)
    lowered = teacher_forced(model, ids, mask, steps, **chosen, inner="eager")
    assert model.graphs == 2
    literal = teacher_forced(model, ids, mask, steps, **chosen, inner="reference")
    for step, (ours, theirs) in enumerate(zip(lowered.positions, literal.positions, strict=True)):
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"step {step}, layer {layer} holds {a} where the reference holds {b}"
    real = mask.bool()
    torch.testing.assert_close(lowered.logits[real], literal.logits[real], atol=1e-4, rtol=1e-4)
    return lowered.positions[-1][0], mask
