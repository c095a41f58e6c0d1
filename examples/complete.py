"""Complete a prompt with a cache that never holds more than 256 tokens.

python examples/complete.py                                  # the bundled model
python examples/complete.py NAME_OR_PATH "Once upon a time"  # any Hugging Face model
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpass

name = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "kvpass" / "apps" / "data" / "tiny-llama"
prompt = sys.argv[2] if len(sys.argv) > 2 else "def main(arguments):\n    "

tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
kvpass.compile(model, policy="h2o", budget=256)

inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
with torch.inference_mode():
    result = model.generate(**inputs, max_new_tokens=400, do_sample=False, return_dict_in_generate=True)
print(tokenizer.decode(result.sequences[0], skip_special_tokens=True))
print(kvpass.inspect(result))
