"""Test every policy's decode graph for a GPU without one: compiled, counted, interpreted."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import binaries as machine
from tests.gpu import cuda_emission, torch_private
from tests.gpu.shared import EVERY, OWN_ROWS, binaries, emission, ran, recorded, run

HALVES = (torch.float16, torch.bfloat16)
BY_DEFAULT = {("h2o", torch.float16)}
EXACT = {torch.float32: dict(atol=1e-5, rtol=1e-5), torch.float16: dict(atol=4e-3, rtol=1e-2)}
EXACT[torch.bfloat16] = dict(atol=3e-2, rtol=3e-2)

MAX_LAUNCHES = 16  # for each layer
OF_NETWORK = {"launches": 6, "products": 4}  # more for each layer whose rows a network repairs
# Other readers of stored keys or values than attention, with the reason; docs/gpu.md.
MORE_READERS = {"d2o": "compares the token that goes with every key"}

every_policy = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""), marks=marks)
        for name in [*EVERY, *OWN_ROWS]
        for dtype in HALVES
        for marks in [[] if (name, dtype) in BY_DEFAULT else [pytest.mark.slow]]
    ],
)


@pytest.mark.slow
@every_policy
def test_the_interpreted_module_equals_the_cpu(name: str, dtype: torch.dtype) -> None:
    exact = dtype == torch.float16
    emission(name, dtype).check(ran(name, dtype), metadata=exact, **EXACT[dtype])


@pytest.mark.slow
def test_the_interpreted_module_equals_the_cpu_in_full_precision() -> None:
    emission("h2o", torch.float32).check(ran("h2o", torch.float32), **EXACT[torch.float32])


@pytest.mark.slow
@every_policy
def test_kernels_compile_for_both_targets_and_attention_spills_nothing(name: str, dtype: torch.dtype) -> None:
    for target in cuda_emission.TARGETS:
        made = binaries(name, dtype, target)
        assert len(made) == len(emission(name, dtype).kernels)
        attention = [binary for binary in made if binary.name.startswith(cuda_emission.ATTEND)]
        assert len(attention) == 1
        assert all(binary.spills == 0 for binary in attention)


@pytest.mark.slow
@every_policy
def test_launches_of_a_layer(name: str, dtype: torch.dtype) -> None:
    made = emission(name, dtype)
    by_library = [launch for launch in made.launches if launch.name == "extern_kernels.mm"]
    products = [launch for launch in by_library if "arg" in launch.arguments[1]]  # with weights, which are inputs
    more = OF_NETWORK if name in OWN_ROWS else {"launches": 0, "products": 0}
    assert len(products) == 2 * (7 + more["products"]) + 1  # seven weights for each layer, and the head
    assert made.launches_per_layer <= MAX_LAUNCHES + more["launches"]


@every_policy
def test_nothing_of_the_size_of_a_slot_buffer_is_allocated(name: str, dtype: torch.dtype) -> None:
    made = emission(name, dtype)
    buffer = made.step.inputs[made.step.names.index("slots_0_key")]
    as_large = [made for made in made.allocations if made.nbytes >= buffer.nbytes]
    assert bool(as_large) == (name in OWN_ROWS)  # these rows are computed at every read


@every_policy
def test_keys_and_values_are_loaded_by_one_kernel(name: str, dtype: torch.dtype) -> None:
    made, launches = emission(name, dtype), ran(name, dtype)
    for layer in range(2):
        for buffer in ("key", "value"):
            readers = made.readers(launches, f"slots_{layer}_{buffer}")
            first, *more = [reader.rpartition("_")[0] for reader in readers]
            if name in OWN_ROWS:  # converted for the network, and changed by its result
                assert first == "triton_poi_fused"
                assert len(more) == 1
            else:
                assert first == "split"
                assert not more or name in MORE_READERS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "streaming"])
def test_every_configuration_that_inductor_would_try_compiles(name: str) -> None:
    made = emission(name, torch.bfloat16)
    tried = made.binaries(("sm_90",), configurations=None)
    assert len(tried) > len(made.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("target", machine.newer())
def test_newer_targets_compile(target: str) -> None:
    assert all(binary.registers > 0 for binary in binaries("h2o", torch.bfloat16, target))


@pytest.mark.slow
def test_a_short_chunk_runs_by_the_kernel_too() -> None:
    """Test cached slots and three new tokens, which on a CPU use torch's own attention."""
    chunk = next(step for step in recorded("h2o", torch.float16, (3,)) if step.query_len == 3)
    made = cuda_emission.emit(chunk)
    assert sum(launch.name.startswith(cuda_emission.ATTEND) for launch in made.launches) == 2
    real = [place for place, out in enumerate(chunk.outputs) if out.is_floating_point() and out.shape[1] == 3]
    ran = run(made)
    for place in real:  # row 0 is padded, but only in the prompt
        torch.testing.assert_close(ran.outputs[place], chunk.outputs[place], **EXACT[torch.float16])
    assert real


