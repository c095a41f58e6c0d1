"""Write an eviction policy of one's own, and compare it with two built-in ones on a real model.

python examples/own_policy.py

A policy is a frozen dataclass.  `score` ranks the cached tokens: the token with the lowest score is evicted first.
"""

import dataclasses

import torch

import kvpass
from kvpass.apps import checkpoint, corpus
from kvpass.policies import Policy, Tokens, register

BUDGET, TOKENS, CHUNK = 128, 1024, 64


@register
@dataclasses.dataclass(frozen=True)
class Landmarks(Policy):
    """Keep the first `sinks` tokens, then every `every`-th, and then the latest."""

    sinks: int = 4
    every: int = 16
    name = "landmarks"

    def score(self, tokens: Tokens) -> torch.Tensor:  # int64 [B, H', N], the same for every KV head
        position = tokens.position
        landmark = (position < self.sinks) | (position % self.every == 0)
        return torch.where(landmark, 2**40, 0) + position


@torch.no_grad()
def perplexity(policy: str, **options: object) -> float:
    """Return the perplexity of a text that is fed in chunks under the policy."""
    torch.compiler.reset()
    model, tokenizer = checkpoint.load(torch.bfloat16)
    kvpass.compile(model, policy, budget=BUDGET, **options)
    ids = tokenizer(" ".join(corpus.prose().values()), return_tensors="pt").input_ids[:, :TOKENS]
    logits = kvpass.prefill(model, ids, chunk=CHUNK, logits="all").logits
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).exp().item()


for policy, options in (("window", {}), ("streaming", {"positions": "absolute"}), ("landmarks", {"every": 16})):
    print(f"{policy:10} {perplexity(policy, **options):8.2f}", flush=True)
