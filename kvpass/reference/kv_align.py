"""Transcribe `kv_align`: run the paper's network on one cached token at a time.

fc1 is applied to the concatenated input as in the paper, without precomputation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.kv_align import KVAlign
from kvpass.reference.base import HeadStream, Reference, Token

Rows = tuple[Tensor, Tensor]


class KVAlignReference(Reference):
    def __init__(self, policy: KVAlign) -> None:
        self.aligner, self.every = policy.loaded, policy.every
        self.sinks, self.window = self.aligner.scope.sinks, self.aligner.scope.window
        self.stores = self.every > 1 or self.aligner.recipe == "paper"

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        """Assign cache positions to new tokens, evict the oldest tokens that are not sinks, and align moved tokens."""
        if stream.notes.get("prompted") is None:
            stream.notes["prompted"] = True
            stream.tokens = new[-stream.budget :]
            for index, token in enumerate(stream.tokens):
                token.notes["made"] = index
            return
        for index, token in enumerate(new, start=len(stream.tokens)):
            token.notes["made"] = min(index, self.window)
        stream.tokens = stream.tokens + new
        excess = len(stream.tokens) - stream.budget
        if excess > 0:
            evicted = self.every if stream.step else excess
            stream.tokens = stream.tokens[: self.sinks] + stream.tokens[self.sinks + evicted :]
        if self.stores:
            self.store(stream)

    def store(self, stream: HeadStream) -> None:
        for rank, token in enumerate(stream.tokens):
            moved = rank >= self.sinks and token.notes["made"] > rank and self.aligner.recipe != "nothing"
            while rank >= self.sinks and token.notes["made"] > rank:
                target = rank
                if self.aligner.recipe == "paper":  # the paper's network supports only steps of `every` positions
                    target += (token.notes["made"] - rank - 1) // self.every * self.every
                token.key, token.value = self.align(token, target, stream.layer)
                token.notes["made"] = target
            if moved:
                token.key, token.value = stream.stored(token.key), stream.stored(token.value, key=False)

    def read(self, stream: HeadStream) -> list[Rows]:
        return [
            (token.key, token.value)
            if self.stores or rank < self.sinks or token.notes["made"] <= rank
            else self.align(token, rank, stream.layer)
            for rank, token in enumerate(stream.tokens)
        ]

    def align(self, token: Token, rank: int, layer: int) -> Rows:
        """Return key [Hkv, D] and value [Hkv, Dv] as if the token were computed at cache position `rank`."""
        if self.aligner.recipe == "direct":
            return self.direct(token, rank, layer)
        if self.aligner.recipe == "paper":
            return self.paper("key", token.key, rank, layer), self.paper("value", token.value, rank, layer)
        return token.key, token.value

    def direct(self, token: Token, rank: int, layer: int) -> Rows:
        """Apply the layer's network, which sees the keys and values of all heads and both positions."""
        weights = self.aligner.tensors
        key, value = token.key.float().flatten(), token.value.float().flatten()
        made, now = (weights["place"][min(at, self.window)] for at in (token.notes["made"], rank))
        x = torch.cat([key, value, made, now])
        parts = [weights[f"fc1.{name}"][layer] for name in ("key", "value", "made", "rank")]
        hidden = torch.relu(x @ torch.cat(parts) + weights["fc1.bias"][layer])
        hidden = torch.relu(hidden @ weights["fc2.weight"][layer] + weights["fc2.bias"][layer])
        change = hidden @ weights["fc3.weight"][layer] + weights["fc3.bias"][layer]
        change = change + now @ weights["shift"][layer] - made @ weights["shift"][layer]
        on_key, on_value = torch.split(change, [key.numel(), value.numel()])
        return _plus(token.key, on_key), _plus(token.value, on_value)

    def paper(self, part: str, row: Tensor, rank: int, layer: int) -> Tensor:
        """Apply the network of all layers and heads: x + fc3(relu(fc2(relu(fc1[x; E_pos; E_layer; E_head]))))."""
        tensors = self.aligner.tensors.items()
        weights = {name.partition(".")[2]: tensor for name, tensor in tensors if name.startswith(part)}
        out = []
        for head, x in enumerate(row.float()):
            at_rank = weights["position"][min(rank, self.window)]
            hidden = torch.cat([x, at_rank, weights["layer"][layer], weights["head"][head]])
            hidden = torch.relu(weights["fc1.weight"] @ hidden + weights["fc1.bias"])
            hidden = torch.relu(weights["fc2.weight"] @ hidden + weights["fc2.bias"])
            out.append(weights["fc3.weight"] @ hidden + weights["fc3.bias"])
        return _plus(row, torch.stack(out))


def _plus(row: Tensor, change: Tensor) -> Tensor:
    return (row.float() + change.view(row.shape)).to(row.dtype)
