"""Test DuoAttention: which heads retrieve, which tokens each head keeps, and gate files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs

import kvpass
from kvpass.apps import cli
from kvpass.cache.model_cache import caches_in
from kvpass.errors import BudgetError, CalibrationError, PolicyError
from kvpass.policies import resolve
from kvpass.policies.budgets import HeadClass
from kvpass.policies.duo_attention import DuoAttention
from kvpass.policies.head_gates import HeadGates
from tests.calibrations import random_gates
from tests.models import build


def gates_of(*layers: list[float]) -> HeadGates:
    return HeadGates("made up", torch.tensor(layers))


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def compiled(gates: Any, model: Any = None, **more: Any) -> Any:
    settings = {"budget": 12, "sinks": 2, "recent": 4, "inner": "eager", **more}
    return torch.compile(model or build("GPTNeoX"), backend=kvpass.backend("duo_attention", gates=gates, **settings))


def held_after(run: Any, *pieces: Tensor) -> list[list[list[int]]]:
    """Return the positions of each layer's heads in the first row, after a prompt and later calls."""
    cache = run(pieces[0], use_cache=True).past_key_values
    for piece in pieces[1:]:
        cache = run(piece, past_key_values=cache, use_cache=True).past_key_values
    positions = [layer.positions[0].tolist() for layer in kvpass.inspect(cache).layers]
    return [[[p for p in head if p >= 0] for head in layer] for layer in positions]


@torch.no_grad()
def test_the_heads_above_the_quantile_retrieve() -> None:
    """Check by hand: gates .9 .1 .5 .3 have the quantile .4 at .5.

    Heads 0 and 2 keep all tokens, and the others 2 sinks and 4 recent tokens.
    """
    run = compiled(gates_of([0.9, 0.1, 0.5, 0.3], [0.1, 0.9, 0.3, 0.5]))
    whole, streaming = [*range(16)], [0, 1, 12, 13, 14, 15]
    first, second = held_after(run, ids(1, 16))
    assert first == [whole, streaming, whole, streaming]
    assert second == [streaming, whole, streaming, whole]
    after, _ = held_after(run, ids(1, 16), ids(1, 1), ids(1, 1), ids(1, 5))
    assert after == [[0, 1, *range(7, 23)], [0, 1, *range(19, 23)]] * 2


@pytest.mark.parametrize(
    ("heads", "quantile", "budget", "classes"),
    [
        (4, 0.5, 12, [(2, 18), (2, 6)]),
        (4, 0.75, 12, [(1, 30), (3, 6)]),
        (4, 0.0, 12, [(3, 14), (1, 6)]),
        (3, 0.5, 12, [(1, 24), (2, 6)]),
        (3, 0.0, 13, [(2, 16), (1, 7)]),  # one more token, so that two heads share the rest equally
        (8, 0.5, 6, []),
    ],
)
def test_classes_hold_the_budget(heads: int, quantile: float, budget: int, classes: list[tuple[int, int]]) -> None:
    policy = DuoAttention(gates=random_gates(1, heads), sinks=2, recent=4, quantile=quantile)
    found = policy.head_classes(heads, budget)
    assert found == tuple(HeadClass(*each) for each in classes)
    assert not found or sum(count * slots for count, slots in found) == heads * budget


def test_of_equal_gates_the_lower_head_retrieves() -> None:
    with torch.no_grad():
        (first, *others), _ = held_after(compiled(gates_of([1.0] * 4, [1.0] * 4), quantile=0.75), ids(1, 20))
    assert len(first) == 20
    assert all(len(each) == 6 for each in others)


