"""Compiled code that is repeated without its Python gives and does what it would."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpass.lowering.replay import Replayed, program, recording
from kvpass.lowering.replay.program import NO_BASE, KernelCalls, MemoryMap, OperatorCall
from kvpass.torch_private import generated_code, inductor


def compiled(function: Callable[..., Any], *examples: Any, **patches: Any) -> Replayed:
    """A function as Inductor compiles it for these examples, repeated."""
    gm = torch.fx.symbolic_trace(function)
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
        node.meta["example_value"] = example
    with torch.no_grad():
        return Replayed(inductor.inductor(gm, list(examples), patches))


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def programs(replayed: Replayed) -> list[Any]:
    return list(replayed._programs.values())


def accumulate(x: Tensor, matrix: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Has a product that the library makes, what lies between kernels, and a write in place."""
    product = torch.softmax(x, -1) @ matrix
    total.add_(product)
    return product.cos(), total.sum(-1)


def is_right(accumulating: Replayed) -> bool:
    """Whether what accumulates does so, run after run, each with other numbers."""
    for seed in range(4):
        x, matrix, total = rows(64, seed), rows(16, seed + 10), rows(64, seed + 20)
        expected_total = total.clone()
        expected = accumulate(x, matrix, expected_total)
        results = [*accumulating(x, matrix, total), total]
        if not all(torch.allclose(*pair, atol=1e-5) for pair in zip(results, [*expected, expected_total], strict=True)):
            return False
    return True


def in_threads(work: Callable[[int], None]) -> None:
    """Run something four times at once, each with a seed of its own."""
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def accumulating() -> Replayed:
    return compiled(accumulate, rows(64), rows(16), rows(64))


def test_other_arguments_give_what_they_give_in_memory_of_their_own(accumulating: Replayed) -> None:
    given = []
    for seed in range(4):
        x, matrix, total = rows(64, seed), rows(16, seed + 10), rows(64, seed + 20)
        expected_total = total.clone()
        expected = accumulate(x, matrix, expected_total)
        results = accumulating(x, matrix, total)
        assert torch.allclose(total, expected_total, atol=1e-5)
        given.append((results, expected))
    for results, expected in given:  # none was written over by a later run
        for result, right in zip(results, expected, strict=True):
            assert torch.allclose(result, right, atol=1e-5)
    (program,) = programs(accumulating)
    assert any(isinstance(part, OperatorCall) for part in program.parts)


def test_nothing_of_a_run_is_held(accumulating: Replayed) -> None:
    for seed in range(2):
        arguments = [rows(64, seed), rows(16), rows(64)]
        results = list(accumulating(*arguments))
    held = [weakref.ref(each) for each in (*arguments, *results)]
    del arguments, results
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_memory_between_kernels_is_used_again() -> None:
    """Ten products one after the other need two of them at a time."""

    def chain(x: Tensor, matrix: Tensor) -> tuple[Tensor]:
        for _ in range(10):
            x = torch.tanh(x @ matrix)
        return (x,)

    x, matrix = rows(64), rows(16) / 4
    replayed = compiled(chain, x, matrix)
    replayed(x, matrix)
    (program,) = programs(replayed)
    assert len(program.blocks) <= 3
    assert torch.allclose(replayed(x, matrix)[0], chain(x, matrix)[0], atol=1e-5)


def test_arguments_that_share_memory_once_need_not_do_so_again(accumulating: Replayed) -> None:
    both = torch.cat([rows(64), rows(64, 1)])
    x, total = both[:64], both[64:]
    accumulating(x, rows(16), total)
    x, total = rows(64, 2), rows(64, 3)
    right = total.clone()
    expected = accumulate(x, rows(16), right)
    results = accumulating(x, rows(16), total)
    assert torch.allclose(results[0], expected[0], atol=1e-5)
    assert torch.allclose(total, right, atol=1e-5)


def test_of_views_into_shared_memory_there_is_no_program() -> None:
    both = rows(8)
    noted = recording._Recording([both[:4], both[4:]])
    assert noted.view_of(both[2:3]) is None  # whose it is cannot be said
    assert noted.view_of(noted.inputs[1]).base == 2  # type: ignore[union-attr]


def test_kernels_get_pointers_and_whole_numbers_alone() -> None:
    noted = recording._Recording([rows(8)])
    assert noted._word(7) == (0, 7)
    assert noted._word(noted.inputs[0][2:]) == (1, 2 * 16 * 4)
    assert noted._word(0.5) is None
    assert noted._word(True) is None


