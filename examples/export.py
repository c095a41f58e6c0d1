"""Compile a decode loop once, and decode from it in later processes without compiling.

python examples/export.py FOLDER                                  # the first time compiles and writes FOLDER
python examples/export.py FOLDER NAME_OR_PATH "Once upon a time"  # any Hugging Face model
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpass

folder = Path(sys.argv[1])
name = sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parents[1] / "kvpass" / "apps" / "data" / "tiny-llama"
prompt = sys.argv[3] if len(sys.argv) > 3 else "def main(arguments):\n    "

tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
if not folder.exists():
    digest = kvpass.export(model, folder, policy="h2o", budget=256)
    print(f"exported, digest {digest}", file=sys.stderr)

began = time.perf_counter()
loop = kvpass.load(folder, model, stop=[] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
loop.prompt(tokenizer(prompt, return_tensors="pt").input_ids)
made = loop.generate(2)
print(f"second token after {time.perf_counter() - began:.1f} s", file=sys.stderr)
made = torch.cat([made, loop.generate(100)], 1)
print(tokenizer.decode(made[0], skip_special_tokens=True))
