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

from kvpass.arguments import check_class_attribute, require, short_text
from kvpass.errors import OUT_OF_MEMORY, KVPassError, PolicyError
from kvpass.policies.budgets import HeadClass, Plan
from kvpass.policies.types import Merge, Tokens
from kvpass.torch_private.tensors import is_fake, write_count

Hook = Callable[..., Any]
_ON_HOST = ("minimum_budget", "check_budget", "capacity", "for_layer", "clock", "tick", "state", "row_state")
"""Hooks that take numbers; some run for each row at each step."""
_MARK = "checked_by_kvpass"
HOOKS = (
    *("score", "victim", "compact", "rescore", "merge_evicted", "align", "bias", "logit_scale", "observe", "project"),
    *("observe_chunk", "init_token_state", "plan", "head_classes", "head_counts", "layer_weights", "scan", "smoothed"),
    *_ON_HOST,
)
"""Names of the hooks that are checked."""


def check_hooks(cls: Any, policy: Any) -> None:
    """Replace the hooks that a class defines by checked ones; hooks of `policy`, the base class, stay."""
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
    window = instance.observation_window
    require(
        isinstance(window, int) and window >= 1, f"{cls.__qualname__}.observation_window", window, "must be at least 1"
    )
    statistics = getattr(cls, "statistics", ())
    scans = isinstance(statistics, frozenset) and "scan" in statistics
    if scans and cls.scan is policy.scan and cls.smoothed is policy.smoothed:
        raise PolicyError(f"{cls.__qualname__}: its statistics have 'scan', which needs a `scan` or a `smoothed`")
    declared = {name for name, kind in inspect.get_annotations(policy).items() if "ClassVar" in str(kind)}
    for base in (base for base in cls.__mro__ if issubclass(base, policy)):
        if "__dataclass_fields__" not in base.__dict__:
            annotated = inspect.get_annotations(base).items()
            ignored = [name for name, kind in annotated if "ClassVar" not in str(kind) and name not in declared]
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
            elif "DynamicOutputShape" in type(error).__name__:
                why = "the shape of a result depends on values, as of nonzero, and hooks are traced: use where"
            elif "FakeTensors" in str(error):
                why += " (make tensors inside of the hook, because it is traced, or return them by `layer_weights`)"
            elif "NoneType" in str(error):
                why += " (a field of Attention is None unless `statistics` lists it)"
            raise PolicyError(f"{title}: {_line(hook, error)}: {why}") from error
        writes = not on_host and _versions(hook_arguments, named) != before
        by_order = () if named else hook_arguments  # a derived class may call its base class by keywords
        wrong = "it writes to a tensor that it was given" if writes else _wrong_result(policy, name, by_order, result)
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
    if name in _KINDS:
        kind, fits = _KINDS[name]
        if not fits(result):
            return f"it returned {short_text(result)}, not {kind}"
    return _IN_SHAPES[name](policy, hook_arguments, result) if name in _IN_SHAPES and hook_arguments else ""


def _items(result: Any, kind: Any, sequences: Any = (tuple, list)) -> bool:
    return isinstance(result, sequences) and all(isinstance(item, kind) for item in result)


def _maps(value: Any, kind: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in value.items())


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "state": ("a dict of names and dtypes of torch", lambda result: _maps(result, torch.dtype)),
    "row_state": ("a dict of names and numbers", lambda result: _maps(result, (int, float))),
    "minimum_budget": ("a number of tokens", lambda result: isinstance(result, numbers.Real)),
    "capacity": ("a number of slots", lambda result: isinstance(result, (int, torch.SymInt))),
    "clock": ("a tuple of numbers", lambda result: _items(result, int, tuple)),
    "tick": (
        "a pair: whether the next token compacts, and a tuple of numbers",
        lambda result: isinstance(result, (tuple, list)) and len(result) == 2 and _items(result[1], int, tuple),
    ),
    "head_classes": ("a tuple of HeadClass", lambda result: _items(result, HeadClass)),
    "plan": ("a list of Plan", lambda result: _items(result, Plan)),
    "layer_weights": ("a list of tensors", lambda result: _items(result, Tensor)),
    "compact": (
        "a pair: which tokens stay, and the changes of the state",
        lambda result: isinstance(result, (tuple, list)) and len(result) == 2,
    ),
    "align": (
        "keys, values and the changes of the state",
        lambda result: isinstance(result, (tuple, list)) and len(result) == 3,
    ),
    "merge_evicted": ("a Merge", lambda result: isinstance(result, Merge)),
}
"""Kinds of results that are no tensors, or no single one: text for messages, and a check."""


