"""Check that two processes hold the same tokens as one, and give the same outputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.distributed import small
from tests.strategies import BUDGETS_BY_HEAD, MODEL_SPECIFIC, ROWS, TABLE

if TYPE_CHECKING:
    from tests.models import Run

RANKS, BUDGET = 2, 16
OPTIONS: dict[str, list[dict[str, object]]] = {
    "cascade": [{}, {"reduce": "max"}, {"reduce": "median"}, {"order": "attend_first"}, {"heads": "kv"}],
    "d2o": [{}, {"merge": "official"}, {"layers": "gate", "gate": 0.5}],
    "sage": [{"refresh_interval": 3}],
    "random": [{"seed": 7}],
    "snapkv": [{"window": 3}],
    **{name: [ROWS[name].fixed] for name in ("pyramid_kv", "keydiff", "r_kv", "vase")},
}
EVERY: dict[str, dict[str, Any]] = {
    f"{row.name} {options}": {"policy": row.name, "budget": BUDGET if row.name != "full" else None, **options}
    for row in TABLE
    if row.name not in (*MODEL_SPECIFIC, *BUDGETS_BY_HEAD)
    for options in OPTIONS.get(row.name, [{}])
}


def check_held(mine: list[Tensor], whole: list[Tensor], rank: int) -> None:
    """Check that each layer of a process holds the tokens of the same heads in one process: [B, heads, n]."""
    for here, all_heads in zip(mine, whole, strict=True):
        heads = here.shape[1]
        assert torch.equal(here, all_heads[:, rank * heads : (rank + 1) * heads])


@pytest.mark.slow
def test_shared_and_seeded_choices_equal_those_of_one_process(tmp_path: Path) -> None:
    settings = [{"policy": name, "budget": small.BUDGET} for name in ("tova", "random")]
    one = [small.run(small.small(), **each) for each in settings]
    torch.multiprocessing.spawn(small.work, (RANKS, settings, str(tmp_path)), nprocs=RANKS)
    for rank in range(RANKS):
        for (said, held), (alone, all_heads) in zip(torch.load(tmp_path / f"{rank}.pt"), one, strict=True):
            torch.testing.assert_close(said, alone, atol=1e-3, rtol=1e-3)
            check_held(held, all_heads, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "inner"), [([*EVERY], "eager"), (["tova {}"], "inductor")], ids=["all", "compiled"])
def test_policies_as_transformers_spreads_a_model(tmp_path: Path, names: list[str], inner: str) -> None:
    from tests.distributed.processes import model, runs, work

    one = runs(model("Llama"), {name: EVERY[name] for name in names})
    several_settings = {name: {**EVERY[name], "inner": inner} for name in names}
    torch.multiprocessing.spawn(work, (RANKS, "Llama", several_settings, str(tmp_path)), nprocs=RANKS)
    for rank in range(RANKS):
        several: dict[str, Run] = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for name, run in several.items():
            torch.testing.assert_close(run.logits, one[name].logits, atol=1e-3, rtol=1e-3, msg=name)
            for here, whole in zip(run.positions, one[name].positions, strict=True):
                check_held(here, whole, rank)
