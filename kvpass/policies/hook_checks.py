"""Check policies outside of kvpass; a mistake in a hook is a PolicyError that names the hook and its line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from kvpass.arguments import check_class_attribute, require
from kvpass.errors import OUT_OF_MEMORY, KVPassError, PolicyError
from kvpass.policies.types import Tokens
from kvpass.torch_private.tensors import is_fake, write_count

Hook = Callable[..., Any]
_CHANGES = ("observe", "observe_chunk", "init_token_state", "project")
"""Hooks that return changes of the state."""
_ON_HOST = ("minimum_budget", "check_budget", "capacity", "for_layer", "clock", "tick", "state", "row_state")
"""Hooks that take numbers; some run for each row at each step."""
_MARK = "checked_by_kvpass"
HOOKS = (
    *("score", "victim", "compact", "rescore", "merge_evicted", "align", "bias", "logit_scale", *_CHANGES),
    *("plan", "head_classes", "head_counts", "layer_weights", "scan", "smoothed", *_ON_HOST),
)
"""Names of the hooks that are checked."""


def check_hooks(cls: Any, policy: Any) -> None:
    """Replace the methods of a class that are hooks by checked ones, except those of `policy`, the base class."""
    for name in HOOKS:
        hook = cls.__dict__.get(name)
        if inspect.isfunction(hook) and hook is not getattr(policy, name, None) and not hasattr(hook, _MARK):
            setattr(cls, name, _checked(f"{cls.__qualname__}.{name}", name, hook))


def check_policy(instance: Any, policy: Any) -> None:
    """Check the attributes of a policy's class, and that its options are fields whose values are hashable.

    Args:
        policy: the base class, which declares the attributes.

    Raises:
        PolicyError: an attribute or an option is missing, or has a value that is not allowed.
    """
    cls = type(instance)
    for name in ("name", "heads", "positions", "statistics", "shardable"):
        if not isinstance(getattr(cls, name, None), (property, functools.cached_property)):
            check_class_attribute(cls, name, policy)
    for base in (base for base in cls.__mro__[:-1] if not issubclass(base, policy)):
        hidden = [name for name in HOOKS if name in base.__dict__ and getattr(cls, name) is getattr(policy, name, None)]
        if hidden:
            raise PolicyError(
                f"{cls.__qualname__}: the {hidden[0]!r} of {base.__qualname__} is hidden by {policy.__name__}'s: "
                f"put {base.__qualname__} first among the bases"
            )
    statistics = getattr(cls, "statistics", ())
    scans = isinstance(statistics, frozenset) and "scan" in statistics
    if scans and cls.scan is policy.scan and cls.smoothed is policy.smoothed:
        raise PolicyError(f"{cls.__qualname__}: its statistics have 'scan', which needs a `scan` or a `smoothed`")
    declared = {name for name, given in inspect.get_annotations(policy).items() if "ClassVar" in str(given)}
    for base in (base for base in cls.__mro__ if issubclass(base, policy)):
        if "__dataclass_fields__" not in base.__dict__:
            annotated = inspect.get_annotations(base).items()
            ignored = [name for name, given in annotated if "ClassVar" not in str(given) and name not in declared]
            if ignored:
                raise PolicyError(
                    f"{base.__qualname__}: {ignored[0]!r} is not an option, as the class is not a dataclass: put "
                    "@dataclasses.dataclass(frozen=True) before it"
                )
    for field in dataclasses.fields(cls):
        if field.init and (field.compare if field.hash is None else field.hash):
            value = getattr(instance, field.name)
            require(_is_hashable(value), field.name, value, "must be hashable: a tuple instead of a list or a dict")


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _checked(title: str, name: str, hook: Hook) -> Hook:
    """Return a hook that raises PolicyError for its own errors, for wrong results, and for writes to its arguments."""
    on_host = name in _ON_HOST

    @functools.wraps(hook)
    def call(policy: Any, *hook_arguments: Any, **named: Any) -> Any:
        before = [] if on_host else _versions(hook_arguments, named)
        try:
            result = hook(policy, *hook_arguments, **named)
        except (KVPassError, *OUT_OF_MEMORY):
            raise
        except Exception as error:
            why = f"it fails with {type(error).__name__}: {error}"
            if "DataDependent" in type(error).__name__:
                reads = ".item(), .tolist(), `if tensor:`"
                why = f"it reads a tensor on the host ({reads}), and hooks are traced: use where"
            elif "NoneType" in str(error):
                why += " (a field of Attention is None unless `statistics` lists it)"
            raise PolicyError(f"{title}: {_line(hook, error)}: {why}") from error
        writes = not on_host and _versions(hook_arguments, named) != before
        wrong = (
            "it writes to a tensor that it was given" if writes else _wrong_result(policy, name, hook_arguments, result)
        )
        if wrong:
            raise PolicyError(f"{title}: {_line(hook)}: {wrong}")
        return result

    setattr(call, _MARK, True)
    return call


def _line(hook: Any, error: Exception | None = None) -> str:
    """Return the line of a hook at which an error was raised, or its first line."""
    code = getattr(inspect.unwrap(hook), "__code__", hook.__code__)  # of the hook, not of a decorator
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"


def _versions(hook_arguments: Sequence[Any], named: Mapping[str, Any]) -> list[int]:
    """Return counters of the writes to tensors, also in fields of dataclasses; inference tensors have none."""
    values: Any = [
        vars(each) if dataclasses.is_dataclass(each) else each for each in (*hook_arguments, *named.values())
    ]
    leaves = optree.tree_leaves(values)
    return [write_count(each) for each in leaves if isinstance(each, Tensor)]


def _wrong_result(policy: Any, name: str, hook_arguments: tuple[Any, ...], result: Any) -> str:
    """Describe what is wrong with the result of a hook; return "" if nothing is."""
    if name == "state":
        return "" if _maps(result, torch.dtype) else f"it returned {result!r}, not a dict of names and dtypes of torch"
    if name == "row_state":
        return "" if _maps(result, (int, float)) else f"it returned {result!r}, not a dict of names and numbers"
    if name == "minimum_budget":
        return "" if isinstance(result, numbers.Real) else f"it returned {result!r}, not a number of tokens"
    if name == "init_token_state" and hook_arguments:
        batch, heads, count, _ = hook_arguments[0].shape
        return _wrong_changes(policy, (batch, 1 if policy.heads == "shared" else heads, count), result)
    if not hook_arguments or not isinstance(hook_arguments[0], Tokens):
        return ""
    shape = tuple(hook_arguments[0].position.shape)
    if name in _CHANGES:
        return _wrong_changes(policy, shape, result)
    if name == "score":
        wrong = _wrong_tensor(result, "int64 or float32 [B, H', N]", shape, lambda dtype: dtype != torch.bool)
        live = hook_arguments[0].live
        return wrong or _wrong_values(live, lambda: result.isnan() & live, "NaN as the score of a token")
    if name == "victim":
        wrong = _wrong_tensor(result, "int64 [B, H']", shape[:-1], lambda dtype: dtype == torch.int64)
        count = shape[-1]
        what = f"a slot that is not one of {count}"
        return wrong or _wrong_values(result, lambda: (result < 0) | (result >= count), what)
    if name != "compact":
        return ""
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        return f"it returned a {type(result).__name__}, not a pair: which tokens stay, and the changes of the state"
    stays = _wrong_tensor(result[0], "bool [B, H', N]", shape, lambda dtype: dtype == torch.bool)
    return stays or _wrong_changes(policy, shape, result[1])


def _wrong_changes(policy: Any, shape: tuple[Any, ...], changes: Any) -> str:
    """Return what is wrong with changes of the state of tokens of a shape [B, H', N]."""
    if not isinstance(changes, dict):
        return f"it returned a {type(changes).__name__}, not a dict of changes of the state"
    dtypes = policy.state()
    of_rows = {name: torch.tensor(number).dtype for name, number in policy.row_state().items()}
    for name, value in changes.items():
        dtype = dtypes.get(name, of_rows.get(name))
        if dtype is None:
            return f"it changes {name!r}, and the entries of the state are {[*dtypes, *of_rows]}"
        size = (*shape[:-1], 1) if name in of_rows else shape
        if isinstance(value, Tensor) and value.ndim == 3 and value.shape[1] == 1:
            size = (size[0], 1, size[2])  # the same for all heads
        if wrong := _wrong_tensor(value, f"{dtype} for {name!r}", size, functools.partial(_can_become, dtype)):
            return wrong
    return ""


def _can_become(wanted: torch.dtype, given: torch.dtype) -> bool:
    return wanted == torch.bool or torch.can_cast(given, wanted)


def _wrong_tensor(value: Any, kind: str, shape: tuple[Any, ...], fits: Callable[[torch.dtype], bool]) -> str:
    if not isinstance(value, Tensor):
        return f"it returned a {type(value).__name__}, not a tensor: {kind}, here {shape}"
    if tuple(value.shape) != shape or not fits(value.dtype):
        return f"it returned {value.dtype} of shape {tuple(value.shape)}, not {kind}, here {shape}"
    return ""


def _wrong_values(like: Tensor, is_wrong: Callable[[], Tensor], what: str) -> str:
    """Describe wrong values of a result; traced tensors, and tensors on other devices than `cpu`, are not read."""
    readable = not is_fake(like) and like.device.type == "cpu"
    return f"it returned {what}" if readable and bool(is_wrong().any()) else ""


def _maps(value: Any, kind: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in value.items())
