"""Measure gates of a model's KV heads: the attention to tokens that a streaming head does not keep.

DuoAttention trains gates, which takes a GPU and hours; a measurement takes minutes on a CPU.  The model reads a text
twice in a row, so that heads which retrieve attend to the first time while they read the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive, check_arguments
from kvpass.calibration.query_statistics import AttentionReader, RecordedAttention
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

    A head's gate is the mean share of its attention, the highest of its G query heads, that the queries of the second
    half of each window pay to tokens after the first `sinks` and before the last `recent` ones.

    Args:
        model: a causal language model with the interface of transformers, uncompiled.
        ids: int64 [T], the token ids of a text, of at least half a window; those after the last whole
            one are not read.
        window: the tokens that are run at once: half as many of the text, twice.
        sinks, recent: the tokens that streaming heads keep.

    Raises:
        CalibrationError: the text is shorter than half a window, or the window has no token that streaming heads lack.
        UnsupportedGraph: the attention of the model cannot be read.
    """
    half = window // 2
    if ids.ndim != 1 or len(ids) < half or half <= recent or half <= sinks:
        raise CalibrationError(
            f"gates cannot be measured on a text of shape {tuple(ids.shape)} in windows of {window} tokens: give int64 "
            f"[T] with T of at least half a window, and a window above {2 * max(sinks, recent) + 1}"
        )
    reader, sums, count = AttentionReader(model), list[Tensor](), 0
    for part in torch.split(ids.to(device_of(model)), half):
        if len(part) == half:
            shares = [_far_share(call, sinks, recent) for call in reader.calls(part.repeat(2)[None])]
            sums = [total + share for total, share in zip(sums, shares, strict=True)] if sums else shares
            count += 1
    gates = torch.stack(sums) / count  # [L, Hq]
    return HeadGates(architecture_of(model), torch.unflatten(gates, 1, (reader.recorded[0].heads, -1)).amax(-1))


def _far_share(call: RecordedAttention, sinks: int, recent: int) -> Tensor:
    """Return the mean share of attention that the second half of the queries pay to far tokens, [Hq]."""
    query, key = call.query[0].float(), call.key[0].float()
    key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    tokens = torch.arange(key.shape[1], device=key.device)
    total = query.new_zeros(query.shape[0])
    for block in torch.split(tokens[len(tokens) // 2 :], BLOCK):
        logits = query[:, block] @ key.mT * call.scale
        probs = logits.masked_fill(tokens > block[:, None], -torch.inf).softmax(-1)
        far = (tokens >= sinks) & (tokens <= block[:, None] - recent)
        total += (probs * far).sum((1, 2))
    return total / (len(tokens) - len(tokens) // 2)