def _wrong_entries(policy: Any, hook_arguments: tuple[Any, ...], result: Any) -> str:
    if not _maps(result, Tensor):
        return f"it returned {short_text(result)}, not a dict of names and tensors"
    batch, heads, count = hook_arguments[0].position.shape
    for name, value in result.items():
        if tuple(value.shape) not in ((batch, heads, count), (batch, 1, count)):
            return f"it returned shape {tuple(value.shape)} for {name!r}, not [B, H', N], here {(batch, heads, count)}"
    return ""


def _wrong_score(policy: Any, hook_arguments: tuple[Any, ...], result: Any) -> str:
    tokens: Tokens = hook_arguments[0]
    shape, live = tokens.position.shape, tokens.live
    kind = "int64 or float32 [B, H', N]"
    wrong = _wrong_tensor(result, kind, shape, lambda dtype: dtype != torch.bool and not dtype.is_complex)
    return wrong or _wrong_values(live, functools.partial(_any_nan, result, live), "NaN as the score of a token")


def _any_nan(value: Tensor, where: Tensor) -> Tensor:
    return value.isnan() & where


def _wrong_compact(policy: Any, hook_arguments: tuple[Any, ...], result: Any) -> str:
    tokens, keep = hook_arguments[0], result[0]
    wrong = _wrong_tensor(keep, "bool [B, H', N]", tokens.position.shape, lambda dtype: dtype == torch.bool)
    wrong = wrong or _wrong_changes(policy, tokens.position.shape, result[1])
    stays = "more tokens to keep than the budget"
    return wrong or _wrong_values(keep, lambda: (keep & tokens.live).sum(-1, keepdim=True) > tokens.budget, stays)


def _wrong_capacity(policy: Any, budget: Any, capacity: Any, by_row: bool = False) -> str:
    """Describe slots that the default eviction does not fit into, or that it would fill beyond the budget.

    Args:
        by_row: whether eviction reads a budget for each row, which it does not exceed in any number of slots.
    """
    if not isinstance(budget, int) or not isinstance(capacity, int) or not policy.evicts:
        return ""  # symbols are not compared
    own = policy._defines("victim") or policy._defines("tick")
    needed = 1 if own else budget + (not policy.overwrites)
    if capacity < needed:
        return f"it returned {capacity} slots for a budget of {budget}, and needs {needed}"
    if capacity > needed and not own and not by_row:
        return f"it returned {capacity} slots for a budget of {budget}: more than {needed} need a `victim` or a `tick`"
    return ""


def _wrong_plan(policy: Any, hook_arguments: tuple[Any, ...], result: Any) -> str:
    layers, _, budget = hook_arguments
    if len(result) != len(layers):
        return f"it returned plans of {len(result)} layers, not of {len(layers)}"
    for plan in result:
        if min((plan.budget, *plan.rows)) < 1:
            return f"it returned a budget of {min((plan.budget, *plan.rows))}: a layer keeps at least 1 token"
        if wrong := _wrong_capacity(policy, max((plan.budget, *plan.rows)), plan.capacity, plan.differs(budget)):
            return wrong
    return ""


def _wrong_slots(slots: Tensor, letters: str, shape: Sequence[Any], tokens: Tokens) -> str:
    wrong = _wrong_tensor(slots, f"int64 {letters}", shape, lambda dtype: dtype == torch.int64)
    count = tokens.position.shape[-1]
    return wrong or _wrong_values(slots, lambda: (slots < 0) | (slots >= count), f"a slot that is not one of {count}")


def _wrong_merge(policy: Any, hook_arguments: tuple[Any, ...], result: Merge) -> str:
    tokens, valid = hook_arguments[0], hook_arguments[-1]
    shape = valid.shape
    wrong = _wrong_slots(result.into, "[B, H', E] for `into`", shape, tokens)
    for name in ("weight", "share"):
        value = getattr(result, name)
        wrong = wrong or _wrong_tensor(value, f"float32 [B, H', E] for `{name}`", shape, _as_float)
        wrong = wrong or _wrong_values(value, functools.partial(_any_nan, value, valid), f"NaN as a {name}")
    if not wrong and not isinstance(result.own, numbers.Real):
        wrong = f"it returned {short_text(result.own)}, not a number for `own`"
    return wrong or _wrong_state(policy, hook_arguments, result.state)