@pytest.mark.slow
@pytest.mark.parametrize("name", ["buzz", "sage"])
def test_the_graph_that_compacts(name: str) -> None:
    given = {"refresh_interval": 3} if name == "sage" else {}
    compacts = [step for step in recorded(name, torch.float32, (1,) * 8, **given) if step.compact]
    made = cuda_emission.emit(compacts[0])
    made.check(run(made), **EXACT[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["GPT2", "GPTNeoX", "Phi", "Gemma", "Cohere"])
def test_other_architectures(architecture: str) -> None:
    steps = recorded("h2o", torch.float32, (1, 1), architecture)
    made = cuda_emission.emit(steps[-1])
    made.check(run(made), **EXACT[torch.float32])


RANKED = [("streaming", "Llama"), ("cascade", "Llama"), ("streaming", "GPTNeoX"), ("streaming", "Cohere")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "architecture"), RANKED)
def test_positions_by_rank_run_by_the_kernel(name: str, architecture: str) -> None:
    """Test keys rotated at read: halves of a key, halves of a part of a key, and neighbours."""
    made = cuda_emission.emit(recorded(name, torch.float32, (1, 1), architecture, positions="cache")[-1])
    assert sum(launch.name.startswith(cuda_emission.ATTEND) for launch in made.launches) == 2
    buffer = made.step.inputs[0]
    assert all(allocation.nbytes < buffer.nbytes for allocation in made.allocations)
    launches = run(made)
    made.check(launches, **EXACT[torch.float32])
    for buffer in ("key", "value"):
        readers = made.readers(launches, f"slots_0_{buffer}")
        assert len(readers) == 1
        assert readers[0].startswith(cuda_emission.ATTEND)


def test_traffic_is_what_attention_needs() -> None:
    """Check that K and V are read once, and that the logits are written."""
    made, launches = emission("h2o", torch.float16), ran("h2o", torch.float16)
    split = next(launch for launch in launches.traffic if launch.name.startswith(cuda_emission.ATTEND))
    key = made.step.names.index("slots_0_key")
    assert split.loaded[key] == made.step.inputs[key].nbytes
    rows, heads, slots, _ = made.step.inputs[key].shape
    assert split.written >= rows * heads * 2 * slots * 4  # G = 2 query heads, float32
    assert split.read < 2 * made.step.inputs[key].nbytes * 1.5


def test_a_report_names_every_launch() -> None:
    made = emission("h2o", torch.float16)
    text = made.report(ran("h2o", torch.float16), binaries("h2o", torch.float16, "sm_90"))
    assert len(text.splitlines()) == len(made.launches) + 1
    assert "split_0" in text
    assert "sm_90" in text


@pytest.mark.slow
def test_an_interpreter_says_what_went_wrong() -> None:
    with (
        cuda_emission.Interpreter() as interpreter,
        pytest.raises(cuda_emission.InterpreterError, match="ZeroDivisionError"),
    ):
        interpreter.run("1 / 0", [])


def test_a_kernel_that_does_not_compile_is_named() -> None:
    from kvpass.lowering.attend_kernel import join

    signature = dict.fromkeys(join.arg_names, "constexpr") | {"m_part": "*fp32"}
    with pytest.raises(cuda_emission.KernelError, match=r"join for sm_90"):
        cuda_emission.compiled(join, signature, {}, "sm_90")


def test_the_pretended_gpu_is_removed_afterwards() -> None:
    import triton

    before = (torch.cuda.is_available(), torch.cuda.current_device, dict(vars(triton.runtime.driver)))
    with torch_private.pretended_gpu():
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device is not before[1]
    assert (torch.cuda.is_available(), torch.cuda.current_device, dict(vars(triton.runtime.driver))) == before
    assert torch.equal(torch.compile(lambda x: x[:2] + 1)(torch.zeros(3)), torch.ones(2))
