"""Check the arguments of public functions and the options of policies against their annotations.

The annotation alone defines the check: a type, union or literal, with each `Condition` in `Annotated`.  NumPy integers,
floats and bools, and tensors without dimensions, are converted to Python's own types.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import math
import numbers
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar, cast

from torch import Tensor

from kvpass.errors import KVPassError, PolicyError

F = TypeVar("F", bound=Callable[..., Any])

LONGEST = 80  # characters of a value in a message
REFUSED: Final = object()
"""Result of a check for a value that the annotation does not allow."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition that `Annotated` adds to a type.

    Attributes:
        text: the part of the error message after the name of the type.
        holds: whether a value of the type is allowed.
        message: the error message for a value that is not allowed, instead of "must be" and the allowed values.
        error: the class of the error for such a value; None for PolicyError.
    """

    text: str = ""
    holds: Callable[[Any], bool] = lambda _: True
    message: str = ""
    error: type[KVPassError] | None = None


def at_least(low: float) -> Condition:
    """Allow numbers that are at least `low`."""
    return Condition(f"of at least {low}", lambda number: low <= number < math.inf)


def between(low: float, high: float) -> Condition:
    """Allow numbers from `low` to `high`, both included."""
    return Condition(f"from {low} to {high}", lambda number: low <= number <= high)


Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Share = Annotated[float, between(0, 1)]
Odd = Annotated[int, Condition("that is odd and at least 1", lambda count: count >= 1 and count % 2 == 1)]


@dataclasses.dataclass(frozen=True)
class _Check:
    """A check that was made from an annotation.

    Attributes:
        text: a description of the allowed values.
        read: returns the value for the function, or REFUSED.
        message, error: see `Condition`.
    """

    text: str
    read: Callable[[Any], Any]
    message: str = ""
    error: type[KVPassError] | None = None

    @staticmethod
    def over(text: str, read: Callable[[Any], Any], parts: Iterable[_Check | Condition]) -> _Check:
        """Return a check with the message and the error of the first part that has its own."""
        parts = list(parts)
        message = next((part.message for part in parts if part.message), "")
        return _Check(text, read, message, next((part.error for part in parts if part.error), None))


def check_arguments(function: F) -> F:
    """Check the arguments of every call of a function, before its body runs.

    Raises:
        PolicyError: an argument that its annotation does not allow, an unexpected argument, or a missing argument; or
            the error class that the annotation names.
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    known = _names(signature, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    forwards = _names(signature, inspect.Parameter.VAR_KEYWORD)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PolicyError(f"{name}: {_surplus(signature, args, kwargs) or error}") from None
        for argument, check in _checks(function).items():
            if argument in given.arguments:
                given.arguments[argument] = _value(argument, given.arguments[argument], check)
        try:
            return function(*given.args, **given.kwargs)
        except PolicyError as error:
            if forwards and error.is_unknown_argument:
                error.reword(f"{error}; arguments of {name}: {', '.join(known)}")
            raise

    return cast(F, call)


def _names(signature: inspect.Signature, *kinds: Any) -> list[str]:
    """Return the names of a function's arguments of these kinds."""
    return [each.name for each in signature.parameters.values() if each.kind in kinds and each.name != "self"]


def _surplus(signature: inspect.Signature, args: Sequence[Any], kwargs: Iterable[str]) -> str | None:
    """Return which arguments of a call a function does not take, and which it takes; None if it takes all."""
    anywhere, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    positional, known = _names(signature, anywhere), _names(signature, anywhere, named)
    if len(args) - ("self" in signature.parameters) > len(positional):
        return f"too many positional arguments; without its name it takes {', '.join(positional)}"
    unknown = [] if _names(signature, inspect.Parameter.VAR_KEYWORD) else [each for each in kwargs if each not in known]
    return f"unknown argument {unknown[0]!r}; it takes {', '.join(known)}" if unknown else None


def check_fields(made: Any) -> None:
    """Check the fields of a frozen dataclass; its `__post_init__` must call this function.

    Raises:
        PolicyError: a field's value that its annotation does not allow.
    """
    cls: Any = type(made)
    for field in [field for field in dataclasses.fields(cls) if field.init]:
        value = _value(field.name, getattr(made, field.name), _field_check(cls, field.name))
        object.__setattr__(made, field.name, value)


def check_class_attribute(cls: Any, name: str, base: Any) -> None:
    """Check an attribute of a class against the annotation, a ClassVar, of the base class that declares it.

    Raises:
        PolicyError: the class has no such attribute, or one that its annotation does not allow.
    """
    try:
        _value(f"{cls.__qualname__}.{name}", getattr(cls, name), _class_attribute_check(base, name))
    except AttributeError:
        raise PolicyError(f"{cls.__qualname__}: its attribute `{name}` is missing") from None


def _value(name: str, value: Any, check: _Check) -> Any:
    """Return the converted value, or raise an error that names the argument, the value and the allowed values."""
    read = check.read(value)
    if read is REFUSED:
        raise (check.error or PolicyError)(f"{name}={short_text(value)}: {check.message or f'must be {check.text}'}")
    return read


def require(condition: bool, option: str, value: object, why: str) -> None:
    """Raise a PolicyError that names the option unless `condition` is true."""
    if not condition:
        raise PolicyError(f"{option}={short_text(value)}: {why}")


def short_text(value: Any) -> str:
    """Return a value as one short line of text for an error message."""
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}>"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a `repr` that fails must not hide the error that is being reported
        text = f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


