"""Score a batch of texts under several policies, and compare with the full cache.

python examples/batch_evaluation.py

The texts have different lengths, so they are padded on the left; the padding takes no slots and changes nothing.
`kvpass eval` measures more, on any checkpoint.
"""

import torch

import kvpass
from kvpass.apps import checkpoint, corpus

BUDGET, CHUNK = 128, 64
LENGTHS = (700, 500, 640, 300)
POLICIES = ("full", "streaming", "h2o")

model, tokenizer = checkpoint.load(torch.bfloat16)
words = tokenizer(" ".join(corpus.prose().values())).input_ids
starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
texts = [words[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]
tokenizer.padding_side = "left"
batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
targets = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)[:, 1:]

print("policy      held  perplexity of each text")
with torch.no_grad():
    for policy in POLICIES:
        torch.compiler.reset()
        model, _ = checkpoint.load(torch.bfloat16)
        kvpass.compile(model, policy, budget=None if policy == "full" else BUDGET)
        out = kvpass.prefill(model, batch.input_ids, batch.attention_mask, chunk=CHUNK, logits="all")
        loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].float().mT, targets, reduction="none")
        mean = loss.sum(-1) / (targets >= 0).sum(-1)
        held = kvpass.inspect(out.cache).layers[0].positions.shape[-1]
        print(f"{policy:10} {held:5}  {'  '.join(f'{x:6.2f}' for x in mean.exp().tolist())}", flush=True)
