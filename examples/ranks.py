"""Heads sharded over processes: every policy writes what it writes in one.

torchrun --nproc-per-node 2 examples/ranks.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpass

NAME = Path(__file__).parents[1] / "kvpass" / "apps" / "data" / "tiny-llama"
PROMPT = "def main(arguments):\n    parser = argparse.ArgumentParser()\n    parser.add_argument("
POLICIES = ("streaming", "tova", "cascade", "d2o", "random")


def completion(model, inputs, policy):
    """The tokens that a model writes under a policy."""
    torch.compiler.reset()
    kvpass.compile(model, policy=policy, budget=None if policy == "full" else 24, inner="eager")
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=40, do_sample=False)


torch.set_num_threads(1)
inputs = AutoTokenizer.from_pretrained(NAME)(PROMPT, return_tensors="pt", return_token_type_ids=False)
model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32).eval()
expected = {policy: completion(model, inputs, policy) for policy in POLICIES}

# transformers does this with from_pretrained(NAME, distributed_config=DistributedConfig(tp_size=2)), and more.
plan = {
    "q_proj": ColwiseParallel(),
    "k_proj": ColwiseParallel(),
    "v_proj": ColwiseParallel(),
    "o_proj": RowwiseParallel(),
}
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
for layer in model.model.layers:
    parallelize_module(layer.self_attn, mesh, plan)
for policy in POLICIES:
    same = torch.equal(completion(model, inputs, policy), expected[policy])
    if dist.get_rank() == 0:
        print(f"{policy:10} {'as in one process' if same else 'DIFFERENT'}", flush=True)
dist.destroy_process_group()
