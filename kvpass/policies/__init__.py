"""Look up eviction policies by name, register new ones, and read their options.

`get` imports the module of one policy alone, so that `import kvpass` stays light.
CONTRIBUTING.md says how to add a policy, or a statistic of attention.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
from typing import Any, TypeVar

from kvpass.arguments import check_arguments, short_text
from kvpass.errors import PolicyError
from kvpass.policies.base import Policy
from kvpass.policies.types import Attention, Tokens

__all__ = ["Attention", "Policy", "Tokens", "from_json", "get", "names", "parse", "register", "resolve", "to_json"]

_BUILT_IN = {
    "ada_kv": "AdaKV",
    "buzz": "Buzz",
    "cascade": "Cascade",
    "critical_kv": "CriticalKV",
    "d2o": "D2O",
    "defensive_kv": "DefensiveKV",
    "duo_attention": "DuoAttention",
    "expected_attention": "ExpectedAttention",
    "full": "Full",
    "h2o": "H2O",
    "keydiff": "KeyDiff",
    "knorm": "KNorm",
    "kv_align": "KVAlign",
    "pyramid_kv": "PyramidKV",
    "r_kv": "RKV",
    "random": "Random",
    "roco": "RoCo",
    "sage": "Sage",
    "snapkv": "SnapKV",
    "streaming": "Streaming",
    "tova": "Tova",
    "tri_attention": "TriAttention",
    "vase": "Vase",
    "window": "Window",
}
_registered: dict[str, type[Policy]] = {}

P = TypeVar("P", bound=type[Policy])


def names() -> list[str]:
    """Return the names of all policies, sorted."""
    return sorted({*_BUILT_IN, *_registered})


@check_arguments
def get(name: str) -> type[Policy]:
    """Return the class of a policy.

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
    """Register a policy class under its `name`; usable as a decorator.

    Returns:
        The class.

    Raises:
        PolicyError: the class is not a dataclass derived from `Policy`, has no `name`, or the name is taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Policy) and dataclasses.is_dataclass(cls)):
        raise PolicyError(f"cls={short_text(cls)}: must be a dataclass derived from kvpass.policies.Policy")
    if not isinstance(getattr(cls, "name", None), str):
        raise PolicyError(f"cls={short_text(cls)}: its attribute `name` must be a string")
    taken = _registered.get(cls.name)
    if cls.name in _BUILT_IN or (taken is not None and taken.__qualname__ != cls.__qualname__):
        raise PolicyError(f"the policy name {cls.name!r} is taken")
    _registered[cls.name] = cls
    return cls


def has_registered_class(policy: Policy) -> bool:
    """Return whether a policy is of the class that `get` returns for its name, not a derived one."""
    return policy.name in names() and get(policy.name) is type(policy)


def is_built_in(policy: Policy) -> bool:
    """Return whether a policy is of a class of kvpass, and not of one derived from it."""
    return policy.name in _BUILT_IN and has_registered_class(policy)


@check_arguments
def resolve(policy: str | Policy, options: dict[str, Any]) -> Policy:
    """Return a policy object for a name and its options, or `policy` if it is an object.

    Args:
        policy: a name of `names()`, or a policy object.
        options: the policy's options by name; empty for an object.

    Raises:
        PolicyError: an unknown name or option, options with an object, a value that is not allowed, or an object with a
            scan whose class is not registered.
    """
    cls, name = (get(policy), policy) if isinstance(policy, str) else (type(policy), type(policy).__qualname__)
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            error = PolicyError(f"unknown option {option!r} of policy {name!r}; its options: {listed}")
            error.is_unknown_argument = True
            raise error
    if isinstance(policy, Policy):
        if options:
            raise PolicyError(f"{', '.join(options)}: must be set on the policy object {policy}")
        if "scan" in policy.statistics and not has_registered_class(policy):
            raise PolicyError(
                f"{type(policy).__qualname__}: a scan runs in an operator, which finds the policy by its name "
                f"{policy.name!r}: give the class its own `name` and decorate it with @kvpass.policies.register"
            )
        return policy
    try:
        return cls(**options)
    except TypeError as error:
        raise PolicyError(f"policy {policy!r} with {options}: {error}") from error


@check_arguments
def parse(text: str) -> Policy:
    """Return the policy that a command line names, with or without options.

    Options follow a colon, with commas or more colons between them: `"sage:select_at=overflow,top=4"`.  A value is read
    as a Python literal (number, bool, None, tuple) if it is one, and otherwise as a string.

    Raises:
        PolicyError: as from `resolve`, and for an option without a value.
    """
    name, _, text_of_options = text.partition(":")
    options = [option.partition("=") for option in _BETWEEN_OPTIONS.split(text_of_options) if option]
    for option, sign, _ in options:
        if not sign:
            raise PolicyError(f"{text!r}: option {option!r} has no value; write {name}:{option}=VALUE")
    return resolve(name, {option: _value(value) for option, _, value in options})


_BETWEEN_OPTIONS = re.compile(r"[,:](?=\w+(?:=|$)|$)")
"""Matches separators of options; a comma inside a value, as in a tuple, is not followed by a name and `=`."""


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def to_values(policy: Policy) -> list[Any]:
    """Return the name and the options of a policy as plain values, for JSON; `from_values` is the inverse.

    Options are text, numbers, or tuples of these.  Trained weights are named by their digest.  A class that is not
    registered is named in addition.  `from_values` refuses both.
    """
    options = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    for name in ("interval", "spans"):
        if options[name] == getattr(type(policy), name):
            del options[name]  # graphs without it keep their text
    plain = {name: {"digest": x.digest} if hasattr(x, "digest") else x for name, x in options.items()}
    cls = type(policy)
    unregistered = [] if has_registered_class(policy) else [f"{cls.__module__}.{cls.__qualname__}"]
    result: list[Any] = json.loads(json.dumps([policy.name, plain, *unregistered]))
    return result


def from_values(saved: Any) -> Policy:
    """Return the policy that `to_values` described.

    Raises:
        PolicyError: as from `resolve`, or a class that was not registered.
    """
    name, options, *unregistered = saved
    if unregistered:
        raise PolicyError(f"policy {name!r} is of {unregistered[0]}, which is not registered")
    return resolve(name, {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})


def to_json(policy: Policy) -> str:
    """Return a policy as JSON text, for operators, which take no objects; `from_json` is the inverse."""
    return json.dumps(to_values(policy), sort_keys=True)


def from_json(text: str) -> Policy:
    """Return the policy of a text that `to_json` made."""
    return from_values(json.loads(text))
