"""Test each pass alone: its graph before and after, the graph's output, and when the pass must not apply."""

from __future__ import annotations

import functools
import logging
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx

import kvpass
from docs.passes import Model, page, report
from kvpass.rewrite.context import PassRecord, StepContext
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.rewrite.pipeline import rewrite_step
from tests.adversary.models import Small, causal, plain, sdpa
from tests.aligners import random_aligner
from tests.gpu.recording import record
from tests.models import build, prompt, teacher_forced
from tests.rewrite.stages import Stages, staged, with_rows


@functools.cache
def with_cache_positions() -> Stages:
    """Return a step with positions by rank, after which one token is evicted."""
    return staged(Model().eval(), budget=8, sinks=1, positions="cache")


@functools.cache
def with_absolute_positions() -> Stages:
    return staged(Model().eval(), budget=8, sinks=1, positions="absolute")


def on_own_arguments(stages: Stages, name: str) -> tuple[Any, Any]:
    """Return the first output after a pass and in the original graph, on the same past.

    No token may be evicted and no cache may be read, because slots hold other rows than the synthetic past.
    """
    call, stage, arguments = stages.calls[0], stages.stages[name], with_rows(stages.calls[0])
    given = [tensor.clone() for tensor in (*stages.slots[0], *stages.contexts[0].policy_weights.tensors)]
    with torch.no_grad():
        return stage.step_gm(*given, *arguments)[0], call.canonical_gm(*arguments)[0]


def test_take_slots_adds_inputs_alone() -> None:
    stages = with_absolute_positions()
    call, after = stages.calls[0], stages.stages["take_slots"]
    names = [f"slots_{layer}_{name}" for layer in (0, 1) for name in call.slots[layer].names]
    assert stages.inputs("take_slots")[: len(names)] == names
    assert sorted(after.record.matched) == sorted(names)
    kept = {node.name for node in call.canonical_gm.graph.nodes}
    new = [node.target for node in after.step_gm.graph.nodes if node.name not in kept]
    assert new == [*names, operator.getitem, "clone"]  # and the counter


@pytest.mark.parametrize(("recipe", "count"), [("direct", 2 * 9), ("paper", 2 * 2 + 10)])
def test_take_slots_adds_the_weights_of_a_policy(recipe: str, count: int) -> None:
    """Test weights of each of two layers, and weights that the layers share."""
    aligner = random_aligner(recipe, layers=2, heads=2, dim=4)
    stages = staged(Model().eval(), "kv_align", budget=8, aligner=aligner, validate=False)
    weights = [name for name in stages.inputs("take_slots") if name.startswith("kvpass_weight")]
    assert len(weights) == len(stages.contexts[0].policy_weights.tensors) == count
    assert not [name for name in with_absolute_positions().inputs("take_slots") if name.startswith("kvpass_weight")]


def test_position_arithmetic_moves_to_a_counter() -> None:
    stages = with_absolute_positions()
    made, gone = stages.added("put_length_on_device"), stages.removed("put_length_on_device")
    assert any(re.fullmatch(r"\w+ = torch\.arange\(1, dtype = torch\.int64\)", line) for line in made)
    assert any(re.fullmatch(r"\w+ = arange\w* \+ clone", line) for line in made)
    assert [line for line in gone if line.startswith("position = arange")]
    ours, theirs = on_own_arguments(stages, "put_length_on_device")
    torch.testing.assert_close(ours, theirs)


def test_key_indices_are_left_to_the_masks() -> None:
    left = with_absolute_positions().stages["put_length_on_device"].record.left
    assert set(left.values()) == {"it counts the keys"}
    assert len(left) == 2  # one in each layer


class Looked(Small):
    """A model that slices a table of positions."""

    def forward(self, ids: torch.Tensor, past: Any = None, **inputs: Any) -> Any:
        seen = 0 if past is None else past[0][0].shape[-2]
        output, present = super().forward(ids, past, **inputs)
        return output + self.table[seen : seen + ids.shape[1]], present


def test_slices_of_tables_become_lookups() -> None:
    stages = staged(Looked(plain, tables={"table": torch.randn(32, 16)}), budget=8, positions="absolute")
    made = stages.added("put_length_on_device")
    assert any("torch.index_select" in line for line in made)
    ours, theirs = on_own_arguments(stages, "put_length_on_device")
    torch.testing.assert_close(ours, theirs)


