"""Check that conversations compile nothing after `kvpass.warm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import kvpass
from kvpass import model_access
from kvpass.backend import Backend
from tests.models import build, graphs, prompt, sharing_compiled_code

BUDGET = 24


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[int, int]]]:
    """Return a function for the numbers of Dynamo's graphs and of Inductor's, which run uncompiled here."""
    given: list[torch.fx.GraphModule] = []

    def forward(backend: Backend, gm: torch.fx.GraphModule, *how: Any) -> Callable[..., Any]:
        given.append(gm)
        return gm.forward

    monkeypatch.setattr(Backend, "_compile_inner", forward)
    with sharing_compiled_code():
        yield lambda: (graphs(), len(given))


def conversation(model: Any, ids: Tensor, mask: Tensor, answer: int, turns: tuple[int, ...]) -> None:
    cache = None
    for new in (0, *turns):
        ids, mask = (torch.cat([x, torch.ones(len(x), new, dtype=x.dtype)], 1) for x in (ids, mask))
        out = model.generate(
            ids, attention_mask=mask, past_key_values=cache, min_new_tokens=answer, max_new_tokens=answer,
            do_sample=False, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        made = out.sequences.shape[1] - ids.shape[1]
        ids, cache = out.sequences, out.past_key_values
        mask = torch.cat([mask, torch.ones(len(mask), made, dtype=mask.dtype)], 1)


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        ("buzz", (1,)),
        pytest.param("streaming:interval=3", (1,), marks=pytest.mark.slow),
        pytest.param("h2o", (1, 2, 3), marks=pytest.mark.slow),
        pytest.param("full", (1, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_afterwards(
    policy: str, rows: tuple[int, ...], compiled: Callable[[], tuple[int, int]]
) -> None:
    chosen = kvpass.policies.parse(policy)
    settings = dict(budget=BUDGET) if chosen.evicts else {}
    model = kvpass.warm(build("Llama", layers=1), chosen, rows=rows, progress=False, **settings)
    before = compiled()
    assert min(before) > 0
    for size in {1, max(rows), 2 * max(rows) - 1}:  # five for three rows, and one for one row
        for length, padding in ((30, 0), (11, 2 * (size > 1))):
            conversation(model, *prompt(size, length, (padding,)), answer=20, turns=(4, 9))
            assert compiled() == before, (size, length)


@pytest.mark.parametrize("policy", ["h2o", pytest.param("h2o:interval=4", marks=pytest.mark.slow)])
def test_no_chunk_of_a_prompt_is_compiled_afterwards(policy: str, compiled: Callable[[], tuple[int, int]]) -> None:
    chosen = kvpass.policies.parse(policy)
    model = kvpass.warm(build("Llama", layers=1), chosen, prefill_chunk=8, progress=False, budget=BUDGET)
    before = compiled()
    for length in (20, 30, 50, 64):
        ids, _ = prompt(1, length, (0,))
        out = kvpass.prefill(model, ids, chunk=8)
        kvpass.prefill(model, ids[:, :5], cache=model_access.cache_of_output(out), chunk=8)
        assert compiled() == before, length


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rows", "chunk", "policy"),
    [
        (None, 8, "h2o"),
        (2, None, "h2o"),
        pytest.param(2, 8, "h2o", marks=pytest.mark.slow),
        pytest.param(None, None, "buzz", marks=pytest.mark.slow),
        pytest.param(2, 8, "streaming:interval=3", marks=pytest.mark.slow),
    ],
)
def test_a_warm_loop_compiles_nothing(
    rows: int | None, chunk: int | None, policy: str, compiled: Callable[[], tuple[int, int]]
) -> None:
    settings: dict[str, Any] = dict(policy=kvpass.policies.parse(policy), budget=BUDGET, rows=rows, prefill_chunk=chunk)
    loop, fresh = (kvpass.DecodeLoop(build("Llama", layers=1), **settings) for _ in range(2))
    loop.warm()
    before = compiled()
    made = []
    for each in (loop, fresh):
        if rows is None:
            each.prompt(prompt(1, 40, (0,))[0])
            made.append(each.generate(50).tolist())
        else:
            batch = [prompt(1, length, (0,))[0][0].tolist() for length in (9, 40, 33)]
            made.append([out.generated_tokens for out in each.generate_batch(batch, max_new_tokens=30).values()])
        if each is loop:
            assert compiled() == before
    assert made[0] == made[1]


class Plain(nn.Module):
    """A model without `generate` that takes neither padding nor positions."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("Llama", layers=1)

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        return self.model(input_ids, past_key_values=past_key_values, use_cache=use_cache)


@pytest.mark.slow
def test_a_model_without_generate(compiled: Callable[[], tuple[int, int]]) -> None:
    model = kvpass.warm(Plain(), "streaming", budget=BUDGET, progress=False)
    before = compiled()
    out = kvpass.prefill(model, prompt(1, 50, ())[0], chunk=9)
    kvpass.prefill(model, prompt(1, 3, ())[0], chunk=1, past_key_values=model_access.cache_of_output(out))
    assert compiled() == before


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 8])
def test_a_policy_that_keeps_everything_has_room_in_its_budget(
    chunk: int | None, compiled: Callable[[], tuple[int, int]]
) -> None:
    model = kvpass.warm(build("Llama", layers=1), "full", budget=256, prefill_chunk=chunk, progress=False)
    before = compiled()
    conversation(model, *prompt(1, 30, ()), answer=20, turns=(4, 9))
    assert compiled() == before


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "budget"), [("full", 24), ("full", 2), ("h2o", 12)])
def test_a_small_budget_compiles_every_part(policy: str, budget: int, caplog: pytest.LogCaptureFixture) -> None:
    pinned = policy != "full"
    kvpass.warm(build("Llama", layers=1), policy, budget=budget, keep_prompt=pinned, progress=False, inner="eager")
    assert "kvpass.warm" not in {record.name for record in caplog.records}  # nothing was left out


def test_a_model_without_get_input_embeddings_may_have_a_configuration() -> None:
    model = Plain()
    model.config = model.model.config
    assert kvpass.warm(model, "h2o", budget=BUDGET, turns=False, progress=False, inner="eager") is model


def test_steps_up_to_a_compaction_stay_within_a_table_of_positions() -> None:
    config = transformers.GPT2Config(
        n_positions=128, n_embd=16, n_layer=1, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    assert kvpass.warm(model, "r_kv", interval=16, budget=120, progress=False, inner="eager") is model


class Failing(transformers.LlamaForCausalLM):
    def forward(self, *given: Any, **more: Any) -> Any:
        raise RuntimeError("out of order")


@pytest.mark.parametrize("rows", [None, 2])
def test_an_error_of_the_model_is_not_one_of_the_budget(rows: int | None) -> None:
    model = build("Llama", layers=1)
    model.__class__ = Failing
    with pytest.raises(RuntimeError, match=r"^out of order$"):
        kvpass.DecodeLoop(model, "h2o", budget=BUDGET, rows=rows, inner="eager").warm()


@pytest.mark.parametrize("rows", [(), (0,), (2, -1)], ids=str)
def test_rows_that_cannot_be(rows: tuple[int, ...]) -> None:
    with pytest.raises(kvpass.PolicyError, match="rows"):
        kvpass.warm(nn.Linear(1, 1), rows=rows)


def test_a_model_that_reads_no_tokens() -> None:
    model = transformers.WhisperForConditionalGeneration.__new__(transformers.WhisperForConditionalGeneration)
    with pytest.raises(kvpass.PolicyError, match="input_features: run your own input"):
        kvpass.warm(model)
