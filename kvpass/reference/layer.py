"""Hold one attention layer of the eager reference: a list of tokens for each row and KV head."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.admission import TokensToAdmit
from kvpass.cache.layout import Layout
from kvpass.cache.slots import FREE, NAMES
from kvpass.fx.precision import accumulate_dtype
from kvpass.policies.pinned_tokens import Pins, check_pinned
from kvpass.reference.base import HeadStream, Reference, Token
from kvpass.reference.storing import store_and_read


@dataclasses.dataclass(frozen=True)
class TakenTokens:
    """The last tokens that a layer received; see `ReferenceLayer.take`."""

    tokens: TokensToAdmit
    probabilities: Tensor
    logits: Tensor

    def first_tokens(self, count: int) -> TakenTokens:
        """Return the first `count` tokens."""
        total = self.probabilities.shape[-1] - self.probabilities.shape[2] + count
        probabilities, logits = (part[:, :, :count, :total] for part in (self.probabilities, self.logits))
        return TakenTokens(self.tokens.first_tokens(count), probabilities, logits)

    def admit_again(self, cache: Any) -> None:
        """Add the tokens again to a cache in its earlier state."""
        cache.slots.take(self.tokens, self.probabilities, self.logits, part=True)


class ReferenceLayer:
    """The streams of one layer; accepts prompts, chunks and single tokens."""

    def __init__(self, layout: Layout, reference: Reference, row_budgets: Sequence[int] = ()) -> None:
        """Create empty streams; `row_budgets` holds the budget of each row, if the plan gives rows their own."""
        self.layout = layout
        self.reference = reference
        self.stored = functools.partial(store_and_read, layout)
        of_heads = [each.budget for each in layout.classes for _ in range(each.heads)]
        same: dict[str, Any] = dict(layer=layout.layer, stored=self.stored)
        same |= dict(interval=layout.policy.interval, spans=layout.policy.spans)
        self.streams = [
            [HeadStream(head, of_heads[head] if of_heads else budget, **same) for head in range(layout.metadata_heads)]
            for budget in row_budgets or (layout.budget,) * layout.batch
        ]
        self.length = 0
        self.fed = 0  # number of calls of `take`
        self.view: Any = None  # keys and values that the last tokens attended to, for layers that share the cache
        self.taken: TakenTokens | None = None
        self.pins: Pins | None = None  # those of the next call of `take`

    def expect_pins(self, pins: Pins) -> None:
        """Note the pins of the next tokens, and check that they leave the policy what it needs.

        Raises:
            BudgetError: they leave less of the budget.
        """
        self.pins = pins
        if pins.on_top:
            return
        for row, more in zip(self.streams, (pins.mask.sum(-1) + pins.later).tolist(), strict=True):
            for stream in row:
                pinned = sum(token.pinned for token in stream.tokens) + more
                check_pinned(self.layout.policy, pinned, stream.budget - pinned)

    def copy(self) -> ReferenceLayer:
        """Return an independent copy of the layer with the same tokens."""
        layer = copy.copy(self)
        layer.streams, layer.view, layer.taken = copy.deepcopy(self.streams), None, None
        return layer

    @property
    def capacity(self) -> int:
        return self.layout.capacity

    @property
    def names(self) -> list[str]:
        """Names as in `Slots.names`."""
        return list(NAMES)

    def cached_indices(self, layout: Layout, pinned: bool = False) -> Tensor:
        """Return the cached tokens as `Slots.cached_indices` does."""
        return self._of_tokens(lambda rank, token: token.index, pinned).expand(-1, layout.heads, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values."""
        layout = self.layout
        row = sum(
            count * dtype.itemsize for f in (layout.key_format, layout.value_format) for count, dtype in f.layout()
        )
        return sum(len(token.key) * row for streams in self.streams for stream in streams for token in stream.tokens)

    def tensors(self) -> list[Any]:
        """Return the inputs of a rewritten graph in place of `Slots.tensors`.

        The first is the layer itself; positions are computed from the others.
        """
        length = torch.full((self.layout.batch,), self.length, device=self.layout.device)
        positions = torch.nn.functional.pad(self.positions(), (0, 1), value=FREE)
        free = torch.full((self.layout.batch, 1), positions.shape[-1] - 1, device=self.layout.device)
        return [self, None, positions, None, free, self.seen, length, None]

    @property
    def seen(self) -> Tensor:
        """The number of real tokens seen, int64 [B]."""
        return torch.tensor([row[0].seen for row in self.streams], device=self.layout.device)

    def evict_before_step(self, valid: Tensor) -> None:
        """Let the policy evict before a single token attends; call before the tokens `valid` [B, q] attend."""
        if valid.shape[1] > 1 or not self.length:
            return
        for row, counts in zip(self.streams, valid[:, 0].tolist(), strict=True):
            for stream in row if counts else []:
                self.reference.prepare(stream)

    def bias(self, groups: int) -> Tensor | None:
        """Return the bias of queries on the cached tokens, float32 [B, Hq, 1, N], or None."""
        positions = self.positions()
        out = torch.zeros(self.layout.batch, self.layout.heads, groups, positions.shape[-1])
        has_bias = False
        for b, row in enumerate(self.streams):
            for stream in row:
                bias = self.reference.bias(stream, groups)
                has_bias = has_bias or bias is not None
                if bias is not None:
                    out[b, self._heads(stream.head), :, : len(stream.tokens)] = bias
        return out.flatten(1, 2)[:, :, None].to(self.layout.device) if has_bias else None

    def logit_scale(self, valid: Tensor) -> Tensor:
        """Return the factor on the logits of the tokens `valid` [B, q], float32 [B, 1, 1, 1]."""
        counts = [len(row[0].tokens) + int(new) for row, new in zip(self.streams, valid.sum(-1).tolist(), strict=True)]
        return torch.tensor([self.reference.logit_scale(n) for n in counts], device=valid.device).view(-1, 1, 1, 1)

    def index(self) -> Tensor:
        """Return the cached tokens' indices in the padded sequence, int64 [B, H', N], padded with -1."""
        return self._of_tokens(lambda rank, token: token.index)

    def positions(self) -> Tensor:
        """Return the cached tokens' positions, int64 [B, H', N], sorted, padded with -1."""
        return self._of_tokens(lambda rank, token: token.position)

    def ranks(self) -> Tensor:
        """Return the ranks 0, 1, 2, ... of the cached tokens, int64 [B, H', N], padded with -1."""
        return self._of_tokens(lambda rank, token: rank)

    def cached_vectors(self, name: str, stored: bool = False) -> Tensor:
        """Return the cached keys or values [B, Hkv, N, D], padded with zeros, as attention sees them or as stored."""
        dim = self.layout.key_dim if name == "key" else self.layout.value_dim
        longest = max(len(stream.tokens) for row in self.streams for stream in row)
        dtype = self.layout.dtype if self.layout.kv_dtype is None else accumulate_dtype(self.layout.dtype)
        out = torch.zeros(self.layout.batch, self.layout.heads, longest, dim, dtype=dtype, device=self.layout.device)
        for b, row in enumerate(self.streams):
            for h, stream in enumerate(row):
                seen = Reference.read(self.reference, stream) if stored else self.reference.read(stream)
                for n, (key, value) in enumerate(seen):
                    out[b, self._heads(h), n] = key if name == "key" else value
        return out

    def take(self, to_admit: TokensToAdmit, probabilities: Tensor, logits: Tensor, part: bool = False) -> None:
        """Add new tokens and evict.

        Args:
            to_admit: the new tokens, with keys as they are stored; its `TokensToAdmit.attention` is ignored.
            probabilities: float32 [B, Hq, q, N + q] of the new tokens' queries over [cached, new].
            logits: likewise, before the softmax and the policy's bias.
            part: the tokens are the first part of a longer chunk, so a single token is no decode step.
        """
        self.taken, self.pins = TakenTokens(to_admit, probabilities, logits), None
        policy, count = self.layout.policy, to_admit.valid.shape[1]
        first_new = probabilities.shape[-1] - count
        for b, row in enumerate(self.streams):
            new = torch.nonzero(to_admit.valid[b]).flatten().tolist()
            for stream in row:
                columns = [*range(len(stream.tokens)), *(first_new + j for j in new)]
                queries = self._queries(stream, probabilities)
                seen = (x[b, queries][:, new][:, :, columns].transpose(0, 1) for x in (probabilities, logits))
                stream.step = self.length > 0 and count == 1 and not part
                tokens = [self._token(stream, to_admit, b, nth, column) for nth, column in enumerate(new)]
                if to_admit.output_projection is not None:
                    stream.output_projection = to_admit.output_projection[0, stream.head]
                if to_admit.pins is not None and to_admit.pins.on_top:
                    stream.budget += sum(token.pinned for token in tokens)
                if any(token.pinned for token in tokens):
                    pinned = sum(token.pinned for token in stream.tokens + tokens)
                    check_pinned(policy, pinned, stream.kept - pinned)
                stream.seen += len(new)
                self.reference.take(stream, tokens, *seen)
            self.reference.settle(row)
        self.length += count
        self.fed += 1

    def attends_to_stored(self, count: int) -> bool:
        """Check whether `count` new tokens are attended to in their stored form, not in the model's.

        That holds for a single token, unless a policy that defers eviction still keeps the whole prompt.
        """
        budget = min(row[0].budget for row in self.streams)
        defers = self.layout.policy.defers and self.fed == 1 and self.length > budget
        return count == 1 and self.layout.kv_dtype is not None and self.fed > 0 and not defers

    def _token(self, stream: HeadStream, to_admit: TokensToAdmit, b: int, nth: int, column: int) -> Token:
        """Return the token of a column [B, q] of a row, the `nth` real one of them."""
        heads = self._heads(stream.head)
        key = self.stored(to_admit.key[b, heads, column].clone())
        value = self.stored(to_admit.value[b, heads, column].clone(), key=False)
        marked = to_admit.pins is not None and bool(to_admit.pins.mask[b, column])
        pinned = marked or (self.layout.policy.keep_prompt and not stream.step)
        return Token(stream.seen + nth, self.length + column, key, value, pinned)

    def _queries(self, stream: HeadStream, probabilities: Tensor) -> slice:
        """Return the query heads of a stream."""
        group, heads = probabilities.shape[1] // self.layout.heads, self._heads(stream.head)
        return slice(heads.start * group, heads.stop * group)

    def _heads(self, group: int) -> slice:
        return slice(0, self.layout.heads) if self.layout.metadata_heads == 1 else slice(group, group + 1)

    def _of_tokens(self, number: Callable[[int, Token], int], pinned: bool = False) -> Tensor:
        """Return a number for each cached or pinned token: int64 [B, H', N], padded with -1."""
        lists = [
            [number(*each) for each in enumerate(stream.tokens) if each[1].pinned or not pinned]
            for row in self.streams
            for stream in row
        ]
        longest = max(len(entry) for entry in lists)
        filled = [entry + [FREE] * (longest - len(entry)) for entry in lists]
        shape = (self.layout.batch, self.layout.metadata_heads, longest)
        return torch.tensor(filled, dtype=torch.int64, device=self.layout.device).view(shape)


def attention_logits(
    query: Tensor, key: Tensor, mask: Tensor, bias: Tensor | None, scale: float, cap: float | None = None
) -> Tensor:
    """Return logits float32 [B, Hq, q, N], minus infinity where the mask is false.

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, N, D].
        mask: bool [B, Hq or 1, q, N]; bias: additive, likewise, or None.
    """
    out = []
    for head in range(query.shape[1]):
        keys = key[:, head * key.shape[1] // query.shape[1]]  # [B, N, D]
        logits = (query[:, head].to(keys.dtype) @ keys.transpose(1, 2)).float() * scale
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        if bias is not None:
            logits = logits + bias[:, head % bias.shape[1]].float()
        out.append(logits.masked_fill(~mask[:, head % mask.shape[1]], -torch.inf))
    return torch.stack(out, 1)


def attention_output(probabilities: Tensor, values: Tensor) -> Tensor:
    """Sum values [B, Hkv, N, Dv], weighted by probabilities [B, Hq, q, N], to [B, Hq, q, Dv]."""
    return probabilities.to(values.dtype) @ values.repeat_interleave(probabilities.shape[1] // values.shape[1], 1)
