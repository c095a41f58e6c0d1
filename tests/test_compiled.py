"""Test Inductor's code for rewritten graphs; slow, because it compiles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import kvpass
from tests.models import ARCHITECTURES, breaks, build, graphs, prompt, teacher_forced

SIZES = re.compile(r"empty_strided_cpu\w*\(\(([\d, ]+)\)")


def allocations(code: str) -> list[int]:
    """Return the number of elements of each buffer that generated code allocates."""
    counts = []
    for shape in SIZES.findall(code):
        count = 1
        for size in filter(None, (part.strip() for part in shape.split(","))):
            count *= int(size)
        counts.append(count)
    return counts


def code_of_a_step(policy: str, layers: int) -> str:
    """Return Inductor's code for a step on 100 slots; the prompt occurs once and is not compiled."""
    model, (ids, _) = build("Llama", layers=layers), prompt(2, 12, ())

    @torch.no_grad()
    def run() -> None:
        compiled = torch.compile(model, backend=kvpass.backend(policy, budget=100))
        cache = compiled(ids[:, :9], use_cache=True).past_key_values
        for t in range(9, 12):
            cache = compiled(ids[:, t : t + 1], past_key_values=cache, use_cache=True).past_key_values

    _, codes = run_and_get_code(run)
    return str(codes[-1])


def assert_no_buffer_is_allocated(code: str) -> None:
    slot_buffer = 2 * 2 * 100 * 16  # [B, Hkv, C, D] without the spare slot
    made = allocations(code)
    assert made
    assert max(made) < slot_buffer


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "random", "cascade", "d2o"])
def test_no_allocation_of_the_size_of_a_slot_buffer(policy: str) -> None:
    assert_no_buffer_is_allocated(code_of_a_step(policy, layers=2))


def test_the_smallest_case_by_default() -> None:
    assert_no_buffer_is_allocated(code_of_a_step("streaming", layers=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "policy"), [(name, ("streaming", "h2o")[i % 2]) for i, name in enumerate(list(ARCHITECTURES)[::2])]
)
def test_inductor_equals_eager(architecture: str, policy: str) -> None:
    """Test every second architecture with positions by rank, and the others with scores."""
    model = build(architecture)
    ids, mask = prompt(2, 20, (3, 0))
    steps = [9, 1, 1, 4, *[1] * 5]
    ours, plain = (
        teacher_forced(model, ids, mask, steps, policy=policy, budget=8, inner=inner) for inner in ("inductor", "eager")
    )
    assert torch.allclose(ours.logits[mask.bool()], plain.logits[mask.bool()], atol=1e-4)
    for a, b in zip(ours.positions, plain.positions, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_ten_thousand_steps_without_a_recompilation(policy: str) -> None:
    model = build("Llama")
    ids, _ = prompt(1, 8, ())
    compiled = torch.compile(model, backend=kvpass.backend(policy, budget=16))
    with torch.inference_mode():
        out = compiled(ids, use_cache=True)
        for _ in range(2):
            out = compiled(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(10_000):
                out = compiled(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
    report = kvpass.inspect(out.past_key_values)
    assert report.seen == 10_010
    assert report.layers[0].capacity == 17
    assert graphs() == 2
    assert breaks() == 0


SCRIPT = """
import torch
import kvpass
from kvpass.policies import Policy, register
import dataclasses
from typing import ClassVar

SIGNS = [{sign}]  # a table that the policy's own source says nothing of

@register
@dataclasses.dataclass(frozen=True)
class Picky(Policy):
    name: ClassVar[str] = "picky"

    def worth(self, tokens):
        return {worth} * torch.tensor(SIGNS, device=tokens.position.device)

class Layer(torch.nn.Module):
    def forward(self, x, past=None):
        k, v = (x, x) if past is None else (torch.cat([past[0], x], 2), torch.cat([past[1], x], 2))
        return torch.nn.functional.scaled_dot_product_attention(x, k, v, is_causal=past is None), (k, v)

model = torch.compile(Layer(), backend=kvpass.backend("picky", budget=4))
x = torch.arange(12.0).view(1, 1, 12, 1)
with torch.no_grad():
    _, past = model(x[:, :, :6])
    for t in range(6, 12):
        _, past = model(x[:, :, t : t + 1], past)
print(kvpass.inspect(past).layers[0].positions[0, 0].tolist())
"""


EDITS = {"code": [("tokens.position", 1), ("-tokens.position", 1)], "table": [("tokens.position", s) for s in (1, -1)]}


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_policy_is_never_answered_with_stale_code(tmp_path: Path, edit: str) -> None:
    """Run two processes with one cache directory, and change a policy's source or constants in between."""
    printed = []
    for worth, sign in EDITS[edit]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(SCRIPT.replace("{worth}", worth).replace("{sign}", str(sign))))
        printed.append(last_line(script, tmp_path / "cache"))
    assert printed == ["[8, 9, 10, 11]", "[0, 1, 2, 3]"]


def last_line(script: Path, cache: Path) -> str:
    """Return the last line that a script prints, in a separate process with this directory for Inductor's caches."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    return result.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Check that the graphs of prompt and step are found in Inductor's caches on disk."""
    script = tmp_path / "script.py"
    counted = "\nfrom torch._dynamo.utils import counters\nprint(counters['aot_autograd']['autograd_cache_miss'])\n"
    script.write_text(textwrap.dedent(SCRIPT.replace("{worth}", "tokens.position").replace("{sign}", "1")) + counted)
    first, second = (int(last_line(script, tmp_path / "cache")) for _ in range(2))
    assert first >= 2
    assert second == 0


@pytest.mark.slow
def test_bfloat16_compiles() -> None:
    model = build("Llama", torch.bfloat16)
    ids, mask = prompt(3, 16, (2, 0, 1))
    ours, plain = (
        teacher_forced(model, ids, mask, [8, *[1] * 8], policy="h2o", budget=12, inner=i) for i in ("inductor", "eager")
    )
    assert torch.allclose(ours.logits[mask.bool()].float(), plain.logits[mask.bool()].float(), atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX"])
def test_a_step_of_one_row_calls_no_library_for_its_weights(architecture: str, dtype: torch.dtype) -> None:
    model = build(architecture, dtype)
    ids, mask = prompt(1, 12, ())
    steps: dict[str, Any] = dict(policy="h2o", budget=8)
    ours, codes = run_and_get_code(lambda: teacher_forced(model, ids, mask, [9, 1, 1, 1], **steps))
    assert not re.findall(r"extern_kernels\.(?:mm|addmm)\(|ops\.aten\.(?:to|_to_copy|copy_)\b", codes[-1])
    plain = teacher_forced(model, ids, mask, [9, 1, 1, 1], inner="eager", **steps)
    assert torch.allclose(ours.logits, plain.logits, atol=1e-4 if dtype == torch.float32 else 0.05)
