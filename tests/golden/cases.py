"""List the models and policies whose graphs and outputs are recorded."""

from __future__ import annotations

from typing import Any

import kvpass
from kvpass import policies
from tests import models
from tests.aligners import random_aligner
from tests.architectures import zoo
from tests.calibrations import CALIBRATED, made_for_model
from tests.strategies import MODEL_SPECIFIC

BUDGET = 8
"""The smallest budget for four sub-caches of `cascade` and four sinks; a prompt has 12 tokens, which is more."""

WITH_ALL_POLICIES = ("Llama", "GPT2", "gpt_oss", "bart (reading)")
WITH_THREE = (
    "Mistral", "Qwen2", "Qwen3", "GPTNeoX", "Phi", "Gemma", "Cohere", "Llama-64",
    "mistral", "mixtral", "deepseek_v2", "deepseek_v3", "falcon", "bloom", "mpt", "opt", "codegen", "gptj", "gpt_neo",
    "gpt_bigcode", "olmo2", "stablelm", "starcoder2", "phi3", "gemma2", "gemma3n_text", "cohere2", "qwen3_moe",
    "qwen3_next", "jamba", "lfm2", "persimmon", "biogpt", "llama4_text",
    "t5 (reading)", "marian (reading)",
)  # fmt: skip
MODELS = (*WITH_ALL_POLICIES, *WITH_THREE)
"""Names of `tests.models.ARCHITECTURES`, which are capitalised, or model types of `tests.architectures.zoo`."""

BY_POSITION = ("streaming", "window", "random", "full")
BY_SCORE = ("h2o", "tova", "roco", "snapkv", "knorm")
IN_OTHER_WAYS = ("d2o", "buzz", "cascade", "sage", "kv_align")
"""Policies that merge, evict in batches, keep sub-caches, select from the prompt, or repair rows."""

SMALLER: dict[str, dict[str, Any]] = {
    "snapkv": dict(window=4),
    "pyramid_kv": dict(window=4),
    "ada_kv": dict(window=3),
    "critical_kv": dict(window=3),
    "defensive_kv": dict(window=3),
    "keydiff": dict(sinks=1, interval=2),
    "r_kv": dict(window=3, interval=2),
    "vase": dict(sinks=1, recent=3, interval=2),
}
"""Options for policies whose defaults need more slots."""

WITHOUT_ALIGNER = ("gpt_oss", "mistral", "falcon", "codegen", "jamba", "llama4_text")
REFUSED = {(model, "kv_align") for model in WITHOUT_ALIGNER}
REFUSED |= {("GPT2", "critical_kv"), ("GPT2", "defensive_kv")}  # its output projection is a Conv1D, no linear layer
REFUSED |= {("gpt_oss", name) for name in (*CALIBRATED, "duo_attention")}  # need all layers, but half have windows
"""Pairs of a model and a policy that refuses it."""


def policies_of(model: str) -> tuple[str, ...]:
    """Return the policies recorded for a model: all of them, or one of each kind in turn."""
    if model in WITH_ALL_POLICIES:
        names = policies.names()
    else:
        number = WITH_THREE.index(model)
        kinds = (BY_POSITION, number), (BY_SCORE, number), (IN_OTHER_WAYS, number + number // len(BY_SCORE))
        names = [kind[index % len(kind)] for kind, index in kinds]
    return tuple(name for name in names if (model, name) not in REFUSED)


def cases(names: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Return pairs of a model and a policy, for all models and policies if none are named."""
    return [(model, policy) for model in names or MODELS for policy in policies_of(model) if not only or policy in only]


def build(name: str) -> Any:
    """Return a fresh tiny model in float32 and evaluation mode."""
    if name in models.ARCHITECTURES | models.HEADS_OF_64:
        return models.build(name)
    kind, _, table = name.partition(" (")
    return zoo.build(kind, table.rstrip(")") or "causal")


def settings(policy: str, model: Any) -> dict[str, Any]:
    """Return the arguments of `kvpass.backend` other than the policy's name."""
    if policy == "full":
        return {}
    if policy in SMALLER:
        return dict(budget=BUDGET, **SMALLER[policy])
    if policy not in MODEL_SPECIFIC:
        return dict(budget=BUDGET)
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = made_for_model(policy, config.num_hidden_layers, config.num_attention_heads, heads, dim)
    if policy == "duo_attention":
        return dict(budget=BUDGET, sinks=1, recent=3, **weights)
    if policy in CALIBRATED:
        return dict(budget=BUDGET, sinks=1, interval=2, **weights)
    return dict(budget=BUDGET, aligner=random_aligner("direct", layers=config.num_hidden_layers, heads=heads, dim=dim))


def backend(policy: str, model: Any) -> kvpass.backend.Backend:
    """Return the backend of a case; rewritten graphs run uncompiled."""
    return kvpass.backend(policy, inner="eager", validate=False, **settings(policy, model))