def test_queries_stand_at_their_ranks() -> None:
    stages = with_cache_positions()
    made = stages.added("rank_positions")
    assert any("slots_0_position" in line for line in made)
    assert len(stages.stages["rank_positions"].record.matched) == 4  # query and key of two layers
    ours, theirs = on_own_arguments(stages, "rank_positions")  # nothing is evicted, so ranks are positions
    torch.testing.assert_close(ours, theirs)


def test_positions_stay_where_keys_are_stored_as_they_are() -> None:
    stages = with_absolute_positions()
    assert stages.added("rank_positions") == stages.removed("rank_positions") == []
    assert stages.contexts[0].rotations.subgraphs == []


def test_position_ids_count_cached_tokens_for_a_policy_that_renumbers() -> None:
    aligner = random_aligner("direct", layers=2, heads=2, dim=4)
    stages = staged(Model().eval(), "kv_align", budget=8, aligner=aligner, validate=False)
    assert stages.stages["renumber_ids"].record.matched
    ours, theirs = on_own_arguments(stages, "renumber_ids")
    torch.testing.assert_close(ours, theirs)
    assert with_absolute_positions().added("renumber_ids") == with_cache_positions().added("renumber_ids") == []


def test_attention_and_cache_updates_are_replaced() -> None:
    stages = with_absolute_positions()
    before, after = stages.before("attend_on_slots"), stages.stages["attend_on_slots"]
    assert sum("torch.ops.kvpass.attention" in line for line in before.lines) == 2
    assert len(after.record.matched) == 2
    output = after.step_gm.graph.output_node().args[0][0]  # type: ignore[index]
    behind = {node.name for node in kvpass.fx.walk.ancestors(output)}
    assert not any("attention" in name or "append" in name for name in behind)
    writes = [line for line in after.lines if line.startswith("index_put_") and "slots_" in line]
    assert len(writes) == 2 * 2  # one row of K and one of V in each layer


def test_layers_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpass.cache import step

    calls: list[Any] = []
    lowered = step.decode_step
    name = "kvpass.rewrite.passes.attention.decode_step"
    monkeypatch.setattr(name, lambda *given: calls.append(given) or lowered(*given))
    staged(Small(plain, layers=4), budget=8, positions="absolute")
    assert len(calls) == 2  # once for these stages, and once for the code that runs


def test_growing_outputs_are_removed() -> None:
    stages = with_absolute_positions()
    assert len(kvpass.fx.walk.results(stages.before("drop_growing_outputs").step_gm.graph)) == 1 + 2 * 2
    assert len(kvpass.fx.walk.results(stages.stages["drop_growing_outputs"].step_gm.graph)) == 1
    assert stages.contexts[0].outputs.dynamo_outputs.indices == [0, None, None, None, None]


def test_survivors_of_a_chunk_come_out() -> None:
    stages = staged(Small(plain), "h2o", budget=8, query_len=4)
    key, value, real, *sums = stages.contexts[0].outputs.admitted_outputs[0]
    assert [key, value, real] == [1, 2, 3]
    assert sums  # h2o needs column sums
    assert "torch.ops.kvpass.append" not in "".join(stages.stages["resolve_sizes"].lines)


class Weighing(Small):
    """A model that also returns its attention weights."""

    def forward(self, ids: torch.Tensor, past: Any = None, **inputs: Any) -> Any:
        output, present = super().forward(ids, past, **inputs)
        return output, present, present[0][0].sum(-1).softmax(-1)


@pytest.mark.parametrize("layers", [1, 2])
def test_weights_over_all_tokens_are_refused_by_their_line(layers: int) -> None:
    model, ids = Weighing(plain, layers=layers), torch.arange(6)[None]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend("streaming", budget=8, inner="eager"))
    with torch.no_grad():
        _, past, _ = compiled(ids[:, :5].contiguous(), None)
        with pytest.raises(kvpass.UnsupportedGraph, match=r"test_passes\.py:\d+.*leave that out .output_attentions."):
            compiled(ids[:, 5:].contiguous(), past)


class Mapping(Small):
    """A model that writes attention weights of its layers to one tensor, and returns this tensor."""

    def __init__(self, write: Callable[[torch.Tensor, int, torch.Tensor], object]) -> None:
        super().__init__(plain, layers=2)
        self.write = write

    def forward(self, ids: torch.Tensor, past: Any = None, **inputs: Any) -> Any:
        output, present = super().forward(ids, past, **inputs)
        maps = torch.zeros(2, *present[0][0].shape[:3])
        for layer, (key, _) in enumerate(present):
            self.write(maps, layer, key.sum(-1).softmax(-1))
        return output, present, maps


