import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import kvpass
from kvpass import policies
from kvpass.apps import cli, corpus
from kvpass.apps.demo import job as jobs
from kvpass.apps.demo import recall, run, worker_pool
from kvpass.apps.demo.job import Job
from kvpass.apps.demo.pairs import PlantedPairs, Tongue
from kvpass.apps.demo.settings import PARTS, DemoSettings
from kvpass.apps.demo.worker_pool import Task
from kvpass.apps.models import LoadedModel, has_position_table
from kvpass.errors import AlignerError, KVPassError, PolicyError
from kvpass.lowering.formats import KV_DTYPES

TOKENIZER = Path(__file__).parents[3] / "kvpass" / "apps" / "data" / "tokenizer"
POLICIES = ["full", "h2o", "streaming"]


def subject(trained, tabled=False) -> LoadedModel:
    return LoadedModel("stub", None, None, trained, tabled)


def job(settings=None, trained=64) -> Job:
    tokens, model = torch.arange(100)[None], subject(trained)
    return Job(settings or DemoSettings(), model, tokens, tokens, model, planted())


def planted() -> PlantedPairs:
    tongue = Tongue(torch.arange(200, 230), mark=240, end=241)
    return recall.planted(torch.arange(100), bos=0, tongue=tongue, length=64)


def test_all_policies_by_default_and_each_once():
    assert sorted(DemoSettings().chosen) == policies.names()
    assert DemoSettings(policies=("h2o", "full", "h2o")).chosen == ["h2o", "full"]


def test_the_cheap_ones_come_first():
    assert DemoSettings().chosen[:3] == ["full", "knorm", "random"]
    assert DemoSettings().chosen[-1] == "kv_align"


def test_only_full_and_cache_relative_policies_run_the_long_stream():
    assert DemoSettings(policies=tuple(POLICIES)).streamed == ["full", "streaming"]
    assert not {"h2o", "kv_align"} & set(DemoSettings().streamed)


def test_the_bundled_model_has_its_aligner_and_others_must_bring_theirs():
    aligned = DemoSettings().policy("kv_align")
    assert DemoSettings(budget=256).slots(aligned, None) == aligned.trained.signature.window == 255
    with pytest.raises(AlignerError, match="needs aligner"):
        DemoSettings(model="another").policy("kv_align")


def test_a_budget_is_fitted_to_the_policy():
    assert DemoSettings(budget=65).slots(policies.get("cascade")(), None) == 64
    assert DemoSettings(budget=65).slots(policies.get("full")(), 100) == 100


@pytest.mark.parametrize(
    ("trained", "tabled", "length", "stream"),
    [(None, False, 1024, 4096), (512, False, 512, 4096), (512, True, 512, 512), (10_000, True, 1024, 4096)],
)
def test_sizes_fit_the_models(trained, tabled, length, stream):
    fitted = DemoSettings().fitted(subject(trained, tabled), subject(trained))
    assert (fitted.length, fitted.stream) == (length, stream)
    assert fitted.planted == min(trained or 2048, 2048)


def test_the_parts_are_in_the_order_of_the_story_and_may_be_chosen():
    assert [part.name for part in run.parts(job())] == list(PARTS) == list(cli.DEMO_PARTS)
    assert cli.KV_DTYPES == KV_DTYPES
    assert [part.name for part in run.parts(job(DemoSettings(parts=("documents", "recall"))))] == [
        "recall",
        "documents",
    ]


def test_what_takes_an_aligner_is_asked_about_pairs_only_with_a_model_of_ones_own():
    assert "kv_align" not in DemoSettings().remembering
    assert "kv_align" in DemoSettings(model="another", aligner=Path("one")).remembering


def test_a_text_that_no_pair_fits_into_is_an_outcome():
    short = dataclasses.replace(job(), planted=KVPassError("no room"))
    assert str(short.recall("window", lambda: None)) == "no room"


class Wrapped(Exception):
    """As Dynamo wraps what a backend raises."""

    def __init__(self, inner: Exception) -> None:
        self.inner_exception = inner


def compiled_as(monkeypatch, compile) -> None:
    monkeypatch.setattr(kvpass, "compile", compile, raising=False)


@pytest.mark.parametrize("error", [PolicyError("needs aligner"), Wrapped(PolicyError("needs aligner"))])
def test_a_refusal_is_an_outcome(monkeypatch, error):
    def refuse(model, **settings):
        raise error

    compiled_as(monkeypatch, refuse)
    assert str(jobs.attempt(None, "h2o", 3, "eager", lambda: "done")) == "needs aligner"


def test_other_errors_are_not_hidden(monkeypatch):
    def fail(model, **options):
        raise ZeroDivisionError

    compiled_as(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError):
        jobs.attempt(None, "h2o", 3, "eager", lambda: "done")


def test_a_policy_that_cannot_be_made_is_an_outcome_too():
    outcome = job(DemoSettings(model="another")).stream_documents("kv_align", lambda: None)
    assert isinstance(outcome, AlignerError)


def test_full_gets_no_budget_for_recall(monkeypatch):
    budgets = {}
    monkeypatch.setattr(kvpass, "backend", lambda policy, budget, **_: budgets.update({policy.name: budget}))
    monkeypatch.setattr(jobs.Traces, "under", lambda *_: None)
    monkeypatch.setattr(recall, "measure", lambda model, planted, tick, sampled: "done")
    for policy in ("full", "window"):
        assert job(DemoSettings(budget=32)).recall(policy, lambda: None) == "done"
    assert budgets == {"full": None, "window": 32}


