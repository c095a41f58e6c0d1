"""Compare graphs whose layers share code with graphs that are compiled in one piece."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.utils import counters

import kvpass
from kvpass.lowering import layer_dedup
from kvpass.lowering.graph_passes import look_up_unchecked
from kvpass.lowering.layer_dedup import link
from kvpass.lowering.layer_dedup.segments import Segment
from tests.lowering.layer_dedup import test_segments
from tests.models import build, graphs, prompt, teacher_forced
from tests.test_compiled import last_line
from tests.traces import Traced


def compilations() -> int:
    """Return the number of graphs given to Inductor since the last reset, cached or not."""
    return sum(counters["aot_autograd"][f"autograd_cache_{how}"] for how in ("hit", "miss", "bypass"))


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes later backends compile each graph in one piece."""

    def switch() -> None:
        monkeypatch.setattr(layer_dedup, "compile_deduplicated", lambda *_: None)

    return switch


def scaled(layers: int) -> Any:
    """Return a Llama whose second layer scales its logits differently."""
    model = build("Llama", layers=layers)
    model.model.layers[1].self_attn.scaling /= 2
    return model


def equal(model: Any, switch: Callable[[], None], **settings: Any) -> tuple[int, int]:
    """Compare a prompt, steps and a chunk whose length comes twice, and count compiled graphs.

    Return the number of graphs that the compiler gets, with layers shared and in one piece.
    """
    ids, mask = prompt(2, 20, (3, 0))
    runs, counts = [], []
    for _ in range(2):
        counters.clear()
        runs.append(teacher_forced(model, ids, mask, [9, 1, 1, 4, 4, 1], budget=8, **settings))
        counts.append(compilations())
        switch()
    ours, plain = runs
    assert torch.allclose(ours.logits[mask.bool()], plain.logits[mask.bool()], atol=1e-5)
    for a, b in zip(ours.positions, plain.positions, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return counts[0], counts[1]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "positions"), [("streaming", "cache"), ("d2o", None)])
def test_equal_to_whole_compilation(whole: Callable[[], None], policy: str, positions: str | None) -> None:
    assert equal(build("Llama", layers=4), whole, policy=policy, positions=positions) == (9, 3)


@pytest.mark.slow
def test_gpt2_is_equal_to_whole_compilation(whole: Callable[[], None]) -> None:
    assert equal(build("GPT2", layers=4), whole, policy="h2o") == (9, 3)


@pytest.mark.slow
def test_two_kinds_of_layers_are_equal_to_whole_compilation(whole: Callable[[], None]) -> None:
    """Check for a prologue, two kinds of layers and an epilogue, in each of three graphs."""
    assert equal(scaled(4), whole, policy="h2o") == (12, 3)


def counted(layers: int, policy: str = "h2o") -> tuple[int, Tensor, Tensor]:
    """Return the number of graphs that the compiler gets for a prompt and a step, and logits compiled and eager."""
    ids, mask = prompt(1, 12, ())
    model = Traced(build("Llama", layers=layers))
    counters.clear()
    ours = teacher_forced(model, ids, mask, [9, 1, 1, 1], policy=policy, budget=8)
    count = compilations()
    plain = teacher_forced(model, ids, mask, [9, 1, 1, 1], policy=policy, budget=8, inner="eager")
    return count, ours.logits, plain.logits


@pytest.mark.slow
def test_four_layers_compile_what_one_does() -> None:
    """Check for a prologue, a layer and an epilogue, of the prompt and of a step."""
    count, ours, plain = counted(4, "window")
    assert count == 6
    assert torch.allclose(ours, plain, atol=1e-4)


@pytest.mark.slow
def test_twelve_layers_compile_what_four_do() -> None:
    assert counted(4)[0] == counted(12)[0] == 6