@torch.no_grad()
def test_a_prompt_and_a_step_are_two_graphs() -> None:
    """Check that one graph serves layers with different heads in each class, because the order is data."""
    counting = EagerAndRecordGraphs()
    run = compiled(random_gates(2, 4), inner=counting)
    cache = run(ids(2, 20), use_cache=True).past_key_values
    one, other = ([layer.slots.order[row].tolist() for layer in caches_in(cache)] for row in range(2))
    assert one == other == [random_gates(2, 4).gates[layer].argsort(descending=True).tolist() for layer in range(2)]
    assert one[0] != one[1]
    for _ in range(3):
        cache = run(ids(2, 1), past_key_values=cache, use_cache=True).past_key_values
    assert len(counting.graphs) == 2


def test_files(tmp_path: Path) -> None:
    gates, file = random_gates(2, 4), tmp_path / "gates"
    gates.save(file)
    assert HeadGates.load(file) == gates
    assert resolve("duo_attention", {"gates": str(file)}) == resolve("duo_attention", {"gates": gates})
    table = tmp_path / "full_attention_heads.tsv"
    table.write_text("-9.5e-05\t5.5e-01\n1.0\t1.2\n\n")
    assert HeadGates.of_table(table, "llama").gates.tolist() == [[0.0, pytest.approx(0.55)], [1.0, 1.0]]
    for text in ("1.0 2.0\n3.0\n", "a\tb\n", ""):
        table.write_text(text)
        with pytest.raises(
            CalibrationError, match=r"not a table of gates, which has a line for each layer|finite numbers"
        ):
            HeadGates.of_table(table, "llama")
    with pytest.raises(CalibrationError, match="cannot read a file of gates"):
        HeadGates.load(tmp_path / "none")
    with pytest.raises(CalibrationError, match="is not a table of gates"):
        HeadGates.of_table(tmp_path / "none", "llama")
    with pytest.raises(CalibrationError, match="finite numbers of the shape"):
        gates_of([float("nan")])


def test_the_command_converts_a_table_without_loading_the_model(tmp_path: Path) -> None:
    build("Llama").config.save_pretrained(tmp_path)
    table, out = tmp_path / "full_attention_heads.tsv", tmp_path / "gates"
    table.write_text("0.25\t0.75\n1.0\t0.0\n")
    assert cli.main(["gates", str(tmp_path), "--table", str(table), "--out", str(out)]) == 0
    assert HeadGates.load(out) == HeadGates("llama", torch.tensor([[0.25, 0.75], [1.0, 0.0]]))


@torch.no_grad()
def test_missing_and_mismatched_gates_are_refused() -> None:
    with pytest.raises(CalibrationError, match=r"needs gates=.* `kvpass gates MODEL --out FILE`"):
        resolve("duo_attention", {})
    with pytest.raises(CalibrationError, match=r"of a random with heads=2, and this model has 4; measure gates"):
        compiled(random_gates(2, 2))(ids(1, 20), use_cache=True)
    with pytest.raises(CalibrationError, match=r"with layers=3, and this model has 2"):
        compiled(random_gates(3, 4))(ids(1, 20), use_cache=True)
    with pytest.raises(BudgetError, match=r"budget=300 .* at least 320"):
        kvpass.backend("duo_attention", gates=random_gates(), budget=300)
    with pytest.raises(BudgetError, match=r"budget=0\.5: 'duo_attention' assigns fixed slots to each head"):
        kvpass.backend("duo_attention", gates=random_gates(), budget=0.5)
    with pytest.raises(PolicyError, match="positions='cache': heads keep different numbers of tokens"):
        kvpass.backend("duo_attention", gates=random_gates(), budget=400, positions="cache")
    with pytest.raises(PolicyError, match="streaming heads keep the first and the last tokens alone"):
        resolve("duo_attention", {"gates": random_gates(), "keep_prompt": True})
    q, k, v = (torch.randn(1, heads, 20, 8) for heads in (2, 1, 1))
    with pytest.raises(PolicyError, match="one per layer: use policy='streaming'"):
        kvpass.simulate("duo_attention", q, k, v, prompt=12, budget=8, gates=random_gates(1, 1), sinks=1, recent=3)
