"""`generate` with a bounded KV cache: model.generate(..., custom_generate="PATH", policy="h2o", budget=1024)."""

import dataclasses
import inspect

import kvpass


def generate(model, policy="h2o", budget=1024, **arguments):
    """Generate with the model, compiled in place by kvpass.

    The first call compiles the model; a call with other settings compiles it again.  The model stays compiled, so an
    ordinary `model.generate` after it is bounded in the same way.

    Args:
        model: a causal language model of transformers, in eval mode.
        policy: the eviction policy, by name or as an object; `kvpass.policies.names()` lists the names.
        budget: the tokens that stay cached for each layer and KV head: a number, or a share of the prompt in (0, 1].
        arguments: the other arguments of `kvpass.compile`, such as `kv_dtype`, options of the policy, such as `sinks`,
            and everything that `model.generate` takes.

    Returns:
        What `model.generate` returns.

    Raises:
        kvpass.KVPassError: the settings cannot be, or the model cannot be rewritten; its cache is never left unbounded.
    """
    kind = kvpass.policies.get(policy) if isinstance(policy, str) else type(policy)
    names = {*inspect.signature(kvpass.backend).parameters, *(field.name for field in dataclasses.fields(kind))}
    settings = {name: arguments.pop(name) for name in names & arguments.keys()}
    wanted = kvpass.backend(policy, budget=budget, **settings)
    if getattr(model, "_kvpass_generates_with", None) != wanted:
        kvpass.compile(model, policy, budget=budget, **settings)
        model._kvpass_generates_with = wanted
    return model.generate(**arguments)
