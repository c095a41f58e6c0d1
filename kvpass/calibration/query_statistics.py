"""Measure the statistics of a model's queries (`kvpass.calibrate`), for policies that predict attention.

The queries are taken before their rotary embedding.  This embedding is measured: a single token attends to itself
alone, so in every layer its key at position p is its key at position 0, rotated.  Queries are read from the canonical
graph of prompts and rotated back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.arguments import Positive, check_arguments
from kvpass.backend import raise_when_run
from kvpass.capture import decomposed_attention
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.capture import capture
from kvpass.errors import CalibrationError, KVPassError, UnsupportedGraph
from kvpass.fx import op_table, walk
from kvpass.model_access import architecture_of, cache_of_output, checked_keys_and_values, device_of
from kvpass.policies.calibration import CalibratedModel, Calibration, multiply_pairs, pair_norms
from kvpass.torch_private import dynamo

FIRST = 4
"""The first tokens of a text, whose queries differ from all other queries and are left out."""
PROBES = 8
"""How many tokens the rotary embedding is measured with."""
POSITIONS = tuple(2**n for n in range(11))
"""The positions at which the embedding is measured: each gives the frequency twice as exactly as the previous one."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The largest relative difference of a key from its rotated form."""


@check_arguments
@torch.no_grad()
def calibrate(model: torch.nn.Module, ids: Tensor, *, window: Positive = 1024) -> Calibration:
    """Return the statistics of a model's queries on a text.

    Args:
        model: a causal language model with the interface of transformers and rotary embeddings, uncompiled.
        ids: int64 [T], the token ids of the text, of at least one window; tokens after the last whole one are not
            read.
        window: the tokens that are run together; statistics of long contexts need long windows.

    Raises:
        CalibrationError: the text is shorter than the window, a layer's keys do not rotate with the position, their
            dimension is odd, or layers differ in their heads.
        UnsupportedGraph: the attention of the model cannot be read.
    """
    if ids.ndim != 1 or len(ids) < window or window <= FIRST:
        raise CalibrationError(
            f"a text of shape {tuple(ids.shape)} has no window of {window} tokens: give int64 [T] with T of at least "
            f"window, and a window above {FIRST}"
        )
    name, windows = architecture_of(model), len(ids) // window
    probed = _probe_keys(model, torch.unique(ids)[:PROBES], window)
    check_equal_layers(name, "KV heads", [keys[0].shape[1] for keys in probed])
    check_equal_layers(name, "dimensions of a head", [keys[0].shape[2] for keys in probed])
    rotations = [_Rotation.measure(keys, name, layer) for layer, keys in enumerate(probed)]
    reader, sums = AttentionReader(model), list[Tensor]()
    for part in torch.split(ids[: windows * window].to(device_of(model)), window):
        calls = reader.calls(part[None])
        if len(calls) != len(rotations):
            raise CalibrationError(f"{name} has {len(rotations)} caches and {len(calls)} attention calls on caches")
        check_equal_layers(name, "query heads", [call.query.shape[1] for call in calls])
        sums_of_text = [torch.stack(parts) for parts in zip(*map(_query_sums, rotations, calls), strict=True)]
        sums = [total + more for total, more in zip(sums, sums_of_text, strict=True)] if sums else sums_of_text
    mean, product, size = (total / (windows * (window - FIRST)) for total in sums)
    tensors = dict(
        mean=mean.float(),
        second=(product - mean[..., None] * mean[..., None, :]).float(),
        size=size.float(),
        frequency=torch.stack([rotation.frequency for rotation in rotations]),
        pairs=torch.stack([rotation.pairs for rotation in rotations]),
        scale=torch.tensor([call.scale for call in reader.recorded]),
    )
    shape = CalibratedModel(name, mean.shape[0], mean.shape[1], probed[0][0].shape[1], mean.shape[2])
    return Calibration(shape, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def check_equal_layers(name: str, unit: str, counts: Sequence[int]) -> None:
    """Raise CalibrationError, which names two layers of a model, unless all layers have equal counts."""
    other = next((layer for layer, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise CalibrationError(
            f"layers 0 and {other} of {name} have {counts[0]} and {counts[other]} {unit}: only models whose layers "
            "have equal numbers can be measured"
        )


def _query_sums(rotation: _Rotation, call: RecordedAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of rows [Hq, D] before their rotation, of their outer products, and of pair sizes [Hq, P]."""
    positions = torch.arange(call.query.shape[2], device=call.query.device)
    rows = rotation.undo(call.query, positions)[0, :, FIRST:]
    return rows.sum(1), rows.mT @ rows, pair_norms(rows).sum(1)


def _probe_keys(model: torch.nn.Module, tokens: Tensor, window: int) -> list[dict[int, Tensor]]:
    """Return each layer's keys [n, Hkv, D] of single tokens, int64 [n], by their position."""
    ids = tokens.to(device_of(model))[:, None]
    layers: list[dict[int, Tensor]] = []
    for position in (0, *(p for p in POSITIONS if p < window)):
        out = model.forward(input_ids=ids, position_ids=torch.full_like(ids, position), use_cache=True)
        rows = checked_keys_and_values(model, cache_of_output(out), CalibrationError)
        layers = layers or [{} for _ in rows]
        for keys, (key, _) in zip(layers, rows, strict=True):
            keys[position] = key[:, :, 0]
    return layers


class _Rotation(NamedTuple):
    """The rotary embedding of one layer: the dimensions of its pairs, int64 [2, P], and frequencies float64 [P]."""

    pairs: Tensor
    frequency: Tensor

    @staticmethod
    def measure(keys: dict[int, Tensor], name: str, layer: int) -> _Rotation:
        """Return the rotation whose pairs explain the keys best; CalibrationError if none explains them."""
        dim, dtype = keys[0].shape[-1], keys[0].dtype
        if dim % 2:
            raise CalibrationError(
                f"the keys of layer {layer} of {name} have {dim} dimensions, which make no pairs to rotate: only "
                "models with an even head dimension can be calibrated"
            )
        rotations = [_Rotation(pairs, _frequencies(keys, pairs)) for pairs in _pairings(dim)]
        errors = [max(rotation.error(keys, position) for position in keys) for rotation in rotations]
        least = min(errors)
        if not least <= TOLERANCE.get(dtype, 0.0):
            raise CalibrationError(
                f"the keys of layer {layer} of {name} do not rotate with their position (the best rotation is off by "
                f"{least:.2g} of their size): only models with rotary embeddings can be calibrated"
            )
        return next(rotation for rotation, error in zip(rotations, errors, strict=True) if error <= 2 * least)

    def undo(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return rows [..., n, D] at positions [n] before the rotation, float64 in the layout of pairs."""
        return self._rotate_by(-positions[:, None], rows)

    def error(self, keys: dict[int, Tensor], position: int) -> float:
        """Return the largest difference between the keys at a position and rotated ones, relative to their norm."""
        apart = self._rotate_by(position, keys[0]) - self._rotate_by(0, keys[position])
        return float((apart.norm(dim=-1) / keys[0].double().norm(dim=-1).clamp(min=1e-12)).max())

    def _rotate_by(self, positions: Tensor | int, rows: Tensor) -> Tensor:
        """Return rows [..., D] rotated by positions, float64 in the layout of pairs."""
        angle = positions * self.frequency
        return multiply_pairs(rows.double()[..., self.pairs.flatten()], torch.polar(torch.ones_like(angle), angle))


def _pairings(dim: int) -> list[Tensor]:
    """Return the pairs of dimensions, int64 [2, P] each, that rotary embeddings are known to use."""
    # All dimensions are rotated, or the first or last half, quarter or three quarters, in halves or next to each other.
    parts = sorted({dim * quarters // 4 for quarters in (4, 3, 2, 1)}, reverse=True)
    pairings = []
    for part in (part for part in parts if part % 2 == 0 and part > 0):
        for begin in sorted({0, dim - part}):
            inside, rest = torch.arange(begin, begin + part), torch.arange(dim)
            rest = rest[(rest < begin) | (rest >= begin + part)]
            for pairs in (inside.view(2, -1), inside.view(-1, 2).T):
                pairings.append(torch.cat([pairs, rest.view(-1, 2).T], 1))
    return pairings


def _frequencies(keys: dict[int, Tensor], pairs: Tensor) -> Tensor:
    """Return the frequency of each pair that explains keys best, float64 [P]; each position makes it more exact."""
    frequency = torch.zeros(pairs.shape[1], dtype=torch.float64)
    for position in sorted(keys)[1:]:
        first, last = (torch.complex(*(keys[p].double()[..., half] for half in pairs)) for p in (0, position))
        angle = (last * first.conj()).flatten(0, -2).sum(0).angle().cpu()
        revolutions = ((frequency * position - angle) / (2 * torch.pi)).round()
        frequency = (angle + 2 * torch.pi * revolutions) / position
    return frequency.to(keys[0].device)


@dataclasses.dataclass(frozen=True)
class RecordedAttention:
    """The arguments of one attention call on a cache; see `kvpass.capture.canonical.attention`.

    Attributes:
        query: [B, Hq, n, D].
        key: [B, Ha, n, D], as attention reads it.
        mask, sink_logit, scale, cap, causal, hidden_logit: as in that operator.
        heads: Hkv, the KV heads of the cache.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    sink_logit: Tensor | None
    scale: float
    cap: float | None
    causal: bool
    hidden_logit: float | None
    heads: int


class AttentionReader:
    """Runs a model and returns its attention calls; the backend that compiles it to record them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.recorded: list[RecordedAttention] = []
        dynamo.register_settings()

        def run(ids: Tensor) -> Any:
            return model.forward(input_ids=ids, use_cache=True)

        self.compiled = torch.compile(run, backend=self, dynamic=False)

    def __call__(self, dynamo_gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Return a callable that replaces a graph of Dynamo and records its attention calls, or raise an error."""
        try:
            with walk.converting_errors(filter(decomposed_attention.is_boundary, dynamo_gm.graph.nodes)):
                captured = capture(dynamo_gm, [False] * len(examples))
            for refused in captured.refusals:
                raise UnsupportedGraph(f"a cache of the model cannot be read: {refused.refusal}")
        except KVPassError as error:
            return raise_when_run(error)
        return _Recorder(captured.canonical_gm, {site.call: site for site in captured.sites}, self.recorded).run

    def calls(self, ids: Tensor) -> list[RecordedAttention]:
        """Return the attention call of each layer on the token ids, int64 [B, n].

        Raises:
            UnsupportedGraph: the attention of the model cannot be read.
        """
        self.recorded.clear()
        self.compiled(ids)
        return self.recorded


class _Recorder(fx.Interpreter):
    """Runs a canonical graph and records its attention calls."""

    def __init__(
        self, canonical_gm: fx.GraphModule, sites: dict[fx.Node, AttentionSite], recorded: list[RecordedAttention]
    ) -> None:
        super().__init__(canonical_gm)
        self.sites, self.recorded = sites, recorded

    def run_node(self, n: fx.Node) -> Any:
        if n in self.sites:
            heads = int(walk.example_value(self.sites[n].grown_key).shape[1])
            given: Any = self.map_nodes_to_values(op_table.named_arguments(n), n)
            named = {field.name: given[field.name] for field in dataclasses.fields(RecordedAttention)[:-1]}
            self.recorded.append(RecordedAttention(**named, heads=heads))
        return super().run_node(n)
