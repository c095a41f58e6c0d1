import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import kvpass
from kvpass import cli
from kvpass.demo import corpus, run
from kvpass.demo.run import Job, Settings
from kvpass.demo.subject import Subject, has_position_table
from kvpass.errors import PolicyError

TOKENIZER = Path(__file__).parents[2] / "examples" / "models" / "tokenizer"
POLICIES = ["full", "h2o", "random", "streaming", "window"]


def subject(trained, tabled=False) -> Subject:
    return Subject("stub", None, None, trained, tabled)


def job(settings=None, trained=64) -> Job:
    tokens = torch.arange(100)[None]
    return Job(settings or Settings(), subject(trained), tokens, tokens)


def test_all_policies_by_default_and_each_once():
    assert set(POLICIES) <= set(Settings().chosen)
    assert Settings(policies=("h2o", "full", "h2o")).chosen == ["h2o", "full"]


def test_only_full_and_cache_relative_policies_run_the_long_stream():
    assert Settings(policies=tuple(POLICIES)).streamed == ["full", "streaming"]


@pytest.mark.parametrize(
    ("trained", "tabled", "length", "stream"),
    [(None, False, 2048, 8000), (512, False, 512, 8000), (512, True, 512, 512), (10_000, True, 2048, 8000)],
)
def test_sizes_fit_the_model(trained, tabled, length, stream):
    fitted = Settings().fitted(subject(trained, tabled))
    assert (fitted.length, fitted.stream) == (length, stream)


@pytest.mark.parametrize(("trained", "length"), [(None, 40), (64, 16), (48, 1)])
def test_the_prompt_is_two_budgets_long_if_that_leaves_room(trained, length):
    prompt = job(Settings(budget=20, new_tokens=48), trained).prompt
    assert prompt.tolist() == [list(range(100 - length, 100))]


class Wrapped(Exception):
    """As Dynamo wraps what a backend raises."""

    def __init__(self, inner: Exception) -> None:
        self.inner_exception = inner


@pytest.mark.parametrize("error", [PolicyError("needs aligner"), Wrapped(PolicyError("needs aligner"))])
def test_a_refusal_is_an_outcome_and_the_others_go_on(monkeypatch, error):
    def compile(model, *, policy, **settings):
        if policy == "h2o":
            raise error

    monkeypatch.setattr(kvpass, "compile", compile, raising=False)
    outcomes = run._each(job(), "test", ["h2o", "window"], 3, lambda tick: "done")
    assert {policy: str(outcome) for policy, outcome in outcomes.items()} == {"h2o": "needs aligner", "window": "done"}


def test_other_errors_are_not_hidden(monkeypatch):
    def compile(model, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(kvpass, "compile", compile, raising=False)
    with pytest.raises(ZeroDivisionError):
        run._each(job(), "test", ["h2o"], 3, lambda tick: "done")


def test_full_gets_no_budget(monkeypatch):
    budgets = {}
    monkeypatch.setattr(
        kvpass, "compile", lambda model, *, policy, budget, inner: budgets.update({policy: budget}), raising=False
    )
    run._each(job(Settings(budget=32)), "test", ["full", "window"], 1, lambda tick: "done")
    assert budgets == {"full": None, "window": 32}


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with run._threads(before + 1):
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


@pytest.mark.slow
def test_the_whole_demo(tmp_path, capsys):
    model, out, text = llama(), tmp_path / "out", tmp_path / "text.py"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text.write_text(corpus.read(corpus.held_out_files())[0][:4000])
    sizes = ["--budget", "16", "--documents", "2", "--length", "64", "--stream", "200", "--threads", "1"]
    where = ["--model", str(tmp_path / "model"), "--text", str(text), "--out", str(out)]
    assert cli.main(["demo", *where, *sizes, "--policy", *POLICIES]) == 0

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

    prompt, *completions = table(out, "completions.json")
    assert prompt["prompt"]
    assert [row["policy"] for row in completions] == POLICIES
    printed = capsys.readouterr().out
    assert all(row["completion"] in printed for row in completions)

    for name, title in (("documents", "2 documents"), ("stream", "200 tokens"), ("kept", "Positions kept")):
        with Image.open(out / f"{name}.png") as picture:
            assert title in picture.info["Title"]
            assert np.asarray(picture.convert("L")).std() > 0