WRITES: dict[str, Callable[[torch.Tensor, int, torch.Tensor], object]] = {
    "subscript": lambda maps, layer, weights: maps.__setitem__(layer, weights),
    "copy_": lambda maps, layer, weights: maps[layer].copy_(weights),
    "add_": lambda maps, layer, weights: maps.select(0, layer).add_(weights),
}


@pytest.mark.parametrize("how", WRITES)
def test_weights_over_all_tokens_that_are_written_in_place_are_refused_by_their_line(how: str) -> None:
    ids = torch.arange(6)[None]
    torch._dynamo.reset()
    compiled = torch.compile(Mapping(WRITES[how]), backend=kvpass.backend("streaming", budget=8, inner="eager"))
    with torch.no_grad():
        _, past, _ = compiled(ids[:, :5].contiguous(), None)
        with pytest.raises(kvpass.UnsupportedGraph, match=r"test_passes\.py:\d+: .*maps.*leave that out .output_att"):
            compiled(ids[:, 5:].contiguous(), past)


def test_dropping_outputs_removes_dead_code_and_resolving_sizes_inserts_numbers() -> None:
    stages = with_absolute_positions()
    removed = stages.removed("drop_growing_outputs")
    assert any("torch.ops.kvpass.append" in line for line in removed)
    left = stages.stages["resolve_sizes"].step_gm.graph.nodes
    assert not [node for node in left if kvpass.fx.walk.is_size(node)]


class Long(Small):
    """A model with a tensor that is as long as its cache but is no mask."""

    def forward(self, ids: torch.Tensor, past: Any = None, **inputs: Any) -> Any:
        output, present = super().forward(ids, past, **inputs)
        return output * self.ones(present[0][0]).prod(), present

    def ones(self, key: torch.Tensor) -> torch.Tensor:
        return torch.ones(key.shape[-2])


