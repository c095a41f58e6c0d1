"""Test KV-Align: renumbered positions, which rows are repaired, and its errors."""

from __future__ import annotations

import pytest
import torch
import transformers

import kvpass
from kvpass.diagnostics.simulate import simulate
from kvpass.errors import AlignerError, BudgetError, PolicyError, UnsupportedGraph
from kvpass.policies.aligners import AlignerScope, identity_aligner
from kvpass.policies.budgets import window_starts
from kvpass.policies.kv_align import KVAlign
from tests.aligners import random_aligner
from tests.models import build, graphs, prompt, teacher_forced
from tests.runtime.test_runtime import assert_equal_runs, bare
from tests.traces import Traced

SHAPES = {"GPT2": dict(layers=2, heads=4, dim=16), "Llama": dict(layers=2, heads=2, dim=16)}


def aligner_for(architecture, recipe="direct", **settings):
    return random_aligner(recipe, **SHAPES[architecture], **settings)


def options(architecture, recipe="direct", every=1, budget=8, **settings):
    own = {"every": every} if recipe == "paper" else {}
    return dict(
        policy="kv_align",
        aligner=aligner_for(architecture, recipe, **own, **settings),
        every=every,
        budget=budget,
        inner="eager",
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "recipe", "every"),
    [
        ("GPT2", "direct", 1),
        ("GPT2", "paper", 2),
        pytest.param("GPT2", "direct", 3, marks=pytest.mark.slow),
        ("Llama", "paper", 1),
        pytest.param("Llama", "direct", 1, marks=pytest.mark.slow),
        pytest.param("Llama", "direct", 3, marks=pytest.mark.slow),
    ],
)
def test_model_equals_reference(traced, architecture, recipe, every):
    settings = options(architecture, recipe, every)
    settings.pop("inner")
    assert_equal_runs(traced(architecture), [7, *[1] * 12], (0, 0, 0), **settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", SHAPES)
def test_chunks_padding_and_long_prompts_equal_the_reference(traced, architecture):
    settings = options(architecture)
    settings.pop("inner")
    assert_equal_runs(traced(architecture), [13, 3, *[1] * 4, 5, *[1] * 3], (3, 1, 0), **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "recipe"), [("GPT2", "direct"), ("Llama", "paper")])
def test_nothing_changes_while_nothing_is_evicted(architecture, recipe):
    model = build(architecture)
    ids, mask = prompt(3, 30, (4, 0, 1))
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=position).logits
    run = teacher_forced(model, ids, mask, [10, 5, *[1] * 15], **options(architecture, recipe, budget=30))
    assert torch.allclose(run.logits[mask.bool()], expected[mask.bool()], atol=1e-4)
    assert graphs() == 3


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_long_prompt_is_the_same_as_its_last_tokens(architecture):
    model, settings = Traced(build(architecture)), options(architecture, budget=8)
    ids, mask = prompt(2, 30, ())
    whole = teacher_forced(model, ids, mask, [21, *[1] * 9], **settings)
    last = teacher_forced(model, ids[:, 13:], mask[:, 13:], [8, *[1] * 9], **settings)
    assert torch.allclose(whole.logits[:, 13:], last.logits, atol=1e-5)
    assert whole.positions[0][0][0, 0].tolist() == list(range(13, 21))
    assert whole.positions[-1][0][0, 0].tolist() == [13, 14, 15, 16, 26, 27, 28, 29]


@pytest.mark.slow
def test_a_table_that_starts_with_an_offset():
    """Test OPT, which looks up position p at p + 2."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=128,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        word_embed_proj_dim=64,
    )
    model = Traced(transformers.OPTForCausalLM(config).eval())
    ids, mask = prompt(2, 50, ())
    whole = teacher_forced(model, ids, mask, [41, *[1] * 9], **options("GPT2", budget=16))
    last = teacher_forced(model, ids[:, 25:], mask[:, 25:], [16, *[1] * 9], **options("GPT2", budget=16))
    assert torch.allclose(whole.logits[:, 25:], last.logits, atol=1e-5)


def test_a_prompt_and_a_stream_may_be_longer_than_the_table_of_positions():
    model = build("GPT2")
    ids, mask = prompt(1, 630, ())
    run = teacher_forced(model, ids, mask, [600, *[1] * 30], inspect=False, **options("GPT2", budget=24))
    assert torch.isfinite(run.logits).all()
    early = model(ids[:, 24:48]).logits
    assert torch.allclose(run.logits[:, 24:48], early, atol=1e-4)


def test_the_next_query_stands_at_the_number_of_cached_tokens():
    """Check that without repair a step is the model's own on the held entries at position min(t, M)."""
    model = build("GPT2")
    ids, mask = prompt(2, 14, ())
    run = teacher_forced(model, ids, mask, [8, *[1] * 6], **options("GPT2", "nothing", budget=8))
    with torch.no_grad():
        out = model(ids[:, :8], use_cache=True)
        for t in range(8, 14):
            cache = out.past_key_values
            out = model(ids[:, t : t + 1], past_key_values=cache, position_ids=torch.full((2, 1), 8), use_cache=True)
            assert torch.allclose(run.logits[:, t], out.logits[:, 0], atol=1e-4)
            for layer in out.past_key_values.layers:
                layer.keys, layer.values = (
                    torch.cat([x[:, :, :4], x[:, :, 5:]], 2) for x in (layer.keys, layer.values)
                )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_bare_loop_gives_the_same_as_position_ids(architecture):
    model = build(architecture)
    ids, mask = prompt(2, 24, ())
    settings = options(architecture)
    with_mask_and_ids = teacher_forced(model, ids, mask, [5, *[1] * 19], **settings).logits
    assert torch.allclose(bare(model, ids, **settings), with_mask_and_ids, atol=1e-5)


