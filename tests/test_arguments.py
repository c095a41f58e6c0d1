"""Test arguments of public functions: an invalid value raises an error that names it, before anything runs."""

from __future__ import annotations

import dataclasses
import fractions
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
import torch

import kvpass
from kvpass import arguments, policies
from kvpass.arguments import Condition, Natural, Positive, Share, at_least, between, check_arguments, check_fields
from tests.models import build

IDS = torch.tensor([[5, 6, 7], [8, 9, 3]])
Q, KV = torch.randn(1, 2, 6, 4), torch.randn(1, 1, 6, 4)

NO_COUNT: tuple[Any, ...] = (
    0,
    -1,
    2.5,
    "2",
    True,
    None,
    [2],
    2**70,
    float("nan"),
    torch.tensor(2.0),
    torch.tensor([2, 3]),
)
"""Invalid values for a count, which must be at least one."""
NO_NUMBER: tuple[Any, ...] = ("0.5", True, [0.5], float("nan"), 1j, torch.tensor([0.5, 0.5]))
NO_TRUTH: tuple[Any, ...] = ("yes", 1, 0, None, [True], torch.tensor([True, False]))
NO_IDS: tuple[Any, ...] = (
    [[5, 6]],
    None,
    "5 6",
    {"input_ids": IDS},
    IDS.float(),
    IDS.bool(),
    IDS[0],
    IDS[:, :0],
    IDS[:0],
    IDS.to("meta"),
    IDS.to_sparse(),
    torch.tensor([[5, 128]]),
    torch.tensor([[-1, 5]]),
)
NO_MASK: tuple[Any, ...] = (
    [[1, 1, 1], [1, 1, 1]],
    torch.ones(2, 2),
    torch.ones(2, 4),
    torch.ones(3),
    torch.ones(2, 3) / 2,
    torch.full((2, 3), 2),
    torch.full((2, 3), -1),
    torch.full((2, 3), float("nan")),
    torch.ones(2, 3, device="meta"),
    torch.tensor([[1, 1, 1], [1, 1, 0]]),
    torch.tensor([[1, 0, 1], [1, 1, 1]]),
    torch.tensor([[0, 1, 0], [1, 1, 1]]),
)
NO_POLICY: tuple[Any, ...] = (3, None, "h3o", "", ["h2o"], b"h2o", object())
NO_BUDGET: tuple[Any, ...] = (0, -1, 0.0, 1.5, -0.5, "8", True, [8], None, float("nan"), float("inf"), 2**70)
NO_MODEL: tuple[Any, ...] = (None, "model", 3, lambda ids: ids)


def without(values: Sequence[Any], *left_out: Any) -> list[Any]:
    return [value for value in values if not any(value is other for other in left_out)]


OF_HEADS: dict[str, Any] = {
    "window": NO_COUNT,
    "kernel": (*NO_COUNT, 4),
    "safeguard": (*NO_NUMBER, 1.5, -0.1, None),
    "shares": ((0.0, 1.0), (-1.0,), ("a",), 1.0, (5.0, 4.0, 3.0, 2.0, 1.0)),
}

