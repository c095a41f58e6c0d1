"""Ask many questions about one long document, which is read once.

python examples/document.py

The document is prefilled in chunks under a bounded cache.  Every question begins behind a copy of its slots, and all
questions are answered in one batch.
"""

import time

import torch

import kvpass
from kvpass.apps import checkpoint, corpus

BUDGET, CHUNK, TOKENS = 1024, 512, 3000
QUESTIONS = (
    "What is this text about? Answer in one sentence.",
    "Which programming language does the text describe?",
    "Is the text a poem or a manual?",
    "Write a title for the text.",
)
SETTINGS = {"policy": "h2o", "budget": BUDGET, "prefill_chunk": CHUNK}

model, tokenizer = checkpoint.load(torch.bfloat16)
reader = kvpass.DecodeLoop(model, **SETTINGS)
served = kvpass.DecodeLoop(model, **SETTINGS, rows=len(QUESTIONS), stop=[tokenizer.eos_token_id])


def ids_of(text):
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


start = time.perf_counter()
document = ids_of("<|im_start|>user\nRead this text.\n\n" + " ".join(corpus.prose().values()))[:, :TOKENS]
reader.prompt(document, pin=[(0, 4)])
prefix = reader.cache  # not continued itself, so that any number of requests may begin behind it
print(f"read {document.shape[1]} tokens in {time.perf_counter() - start:.1f} s")

start = time.perf_counter()
asked = [ids_of(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n")[0] for question in QUESTIONS]
answers = served.generate_batch(asked, prefix=prefix, max_new_tokens=40)
for question, answer in zip(QUESTIONS, answers.values(), strict=True):
    print(f"\n{question}\n  {tokenizer.decode(answer.generated_tokens, skip_special_tokens=True).strip()}")
print(f"\n{len(QUESTIONS)} answers in {time.perf_counter() - start:.1f} s; the document was read once")
print(kvpass.inspect(prefix).layers[0].positions.shape[-1], "of its tokens are held in each layer and head")
