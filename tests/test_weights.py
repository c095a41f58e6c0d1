"""Test weights of tensor subclasses, and modules around a model: they work as without kvpass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import kvpass
from kvpass.cache.handle import Handle
from kvpass.torch_private import tensors
from tests.lowering.layer_dedup.test_link import compilations
from tests.models import build, prompt, teacher_forced
from tests.traces import Traced

PIECES = [9, 1, 4, 1]
BUDGET = 8


class Coded(Tensor):
    """int8 codes [m, n] with a scale [m, 1] for each row; supports linear layers and little else."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Coded:
        made: Coded = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=scale.device)
        made.codes, made.scale = codes, scale
        return made

    @staticmethod
    def of(weight: Tensor) -> Coded:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return Coded((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Coded:
        return Coded(inner["codes"], inner["scale"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Coded({tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            x, weight, *bias = args
            return linear(x, weight.codes.to(x.dtype) * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Coded(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class Doubling(Tensor):
    """A plain tensor except that linear layers return twice as much: Dynamo traces through it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            if func is Tensor.detach:  # `nn.Parameter` calls this
                return made.as_subclass(cls)
            return made * 2 if func is linear else made


def with_weights(model: Any, make: Any) -> Any:
    """Replace the weights of the linear layers in a model's blocks."""
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(make(module.weight.detach()), requires_grad=False)
    return model


def doubling(weight: Tensor) -> Tensor:
    return weight.as_subclass(Doubling)


def both(weight: Tensor) -> Tensor:
    """Convert a weight to one class or the other, by its shape."""
    return Coded.of(weight) if weight.shape[0] == weight.shape[1] else doubling(weight)


def fed() -> tuple[Tensor, Tensor]:
    return prompt(2, sum(PIECES), (3, 0))


@torch.no_grad()
def uncompiled(model: Any) -> Tensor:
    ids, mask = fed()
    return model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits


def check(model: Any, inner: str) -> None:
    """Compare `full` with the uncompiled model and `h2o` with its reference, for tokens and chunks."""
    (ids, mask), expected = fed(), uncompiled(model)
    traced = Traced(model)
    real = mask.bool()
    ours = teacher_forced(traced, ids, mask, PIECES, policy="full", inner=inner, inspect=False).logits
    torch.testing.assert_close(ours[real], expected[real], atol=1e-4, rtol=1e-4)
    bounded, literal = (
        teacher_forced(traced, ids, mask, PIECES, policy="h2o", budget=BUDGET, inner=how).logits
        for how in (inner, "reference")
    )
    torch.testing.assert_close(bounded[real], literal[real], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(bounded[real], expected[real], atol=1e-4)


def test_names_of_the_tensors_in_a_wrapper() -> None:
    """Check the order in which compiled code takes tensors, also for nested wrappers."""
    plain = Coded.of(torch.randn(3, 4))
    assert tensors.inner_names(plain) == ["codes", "scale"]
    assert tensors.inner_names(Coded(plain.codes, Coded.of(torch.randn(3, 1)))) == [
        "codes",
        "scale.codes",
        "scale.scale",
    ]
    assert tensors.inner_names(torch.ones(2)) == []


@pytest.mark.parametrize(
    "make", [pytest.param(Coded.of, marks=pytest.mark.slow), pytest.param(doubling, marks=pytest.mark.slow), both]
)
def test_weights_of_a_class_of_their_own(make: Any) -> None:
    check(with_weights(build("Llama", layers=1), make), "eager")


@pytest.mark.slow
def test_layers_whose_weights_wrap_tensors_share_code() -> None:
    """Count pieces: prologue, layer and epilogue of the prompt, of a step, and of a chunk of dynamic length."""
    model, (ids, mask) = with_weights(build("Llama", layers=4), Coded.of), prompt(2, 18, (3, 0))
    torch._dynamo.utils.counters.clear()
    ours, plain = (
        teacher_forced(
            Traced(model), ids, mask, [9, 1, 4, 4], policy="h2o", budget=BUDGET, inner=inner, inspect=False
        ).logits
        for inner in ("inductor", "eager")
    )
    assert compilations() == 9
    torch.testing.assert_close(ours[mask.bool()], plain[mask.bool()], atol=1e-4, rtol=1e-4)


class Gain(Tensor):
    """A wrapper of one tensor that layers multiply with; operators run on it."""

    gain: Tensor

    @staticmethod
    def __new__(cls, gain: Tensor) -> Gain:
        made: Gain = Tensor._make_wrapper_subclass(cls, gain.shape, dtype=gain.dtype, device=gain.device)
        made.gain = gain
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["gain"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Gain:
        return Gain(inner["gain"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # torch 2.11 prints example inputs
        return f"Gain({tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Gain, lambda each: each.gain, args)
        result = func(*plain, **(kwargs or {}))
        keeps = func in (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return Gain(result) if keeps else result


@pytest.mark.slow
def test_a_wrapper_that_all_layers_read_keeps_their_graph_whole() -> None:
    """Check one graph: a separate layer would get a copy from another part of the graph as a plain tensor."""
    model, copies = build("Llama", layers=4), dict[str, Tensor]()
    model.model.gain = nn.Parameter(Gain(torch.linspace(0.5, 1.5, model.config.hidden_size)), requires_grad=False)
    model.model.register_forward_pre_hook(lambda module, _: copies.update(gain=module.gain.clone()))
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _, inputs, output: output * copies["gain"])
    ids, mask = prompt(1, 12, ())
    ours, plain = (
        teacher_forced(Traced(model), ids, mask, [9, 1, 1, 1], policy="full", inner=inner, inspect=False).logits
        for inner in ("inductor", "eager")
    )
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


def test_a_model_whose_weights_wrap_tensors_is_not_exported(tmp_path: Path) -> None:
    model = with_weights(build("Llama", layers=3), Coded.of)
    with pytest.raises(kvpass.UnsupportedGraph, match="this model cannot be exported"):
        kvpass.export(model, tmp_path / "exported", policy="h2o", budget=BUDGET)


def test_a_repeated_step_unwraps_tensor_classes_as_dynamo_did() -> None:
    model, (ids, mask) = with_weights(build("Llama", layers=1), doubling), prompt(2, 9, (3, 0))
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    loop = kvpass.DecodeLoop(model, policy="full", inner="eager")
    loop.prompt(ids, mask)
    assert torch.equal(loop.generate(6), expected[:, 9:])


class Adapted(nn.Module):
    """A module around a model whose `generate` calls the inner one, like an adapted model of PEFT."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def get_base_model(self) -> nn.Module:
        return self.inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside.forward(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside.generate(*args, **kwargs)


def test_a_model_inside_of_one_that_adapts_it_is_compiled_too() -> None:
    model, (ids, mask) = Adapted(build("Llama", layers=1)), prompt(2, 9, (3, 0))
    kvpass.compile(model, "h2o", budget=BUDGET, inner="eager")
    out = model.generate(ids, attention_mask=mask, max_new_tokens=4, pad_token_id=0, return_dict_in_generate=True)
    assert kvpass.inspect(out.past_key_values).layers[0].capacity == BUDGET + 1
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, past_key_values=out.past_key_values.__class__()).past_key_values
    assert isinstance(cache.layers[0].keys, Handle)