POLICY_OPTIONS: dict[str, dict[str, Sequence[Any]]] = {
    "streaming": {"sinks": without(NO_COUNT, 0), "keep_prompt": NO_TRUTH},
    "h2o": {"heavy": (*NO_NUMBER, 1.5, -0.1, None), "interval": NO_COUNT},
    "snapkv": {"window": NO_COUNT, "kernel": (*NO_COUNT, 4)},
    "random": {"seed": (*without(NO_COUNT, 0), 2**31 - 1), "redraw": NO_TRUTH, "recent": without(NO_COUNT, 0)},
    "buzz": {
        "stride": (*NO_COUNT, 2),
        "sinks": without(NO_COUNT, 0),
        "window": without(NO_COUNT, None),
        "threshold": (*without(NO_COUNT, None), 1),
        "old_stride": (*without(NO_COUNT, None), 1),
        "log_n": NO_TRUTH,
        "variant": ("slow", 3, None, ["buzz"]),
        "iterate_prompt": NO_TRUTH,
    },
    "cascade": {
        "cascades": NO_COUNT,
        "sinks": without(NO_COUNT, 0),
        "growth": ("pow5", 2, None),
        "reduce": ("sum", ["mean"]),
        "gamma": (*NO_NUMBER, 1.1, -1),
        "order": ("first", None),
        "eager_fill": NO_TRUTH,
        "heads": ("all", 2, None),
        "select": NO_TRUTH,
    },
    "d2o": {
        "sinks": without(NO_COUNT, 0),
        "heavy": (*NO_NUMBER, 2),
        "layers": ("mean", 3),
        "gate": (*NO_NUMBER, -1.0),
        "alpha": (*NO_NUMBER, 0.5),
        "beta": (*NO_NUMBER, 1.5),
        "merge": ("mean", True),
        "skip_layers": (("a",), 1, "01", [0.5], {0: 1}, [True]),
        "extra_sinks": NO_TRUTH,
        "density": ("layer", None),
    },
    "sage": {
        "share": ("all", 0.5),
        "refresh_interval": without(NO_COUNT, None),
        "sinks": without(NO_COUNT, 0, None),
        "top": without(NO_COUNT, None),
        "select_at": ("once", None),
    },
    "pyramid_kv": {"window": NO_COUNT, "kernel": (*NO_COUNT, 4), "beta": NO_COUNT},
    "ada_kv": OF_HEADS,
    "critical_kv": {**OF_HEADS, "first": (*NO_NUMBER, 1.5, -0.1, None), "epsilon": (*NO_NUMBER, -0.1, None)},
    "defensive_kv": {**OF_HEADS, "mass": (*NO_NUMBER, 1.5, -0.1, None)},
    "duo_attention": {
        "gates": (3, [], None),
        "sinks": without(NO_COUNT, 0),
        "recent": NO_COUNT,
        "quantile": (*NO_NUMBER, 1.0, -0.1, None),
    },
    "keydiff": {"sinks": without(NO_COUNT, 0), "recent": without(NO_COUNT, 0)},
    "r_kv": {
        "window": NO_COUNT,
        "kernel": (*NO_COUNT, 4),
        "weight": (*NO_NUMBER, 1.5, -0.1, None),
        "plain": NO_TRUTH,
        "official": NO_TRUTH,
    },
    "vase": {
        "variant": ("values", None),
        "sinks": without(NO_COUNT, 0),
        "recent": NO_COUNT,
        "large": (*NO_NUMBER, 1.5, -0.1, None),
        "kernel": (*NO_COUNT, 4),
        "seed": (*without(NO_COUNT, 0), 2**31 - 1),
    },
    "tri_attention": {"calibration": (3, [], None), "sinks": without(NO_COUNT, 0), "recent": without(NO_COUNT, 0)},
    "expected_attention": {
        "calibration": (3, [], None),
        "sinks": without(NO_COUNT, 0),
        "horizon": NO_COUNT,
        "epsilon": (*NO_NUMBER, -0.1, None),
    },
    "kv_align": {"aligner": (3, [], None), "every": NO_COUNT},
    "window": {"keep_prompt": NO_TRUTH, "spans": ((0,), (3, 3), (4, 2), (1.5,), ("a",), 4, None)},
}

OF_FILES: dict[str, dict[str, Any]] = {
    "duo_attention": {"gates": "none"},
    "kv_align": {"aligner": "none"},
    "tri_attention": {"calibration": "none"},
    "expected_attention": {"calibration": "none"},
}

SETTINGS: dict[str, Sequence[Any]] = {
    "policy": NO_POLICY,
    "budget": NO_BUDGET,
    "positions": ("relative", 3, True, ["cache"]),
    "inner": ("inductr", None, 3, ["eager"]),
    "mode": ("fastest", 3, ["default"], True),
    "options": ("max_autotune", 3, {3: 1}, {"no_such": 1}, [("max_autotune", True)]),
    "strict": NO_TRUTH,
    "validate": NO_TRUTH,
    "kv_dtype": ("int3", torch.int8, 8, True, ["int8"]),
    "crop": without(NO_COUNT, 0),
    "sinks_": (4,),
}

