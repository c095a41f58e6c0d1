"""Run a tiny model in several processes, and save each one's outputs and cached tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.distributed import DistributedConfig

from tests.models import Run, teacher_forced
from tests.traces import Traced

SIZES = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8)
MORE: dict[str, dict[str, Any]] = {
    "Llama": dict(num_key_value_heads=4),
    "GPTNeoX": {},  # one projection for query, key and value
    "DeepseekV2": dict(
        num_key_value_heads=8, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=2,
    ),
}  # fmt: skip
STEPS = (24, *[1] * 8, 4, *[1] * 4)  # a prompt, steps, a chunk, steps
Settings = dict[str, dict[str, Any]]


def model(name: str) -> Any:
    """Return a model with the same weights in every process, large enough for uneven attention."""
    made: Any = getattr(transformers, f"{name}ForCausalLM")
    config = made.config_class(**SIZES, **MORE[name], initializer_range=0.25)
    torch.manual_seed(0)
    return made(config).eval()


def tokens() -> tuple[Tensor, Tensor]:
    """Return ids and mask of two rows, the first padded; no token repeats, so that no two keys are equal."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(125, generator=drawn)[: sum(STEPS)] + 3 for _ in range(2)])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, mask


def spread_out(whole: Any, ranks: int) -> Any:
    """Shard a model like transformers: this process keeps its share of the weights."""
    config, _, mesh = type(whole).prepare_distribute_model(DistributedConfig(tp_size=ranks))
    return type(whole).maybe_distribute_model(whole, config, mesh)


def runs(here: Any, settings: Settings) -> dict[str, Run]:
    """Return a model's outputs and cached tokens under each of several settings."""
    made, traced = {}, Traced(here)
    for name, given in settings.items():
        run = teacher_forced(traced, *tokens(), STEPS, **{"inner": "eager", **given})
        made[name] = Run(run.logits, run.positions, None)
    return made


def work(rank: int, ranks: int, name: str, settings: Settings, folder: str) -> None:
    """Run one process of `torch.multiprocessing.spawn`, and save the results of `runs`."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.save(runs(spread_out(model(name), ranks), settings), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
