"""Test the functions through which kvpass reads and patches Inductor."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from torch.fx.experimental.proxy_tensor import make_fx

import kvpass
from kvpass.lowering.formats import format_of
from kvpass.torch_private import inductor
from tests.step_settings import step_settings


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    inductor._compiler_accepts.cache_clear()
    yield
    inductor._compiler_accepts.cache_clear()


known = pytest.mark.skipif(not hasattr(config.cpp, "march"), reason="this Inductor has no setting for it")


@known
def test_vectors_are_copied_in_one_piece_where_the_compiler_can(avx2, monkeypatch):
    monkeypatch.setattr(inductor, "MOVES", ("-O1",))  # every C++ compiler knows this option
    assert inductor.vector_move_flags() == {"cpp.march": "native -O1"}
    assert step_settings(kvpass.backend("h2o", budget=8))["cpp.march"] == "native -O1"


@known
def test_unknown_flags_are_not_passed_to_the_compiler(avx2, monkeypatch):
    monkeypatch.setattr(inductor, "MOVES", ("-mno-such-flag",))
    assert inductor.vector_move_flags() == {}


def test_other_processors_are_left_alone(avx2, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert inductor.vector_move_flags() == {}


@known
@pytest.mark.parametrize("theirs", ["", "x86-64-v3"])
def test_an_architecture_of_the_user_is_kept(avx2, theirs):
    with config.patch({"cpp.march": theirs}):
        assert inductor.vector_move_flags() == {}


@known
def test_the_users_march_option_takes_precedence(avx2, monkeypatch):
    monkeypatch.setattr(inductor, "MOVES", ("-O1",))
    chosen = kvpass.backend("h2o", budget=8, options={"cpp.march": "x86-64-v3"})
    assert step_settings(chosen)["cpp.march"] == "x86-64-v3"


@known
def test_a_missing_compiler_is_left_to_inductor(avx2):
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert inductor.vector_move_flags() == {}


def wrapped(name: str, code: Any) -> Any:
    """Wrap code in a function of this name, as AOTAutograd does."""

    def wrapper(arguments: list[Any]) -> Any:
        return code(arguments)

    return wrapped_as(wrapper, name, code)


def wrapped_as(wrapper: Any, name: str, code: Any) -> Any:
    wrapper.__name__, wrapper.__wrapped__ = name, code
    return wrapper


@pytest.mark.parametrize(("tokens", "random"), [(0, False), (2, False), (0, True)])
def test_wrappers_of_torch_2_11_that_only_call_the_code_are_left_out(tokens: int, random: bool) -> None:
    """Give each wrapper the name of the function inside."""

    def effects(compiled_fn: Any, num_tokens: int) -> Any:
        return wrapped_as(lambda arguments: compiled_fn(arguments)[num_tokens:], "inner_fn", compiled_fn)

    def numbers(self: Any, compiled_fn: Any, runtime_metadata: Any) -> Any:
        return wrapped_as(lambda arguments: compiled_fn((self, runtime_metadata, *arguments)), "inner_fn", compiled_fn)

    code = object.__new__(CompiledFxGraph)
    code.current_callable, code.compiled_fn_runner = print, None
    both = numbers(None, effects(code, tokens), SimpleNamespace(is_rng_op_functionalized=random))
    assert inductor._unwrap(both, False)[1] is (None if tokens or random else code)
    assert inductor._unwrap(wrapped("inner_fn", both), True)[1] is (None if tokens or random else code)


def test_unknown_wrappers_of_an_untested_torch_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    code = object.__new__(CompiledFxGraph)
    code.current_callable, code.compiled_fn_runner = print, None
    inductor._warn_of_unknown_wrappers.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert inductor._unwrap(wrapped("runtime_wrapper", code), False)[1] is code
        assert inductor._unwrap(wrapped("inner_fn", code), False)[1] is None
    monkeypatch.setattr(inductor, "untested_version", lambda package: "9.9")
    with pytest.warns(kvpass.KVPassWarning, match="compiles graphs whole"):
        assert inductor._unwrap(wrapped("of_the_next_torch", code), False)[1] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert inductor._unwrap(wrapped("of_the_next_torch", code), False)[1] is None
    inductor._warn_of_unknown_wrappers.cache_clear()


def test_a_graph_is_compiled_whole_if_a_setting_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inductor.allows_parts({})
    assert not inductor.allows_parts({"freezing": True})
    monkeypatch.setattr(inductor, "NEEDS_THE_WHOLE", ("freezing", "no_setting_of_this_torch"))
    assert not inductor.allows_parts({})


@pytest.mark.parametrize("in_parts", [False, True])
def test_scales_in_bfloat16_beside_keys_in_float16_give_no_warning(in_parts: bool) -> None:
    """Check that Inductor does not warn of every model in float16 with such rows, whole or cut between layers."""
    stored = format_of("int8", 16, torch.float16)
    query, rows = torch.randn(1, 1, 1, 16).half(), stored.encode(torch.randn(1, 1, 8, 16).half())
    gm = make_fx(lambda query, *parts: (stored.products(query, parts).half(),))(query, *rows)
    settings = {"force_disable_caches": True}
    with warnings.catch_warnings(record=True) as given, torch.no_grad():
        warnings.simplefilter("always")
        if in_parts:
            with inductor.compiling_parts(gm, [query, *rows]) as parts:
                run, _ = parts.compile(gm, parts.examples, settings)
            [products] = run([query, *rows])
        else:
            [products] = inductor.inductor(gm, [query, *rows], settings)(query, *rows)
    assert not [each for each in given if "mixed" in str(each.message)]
    torch.testing.assert_close(products, stored.products(query, rows).half())