SAMPLING: dict[str, Sequence[Any]] = {
    "temperature": (*NO_NUMBER, -1.0, float("inf")),
    "top_k": without(NO_COUNT, None),
    "top_p": (*NO_NUMBER, 0.0, 0, 1.5),
    "seed": without(NO_COUNT, 0, None),
    "stop": (["a"], [2.5], "ab", 3, [True], [None], {2: 3}, [[2]], [2**70]),
}

LOOP: dict[str, Sequence[Any]] = {
    **SAMPLING,
    "model": (*NO_MODEL, torch.nn.Linear(2, 2, device="meta")),
    "temperature": (*SAMPLING["temperature"], None),
    "seed": (*SAMPLING["seed"], None),
    "stop": (*SAMPLING["stop"], None),
    "read_interval": NO_COUNT,
    "pad": ("0", None, 0.0, True, 2**70),
    "prefill_chunk": without(NO_COUNT, None),
    "rows": without(NO_COUNT, None),
    "crop": (2,),
    "mode": ("reduce-overhead", 3),
    "options": ({"triton.cudagraphs": True}, 5),
    "strict": ("yes",),
    "hevy": (0.5,),
}

REQUEST: dict[str, Sequence[Any]] = {
    **SAMPLING,
    "ids": (
        [], None, 5, "56", [1.5], ["5"], [True], [[5, 6]], [128], [-1], [2**70], IDS, IDS[0].float(), IDS[0].to("meta"),
        torch.tensor(5), torch.tensor([128]), torch.zeros(0, dtype=torch.int64), {5: 6},
    ),
    "max_new_tokens": NO_COUNT,
    "request_id": (3, b"mine", ["mine"]),
    "stop": (*SAMPLING["stop"], range(9)),
    "max_tokens": (5,),
}  # fmt: skip

SIMULATE: dict[str, Sequence[Any]] = {
    "policy": NO_POLICY,
    "q": (None, [[1.0]], Q.long(), Q[0], Q[:, :0], Q.to("meta"), Q.bool()),
    "k": (None, KV.int(), KV[0]),
    "v": ("v", KV.long(), KV[..., :0]),
    "prompt": (*NO_COUNT, 7),
    "budget": NO_BUDGET,
    "positions": ("relative", 3),
    "rope_theta": (*NO_NUMBER, 0, -1.0, float("inf")),
    "scale": (*NO_NUMBER, float("inf")),
    "kv_dtype": ("int3", torch.int8),
    "compiled": NO_TRUTH,
    "heavi": (0.5,),
}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Sequence[Any]]]] = {
    "backend": (kvpass.backend, dict(policy="h2o", budget=8), SETTINGS),
    "compile": (
        kvpass.compile,
        dict(model=torch.nn.Linear(2, 2), policy="h2o", budget=8),
        {"model": NO_MODEL, "policy": NO_POLICY, "budget": NO_BUDGET, "strict": NO_TRUTH, "hevy": (0.5,)},
    ),
    "explain": (
        kvpass.explain,
        dict(model=torch.nn.Linear(2, 2), policy="h2o", budget=8),
        {"model": NO_MODEL, "policy": NO_POLICY, "graphs": NO_TRUTH, "timings": NO_TRUTH, "strict": NO_TRUTH},
    ),
    "warm": (
        kvpass.warm,
        dict(model=torch.nn.Linear(2, 2), policy="h2o", budget=8),
        {
            "model": NO_MODEL,
            "rows": (2, (), None, "2", [0], [2.5], [True], {2: 1}, [[2]]),
            "turns": NO_TRUTH,
            "progress": NO_TRUTH,
            "budget": NO_BUDGET,
            "policy": NO_POLICY,
        },
    ),
    "simulate": (kvpass.simulate, dict(policy="h2o", q=Q, k=KV, v=KV, prompt=3, budget=4), SIMULATE),
    "register": (policies.register, {}, {"cls": (3, int, policies.Policy, policies.get("h2o")(), None)}),
    "get": (policies.get, {}, {"name": NO_POLICY}),
    "parse": (policies.parse, {}, {"text": (3, None, ["h2o"])}),
    "resolve": (policies.resolve, dict(policy="h2o", options={}), {"policy": NO_POLICY, "options": (3, None, {3: 1})}),
    **{
        f"policy {name}": (policies.get(name), OF_FILES.get(name, {}), options)
        for name, options in POLICY_OPTIONS.items()
    },
}  # fmt: skip


