"""Transcribe every policy from its paper, eagerly, over Python lists of tokens.

A reference shares nothing with the compiled path but the policy's options.  Tests compare the two at every step.
"""

from __future__ import annotations

import importlib

from kvpass.errors import PolicyError
from kvpass.policies import Policy, is_built_in
from kvpass.reference.base import HeadStream, Reference, Token
from kvpass.reference.layer import ReferenceLayer

__all__ = ["HeadStream", "Reference", "ReferenceLayer", "Token", "reference_of"]


def reference_of(policy: Policy) -> Reference:
    """Return the reference of a policy: `kvpass.reference.h2o.H2OReference` of `H2O`, or the policy's `reference()`.

    Raises:
        PolicyError: the policy has no reference.
    """
    named = getattr(policy, "reference", None)
    if named is not None:
        own: Reference = named()
        return own
    if not is_built_in(policy):
        raise PolicyError(
            f"policy {policy.name!r} has no eager reference: give {type(policy).__qualname__} a method reference()"
        )
    module = importlib.import_module(f"kvpass.reference.{policy.name}")
    built: Reference = getattr(module, f"{type(policy).__name__}Reference")(policy)
    return built