# -- annotations -------------------------------------------------------------------------------------------------------


@functools.cache
def _checks(function: Callable[..., Any]) -> dict[str, _Check]:
    """Return the checks of a function's arguments by name, without `**` arguments, which other functions check."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    return {name: _check(hints[name]) for name in named if name in hints}


@functools.cache
def _field_check(cls: type[Any], name: str) -> _Check:
    return _check(_field_annotation(cls, name))


def _field_annotation(cls: type[Any], name: str) -> Any:
    """Return the annotation of a dataclass's field; Any for a user's annotation that cannot be resolved."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    holder = types.SimpleNamespace(__annotations__={name: inspect.get_annotations(owner)[name]})
    try:
        return typing.get_type_hints(holder, vars(sys.modules[owner.__module__]), include_extras=True)[name]
    except (AttributeError, NameError, TypeError):
        return Any


@functools.cache
def _class_attribute_check(cls: Any, name: str) -> _Check:
    (annotation,) = typing.get_args(typing.get_type_hints(cls, include_extras=True)[name])
    return _check(annotation)


def _check(annotation: Any) -> _Check:
    """Return the check of an annotation; a class without a special check allows its instances."""
    origin, parameters = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _GENERIC and parameters:
        return _GENERIC[origin](*parameters)
    if origin is not None:  # not looked up: metadata in it may have no hash
        return _instance(origin)
    if isinstance(annotation, TypeVar):
        kinds = annotation.__constraints__ or (Any if annotation.__bound__ is None else annotation.__bound__,)
        return _union(*kinds)
    return _PLAIN.get(annotation) or _instance(annotation)


def _instance(cls: Any) -> _Check:
    """Return a check for instances of a class; protocols, and annotations that are not classes, allow any value."""
    if not isinstance(cls, type) or getattr(cls, "_is_protocol", False):
        return _PLAIN[Any]
    article = "an" if cls.__name__[0] in "AEIOUaeiou" else "a"
    return _Check(f"{article} {cls.__name__}", lambda value: value if isinstance(value, cls) else REFUSED)


def _check_of_annotated(base: Any, *metadata: Any) -> _Check:
    """Return the check of a type with conditions; other metadata, such as a description, changes nothing."""
    check, conditions = _check(base), [each for each in metadata if isinstance(each, Condition)]

    def read(value: Any) -> Any:
        found = check.read(value)
        return found if found is not REFUSED and all(condition.holds(found) for condition in conditions) else REFUSED

    texts = [check.text, *(condition.text for condition in conditions)]
    return _Check.over(" ".join(filter(None, texts)), read, [*conditions, check])