def _without_address(value: Any) -> str:
    """Format a value equally in every process, as the names of test cases require."""
    return re.sub(r" at 0x[0-9a-f]+", "", arguments.short_text(value))


def misuses() -> list[Any]:
    return [
        pytest.param(call, {**good, name: value}, name, id=f"{title}({name}={_without_address(value)})")
        for title, (call, good, wrong) in CALLS.items()
        for name, values in wrong.items()
        for value in values
    ]


def refused(call: Callable[..., Any], given: dict[str, Any], name: str) -> None:
    """Check that the error names the argument, or says that its name is unknown."""
    unknown = "|policy" if name in ("name", "text", "cls") else ""
    with pytest.raises(kvpass.KVPassError, match=f"{re.escape(name)}{unknown}") as caught:
        call(**given)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("call", "given", "name"), misuses())
def test_misuses_of_functions_are_refused_by_name(call: Callable[..., Any], given: dict[str, Any], name: str) -> None:
    """Check that every value in the tables raises an error of kvpass that names the argument.

    Valid values are read from signatures in one place, so an argument without an annotation is unchecked. A test below
    rules this out for all public functions.
    """
    refused(call, given, name)


@pytest.fixture(scope="module")
def loops() -> tuple[kvpass.DecodeLoop, kvpass.DecodeLoop]:
    """Return a loop of prompts and a loop of requests, on a model that never runs."""
    model = build("Llama", layers=1)
    how: dict[str, Any] = dict(policy="h2o", budget=8, inner="eager")
    return kvpass.DecodeLoop(model, **how), kvpass.DecodeLoop(model, **how, rows=2)


def test_misuses_of_a_loop_are_refused_by_name(loops: tuple[kvpass.DecodeLoop, kvpass.DecodeLoop]) -> None:
    """Check methods, which need a model but do not run it."""
    loop, serving = loops
    made = kvpass.DecodeLoop
    tables: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Sequence[Any]]]] = [
        (made, dict(model=loop.model, policy="h2o", budget=8), {**LOOP, "policy": NO_POLICY, "budget": NO_BUDGET}),
        (loop.prompt, dict(ids=IDS), {"ids": NO_IDS, "attention_mask": (*NO_MASK, torch.zeros(2, 3))}),
        (loop.stream, {}, {"tokens": without(NO_COUNT, 0)}),
        (loop.generate, {}, {"tokens": without(NO_COUNT, 0)}),
        (serving.add, dict(ids=[5, 6]), REQUEST),
        (serving.cancel, {}, {"request_id": (3, None, ["a"])}),
        (serving.generate_batch, {}, {"inputs": (3, None, "ab", {1: 2}, torch.tensor(5))}),
        (serving.generate_batch, dict(inputs=[[5]]), {"temperature": (-1.0, "0"), "max_tokens": (3,)}),
        (
            kvpass.prefill,
            dict(compiled=loop.model, ids=IDS, chunk=2),
            {
                "compiled": (None, "model", 3),
                "ids": NO_IDS,
                "attention_mask": NO_MASK,
                "chunk": NO_COUNT,
                "logits": ("some", None, 3, True),
                "length": (3,),
            },
        ),
    ]
    count = 0
    for call, good, wrong in tables:
        for name, value in ((name, value) for name, values in wrong.items() for value in values):
            refused(call, {**good, name: value}, name)
            count += 1
    assert count + len(misuses()) > 250
    assert serving.pending == 0
    assert loop.past_key_values is None


