"""Test `explain` and `inspect`, as objects and as tables."""

from __future__ import annotations

import pytest
import torch

import kvpass
from kvpass.diagnostics.report import spans
from kvpass.runtime.backend_base import BackendBase
from tests.models import build, prompt, teacher_forced
from tests.test_backend import Tiny


def test_explain_lists_every_attention_call_with_its_module_and_line() -> None:
    ids, _ = prompt(2, 8, ())
    report = kvpass.explain(build("Llama"), "h2o", budget=16)(ids)
    assert [site.verdict for site in report.sites] == ["rewritten", "rewritten"]
    assert "layers.0.self_attn" in report.sites[0].module
    assert "scaled_dot_product_attention" in report.sites[0].line
    assert report.graphs == ("prompt",)
    assert "2 of 2 attention calls rewritten" in str(report)


def test_explain_sees_a_decode_step() -> None:
    model = build("Llama", layers=1)
    ids, mask = prompt(2, 8, ())
    cache = teacher_forced(model, ids, mask, [8], policy="h2o", budget=16, inner="eager").cache
    report = kvpass.explain(model, "h2o", budget=16)(ids[:, :1], past_key_values=cache)
    assert report.error is None
    assert report.graphs == ("step",)
    assert kvpass.inspect(cache).seen == 8  # explaining a step does not run it
    assert len(report.rewritten) == 1


def test_each_explanation_is_of_its_own_call() -> None:
    explain = kvpass.explain(build("Llama", layers=1), "h2o", budget=16, graphs=True)
    reports = [explain(prompt(2, count, ())[0]) for count in (8, 9)]
    assert [len(report.sites) for report in reports] == [1, 1]
    assert [report.graphs for report in reports] == [("prompt",)] * 2
    assert len(reports[0].programs) == len(reports[1].programs) > 0


def test_explain_says_where_the_time_went() -> None:
    model = build("Llama", layers=1)
    ids, mask = prompt(2, 8, ())
    cache = teacher_forced(model, ids, mask, [8], policy="h2o", budget=16, inner="eager").cache
    report = kvpass.explain(model, "h2o", budget=16, timings=True, inner="eager")(ids[:, :1], past_key_values=cache)
    spent = report.timings
    assert spent is not None
    assert min(spent.kvpass, spent.validation, spent.tracing) > 0
    assert spent.inductor == spent.cpp == 0
    assert spent.compiler < spent.kvpass < spent.total
    assert "validation" in str(report)
    assert kvpass.explain(model, "h2o", budget=16)(ids).timings is None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_timings_include_the_compiler_of_a_step_of_any_length(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count runs of Inductor, which other backends leave out for a first chunk."""
    model, compiled = build("Llama", layers=1), list[object]()
    ids, mask = prompt(2, 8, ())
    cache = teacher_forced(model, ids, mask, [8], policy="h2o", budget=16, inner="eager").cache
    monkeypatch.setattr(BackendBase, "_compile_inner", lambda self, gm, *_: compiled.append(gm) or gm.forward)
    report = kvpass.explain(model, "h2o", budget=16, timings=True)(ids[:, :count], past_key_values=cache)
    assert (report.error, report.graphs, len(compiled)) == (None, ("step",), 1)


@pytest.mark.slow
def test_timings_tell_inductor_from_what_is_before_it() -> None:
    report = kvpass.explain(build("Llama", layers=1), "h2o", budget=16, timings=True)(torch.arange(9)[None])
    assert report.timings is not None
    assert report.timings.kvpass > 0
    assert 0 <= report.timings.inductor < report.timings.compiler


def test_explain_says_what_is_refused_and_why() -> None:
    report = kvpass.explain(Tiny("of a new kind"), "window", budget=8)(torch.zeros(1, 4, dtype=torch.int64), _past())
    assert report.refused
    assert "test_backend.py" in report.refused[0].line
    assert "attention call" in report.refused[0].reason


def _past() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)


def test_explain_tells_when_positions_stay_absolute() -> None:
    ids, _ = prompt(1, 8, ())
    report = kvpass.explain(build("GPT2", layers=1), "streaming", budget=16)(ids)
    assert "positions are absolute" in report.notes[0]


def test_inspect_reports_positions_bytes_and_ratio() -> None:
    ids, mask = prompt(2, 40, (5, 0))
    cache = teacher_forced(
        build("Llama", layers=1), ids, mask, [30, *[1] * 10], policy="streaming", budget=8, inner="eager"
    ).cache
    report = kvpass.inspect(cache)
    assert report.seen == 40
    assert report.layers[0].positions[0, 0].tolist() == [5, 6, 7, 8, 36, 37, 38, 39]  # padding is never kept
    assert report.layers[0].positions[1, 1].tolist() == [0, 1, 2, 3, 36, 37, 38, 39]
    assert report.ratio < 0.35
    assert "of a full cache" in str(report)
    assert "36-39" in str(report)


def test_inspect_takes_tensors_and_refuses_what_holds_no_slots() -> None:
    ids, mask = prompt(1, 12, ())
    cache = teacher_forced(build("Llama", layers=1), ids, mask, [12], policy="window", budget=8, inner="eager").cache
    pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
    assert len(kvpass.inspect(pairs).layers) == 1
    with pytest.raises(kvpass.CacheHandleError, match="no kvpass cache"):
        kvpass.inspect((torch.zeros(1), torch.zeros(1)))


def test_spans() -> None:
    assert spans(torch.tensor([0, 1, 2, 7, 9, 10, -1])) == "0-2 7 9-10"
