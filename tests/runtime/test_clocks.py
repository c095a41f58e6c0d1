"""Test the host's counts for the caches of a model's layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kvpass
from kvpass.policies.budgets import HeadClass
from kvpass.runtime import clocks


def test_layers_with_other_classes_of_heads_are_due_at_other_times() -> None:
    """Test layers with 3 and 5 KV heads, which have as many classes with different budgets."""
    policy = kvpass.policies.get("ada_kv")(interval=4)

    def layer(*budgets: int) -> Any:
        layout = SimpleNamespace(policy=policy, classes=tuple(HeadClass(1, budget) for budget in budgets))
        return SimpleNamespace(layout=layout, row_budgets=(12,), clocks=((9,) * len(budgets),))

    many, few = layer(24, 12, 10), layer(24, 12, 9)
    for order in ([many, few], [few, many]):
        compact, ticked = clocks.next_clocks(order)
        assert compact
        assert ticked == [clocks.next_clocks([each])[1][0] for each in order]
    assert not clocks.next_clocks([many])[0]