def test_missing_and_surplus_arguments_are_refused() -> None:
    for call, given in ((kvpass.simulate, ("h2o", Q)), (kvpass.prefill, (len, IDS)), (kvpass.warm, ())):
        with pytest.raises(kvpass.KVPassError, match=f"{call.__name__}: missing a required"):
            call(*given)
    with pytest.raises(kvpass.KVPassError, match=r"too many positional arguments; without its name it takes policy$"):
        kvpass.backend("h2o", 8)
    with pytest.raises(
        kvpass.KVPassError, match=r"DecodeLoop.generate: unknown argument 'max_new_tokens'; it takes tokens$"
    ):
        kvpass.DecodeLoop(torch.nn.Linear(2, 2)).generate(max_new_tokens=3)
    with pytest.raises(kvpass.KVPassError, match="budget, heavy: must be set in the backend"):
        kvpass.simulate(kvpass.backend("h2o", budget=8), Q, KV, KV, prompt=2, budget=4, heavy=0.5)


@pytest.mark.parametrize("policy", ["h2o", kvpass.policies.get("h2o")()], ids=["name", "object"])
def test_an_unknown_argument_is_refused_with_the_arguments_of_every_function_that_passes_it_on(policy: Any) -> None:
    listed = "its options: keep_prompt, .*heavy; arguments of backend: policy, budget, .*crop"
    with pytest.raises(kvpass.PolicyError, match=f"unknown option 'buget' .*{listed}$"):
        kvpass.backend(policy, buget=8)
    with pytest.raises(kvpass.PolicyError, match=f"{listed}; arguments of compile: model, policy$"):
        kvpass.compile(torch.nn.Linear(2, 2), policy, budget=8, fullgraph=True)
    with pytest.raises(
        kvpass.PolicyError, match=f"'temprature' .*{listed}; arguments of DecodeLoop: model, .*temperature"
    ):
        kvpass.DecodeLoop(torch.nn.Linear(2, 2), policy, budget=8, temprature=1)


GOOD: dict[str, Sequence[Any]] = {
    "budget": (8, np.int64(8), np.uint8(8), torch.tensor(8), 0.5, np.float32(0.5), np.float64(0.5), 1.0),
    "heavy": (0, 1, 0.5, np.float32(0.5), torch.tensor(0.5), fractions.Fraction(1, 2)),
    "crop": (0, 2, np.int32(2)),
    "strict": (True, False, np.bool_(True), torch.tensor(False)),
    "kv_dtype": (None, "int8", "int4-hadamard", np.str_("int8")),
    "positions": (None, "absolute"),
    "inner": ("eager", "aot_eager", lambda gm, examples: gm),
    "mode": (None, "default", "max-autotune-no-cudagraphs"),
    "options": (None, {}, {"max_autotune": False}),
    "policy": ("h2o", policies.get("h2o")(heavy=0.25)),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD.items() for value in values], ids=_without_address
)
def test_documented_forms_are_accepted(name: str, value: Any) -> None:
    made = kvpass.backend(**{"policy": "h2o", "budget": 8, name: value})
    given = getattr(made, name, None) if name != "heavy" else made.policy.heavy  # type: ignore[attr-defined]
    assert type(given) in (int, float, bool, str, type(None), tuple, policies.get("h2o"), type(lambda: 0))
    hash(made)
    policies.from_json(policies.to_json(made.policy))


def test_documented_forms_of_a_loop_are_accepted(loops: tuple[kvpass.DecodeLoop, kvpass.DecodeLoop]) -> None:
    model, serving = loops[0].model, loops[1]
    many: dict[str, Sequence[Any]] = {
        "temperature": (0, 0.7, np.float32(0.7), torch.tensor(0.7)),
        "top_k": (None, 5, np.int64(5), torch.tensor(5), 10**9),
        "top_p": (None, 1, 0.5, 1.0),
        "seed": (0, 2**63 - 1, np.int64(3)),
        "stop": ((), [2], (2, 3), {2, 3}, range(2), np.array([2, 3]), torch.tensor([2, 3]), [torch.tensor(2)]),
        "pad": (0, -1, -100, np.int64(0)),
        "rows": (None, 2, np.int64(2)),
    }
    for name, value in ((name, value) for name, values in many.items() for value in values):
        kvpass.DecodeLoop(model, "h2o", budget=8, **{name: value})
    forms = (
        [5, 6],
        (5, 6),
        np.array([5, 6]),
        IDS[0],
        IDS[:1],
        IDS[0].int(),
        [np.int64(5)],
        [torch.tensor(5)],
        range(3),
    )
    for ids in forms:
        assert serving.cancel(serving.add(ids, max_new_tokens=np.int64(3), stop=None, temperature=None))  # type: ignore[arg-type]
    assert len(serving.step()) == len(forms)


