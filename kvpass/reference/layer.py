"""Hold one attention layer of the eager reference: a list of tokens for each row and KV head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.cache.admission import TokensToAdmit
from kvpass.cache.layout import Layout
from kvpass.cache.slots import FREE
from kvpass.fx.precision import accumulate_dtype
from kvpass.policies.pinned_tokens import check_pinned
from kvpass.reference.base import HeadStream, Reference, Token
from kvpass.reference.storing import store_and_read


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

    def index(self, pinned: bool = False) -> Tensor:
        """Return the cached or pinned tokens' indices in the padded sequence, int64 [B, H', N], padded with -1."""
        return self._of_tokens(lambda rank, token: token.index, pinned)

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
            to_admit: the new tokens, with keys as stored; its `TokensToAdmit.attention` is ignored.
            probabilities: float32 [B, Hq, q, N + q] of the new tokens' queries over [cached, new].
            logits: the logits of the probabilities, before the policy's bias.
            part: the tokens are the first part of a longer chunk, so a single token is not a decode step.
        """
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
        """Return whether `count` new tokens are attended to as they are stored: a single token of codes."""
        return count == 1 and self.layout.kv_dtype is not None and self.fed > 0

    def _token(self, stream: HeadStream, to_admit: TokensToAdmit, b: int, nth: int, column: int) -> Token:
        """Return the token of a column [B, q] of a row, the `nth` real token."""
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


class Attended(NamedTuple):
    """The result of `attend`.

    Attributes:
        output: [B, Hq, q, Dv].
        probabilities: float32 [B, Hq, q, N].
        logits, biased: float32 [B, Hq, q, N], before and after the policy's bias.
    """

    output: Tensor
    probabilities: Tensor
    logits: Tensor
    biased: Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    *,
    policy_bias: Tensor | None = None,
    bias: Tensor | None = None,
    cap: float | None = None,
    sink_logit: Tensor | None = None,
) -> Attended:
    """Attend to cached and new tokens; a query that sees no token has probabilities of zero.

    Args:
        query: [B, Hq, q, D], with the policy's `logit_scale`.
        keys, values: [B, Hkv, N, D] and [B, Hkv, N, Dv].
        mask: bool [B, Hq or 1, q, N].
        scale, cap, sink_logit: see `kvpass.capture.canonical.SiteFacts`.
        policy_bias: the bias on the cached tokens, the first of the N, see `ReferenceLayer.bias`.
        bias: the model's bias, like the mask.
    """
    logits = _logits(query, keys, mask, bias, scale, cap)
    biased = logits
    if policy_bias is not None:
        biased = logits + torch.nn.functional.pad(policy_bias, (0, keys.shape[2] - policy_bias.shape[-1]))
    sinks = [] if sink_logit is None else [sink_logit.float().expand(*logits.shape[:3], 1)]
    probabilities = torch.nan_to_num(torch.cat([biased, *sinks], -1).softmax(-1)[..., : keys.shape[2]])
    groups = query.shape[1] // values.shape[1]
    output = probabilities.to(values.dtype) @ values.repeat_interleave(groups, 1)
    return Attended(output, probabilities, logits, biased)


def _logits(query: Tensor, key: Tensor, mask: Tensor, bias: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """Return logits float32 [B, Hq, q, N], minus infinity where the mask is false."""
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
