"""Look up eviction policies by name, register new ones, and read their options.

`get` imports the module of the one policy that is asked for, so that `import kvpass` stays light.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
from typing import Any, TypeVar

from kvpass.arguments import checked, shown
from kvpass.errors import PolicyError
from kvpass.policies.base import Attention, Policy, Tokens

__all__ = ["Attention", "Policy", "Tokens", "get", "names", "parse", "register", "resolve", "specified", "specify"]

_BUILT_IN = {
    "buzz": "Buzz",
    "cascade": "Cascade",
    "d2o": "D2O",
    "full": "Full",
    "h2o": "H2O",
    "knorm": "KNorm",
    "kv_align": "KVAlign",
    "random": "Random",
    "roco": "RoCo",
    "sage": "Sage",
    "snapkv": "SnapKV",
    "streaming": "Streaming",
    "tova": "Tova",
    "window": "Window",
}
_registered: dict[str, type[Policy]] = {}

P = TypeVar("P", bound=type[Policy])


def names() -> list[str]:
    """The names of all policies, sorted."""
    return sorted({*_BUILT_IN, *_registered})


@checked
def get(name: str) -> type[Policy]:
    """The class of a policy.

    Raises:
        PolicyError: no policy has that name.
    """
    if name in _registered:
        return _registered[name]
    if name not in _BUILT_IN:
        raise PolicyError(f"unknown policy {name!r}; known are {', '.join(names())}")
    policy: type[Policy] = getattr(importlib.import_module(f"kvpass.policies.{name}"), _BUILT_IN[name])
    return policy


def register(cls: P) -> P:
    """Make a policy of your own known by its `name`; usable as a decorator.

    Raises:
        PolicyError: it is not a frozen dataclass derived from `Policy`, or the name is taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Policy) and dataclasses.is_dataclass(cls)):
        raise PolicyError(f"cls={shown(cls)}: must be a dataclass derived from kvpass.policies.Policy")
    if not isinstance(getattr(cls, "name", None), str):
        raise PolicyError(f"cls={shown(cls)}: its attribute `name` must be a string")
    taken = _registered.get(cls.name)
    if cls.name in _BUILT_IN or (taken is not None and taken.__qualname__ != cls.__qualname__):
        raise PolicyError(f"the policy name {cls.name!r} is taken")
    _registered[cls.name] = cls
    return cls


@checked
def resolve(policy: str | Policy, options: dict[str, Any]) -> Policy:
    """A policy object from a name and its options, or the object itself.

    Raises:
        PolicyError: an unknown name or option, options beside an object, or a value that cannot be.
    """
    if isinstance(policy, Policy):
        if options:
            raise PolicyError(f"{', '.join(options)}: set on the policy object {policy}, not beside it")
        return policy
    cls = get(policy)
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise PolicyError(f"unknown option {option!r} of policy {policy!r}; its options: {listed}")
    try:
        return cls(**options)
    except TypeError as error:
        raise PolicyError(f"policy {policy!r} with {options}: {error}") from error


@checked
def parse(text: str) -> Policy:
    """The policy that a name, or a name and options, stands for, as people write it on a command line.

    Options follow a colon, commas or more colons between them: `"sage:select_at=overflow,top=4"`.  A value that reads
    as a number, a truth value, None or a tuple is one; any other is a word.

    Raises:
        PolicyError: as of `resolve`, and for an option without a value.
    """
    name, _, given = text.partition(":")
    options = [option.partition("=") for option in _BETWEEN_OPTIONS.split(given) if option]
    for option, sign, _ in options:
        if not sign:
            raise PolicyError(f"{text!r}: option {option!r} has no value; write {name}:{option}=VALUE")
    return resolve(name, {option: _value(value) for option, _, value in options})


_BETWEEN_OPTIONS = re.compile(r"[,:](?=\w+(?:=|$)|$)")
"""A comma within a value, as in a tuple, is followed by no option."""


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def specify(policy: Policy) -> str:
    """The policy as text, for operators, which take no objects; `specified` is the inverse.

    Only for policies whose options are text and numbers.
    """
    return json.dumps([policy.name, dataclasses.asdict(policy)], sort_keys=True)


def specified(text: str) -> Policy:
    """The policy that `specify` wrote down."""
    name, options = json.loads(text)
    return resolve(name, {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