def public() -> list[Callable[..., Any]]:
    loop = kvpass.DecodeLoop
    methods = (loop.__init__, loop.prompt, loop.stream, loop.generate, loop.add, loop.cancel, loop.generate_batch)
    functions = (kvpass.backend, kvpass.compile, kvpass.explain, kvpass.prefill, kvpass.simulate, kvpass.warm)
    files = (kvpass.save_cache, kvpass.load_cache)
    return [*methods, loop.warm, loop.branch, *functions, *files, policies.get, policies.parse, policies.resolve]


OF_ANY_TYPE = {
    kvpass.prefill: ["cache", "past_key_values"],
    kvpass.DecodeLoop.add: ["prefix"],
    kvpass.DecodeLoop.branch: ["cache"],
    kvpass.save_cache: ["cache"],
    kvpass.load_cache: ["compiled_or_model"],
}
"""Caches and models, which may be of a user's type; invalid ones are refused where they are used."""


@pytest.mark.parametrize("given", [object(), 3, [1], torch.zeros(2)], ids=["object", "number", "list", "tensor"])
def test_an_argument_that_is_no_cache_is_refused(given: Any, tmp_path: Path) -> None:
    loop, serving = (kvpass.DecodeLoop(build("Llama", layers=1), "h2o", budget=8, rows=rows) for rows in (None, 1))
    with pytest.raises(kvpass.CacheHandleError, match="no kvpass cache"):
        serving.add([1, 2], prefix=given)
    with pytest.raises(kvpass.CacheHandleError, match="no kvpass cache"):
        loop.branch(given)
    with pytest.raises(kvpass.CacheHandleError, match="no kvpass cache"):
        kvpass.save_cache(given, tmp_path / "cache.safetensors")


@pytest.mark.parametrize("function", public(), ids=lambda function: function.__qualname__)
def test_every_public_argument_is_checked(function: Callable[..., Any]) -> None:
    """Check that each argument has an annotation more specific than `Any`."""
    hints = typing.get_type_hints(function, include_extras=True)
    named = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name != "self"
    ]
    anything = [name for name in named if arguments._check(hints[name]).read(object()) is not arguments.REFUSED]
    assert anything == OF_ANY_TYPE.get(function, [])
    assert function.__code__ is check_arguments(len).__code__  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in policies.names() if not name.startswith("_")])
def test_every_option_of_a_policy_is_checked(name: str) -> None:
    cls = policies.get(name)
    for field in dataclasses.fields(cls):
        hint = arguments._field_annotation(cls, field.name)
        assert arguments._check(hint).read(object()) is arguments.REFUSED, field.name
        assert field.name in POLICY_OPTIONS.get(name, ()) or field.name in ("keep_prompt", "interval", "spans")


@dataclasses.dataclass(frozen=True)
class Options:
    count: Natural = 0
    share: Share | None = None
    names: tuple[str, ...] = ()
    pair: tuple[int, str] = (1, "a")
    mode: Literal["a", "b"] = "a"
    number: int | float = 1
    even: Annotated[int, at_least(0), Condition("that is even", lambda count: count % 2 == 0)] = 0
    unknown: NoSuchName | None = None  # type: ignore[name-defined]  # noqa: F821
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    kind: ClassVar[str] = "options"

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(count=-1), "count=-1: must be a 64-bit integer of at least 0"),
        (dict(share=2), "share=2: must be a number from 0 to 1 or None"),
        (dict(names=["a", 3]), "names=['a', 3]: must be a list, each item a string"),
        (dict(pair=[1, "a"]), "pair=[1, 'a']: must be a tuple"),
        (dict(mode="c"), "mode='c': must be 'a' or 'b'"),
        (dict(number="1"), "number='1': must be a 64-bit integer or a number"),
        (dict(even=3), "even=3: must be a 64-bit integer of at least 0 that is even"),
        (dict(table={"a": "b"}), "table={'a': 'b'}: must be a dict, each key a string and each value a 64-bit integer"),
    ],
)
def test_messages(given: dict[str, Any], said: str) -> None:
    with pytest.raises(kvpass.PolicyError, match=f"^{re.escape(said)}$"):
        Options(**given)


