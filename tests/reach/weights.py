"""Build a tiny Llama with quantised, adapted or offloaded weights; each builder imports its package."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.reach.model import llama

GROUP = 32
"""Number of weights that share a scale, for formats with groups."""


def _torchao(config: Any) -> Any:
    from torchao.quantization import quantize_

    model = llama()
    quantize_(model, config)
    return model


def torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return _torchao(Int8WeightOnlyConfig())


def torchao_int8_dynamic() -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return _torchao(Int8DynamicActivationInt8WeightConfig())


def torchao_intx() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return _torchao(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)))


def torchao_dynamic_intx() -> Any:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup

    return _torchao(Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(GROUP)))


def torchao_int4() -> Any:
    """Quantise to the layout for which torch has a CPU kernel."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return _torchao(PrototypeInt4WeightOnlyConfig(group_size=GROUP))


def torchao_float8() -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return _torchao(Float8WeightOnlyConfig())


def _quanto(bits: str) -> Any:
    from optimum import quanto

    model = llama()
    quanto.quantize(model, weights=getattr(quanto, bits))
    quanto.freeze(model)
    return model


def quanto_int8() -> Any:
    return _quanto("qint8")


def quanto_int4() -> Any:
    return _quanto("qint4")


def _with_linears(make: Callable[[nn.Linear], nn.Module]) -> Any:
    """Replace the linear layers by layers that quantise their weights when they are moved."""
    model = llama()
    for module in list(model.model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                made = make(child)
                made.load_state_dict(child.state_dict())
                setattr(module, name, made)
    return model.to("cpu")


def bitsandbytes_8bit() -> Any:
    from bitsandbytes.nn import Linear8bitLt

    return _with_linears(
        lambda old: Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
    )


def bitsandbytes_4bit() -> Any:
    from bitsandbytes.nn import Linear4bit

    return _with_linears(lambda old: Linear4bit(old.in_features, old.out_features, False, torch.float32))


def lora() -> Any:
    """Add adapters that are computed at every call, with initial weights that have an effect."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    modules = ["q_proj", "k_proj", "v_proj", "down_proj"]
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=modules, init_lora_weights=False)).eval()


def lora_merged() -> Any:
    return lora().merge_and_unload()


def hooked() -> Any:
    """Add the hooks of `device_map`, which move inputs before each module's call."""
    from accelerate.hooks import attach_align_device_hook

    model = llama()
    attach_align_device_hook(model, execution_device=torch.device("cpu"))
    return model


def offloaded() -> Any:
    from accelerate import cpu_offload

    return cpu_offload(llama(), execution_device=torch.device("cpu"))


def offloaded_to_disk() -> Any:
    from accelerate import disk_offload

    return disk_offload(llama(), tempfile.mkdtemp(), execution_device=torch.device("cpu"))
