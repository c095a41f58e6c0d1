"""Test dynamic sizes: new lengths, batches, budgets and capacities reuse compiled code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import kvpass
from kvpass import policies
from kvpass.backend import Backend
from kvpass.torch_private import symbolic_shapes
from tests.models import build, many_graphs, model_with_unequal_layers
from tests.strategies import MODEL_SPECIFIC, ROWS

LENGTHS = (5, 7, 3, 11, 4, 6, 2, 9, 8, 10)


@dataclasses.dataclass(frozen=True)
class Counting(Backend):
    """A backend that counts the step graphs it compiles; with `numbers` all sizes are static."""

    numbers: bool = False
    made: list[int] = dataclasses.field(default_factory=list, compare=False)

    @property
    def compiles_at_once(self) -> bool:
        return True

    def compile_step(self, rewritten_gm: Any, *how: Any) -> Any:
        self.made.append(len(rewritten_gm.graph.nodes))
        return super().compile_step(rewritten_gm, *how)

    def has_dynamic_sizes(self, device: torch.device) -> bool:
        return not self.numbers and super().has_dynamic_sizes(device)


def counting(policy: str | policies.Policy, numbers: bool = False, inner: str = "eager", **settings: Any) -> Counting:
    made = kvpass.backend(policy, inner=inner, **settings)
    given = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return Counting(**given, numbers=numbers)


@torch.no_grad()
def logits(model: Any, rows: int, pieces: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the logits of one conversation with this many rows, fed in pieces."""
    ids = torch.randint(0, 60, (rows, sum(pieces)), generator=torch.Generator().manual_seed(rows))
    past = None
    for piece in ids.split(pieces, 1):
        out = model(piece, past_key_values=past, use_cache=True)
        past = out.past_key_values
        yield out.logits


def compiled(backend: Backend, name: str = "Llama") -> Any:
    return torch.compile(build(name, layers=1), backend=backend)


NAMES = [name for name in policies.names() if name not in MODEL_SPECIFIC]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name in NAMES if ROWS[name].rows])
def test_dynamic_sizes_equal_numbers(policy: str) -> None:
    """Test rows, chunks of several lengths and budgets that are shares, beyond the first eviction."""
    budget = None if policy == "full" else 0.5
    ours, theirs = (counting(policy, numbers, budget=budget) for numbers in (False, True))
    with many_graphs():
        one, other = compiled(ours), compiled(theirs)
        for rows, pieces in ((1, (40, 1, 5, 1)), (1, (50, 1, 7, 1)), (2, (44, 1, 3, 1)), (3, (48, 1, 6, 1, 1))):
            for got, wanted in zip(logits(one, rows, pieces), logits(other, rows, pieces), strict=True):
                assert torch.allclose(got, wanted, atol=1e-5)
    assert len(ours.made) < len(theirs.made)


def test_ten_lengths_are_one_compilation() -> None:
    """Count the compilations of chunks; steps of one token between them need one more."""
    backend = counting("h2o", budget=24)
    pieces = (12, *(part for length in LENGTHS for part in (length, 1)))
    assert len(list(logits(compiled(backend), 1, pieces))) == len(pieces)
    assert len(backend.made) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [1, 2])
def test_ten_batches_are_two_compilations(first: int) -> None:
    """Check that the first batch size is compiled alone, and all others share code for Dynamo's second graph."""
    backend = counting("h2o", budget=24)
    with many_graphs():
        model = compiled(backend)
        for rows in range(first, first + 10):
            list(logits(model, rows, (30, 1, 1)))
    assert len(backend.made) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", NAMES)
def test_chunks_of_any_batch_are_one_compilation(policy: str) -> None:
    """Check that no traced code reads the number of rows as an int, as `len` of a tensor would."""
    backend = counting(policies.get(policy)(**ROWS[policy].fixed), budget=None if policy == "full" else 24)
    with many_graphs():
        model = torch.compile(build("Llama", layers=1), backend=backend)  # d2o would order several
        for rows in (2, 3):
            list(logits(model, rows, (30, 5, 1, 1)))
        made = len(backend.made)
        for rows in (5, 4, 7):
            list(logits(model, rows, (30, 5, 1, 1)))
    assert len(backend.made) == made


def test_ten_prompts_under_a_share_are_two_compilations() -> None:
    backend = counting("streaming", budget=0.5)
    model = compiled(backend)
    for length in range(30, 50, 2):
        list(logits(model, 1, (length, 1, 1)))
    assert len(backend.made) == 2


