"""One attention layer as the papers describe it: a list of tokens for each row (and KV head)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.slots import FREE, Chunk, Layout


@dataclasses.dataclass
class Token:
    """One held token.

    Attributes:
        position: its place among the real tokens of its row.
        index: its place in the padded sequence.
        key, value: [h, D] and [h, Dv]; h = Hkv when the heads keep the same tokens, else 1.
        score: whatever the policy accumulates.
    """

    position: int
    index: int
    key: Tensor
    value: Tensor
    score: float = 0.0


class Reference:
    """What a policy's reference says; one object serves every stream of a layer."""

    def observe(self, tokens: list[Token], rows: Tensor) -> None:
        """Learn from new attention: probabilities float32 [queries, heads, tokens], padding queries left out."""

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        """The tokens to keep of the stream of KV head `head` (0 if shared), `seen` real tokens so far."""
        raise NotImplementedError


class ReferenceLayer:
    """The streams of one layer; takes prompts, chunks and single tokens alike."""

    def __init__(self, layout: Layout, reference: Reference) -> None:
        self.layout = layout
        self.reference = reference
        self.streams: list[list[list[Token]]] = [[[] for _ in range(layout.groups)] for _ in range(layout.rows)]
        self.seen = [0] * layout.rows
        self.length = 0

    def index(self) -> Tensor:
        """int64 [B, H', N]: places of the held tokens in the padded sequence, -1 after the last."""
        return self._padded([[[t.index for t in stream] for stream in row] for row in self.streams])

    def positions(self) -> Tensor:
        """int64 [B, H', N], sorted, -1 after the last."""
        return self._padded([[[t.position for t in stream] for stream in row] for row in self.streams])

    def ranks(self) -> Tensor:
        """int64 [B, H', N]: 0, 1, 2, ... over the held tokens."""
        return self._padded([[list(range(len(stream))) for stream in row] for row in self.streams])

    def rows(self, name: str) -> Tensor:
        """[B, Hkv, N, D]: the held keys or values, zero after the last."""
        dim = self.layout.key_dim if name == "key" else self.layout.value_dim
        longest = max(len(stream) for row in self.streams for stream in row)
        out = torch.zeros(
            self.layout.rows, self.layout.heads, longest, dim, dtype=self.layout.dtype, device=self.layout.device
        )
        for b, row in enumerate(self.streams):
            for h, stream in enumerate(row):
                for n, token in enumerate(stream):
                    out[b, self._heads(h), n] = getattr(token, name)
        return out

    def take(self, chunk: Chunk, rows: Tensor) -> None:
        """Take in new tokens and evict.

        Args:
            chunk: the keys as they are stored; its `attention` is not looked at.
            rows: probabilities float32 [B, Hq, q, N + q] of the chunk's queries over [held, chunk].
        """
        held = rows.shape[-1] - chunk.real.shape[1]
        for b in range(self.layout.rows):
            new = torch.nonzero(chunk.real[b]).flatten().tolist()
            for h, stream in enumerate(self.streams[b]):
                columns = list(range(len(stream))) + [held + j for j in new]
                heads = self._heads(h)
                for place, j in enumerate(new):
                    key, value = chunk.key[b, heads, j].clone(), chunk.value[b, heads, j].clone()
                    stream.append(Token(self.seen[b] + place, self.length + j, key, value))
                group = rows.shape[1] // self.layout.heads
                queries = slice(heads.start * group, heads.stop * group)
                seen = rows[b, queries][:, new][:, :, columns].transpose(0, 1)  # [queries, heads, tokens]
                self.reference.observe(stream, seen)
                self.streams[b][h] = self.reference.evict(stream, h, self.seen[b] + len(new), self.layout.budget)
            self.seen[b] += len(new)
        self.length += chunk.real.shape[1]

    def _heads(self, group: int) -> slice:
        """The KV heads of a stream."""
        return slice(0, self.layout.heads) if self.layout.groups == 1 else slice(group, group + 1)

    def _padded(self, lists: list[list[list[int]]]) -> Tensor:
        longest = max(len(entry) for row in lists for entry in row)
        filled = [[entry + [FREE] * (longest - len(entry)) for entry in row] for row in lists]
        return torch.tensor(filled, dtype=torch.int64, device=self.layout.device).view(
            self.layout.rows, self.layout.groups, longest
        )


def attention_rows(query: Tensor, key: Tensor, mask: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Probabilities float32 [B, Hq, q, N], head by head, the way a textbook writes it.

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, N, D].
        mask: bool [B, Hq or 1, q, N]; bias: additive, likewise, or None.
    """
    out = []
    for head in range(query.shape[1]):
        keys = key[:, head * key.shape[1] // query.shape[1]]  # [B, N, D]
        logits = (query[:, head] @ keys.transpose(1, 2)).float() * scale
        if bias is not None:
            logits = logits + bias[:, head % bias.shape[1]].float()
        logits = logits.masked_fill(~mask[:, head % mask.shape[1]], -torch.inf)
        out.append(torch.nan_to_num(logits.softmax(-1)))
    return torch.stack(out, 1)
