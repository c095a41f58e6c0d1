"""Measure gates of a model's KV heads: the attention to tokens that a streaming head does not keep.

DuoAttention trains gates, which takes a GPU and hours; a measurement takes minutes on a CPU.  The model reads a text
twice in a row, so that heads that retrieve attend to the first copy while they read the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive, check_arguments
from kvpass.calibration.query_statistics import AttentionReader, RecordedAttention, check_equal_layers
from kvpass.capture import canonical
from kvpass.errors import CalibrationError
from kvpass.model_access import architecture_of, device_of
from kvpass.policies.head_gates import HeadGates

BLOCK = 128
"""How many queries are read at a time."""


@check_arguments
@torch.no_grad()
def measure_gates(
    model: torch.nn.Module, ids: Tensor, *, window: Positive = 2048, sinks: Natural = 64, recent: Positive = 256
) -> HeadGates:
    """Return the gates of a model's KV heads.

    A head's gate is a mean share of attention, the highest over its G query heads.  It is the share that the queries of
    the second half of each window pay to tokens after the first `sinks` and before the last `recent` ones.

    Args:
        model: a causal language model with the interface of transformers, uncompiled.
        ids: int64 [T], the token ids of a text, of at least half a window; tokens after the last whole
            one are not read.
        window: the tokens that are run together: half of this number from the text, twice.
        sinks, recent: the tokens that streaming heads keep.

    Raises:
        CalibrationError: the text is shorter than half a window, the window has no token that streaming heads lack, the
            model has no attention on a cache, or its layers have different numbers of KV heads.
        UnsupportedGraph: the attention of the model cannot be read.
    """
    half = window // 2
    if ids.ndim != 1 or len(ids) < half or half <= recent or half <= sinks:
        raise CalibrationError(
            f"gates cannot be measured on a text of shape {tuple(ids.shape)} in windows of {window} tokens: give int64 "
            f"[T] with T of at least half a window, and a window above {2 * max(sinks, recent) + 1}"
        )
    name, reader, sums, count = architecture_of(model), AttentionReader(model), list[Tensor](), 0
    for part in torch.split(ids.to(device_of(model)), half):
        if len(part) == half:
            calls = reader.calls(part.repeat(2)[None])
            if not calls:
                raise CalibrationError(f"{name} has no attention call on a cache, and so no heads to measure gates of")
            check_equal_layers(name, "KV heads", [call.heads for call in calls])
            shares = [_far_share(call, sinks, recent) for call in calls]
            sums = [total + share for total, share in zip(sums, shares, strict=True)] if sums else shares
            count += 1
    gates = [(total / count).view(call.heads, -1).amax(-1) for total, call in zip(sums, reader.recorded, strict=True)]
    return HeadGates(name, torch.stack(gates))


def _far_share(call: RecordedAttention, sinks: int, recent: int) -> Tensor:
    """Return the mean share of attention that the second half of the queries pay to far tokens, [Hq].

    The share of a query is its attention to values that are 1 for tokens that are far from it and 0 for others.
    """
    tokens = torch.arange(call.key.shape[2], device=call.key.device)
    total = call.query.new_zeros(call.query.shape[1], dtype=torch.float32)
    for block in torch.split(tokens[len(tokens) // 2 :], BLOCK):
        far = (tokens[:, None] >= sinks) & (tokens[:, None] <= block - recent)  # [S, n], one column for each query
        total += _attend(call, block, far.float()).diagonal(dim1=1, dim2=2).sum(-1)
    return total / (len(tokens) - len(tokens) // 2)


def _attend(call: RecordedAttention, queries: Tensor, values: Tensor) -> Tensor:
    """Return the attention of some queries, int64 [n], to other values [S, Dv], in float32 [Hq, n, Dv]."""
    mask, sink_logit = (
        each if each is None or each.shape[2] == 1 else each[:, :, queries] for each in (call.mask, call.sink_logit)
    )
    if call.causal:
        mask = torch.arange(len(values), device=values.device) <= queries[:, None]
    output: Tensor = canonical.ATTENTION(
        call.query[:, :, queries], call.key, values[None, None], mask, sink_logit, call.scale, call.cap, False,
        call.hidden_logit, torch.float32, torch.float32, torch.float32,
    )  # fmt: skip
    return output[0]