def test_random_numbers_are_drawn_anew() -> None:
    def noisy(x: Tensor) -> tuple[Tensor]:
        return (x + torch.rand_like(x),)

    x = rows(8)
    replayed = compiled(noisy, x)
    drawn = [replayed(x)[0] for _ in range(4)]
    assert len({tuple(each.flatten().tolist()) for each in drawn}) == 4
    assert all(bool(((each - x >= 0) & (each - x <= 1)).all()) for each in drawn)


def test_code_that_asks_for_values_is_run_itself() -> None:
    calls = []

    def run(x: Tensor) -> tuple[Tensor]:
        calls.append(1)
        return (x * int(x.sum() > 0),)

    replayed = Replayed(run)
    for sign in (1.0, -1.0, 1.0):
        x = torch.full((3,), sign)
        assert torch.equal(replayed(x)[0], x * int(sign > 0))
    assert programs(replayed) == [None]
    assert len(calls) == 3


def test_weights_that_a_library_has_packed() -> None:
    packed, x = rows(16).to_mkldnn(), rows(8)
    replayed = Replayed(lambda x: (x @ packed.to_dense(),))
    assert all(torch.allclose(replayed(x)[0], x @ rows(16)) for _ in range(3))
    assert None not in programs(replayed)
    given = Replayed(lambda x, packed: (x @ packed.to_dense(),))
    assert all(torch.allclose(given(x, packed)[0], x @ rows(16)) for _ in range(3))


def test_operators_alone_are_a_program_too() -> None:
    replayed = Replayed(lambda x, y: ((x @ y).relu(), x.T, 3))
    for seed in range(3):
        x, y = rows(16, seed), rows(16, seed + 5)
        product, turned, number = replayed(x, y)
        assert torch.allclose(product, (x @ y).relu())
        assert torch.equal(turned, x.T)
        assert turned.data_ptr() == x.data_ptr()
        assert number == 3


def test_other_shapes_strides_and_numbers_are_programs_of_their_own() -> None:
    replayed = Replayed(lambda x, n: (x * n,))
    for x, number in ((rows(4), 1), (rows(5), 1), (rows(16).T, 1), (rows(4), 2), (rows(5), 1)):
        for _ in range(2):
            assert torch.equal(replayed(x, number)[0], x * number)
    assert len(programs(replayed)) == 4


def test_weights_that_were_replaced_are_read_where_they_are() -> None:
    weight = torch.nn.Parameter(rows(16))
    replayed = Replayed(lambda x, w: (x @ w.detach(),))
    for new in (rows(16), rows(16, 1), rows(16, 2).T, rows(16, 3)[:, :4], rows(16, 4).double()):
        weight.data = new
        x = rows(8).to(new.dtype)
        assert torch.allclose(replayed(x, weight)[0], x @ new)


def test_no_more_programs_are_kept_than_are_useful() -> None:
    replayed = Replayed(lambda x: (x + 1,))
    for count in range(1, 10):
        replayed(rows(count))
    assert len(programs(replayed)) == 4


def test_what_is_recorded_in_inference_mode_runs_outside_of_it(accumulating: Replayed) -> None:
    x, matrix, total = rows(64), rows(16), rows(64)
    with torch.inference_mode():
        accumulating(x, matrix, total.clone())
        accumulating(x, matrix, total.clone())
    right = total.clone()
    expected = accumulate(x, matrix, right)
    for _ in range(2):
        assert torch.allclose(accumulating(x, matrix, total.clone())[0], expected[0], atol=1e-5)


def test_threads_do_not_share_what_lies_between_kernels(accumulating: Replayed) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        x, matrix = rows(64, seed), rows(16, seed)
        right = accumulate(x, matrix, rows(64))[0]
        for _ in range(200):
            if not torch.allclose(accumulating(x, matrix, rows(64))[0], right, atol=1e-5):
                wrong.append(seed)

    in_threads(work)
    assert not wrong