def test_a_class_whose_name_begins_with_a_vowel_has_the_article_an() -> None:
    with pytest.raises(kvpass.PolicyError, match=r"^aligner=3: must be an Aligner, a string, a PathLike or None$"):
        kvpass.backend("kv_align", budget=64, aligner=3)


def test_values_come_out_as_pythons_own() -> None:
    made = Options(np.int64(3), np.float32(0.5), ["a"], (1, "b"), "b", torch.tensor(2), unknown=object())  # type: ignore[arg-type]
    assert (made.count, made.share, made.names, made.number) == (3, 0.5, ("a",), 2)
    assert [type(value) for value in (made.count, made.share, made.number)] == [int, float, int]


def test_a_long_value_is_cut_short_and_a_tensor_is_described() -> None:
    assert len(arguments.short_text("x" * 1000)) == arguments.LONGEST
    assert arguments.short_text(torch.zeros(2, 3)) == "<float32 [2, 3] on cpu>"

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert arguments.short_text(Broken()) == "<Broken>"


def test_types_that_kvpass_does_not_use_are_read_too() -> None:
    """Test annotations that kvpass does not use, because a user's policy may have them."""
    pairs = itertools.product(
        (typing.Optional[int], typing.Union[int, None], int | None),  # noqa: UP007, UP045
        ((3, 3), (None, None), ("3", arguments.REFUSED)),
    )
    for hint, (value, read) in pairs:
        assert arguments._check(hint).read(value) is read or arguments._check(hint).read(value) == read
    assert arguments._check(Annotated[float, between(0, 1)]).read(2) is arguments.REFUSED
    assert arguments._check(Sequence[Positive]).read(np.array([1, 2])) == (1, 2)
    assert arguments._check(typing.SupportsInt).read("anything") == "anything"
    assert arguments._check(list[int]).read([1]) == [1]
    assert arguments._check(type[policies.Policy]).read(int) is arguments.REFUSED


T = typing.TypeVar("T")
Counted = typing.TypeVar("Counted", int, str)


@pytest.mark.parametrize(
    ("hint", "value", "refused"),
    [
        (Annotated[int, "number of sinks"], 4, "4"),
        (Annotated[int, at_least(1), "number of sinks"], 4, 0),
        (Annotated[int, {"doc": "number of sinks"}], 4, "4"),
        (Annotated[int | None, ["sinks"]], None, "4"),
        (tuple[Annotated[int, {"doc": "sinks"}], ...], (4,), ("4",)),
        (T, "anything", arguments.REFUSED),
        (Counted, "3", 3.5),
        (typing.Dict, {"a": 1}, [1]),  # noqa: UP006
        (typing.Tuple, (1,), [1]),  # noqa: UP006
        (typing.Sequence, [1], 1),
        (typing.FrozenSet, frozenset({1}), {1}),  # noqa: UP006
        (typing.Type, int, 1),  # noqa: UP006
        (tuple[()], (), []),
    ],
)
def test_annotations_of_a_users_policy_are_read(hint: Any, value: Any, refused: Any) -> None:
    """Check metadata of other libraries, and types without parameters: what kvpass cannot read, it allows."""
    methods = {"__post_init__": check_fields}
    kind = dataclasses.make_dataclass("UserOptions", [("k", hint)], frozen=True, namespace=methods)
    assert kind(value).k == value
    if refused is not arguments.REFUSED:
        with pytest.raises(kvpass.PolicyError, match=r"^k=.*: must be"):
            kind(refused)


def test_a_users_policy_may_describe_its_options_with_text() -> None:
    @dataclasses.dataclass(frozen=True)
    class DescribedSinks(policies.Policy):
        k: Annotated[int, "number of sinks"] = 4
        name = "described_sinks"

    assert DescribedSinks(k=2).k == 2
    with pytest.raises(kvpass.PolicyError, match=r"^k='2': must be a 64-bit integer$"):
        DescribedSinks(k="2")  # type: ignore[arg-type]