class LongOfKeys(Long):
    """A model whose tensor is made from its cache."""

    def ones(self, key: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(key[0, 0, :, 0])


def test_a_value_of_the_length_alone_is_computed_on_the_host() -> None:
    stages = staged(Long(plain), budget=8, positions="absolute")
    assert [name for name in stages.inputs("order_inputs") if name.endswith("_on_host")] == ["prod_on_host"]


def reads_values(q: Any, k: Any, v: Any, i: Any, j: Any) -> Any:
    return plain(q, k, v, i, j) + v.mean(2, keepdim=True)


def rotates_at_read(q: Any, k: Any, v: Any, i: Any, j: Any) -> Any:
    return plain(
        q, torch.stack([k[..., ::2] * j[:, None].cos(), k[..., 1::2] * j[:, None].sin()], -1).flatten(-2), v, i, j
    )


@pytest.mark.parametrize(
    "model", [LongOfKeys(plain), Small(reads_values), Small(rotates_at_read)], ids=["size", "values", "keys"]
)
def test_a_value_that_still_grows_is_refused_by_its_line(model: Any) -> None:
    lines = r"(test_passes|adversary.models)\.py:\d+"
    with pytest.raises(kvpass.UnsupportedGraph, match=rf"^[^:]*{lines}: .*still depends on the length"):
        staged(model, budget=8, positions="absolute")


class Difference(Small):
    """A model that counts its new tokens as keys less cached tokens."""

    def forward(self, ids: torch.Tensor, past: Any = None, **inputs: Any) -> Any:
        output, present = super().forward(ids, past, **inputs)
        seen = 0 if past is None else past[0][0].shape[2]
        return output.reshape(present[0][0].shape[2] - seen, -1), present


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_number_of_tokens_may_be_the_difference_of_lengths(query_len: int) -> None:
    stages = staged(Difference(plain), budget=8, positions="absolute", query_len=query_len)
    left = filter(kvpass.fx.walk.is_size, stages.stages["resolve_sizes"].step_gm.graph.nodes)
    assert not [node for node in left if stages.contexts[0].sizes.grows(node)]


def test_order_inputs_puts_slots_first() -> None:
    stages = staged(Small(sdpa(causal), layers=2), budget=8, positions="absolute")
    names = stages.inputs("order_inputs")
    slots = [name for name in names if name.startswith("slots_")]
    assert names[: len(slots)] == slots
    assert len(slots) == sum(len(layer.names) for layer in stages.calls[0].slots)


@pytest.mark.few(1)
@pytest.mark.parametrize(("policy", "copies"), [("d2o", True), ("h2o", False)])
def test_a_gpu_copies_write_indices_for_merging_and_leaves_counters(policy: str, copies: bool) -> None:
    ids, mask = prompt(2, 12, (2, 0))
    compiled, steps = record(build("Llama"), policy, budget=8)
    with torch.no_grad():
        cache = None
        for count in (9, 1):
            now = slice(0, 9) if count == 9 else slice(9, 10)
            out = compiled(
                ids[:, now].contiguous(), attention_mask=mask[:, : now.stop].contiguous(), past_key_values=cache
            )
            cache = out.past_key_values
    graph = steps[-1].rewritten_gm.graph
    inputs = kvpass.fx.walk.placeholders(graph)
    counters = {node for node in inputs if re.fullmatch(r"slots_\d_(seen|length)", node.name)}
    writes = [node for node in graph.nodes if kvpass.torch_private.fx_nodes.mutates(node) and node.args[0] in counters]
    assert not writes
    free = [node for node in inputs if node.name.endswith("_free")]
    assert all(any("clamp" in user.name for user in node.users) == copies for node in free)


def test_a_cpu_copies_no_write_indices_and_keeps_counters() -> None:
    for name in ("copy_write_indices", "move_counters_to_caller"):
        assert with_absolute_positions().added(name) == with_absolute_positions().removed(name) == []
        assert with_absolute_positions().stages[name].record.left


def test_every_pass_says_what_it_did(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVPASS_LOGS", "passes,graphs")
    for name in ("kvpass.passes", "kvpass.graphs"):
        caplog.set_level(logging.INFO, name)  # caplog restores this level, unlike the one that `configure` sets
    with caplog.at_level(logging.INFO, "kvpass"):
        staged(Small(plain), budget=8, positions="absolute")
    said = [entry.getMessage() for entry in caplog.records if entry.name == "kvpass.passes"]
    assert [line.split(":")[0] for line in said] == [each.__name__ for each in STEP_PASSES]
    programs = [entry.getMessage() for entry in caplog.records if entry.name == "kvpass.graphs"]
    assert any(text.startswith("# canonical") for text in programs)
    assert any(text.startswith("# after attend_on_slots") for text in programs)


def test_an_unknown_log_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPASS_LOGS", "everything")
    with pytest.raises(kvpass.PolicyError, match="must be one of passes, graphs, regions"):
        kvpass.backend("full")


def test_programs_are_kept_if_they_are_asked_for() -> None:
    found = report()
    assert [record.name for record in found.passes] == [each.__name__ for each in STEP_PASSES]
    titles = [title for title, _ in found.programs]
    assert titles[:2] == ["dynamo's graph", "canonical"]
    assert titles[2:] == [f"after {each.__name__}" for each in STEP_PASSES]
    assert "kvpass.attention" in page(found)
    assert "kvpass.attention" in str(found)


def test_programs_are_not_kept_otherwise() -> None:
    ids, mask = prompt(1, 8, ())
    cache = teacher_forced(build("Llama"), ids, mask, [7], policy="h2o", budget=16, inner="eager").cache
    found = kvpass.explain(build("Llama"), "h2o", budget=16)(ids[:, 7:], past_key_values=cache)
    assert found.programs == ()
    assert found.passes


@pytest.mark.parametrize("line", [None, "model.py:7: return x"])
def test_a_refusal_of_a_pass_names_a_line(line: str | None) -> None:
    def odd(step: StepContext) -> PassRecord:
        raise kvpass.ShardingError("the length is odd", line=line)

    call = fx.Graph().placeholder("call")
    call.meta["stack_trace"] = '  File "attention.py", line 3, in forward\n    sdpa(q, k, v)\n'
    step: Any = types.SimpleNamespace(sites=[types.SimpleNamespace(call=call)])
    with pytest.raises(kvpass.ShardingError, match="the length is odd") as refused:
        rewrite_step(step, [odd])
    assert refused.value.line == (line or "attention.py:3: sdpa(q, k, v)")
    assert refused.value.reason == "the length is odd"
    assert str(refused.value) == f"{refused.value.line}: the length is odd"