def _union(*annotations: Any) -> _Check:
    checks = [_check(annotation) for annotation in annotations]

    def read(value: Any) -> Any:
        return next((found for check in checks if (found := check.read(value)) is not REFUSED), REFUSED)

    return _Check.over(_alternatives([check.text for check in checks]), read, checks)


def _literal(*choices: Any) -> _Check:
    def read(value: Any) -> Any:
        return next((known for known in choices if isinstance(value, type(known)) and value == known), REFUSED)

    return _Check(_alternatives([repr(choice) for choice in choices]), read)


def _items(item: Any, *rest: Any) -> _Check:
    """Return a check of a sequence and its items, which are converted to a tuple."""
    if rest not in ((), (Ellipsis,)):
        return _instance(tuple)
    check = _check(item)

    def read(value: Any) -> Any:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable) or _is_scalar(value):
            return REFUSED
        found = tuple(check.read(each) for each in value)
        return REFUSED if any(each is REFUSED for each in found) else found

    return _Check.over(f"a list, each item {check.text}", read, [check])


def _frozen_set(item: Any) -> _Check:
    check = _check(item)

    def read(value: Any) -> Any:
        allowed = isinstance(value, frozenset) and all(check.read(each) is not REFUSED for each in value)
        return value if allowed else REFUSED

    return _Check.over(f"a frozenset, each item {check.text}", read, [check])


def _mapping(key: Any, item: Any) -> _Check:
    keys, items = _check(key), _check(item)

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return REFUSED
        found = {keys.read(name): items.read(each) for name, each in value.items()}
        return REFUSED if REFUSED in found or any(each is REFUSED for each in found.values()) else found

    values = "" if item is Any else f" and each value {items.text}"
    return _Check(f"a dict, each key {keys.text}{values}", read)


def _subclass(base: Any) -> _Check:
    bound: type = typing.get_origin(base) or base
    return _Check(
        f"a subclass of {bound.__name__}",
        lambda value: value if isinstance(value, type) and issubclass(value, bound) else REFUSED,
    )


def _alternatives(texts: list[str]) -> str:
    """Join texts with commas and, before the last one, "or"."""
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


# -- numbers -----------------------------------------------------------------------------------------------------------


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0


def _plain(value: Any) -> Any:
    """Return the Python number of a NumPy number or a tensor without dimensions; other values unchanged."""
    return value.item() if _is_scalar(value) and not getattr(value, "is_meta", False) else value


def _whole(value: Any) -> Any:
    value = _plain(value)
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63
    return int(value) if fits else REFUSED


def _number(value: Any) -> Any:
    value = _plain(value)
    if isinstance(value, numbers.Integral):
        return _whole(value)
    return float(value) if isinstance(value, numbers.Real) and not math.isnan(value) else REFUSED


def _truth(value: Any) -> Any:
    value = _plain(value)
    return value if isinstance(value, bool) else REFUSED


_PLAIN: dict[Any, _Check] = {
    Any: _Check("anything", lambda value: value),
    **dict.fromkeys((None, type(None)), _Check("None", lambda value: REFUSED if value is not None else None)),
    int: _Check("a 64-bit integer", _whole),
    float: _Check("a number", _number),
    bool: _Check("True or False", _truth),
    str: _Check("a string", lambda value: value if isinstance(value, str) else REFUSED),
    Tensor: _Check("a tensor", lambda value: value if isinstance(value, Tensor) else REFUSED),
}

_GENERIC: dict[Any, Callable[..., _Check]] = {
    Annotated: _check_of_annotated,
    Literal: _literal,
    types.UnionType: _union,
    typing.Union: _union,
    collections.abc.Sequence: _items,
    tuple: _items,
    frozenset: _frozen_set,
    dict: _mapping,
    type: _subclass,
    collections.abc.Callable: lambda *_: _Check("a callable", lambda value: value if callable(value) else REFUSED),
}