def test_parts_that_share_a_measurement_share_its_tasks(monkeypatch, capsys, tmp_path):
    told = {}

    def measured(job, tasks, progress):
        told["tasks"] = tasks
        return iter([(task, KVPassError(f"not {task.method}")) for task in tasks])

    monkeypatch.setattr(worker_pool, "perform", measured)
    settings = DemoSettings(policies=("window",), parts=("recall", "completions"), out=tmp_path)
    asked = dataclasses.replace(job(settings), planted=KVPassError("no room"))
    run.perform(asked, run.parts(asked))
    assert [(task.method, task.policy) for task in told["tasks"]] == [("recall", "window")]
    assert capsys.readouterr().out.count("window: not recall") == 2


def test_all_ticks_of_a_task_are_reported_whatever_it_did(monkeypatch):
    def stream(self, policy, tick):
        for _ in range(70):
            tick()
        return "done"

    monkeypatch.setattr(Job, "stream_documents", stream)
    told = []
    task = Task("stream_documents", "h2o", ticks=72)
    assert (
        list(worker_pool.perform(job(), [task, task], lambda task, count: told.append(count))) == [(task, "done")] * 2
    )
    assert told == [0, 32, 32, 8] * 2


@pytest.mark.parametrize(
    ("methods", "begun"), [("r", [0]), ("rrr", [2, 0, 1]), ("rrsdd", [0, 1, 2, 4, 3]), ("rrd", [0, 1, 2])]
)
def test_the_dearest_task_of_the_last_measurement_begins_before_its_others(methods, begun):
    tasks = [Task(method, str(number), 1) for number, method in enumerate(methods)]
    assert [int(task.policy) for task in worker_pool._dearest_first(tasks)] == begun


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with jobs._threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=2048, **sizes, **heads, **special)
    return transformers.LlamaForCausalLM(config).eval()


def test_models_with_a_table_of_positions_are_told_apart():
    gpt2 = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    assert has_position_table(transformers.GPT2LMHeadModel(gpt2))
    assert not has_position_table(llama())


def expected_perplexity(model, documents: torch.Tensor) -> float:
    """Teacher-forced, uncompiled and without a cache."""
    with torch.no_grad():
        logits = model(documents[:, :-1], use_cache=False).logits
    return math.exp(torch.nn.functional.cross_entropy(logits.flatten(0, 1), documents[:, 1:].flatten()).item())


def table(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / name).read_text())["rows"]


def saved(model, tmp_path: Path) -> tuple[transformers.PreTrainedTokenizerFast, Path]:
    """The tokenizer and the text; the model lies beside it."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.py"
    text.write_text(corpus.read(corpus.held_out_files())[0][:4000])
    return tokenizer, text


@pytest.mark.slow
def test_several_processes_give_what_one_gives(tmp_path):
    _, text = saved(llama(), tmp_path)
    tasks = [Task("recall", policy, 5) for policy in ("window", "kv_align", "h2o")]
    found, ticks = [], []
    for processes in (1, 2):
        sizes = {"budget": 16, "planted": 64, "length": 64, "stream": 200, "new_tokens": 5}
        settings = DemoSettings(str(tmp_path / "model"), text=text, **sizes, jobs=processes)
        outcomes = worker_pool.perform(jobs.prepare(settings), tasks, lambda task, count: ticks.append(count))
        found.append({task.policy: str(outcome) for task, outcome in outcomes})
    assert found[0] == found[1]
    assert "needs aligner" in found[0]["kv_align"]
    assert sum(ticks) == 2 * 3 * 5


@pytest.mark.slow
def test_the_whole_demo(tmp_path, capsys):
    model, out = llama(), tmp_path / "out"
    tokenizer, text = saved(model, tmp_path)
    sizes = ["--budget", "16", "--planted", "64", "--documents", "2", "--length", "64", "--stream", "200"]
    where = ["--model", str(tmp_path / "model"), "--text", str(text), "--out", str(out)]
    assert cli.main(["demo", *where, *sizes, "--threads", "1", "--jobs", "2", "--policy", *POLICIES]) == 0

    documents = {row["policy"]: row for row in table(out, "documents.json")}
    assert list(documents) == POLICIES
    ids = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    pieces = torch.tensor(corpus.documents([ids], 2, 64, bos=0))
    assert documents["full"]["perplexity"] == pytest.approx(expected_perplexity(model, pieces), rel=1e-3)
    for policy, row in documents.items():
        assert (row["decode_graphs"], row["graph_breaks"]) == (1, 0), policy
        assert row["tokens_per_second"] > 0
        assert policy == "full" or row["cache_bytes"] < row["full_cache_bytes"]

    stream = {row["policy"]: row for row in table(out, "stream.json")}
    assert list(stream) == ["full", "streaming"]
    assert all(math.isfinite(row["perplexity_beyond"]) for row in stream.values())
    assert stream["streaming"]["cache_bytes"] < stream["streaming"]["full_cache_bytes"] / 4

    recalled = table(out, "recall.json")
    assert [row["policy"] for row in recalled] == [policy for policy in POLICIES for _ in range(2)]
    assert all(0 <= row["16"] <= 1 for row in recalled)

    completions = table(out, "completions.json")
    assert [row["policy"] for row in completions] == POLICIES * len({row["distance"] for row in completions})
    printed = capsys.readouterr().out
    assert all(repr(row["completion"]) in printed for row in completions)

    pictures = {"recall": "recalled", "documents": "2 documents", "stream": "200 tokens", "kept": "Positions kept"}
    for name, title in pictures.items():
        with Image.open(out / f"{name}.png") as picture:
            assert title in picture.info["Title"]
            assert np.asarray(picture.convert("L")).std() > 0
