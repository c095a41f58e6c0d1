"""Compile a decode loop once, and decode from it in later processes without compiling.

python examples/export.py [FOLDER]

The first run compiles and writes FOLDER (by default one in the temporary folder), which takes less than a minute on two
cores; later ones load it.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

import kvpass
from kvpass.apps import checkpoint

folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "kvpass-exported")

model, tokenizer = checkpoint.load(torch.bfloat16)
if not folder.exists():
    start = time.perf_counter()
    digest = kvpass.export(model, folder, policy="h2o", budget=256)
    print(f"exported in {time.perf_counter() - start:.1f} s, digest {digest}", file=sys.stderr)

question = [{"role": "user", "content": "Name three colours, and something that has each of them."}]
ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
start = time.perf_counter()
loop = kvpass.load(folder, model, stop=[tokenizer.eos_token_id])
loop.prompt(ids.input_ids)
made = loop.generate(2)
print(f"second token after {time.perf_counter() - start:.2f} s", file=sys.stderr)
made = torch.cat([made, loop.generate(100)], 1)
print(tokenizer.decode(made[0], skip_special_tokens=True))
