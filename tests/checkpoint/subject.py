"""Provide the checkpoint under test, uncompiled and compiled, and logits to compare answers with."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvpass
from tests import on_reference
from tests.aligners import random_aligner
from tests.calibrations import made_for_model
from tests.strategies import ROWS, fitting_budget
from tests.traces import Traced

WHOLE = 30
"""Number of layers of the checkpoint."""
QUERY_HEADS, KV_HEADS, DIM = 9, 3, 64
ROOMY = 2048
"""A budget larger than the longest conversation, so that nothing is evicted."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Output of a model for one batch of conversations.

    Attributes:
        context: token ids before the answer, int64 [B, T].
        tokens: the answer, int64 [B, n].
        logits: [B, n, vocabulary], from which each token was chosen; None if the way of decoding does not return them.
        pieces: number of context tokens in each call; None for a single call.
        mask: [B, T], 0 for padding; None for no padding.
        score: mean log-probability of the tokens, from a beam search.
    """

    context: Tensor
    tokens: Tensor
    logits: Tensor | None = None
    pieces: tuple[int, ...] | None = None
    mask: Tensor | None = None
    score: float | None = None

    @property
    def fed(self) -> tuple[int, ...]:
        """Return the number of tokens of each call: the pieces of the context, then one token at a time."""
        return (*(self.pieces or (self.context.shape[1],)), *[1] * (self.tokens.shape[1] - 1))

    def calls(self) -> Iterator[dict[str, Tensor]]:
        """Yield the arguments of each call in which this answer was made."""
        ids = torch.cat([self.context, self.tokens], 1)
        mask = torch.ones_like(ids)
        if self.mask is not None:
            mask[:, : self.mask.shape[1]] = self.mask
        position, done = (mask.cumsum(-1) - 1).clamp(min=0), 0
        for count in self.fed:
            new, done = slice(done, done + count), done + count
            yield dict(input_ids=ids[:, new], attention_mask=mask[:, :done], position_ids=position[:, new])

    def likelihood(self, logits: Tensor) -> Tensor:
        """Return the mean log-probability of each row's tokens, [B], under logits [B, n, V]."""
        return logits.log_softmax(-1).gather(-1, self.tokens[..., None]).mean((1, 2))


class Subject:
    """The checkpoint in one dtype, with all its layers or the first of them.

    Attributes:
        plain: the uncompiled model.
        traced: the same weights, compiled; all policies share what Dynamo traces.
    """

    def __init__(self, dtype: torch.dtype, layers: int = WHOLE) -> None:
        model, self.tokenizer = loaded(dtype)
        self.plain, self.dtype, self.layers = first_layers(model, layers), dtype, layers
        self.traced = Traced(copy.copy(self.plain))

    def settings(self, policy: str, budget: int) -> dict[str, Any]:
        """Return the arguments of `kvpass.backend` for a policy, with its smallest budget of at least `budget`."""
        options = ROWS[policy].fixed | made_for_model(policy, self.layers, QUERY_HEADS, KV_HEADS, DIM)
        if budget == ROOMY:
            options |= ROWS[policy].lossless_at(budget)
        if policy == "kv_align":  # aligners are trained for one model; for comparisons a random one suffices
            options["aligner"] = random_aligner("direct", self.layers, KV_HEADS, DIM, window=ROOMY)
        chosen = kvpass.policies.resolve(policy, options)
        return {"policy": policy, "budget": fitting_budget(chosen, budget) if chosen.evicts else ROOMY, **options}

    def under(self, **settings: Any) -> Any:
        """Select the settings of `kvpass.compile`, and return the compiled model."""
        return self.traced.under(on_reference.backend(**settings))

    def by_kernel(self, answer: Answer) -> list[Tensor]:
        """Return the uncompiled model's logits [B, n, V] for an answer under each of torch's attention kernels."""
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            flash = forced(self.plain, answer)
        with sdpa_kernel(SDPBackend.MATH):
            math = forced(self.plain, answer)
        return [flash, math, forced(self.eager, answer)]

    def exact(self, answer: Answer) -> Tensor:
        """Return the logits [B, n, V] for an answer of the uncompiled model with the same weights in float32."""
        return forced(self.widened, answer)

    @functools.cached_property
    def widened(self) -> Any:
        """Return the uncompiled model in float32, with weights rounded to the subject's dtype."""
        return copy.deepcopy(self.plain).float()

    @functools.cached_property
    def eager(self) -> Any:
        """Return the uncompiled model with eager attention; it shares the weights."""
        model = with_the_same_weights(self.plain)
        model.set_attn_implementation("eager")
        return model


def with_the_same_weights(model: Any) -> Any:
    """Return a copy of a model that shares its weights but no module."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


@torch.no_grad()
def forced(model: Any, answer: Answer) -> Tensor:
    """Return a model's logits [B, n, V] for an answer, fed with the answer's tokens in the same calls."""
    cache, logits = None, []
    for arguments in answer.calls():
        out = model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits.append(out.logits[:, -1].float())
    return torch.stack(logits[-answer.tokens.shape[1] :], 1)


def first_layers(model: Any, count: int) -> Any:
    """Return the model with its first layers only; it shares the weights."""
    if count == WHOLE:
        return model
    inner, cut = copy.copy(model.model), copy.copy(model)
    inner._modules = {**inner._modules, "layers": model.model.layers[:count]}
    cut._modules = {**cut._modules, "model": inner}
    cut.config = inner.config = copy.deepcopy(model.config)
    cut.config.num_hidden_layers = count
    return cut


@functools.cache
def loaded(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return model and tokenizer; weights are read once in each process.

    No token ends an answer, so that all answers have the same length.
    """
    from kvpass.apps import checkpoint

    model, tokenizer = checkpoint.load(dtype)
    model.generation_config.eos_token_id = None
    return model, tokenizer