def _wrong_alignment(policy: Any, hook_arguments: tuple[Any, ...], result: Any) -> str:
    for of, like, value in zip(("keys", "values"), hook_arguments[1:3], result, strict=False):
        if wrong := _wrong_tensor(value, of, like.shape, _as_float):
            return wrong
    return _wrong_state(policy, hook_arguments, result[2])


def _wrong_bias(policy: Any, hook_arguments: tuple[Any, ...], result: Any) -> str:
    if result is None:
        return ""
    tokens, groups = hook_arguments
    batch, heads, count = tokens.position.shape
    kind = "float32 that can be broadcast to [B, Hkv, G, N]"
    if not isinstance(result, Tensor):
        return f"it returned a {type(result).__name__}, not a tensor: {kind}"
    sizes = ((batch, 1), (heads, 1) if policy.heads == "kv" else (), (groups, 1), (count, 1))
    fits = result.ndim <= len(sizes) and all(
        not of or size in of for size, of in zip(reversed(result.shape), reversed(sizes), strict=False)
    )
    if not fits or not result.dtype.is_floating_point:
        return f"it returned {result.dtype} of shape {tuple(result.shape)}, not {kind}, here G = {groups}, N = {count}"
    return _wrong_values(result, lambda: result.isnan(), "NaN as a bias")


def _wrong_state(policy: Any, hook_arguments: tuple[Any, ...], result: Any) -> str:
    return _wrong_changes(policy, hook_arguments[0].position.shape, result)


_IN_SHAPES: dict[str, Callable[[Any, tuple[Any, ...], Any], str]] = {
    "plan": _wrong_plan,
    "capacity": lambda policy, args, result: _wrong_capacity(policy, args[0], result),
    "init_token_state": lambda policy, args, result: _wrong_changes(
        policy, (args[0].shape[0], 1 if policy.heads == "shared" else args[0].shape[1], args[0].shape[2]), result
    ),
    "rescore": _wrong_entries,
    "score": _wrong_score,
    "victim": lambda _, args, result: _wrong_slots(result, "[B, H']", args[0].position.shape[:-1], args[0]),
    "compact": _wrong_compact,
    "merge_evicted": _wrong_merge,
    "align": _wrong_alignment,
    "bias": _wrong_bias,
    "logit_scale": lambda _, args, result: (
        ""
        if result is None
        else _wrong_tensor(result, "a factor for each count", args[0].shape, _as_float)
        or _wrong_values(result, result.isnan, "NaN as a factor")
    ),
    "head_counts": lambda _, args, result: _wrong_tensor(
        result, "numbers [B, Hkv]", args[0].position.shape[:2], _as_float
    ),
    **dict.fromkeys(("observe", "observe_chunk", "project"), _wrong_state),
}
"""Functions that compare a result with the arguments of its hook: the policy, the arguments, the result."""


def _wrong_changes(policy: Any, shape: Sequence[Any], changes: Any) -> str:
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


def _can_become(target: torch.dtype, dtype: torch.dtype) -> bool:
    return target == torch.bool or torch.can_cast(dtype, target)


def _as_float(dtype: torch.dtype) -> bool:
    return torch.can_cast(dtype, torch.float32)


def _wrong_tensor(value: Any, kind: str, sizes: Sequence[Any], fits: Callable[[torch.dtype], bool]) -> str:
    shape = tuple(sizes)
    if not isinstance(value, Tensor):
        return f"it returned a {type(value).__name__}, not a tensor: {kind}, here {shape}"
    if tuple(value.shape) != shape or not fits(value.dtype):
        return f"it returned {value.dtype} of shape {tuple(value.shape)}, not {kind}, here {shape}"
    return ""


def _wrong_values(like: Tensor, is_wrong: Callable[[], Tensor], what: str) -> str:
    """Describe wrong values of a result; traced tensors, and tensors on other devices than `cpu`, are not read."""
    readable = not is_fake(like) and like.device.type == "cpu"
    return f"it returned {what}" if readable and bool(is_wrong().any()) else ""
