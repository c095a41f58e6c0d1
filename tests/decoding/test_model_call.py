"""Test loops and prompts in chunks of models that return their logits and caches in different ways."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from tests.models import build, prompt

HOW: dict[str, Any] = dict(policy="h2o", budget=8, inner="eager")
IDS = prompt(1, 13, ())[0]
Returns = Callable[[Tensor, Any], Any]


class Returning(torch.nn.Module):
    """A Llama that returns what a function makes of its logits and its cache."""

    def __init__(self, returns: Returns) -> None:
        super().__init__()
        self.inner, self.returns = build("Llama", layers=1), returns

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> Any:
        given = dict(attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values)
        out = self.inner(input_ids, **given, use_cache=use_cache)
        return self.returns(out.logits, out.past_key_values)


NamedOutput = collections.namedtuple("NamedOutput", ["logits", "past_key_values"])


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    logits: Tensor
    past_key_values: Any


MODELS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: Returning(lambda logits, cache: (logits, cache)),
    "cache first": lambda: Returning(lambda logits, cache: [cache, logits, None]),
    "hidden states too": lambda: Returning(lambda logits, cache: (logits, cache, (logits[..., :64],))),
    "named tuple": lambda: Returning(lambda logits, cache: NamedOutput(logits, cache)),
    "dict": lambda: Returning(lambda logits, cache: dict(logits=logits, past_key_values=cache)),
    "frozen": lambda: Returning(lambda logits, cache: FrozenOutput(logits, cache)),
}


@functools.cache
def expected() -> tuple[Tensor, Tensor]:
    """Return the answers of the Llama itself, and the logits of all tokens of the prompt in chunks."""
    llama = build("Llama", layers=1)
    return answers(llama, IDS), kvpass.prefill(under_kvpass(llama), IDS, chunk=4, logits="all").logits


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_cache_are_found_in_what_a_model_returns(name: str) -> None:
    model, (said, wanted) = MODELS[name](), expected()
    assert torch.equal(answers(model, IDS), said)
    serving = kvpass.DecodeLoop(model, **HOW, rows=1)
    (output,) = serving.generate_batch([IDS[0]], max_new_tokens=9).values()
    assert output.generated_tokens == said[0, :9].tolist(), output.error
    for logits, tokens in (("last", 1), ("all", 13)):
        out = kvpass.prefill(serving.compiled.call, IDS, chunk=4, logits=logits)
        torch.testing.assert_close(out["logits"] if isinstance(out, dict) else out.logits, wanted[:, -tokens:])
        assert kvpass.inspect(out).seen == 13


def under_kvpass(model: Any) -> Any:
    return torch.compile(model, backend=kvpass.backend(**HOW))


def answers(model: Any, ids: Tensor) -> Tensor:
    loop = kvpass.DecodeLoop(model, **HOW)
    loop.prompt(ids)
    said = loop.generate(9)
    loop.prompt(ids[:, :3])
    return torch.cat([said, loop.generate(4)], 1)


@pytest.mark.parametrize(
    "returns",
    [
        lambda logits, cache: dict(scores=logits, past_key_values=cache),
        lambda logits, cache: (logits, 2 * logits, cache),  # either may be the logits
        lambda logits, cache: (logits[0], cache),
    ],
)
def test_a_model_that_returns_no_logits_is_refused(returns: Returns) -> None:
    model = Returning(returns)
    for use in (
        kvpass.DecodeLoop(model, **HOW).prompt,
        functools.partial(kvpass.prefill, under_kvpass(model), chunk=4),
    ):
        with pytest.raises(kvpass.UnsupportedGraph, match=r"Returning returned a \w+ in which no `logits` are found"):
            use(IDS)


class Adapter(torch.nn.Module):
    """A wrapper as PEFT's, which names some arguments of the model and passes on all."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_base_model(self) -> torch.nn.Module:
        return self.inner

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **named: Any) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask, **named)


class Parallel(torch.nn.Module):
    """A wrapper as DistributedDataParallel, which names nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)


def conversation(model: Any) -> Tensor:
    """Return the tokens of rows that are padded on the left, after two turns."""
    ids, mask = prompt()
    loop = kvpass.DecodeLoop(model, **HOW)
    loop.prompt(ids, mask)
    first = loop.generate(4)
    loop.prompt(ids[:, :3])
    return torch.cat([first, loop.generate(4)], 1)


@pytest.mark.parametrize("wrap", [Adapter, Parallel, lambda model: Parallel(Adapter(model))])
def test_a_wrapped_model_gets_masks_and_positions(wrap: Callable[[Any], Any]) -> None:
    """Check that a model does not count padding because a wrapper does not name its position ids."""
    model = build("GPT2", layers=1)
    model.transformer.wpe.weight.data.mul_(50)  # so that other positions give other tokens
    assert torch.equal(conversation(wrap(copy.deepcopy(model))), conversation(model))


@pytest.mark.filterwarnings("error::kvpass.KVPassWarning")
def test_requests_of_a_wrapped_model_run_together() -> None:
    prompts, tokens = [IDS[0].tolist(), IDS[0, :5].tolist()], []
    for model in (Adapter(build("Llama", layers=1)), build("Llama", layers=1)):
        outputs = kvpass.DecodeLoop(model, **HOW, rows=2).generate_batch(prompts, max_new_tokens=5)
        tokens.append([output.generated_tokens for output in outputs.values()])
    assert tokens[0] == tokens[1]