def test_threads_that_record_at_the_same_time_note_their_own(accumulating: Replayed) -> None:
    """Each a program of its own, of the same kernels."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        x, matrix = rows(64, seed), rows(16, seed)
        right = accumulate(x, matrix, rows(64))[0]
        for _ in range(10):
            own = Replayed(accumulating.compiled)
            results = [own(x, matrix, rows(64))[0] for _ in range(3)]
            if not all(torch.allclose(result, right, atol=1e-5) for result in results) or None in programs(own):
                wrong.append(seed)

    in_threads(work)
    assert not wrong


def test_modules_are_as_they_were_after_a_recording(accumulating: Replayed) -> None:
    before = [dict(scope) for scope in generated_code.generated_scopes()]
    accumulating(rows(64), rows(16), rows(64).double().float().contiguous())
    recording.record(accumulating.compiled, [rows(64), rows(16), rows(64)])
    after = [dict(scope) for scope in generated_code.generated_scopes()]
    assert all(one == other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("missed", ["modules", "allocations"])
def test_what_runs_past_a_recording_ends_it(
    missed: str, accumulating: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor keeps no list of its modules where caches are disabled: tokens repeated themselves for that."""
    if missed == "modules":
        monkeypatch.setattr(generated_code, "generated_scopes", list)
    else:
        monkeypatch.setattr(generated_code, "ALLOCATOR", "by another name")
    own = Replayed(accumulating.compiled)
    assert is_right(own)
    assert programs(own) == [None]


def test_code_whose_kernels_are_called_from_c_is_run_itself() -> None:
    own = compiled(accumulate, rows(64), rows(16), rows(64), cpp_wrapper=True)
    assert is_right(own)
    assert programs(own) == [None]


def test_a_thread_that_is_profiled_records_nothing(accumulating: Replayed) -> None:
    def profile(*_: Any) -> None: ...

    own = Replayed(accumulating.compiled)
    sys.setprofile(profile)
    try:
        assert is_right(own)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert not programs(own)
    assert is_right(own)
    assert None not in programs(own)


def libraries(counts: list[int]) -> Any:
    """C++ functions of so many arguments, each of which adds all of them to what the first points to; one throws."""
    adding = "\n".join(
        f"""extern "C" void add_{n}({", ".join(f"word a{i}" for i in range(n))}) {{
          *reinterpret_cast<word*>(a0) += {" + ".join(["0", *(f"a{i}" for i in range(1, n))])};
        }}"""
        for n in counts
    )
    source = f"""#include <cstdint>
    #include <stdexcept>
    typedef int64_t word;
    {adding}
    extern "C" void fail(word) {{ throw std::out_of_range("no such row"); }}
    extern "C" void fail_otherwise(word) {{ throw 3; }}
    """
    return generated_code.cpp_library(source)


def address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def launched(*functions: tuple[int, list[int]]) -> None:
    """Launch functions on plain numbers."""
    kernels = KernelCalls()
    for where, numbers in functions:
        kernels.add(where, [(NO_BASE, number) for number in numbers])
    kernels.run(MemoryMap(1))


def test_a_function_gets_its_arguments_whatever_their_number() -> None:
    counts = [1, 7, 8, 9, 160, 161, program.MOST_ARGUMENTS]
    library, total = libraries(counts), torch.zeros(1, dtype=torch.int64)
    for count in counts:
        total.zero_()
        launched((address(getattr(library, f"add_{count}")), [total.data_ptr(), *range(1, count)]))
        assert total.item() == sum(range(count))


@pytest.mark.parametrize(("name", "message"), [("fail", "no such row"), ("fail_otherwise", "unknown type")])
def test_an_exception_in_a_kernel_is_one_of_python(name: str, message: str) -> None:
    """The launcher catches whatever is thrown, so none can pass through ctypes, which would end the process."""
    library, total = libraries([2]), torch.zeros(1, dtype=torch.int64)
    adds = (address(library.add_2), [total.data_ptr(), 1])
    with pytest.raises(RuntimeError, match=message):
        launched(adds, (address(getattr(library, name)), [0]), adds)
    assert total.item() == 1  # what stands behind it did not run


def test_a_step_goes_on_after_an_exception() -> None:
    """Inductor's own check throws in a recorded program; the next run gives what it should."""

    def look_up(table: Tensor, index: Tensor) -> tuple[Tensor]:
        return (table[index, index] * 2,)

    table, index = rows(16), torch.tensor([3])
    replayed = compiled(look_up, table, index)
    replayed(table, index)
    assert None not in programs(replayed)
    with pytest.raises(RuntimeError, match="out of bounds"):
        replayed(table, torch.tensor([16]))
    assert torch.equal(replayed(table, torch.tensor([5]))[0], table[5, 5:6] * 2)