def test_sinks_and_unmoved_vectors_are_not_repaired():
    drawn = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 20, 8, generator=drawn) for _ in range(3))
    paper = simulate("kv_align", q, k, v, prompt=6, budget=8, compiled=True, aligner=random_aligner("paper"))
    held = paper.positions[-1, 0, 0].tolist()
    assert held == [0, 1, 2, 3, 16, 17, 18, 19]
    assert torch.equal(paper.keys[:, :, :4], k[:, :, :4])
    assert (paper.keys[:, :, 4:] != k[:, :, held[4:]]).any(-1).all()
    direct = simulate("kv_align", q, k, v, prompt=6, budget=8, compiled=True, aligner=random_aligner("direct"))
    assert torch.equal(direct.keys, k[:, :, held])  # the slots hold the original keys


def test_every_n_evicts_n_tokens_at_once():
    q = torch.randn(1, 2, 24, 8)
    aligner = random_aligner("paper", every=3)
    trace = simulate("kv_align", q, q, q, prompt=8, budget=9, compiled=True, aligner=aligner, every=3)
    assert [int((p >= 0).sum()) for p in trace.positions[:, 0, 0]] == [8, 9, *[7, 8, 9] * 5][:17]


def test_one_decode_graph_for_every_one():
    model = build("GPT2")
    ids, mask = prompt(1, 40, ())
    teacher_forced(model, ids, mask, [6, *[1] * 34], inspect=False, **options("GPT2"))
    assert graphs() == 2


@pytest.mark.slow
def test_generate_runs_beyond_the_window():
    model = build("GPT2")
    ids, mask = prompt(2, 9, (2, 0))
    settings = options("GPT2")
    kvpass.compile(model, **settings)
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert tokens.shape == (2, 29)
    assert graphs() == 2


def test_window_starts():
    real = torch.tensor([[True] * 9, [False, False] + [True] * 7])
    assert window_starts(real, 4).tolist() == [[0, 0, 0, 0, 4, 5, 5, 5, 5], [0, 0, 0, 0, 0, 3, 3, 3, 3]]
    assert window_starts(real, 9).tolist() == [[0] * 9] * 2


def test_policies_are_equal_when_their_weights_are():
    one, same, other = (KVAlign(random_aligner.__wrapped__("direct", seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert repr(one) != repr(other)


def test_no_aligner_is_named():
    with pytest.raises(AlignerError, match="kvpass align train"):
        kvpass.backend("kv_align", budget=8)


def test_a_window_that_was_not_trained_for_is_refused():
    with pytest.raises(BudgetError, match="up to 40"):
        kvpass.backend("kv_align", budget=41, aligner=random_aligner("direct"))
    with pytest.raises(BudgetError, match="at least 7"):
        kvpass.backend("kv_align", budget=6, aligner=random_aligner("direct"), every=3)


def test_a_model_with_other_layers_or_heads_is_refused():
    model = build("GPT2")
    ids, mask = prompt(1, 6, ())
    with pytest.raises(AlignerError, match="layers=3, and this one has 2"):
        teacher_forced(model, ids, mask, [6], **(options("GPT2") | {"aligner": random_aligner("direct", 3, 4, 16)}))
    with pytest.raises(AlignerError, match="heads=2, and this one has 4"):
        teacher_forced(model, ids, mask, [6], **(options("GPT2") | {"aligner": random_aligner("direct", 2, 2, 16)}))


def test_paper_knows_one_distance():
    with pytest.raises(PolicyError, match="every=1"):
        KVAlign(random_aligner("paper"), every=2)
    with pytest.raises(PolicyError, match="every"):
        KVAlign(random_aligner("direct"), every=0)


def test_positions_in_the_cache_are_refused():
    with pytest.raises(PolicyError, match="numbers tokens itself"):
        kvpass.backend("kv_align", budget=8, positions="cache", aligner=random_aligner("direct"))


def test_an_uncompiled_prompt_is_refused():
    model = build("GPT2")
    ids, _ = prompt(1, 9, ())
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        compiled = torch.compile(model, backend=kvpass.backend(**options("GPT2")))
        with pytest.raises(UnsupportedGraph, match="ran uncompiled"):
            compiled(ids[:, 8:], past_key_values=cache, use_cache=True)


def test_nothing_is_an_aligner_for_any_window():
    scope = AlignerScope("any", 1, 2, 8, 8, 12)
    assert KVAlign(identity_aligner(scope)).aligns == "never"