SCRIPT = """
import torch
from torch._dynamo.utils import counters
from tests.lowering.layer_dedup import test_segments
from tests.models import build, prompt, teacher_forced

ids, mask = prompt(1, 12, ())
teacher_forced(build("Llama", layers={layers}), ids, mask, [9, 1, 1, 1], policy="{policy}", budget=8)
print(counters["aot_autograd"]["autograd_cache_miss"])
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_whatever_the_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that pieces are found in the caches on disk, because their names do not depend on positions."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    assert misses([(4, "streaming"), (4, "streaming"), (6, "streaming")], tmp_path) == [6, 0, 0]


@pytest.mark.slow
def test_of_another_policy_the_layers_alone_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that prologue and epilogue are found on disk, if the policies number tokens equally."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    first, other = misses([(4, "window"), (4, "tova")], tmp_path)
    assert first == 6
    assert other <= 2  # a layer of the prompt, which computes the policy's scores, and a layer of the step


def misses(calls: list[tuple[int, str]], folder: Path) -> list[int]:
    """Return the number of pieces that are compiled for each call, each in a separate process."""
    script, found = folder / "script.py", []
    for layers, policy in calls:
        script.write_text(SCRIPT.replace("{layers}", str(layers)).replace("{policy}", policy))
        found.append(int(last_line(script, folder / "cache")))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_a_prompt_of_another_length_compiles_nothing(policy: str) -> None:
    """Count traces, of which the second has dynamic sizes, and compilations, which wait for its second prompt."""
    model = build("Llama", layers=4)
    compiled = torch.compile(model, backend=kvpass.backend(policy, budget=8))
    made = []
    with torch.inference_mode():
        for length in (30, 20, 25, 77, 12):
            ids, _ = prompt(1, length, ())
            out = compiled(ids, use_cache=True).logits
            made.append((graphs(), compilations()))
            assert torch.allclose(out, model(ids).logits, atol=1e-4)
    traced, given_to_inductor = zip(*made, strict=True)
    assert traced == (1, 2, 2, 2, 2)
    assert given_to_inductor[:2] == (0, 0)
    assert given_to_inductor[2] > 0
    assert len(set(given_to_inductor[2:])) == 1


def test_four_equal_layers_are_one_graph_for_the_compiler() -> None:
    """Count graphs in each version of torch, because their wrappers around code differ."""
    gm, x = fx.symbolic_trace(lambda x: (test_segments.layers(x, lambda y, _: y),)), torch.randn(3)
    test_segments.Recorder(gm).run(x)
    anchors = [node for node in gm.graph.nodes if node.target is torch.tanh]
    counters.clear()
    with torch.no_grad():
        run = link.compile_deduplicated(gm, [x], anchors, lambda part: {})
        torch.testing.assert_close(run(x), gm(x))
    assert compilations() == len(run.runs) == 1


@pytest.mark.slow
def test_values_are_let_go_of_before_their_last_reader_runs() -> None:
    """Check that a segment's last reads are only in its input list, which releases them."""
    gm = fx.symbolic_trace(lambda x: x.cos().sin().tan())
    first, *others = (node for node in gm.graph.nodes if node.op == "call_method")
    gm.graph.output_node().args = ((others[-1],),)
    alive: list[bool] = []
    made: list[weakref.ref[Tensor]] = []

    def run(given: list[Any]) -> tuple[Tensor]:
        (operand,) = given
        given.clear()
        before = made[-1:]
        del operand
        gc.collect()
        alive.extend(ref() is not None for ref in before)
        result = torch.ones(3)
        made.append(weakref.ref(result))
        return (result,)

    call = link._link(gm, [(Segment.of([node]), run) for node in (first, *others)])
    (result,) = call(torch.zeros(3))
    assert alive == [False, False]
    assert made[-1]() is result


def test_returned_values_are_kept_and_unread_ones_dropped() -> None:
    gm = fx.symbolic_trace(lambda x: (x, x.cos(), x.sin(), None))
    cos, sin = (node for node in gm.graph.nodes if node.op == "call_method")
    both = dataclasses.replace(Segment.of([cos, sin]), results=(0, 1))
    call = link._link(gm, [(both, lambda given: (given[0] + 1, given[0] + 2))])
    assert call(1) == (1, 2, 3, None)


def test_gradients_are_off_and_autocasting_is_off_inside() -> None:
    gm = fx.symbolic_trace(lambda x: (x.cos(),))
    seen = []

    def run(given: list[Any]) -> tuple[Any]:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return (given[0],)

    call = link._link(gm, [(Segment.of([n for n in gm.graph.nodes if n.op == "call_method"]), run)])
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        call(torch.zeros(1))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(False, False)]


@pytest.mark.parametrize("setting", [dict(options={"freezing": True}), dict(options={"cpp_wrapper": True})])
def test_settings_that_need_the_whole_graph(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(link.segments, "split", lambda *a: calls.append(a) or [])
    gm = fx.symbolic_trace(lambda x: (x.cos(),))
    plain = kvpass.backend("h2o", budget=8)
    for backend in (plain, dataclasses.replace(plain, **{k: tuple(v.items()) for k, v in setting.items()})):
        assert (
            link.compile_deduplicated(
                gm, [torch.zeros(1)], [], lambda part, b=backend: b._patches({}, look_up_unchecked, part)
            )
            is None
        )
    assert len(calls) == 1