def test_growing_slots_are_two_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test policy `full`, which doubles its slots three times here."""
    monkeypatch.setattr("kvpass.user_budget.SPARE", 1)
    backend = counting("full")
    model, plain = compiled(backend), build("Llama", layers=1)
    for got, wanted in zip(logits(model, 1, (6, *[1] * 40)), logits(plain, 1, (6, *[1] * 40)), strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)
    assert len(backend.made) == 2


@pytest.mark.slow
@torch.no_grad()
def test_layers_with_slots_of_their_own_are_one_compilation() -> None:
    """Check that one graph with dynamic sizes serves all layers and prompts, with equal memory for the budget."""
    backend = counting("d2o", budget=12)
    numbers = counting("d2o", numbers=True, budget=12)
    one, other = (torch.compile(model_with_unequal_layers(3), backend=each) for each in (backend, numbers))
    met = set()
    for length in (30, 8, 37):  # the prompt of 8 tokens fits, and the budgets are equal
        for got, wanted in zip(logits(one, 1, (length, 1, 1)), logits(other, 1, (length, 1, 1)), strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)
        ids = torch.randint(0, 60, (1, length), generator=torch.Generator().manual_seed(1))
        capacities = [x.capacity for x in kvpass.inspect(one(ids, use_cache=True).past_key_values).layers]
        assert sum(capacities) == 3 * (12 + 1)
        met.add(tuple(capacities))
    assert len(met) == 3
    assert len(backend.made) == 1


class Counted(nn.Module):
    """Attention whose logits or outputs depend on the number of rows or new tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(64, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        count, total = q.shape[2], k.shape[2]
        seen = torch.arange(total) <= torch.arange(total - count, total)[:, None]
        if self.how == "mask by count":
            seen = seen & (torch.arange(total) % count != 1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None]).transpose(1, 2).flatten(2)
        if self.how == "times rows":
            out = out * ids.shape[0]
        elif self.how == "times count":
            out = out * (2 * count + ids.shape[0] + 1)
        elif self.how == "mean":
            out = out + out.mean(1, keepdim=True)
        elif self.how == "few":
            out = out * 2 if count < 6 else out
        elif self.how == "padded":
            out = torch.cat([out, out.new_zeros(out.shape[0], 12 - count, 16)], 1).cumsum(1)[:, :count]
        return self.out(out), (k, v)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["mask by count", "times rows", "times count", "mean", "few", "padded"])
@torch.no_grad()
def test_models_that_look_at_their_sizes(how: str) -> None:
    """Compare each model with itself uncompiled, whether its sizes share code or not."""
    torch.manual_seed(0)
    model = Counted(how).eval()
    with many_graphs():
        fast = torch.compile(model, backend=counting("window", budget=64))
        for rows in (1, 2, 3, 5):
            ids, past, other = torch.randint(0, 64, (rows, 40)), None, None
            for piece in ids.split((9, 1, 4, 7, 1, 5, 6, 7), 1):
                (got, past), (wanted, other) = fast(piece, past), model(piece, other)
                assert torch.allclose(got, wanted, atol=1e-5), (rows, piece.shape)


def test_comparisons_of_a_symbol_become_guards() -> None:
    sizes = symbolic_shapes.SymbolicSizes([7, 12], {"s99"})
    few, many = (sizes.size(symbol) for symbol in sizes.symbols)
    assert [sizes.hold(numbers) for numbers in ([4, 3], [1, 4])] == [True, False]
    assert few < many
    assert [sizes.hold(numbers) for numbers in ([3, 4], [4, 3])] == [True, False]
    assert int(few) == 7
    assert [sizes.hold(numbers) for numbers in ([7, 30], [6, 30])] == [True, False]
    assert "s99" not in map(str, sizes.symbols)


def test_a_guard_on_one_size_holds_for_all_alike_sizes() -> None:
    sizes = symbolic_shapes.SymbolicSizes([7, 12, 9], set(), exchangeable=(0, 2))
    one, _, _ = (sizes.size(symbol) for symbol in sizes.symbols)
    assert one < 10
    assert [sizes.hold(numbers) for numbers in ([7, 30, 9], [7, 12, 11], [11, 12, 7])] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["d2o", "h2o"])
def test_generated_code_serves_other_sizes(policy: str) -> None:
    """Test Inductor's code: first only lengths are dynamic, then rows and lengths."""
    ours, theirs = counting(policy, inner="inductor", budget=24), counting(policy, numbers=True, budget=24)
    with many_graphs():
        one, other = compiled(ours), compiled(theirs)
        for rows, pieces in ((1, (40, 1, 5, 1)), (2, (44, 1)), (3, (48, 1, 4))):
            for got, wanted in zip(logits(one, rows, pieces), logits(other, rows, pieces), strict=True):
                assert torch.allclose(got, wanted, atol=1e-4)
