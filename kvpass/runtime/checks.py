"""Check that a call continues the conversation in its caches, and read the padding of its tokens."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.padding_analysis import padding_inputs_of_sites
from kvpass.capture.rotary import find_rotary, strip_reshapes
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.fx import splicing, walk
from kvpass.fx.shapes import Sizes
from kvpass.policies.ranking import INT64_MAX
from kvpass.rewrite.pipeline import new_columns
from kvpass.rewrite.rotary_slice import RotaryProbe
from kvpass.rewrite.step_graph import PaddingInputs
from kvpass.runtime import model_identity
from kvpass.runtime.model_identity import TensorSet
from kvpass.torch_private import dynamo

OWN_POSITIONS = (
    "the position ids are not 0, 1, 2, ... over the real tokens of a row, and cached tokens are numbered by their rank "
    "instead: leave position_ids out, or pass positions='absolute'"
)
PADDING_BETWEEN = (
    "the model's own position ids do not increase by one over the real tokens of a row, for example because they count "
    "padding in between, but cached tokens are numbered by rank: pad on the left, pass position_ids that count real "
    "tokens, or pass positions='absolute'"
)
OTHER_STARTS = (
    "the model makes position ids of its own for several rotary embeddings, which start at different ids in a row, but "
    "a cached token has one rank for all of them: use positions='absolute'"
)
OTHER_ANGLES = (
    "this call rotates keys by other angles than the calls before, or scales them differently, for example because "
    "frequencies depend on the length or a tensor of the model was replaced, but all cached keys are rotated alike "
    "when they are read: use positions='absolute'"
)


class PositionCheck:
    """A check that the position ids which rotate the keys of a graph are consecutive.

    The ids are computed from the arguments of each call.  The check is for layers with cache positions, which replace
    position ids by the rank among cached tokens.  This keeps the distances between real tokens only if the ids of a row
    increase by one, from any first id.
    """

    def __init__(self, gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        rotaries = [find_rotary(site) for site in sites]
        nodes = list(dict.fromkeys(strip_reshapes(rotary.position) for rotary in rotaries if rotary))
        self._are_arguments = [node.op == "placeholder" for node in nodes]
        self._module = splicing.extract(gm, nodes)

    def first_ids(self, arguments: tuple[Any, ...], valid: Tensor) -> Tensor | None:
        """Return the position id of each row's first real token, int64 [B]; None if no ids rotate keys.

        Args:
            valid: bool [B, q], False for padding.

        Raises:
            UnsupportedGraph: the ids of a row do not increase by one, ids from the caller begin above 0, or the others
                of a row do not all begin alike.
        """
        first, own = None, None
        for ids, is_argument in zip(self._ids(arguments, valid), self._are_arguments, strict=True):
            offsets = _offsets(ids, valid)
            first = torch.where(valid.any(-1), offsets.gather(-1, valid.long().argmax(-1, keepdim=True))[:, 0], 0)
            if not bool(_is_constant(offsets, valid, torch.zeros_like(first) if is_argument else first)):
                raise UnsupportedGraph(self.refusal)
            if is_argument:
                continue
            if own is not None and not torch.equal(own, first):
                raise UnsupportedGraph(OTHER_STARTS)
            own = first
        return first if own is None else own

    def continues(self, arguments: tuple[Any, ...], valid: Tensor, first: Tensor | None, seen: Tensor) -> Tensor:
        """Return whether the ids of a step continue those of each row's earlier real tokens; a bool on the device.

        Args:
            valid: bool [B, q], False for padding.
            first: the result of `first_ids`; None if the rows come from several prompts.
            seen: the number of earlier real tokens, int64 [B].
        """
        fits = torch.ones((), dtype=torch.bool, device=valid.device)
        for ids, is_argument in zip(self._ids(arguments, valid), self._are_arguments, strict=True):
            begin = torch.zeros_like(seen) if is_argument else first
            if begin is not None:
                fits = fits & _is_constant(_offsets(ids, valid), valid, begin + seen)
        return fits

    @property
    def refusal(self) -> str:
        """Error message for ids that are not consecutive."""
        return OWN_POSITIONS if any(self._are_arguments) else PADDING_BETWEEN

    def _ids(self, arguments: tuple[Any, ...], valid: Tensor) -> list[Tensor]:
        """Return the position ids of each distinct rotary embedding, as [B or 1, q]."""
        queries = valid.shape[1]
        result = [ids if ids.shape[-1] == queries or ids.ndim != 2 else ids.T for ids in self._module(*arguments)]
        return [ids.reshape(-1, queries).to(valid.device) for ids in result]


def _offsets(ids: Tensor, valid: Tensor) -> Tensor:
    """Subtract each token's rank among the call's real tokens from ids [B or 1, q]."""
    return ids - (valid.long().cumsum(-1) - 1)


def _is_constant(offsets: Tensor, valid: Tensor, wanted: Tensor) -> Tensor:
    """Return whether the offsets [B, q] of real tokens equal the wanted offset of their row [B]."""
    return ((offsets == wanted.to(offsets.device)[:, None]) | ~valid).all()


class RotationCheck:
    """The rotation of one key by a graph, computed anew when a tensor that it reads has changed.

    A tensor has changed if it was replaced or written to in place.  Tensors of inference mode do not count writes.
    """

    def __init__(self, gm: fx.GraphModule, sites: Sequence[AttentionSite]) -> None:
        self._make: Callable[[Sizes], RotaryProbe] | None = functools.partial(RotaryProbe, gm, sites)
        self._probe: RotaryProbe | None = None
        self._last: tuple[list[tuple[int, weakref.ref[Tensor], int]], Tensor | None] | None = None

    def rotated_key(self, arguments: Sequence[Any], sizes: Callable[[], Sizes], device: torch.device) -> Tensor | None:
        """Return `RotaryProbe.run`, the same tensor as long as nothing changes."""
        last = self._last  # another thread may replace it
        if last is not None and all(
            arguments[index] is known() and _version(arguments[index]) == version for index, known, version in last[0]
        ):
            return last[1]
        with dynamo.compile_lock():
            if self._make is not None:
                self._probe, self._make = self._make(sizes()), None  # which releases the graph
        assert self._probe is not None
        read = [(index, weakref.ref(arguments[index]), _version(arguments[index])) for index in self._probe.indices]
        try:
            rotated = self._probe.run(arguments, device)
        except RuntimeError:
            if last is None:
                raise
            rotated = torch.full((1,), torch.nan)  # a tensor of another shape, which equals no other rotation
        self._last = read, rotated
        return rotated


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return 0 if tensor.is_inference() else tensor._version


class StepVerifier:
    """The checks of one step graph."""

    def __init__(self, gm: fx.GraphModule, sites: list[AttentionSite], key_weights_of_steps: TensorSet) -> None:
        """
        Args:
            key_weights_of_steps: the key projections of all layers that have run a step.
        """
        self._gm, self._sites, self._key_weights_of_steps = gm, sites, key_weights_of_steps
        self._projection_indices = [model_identity.key_projection_indices(site) for site in sites]
        self._positions: PositionCheck | None = None
        self._rotation = RotationCheck(gm, sites)

    def check_layers(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> None:
        """Check that each cache belongs to the layer that reads it, and has the prompt's window.

        A layer is known by the tensors that project its keys, for models whose layers are graphs of their own.

        Raises:
            CacheHandleError: a cache is of another layer or model, or its heads are sharded differently.
            UnsupportedGraph: the windows differ.
        """
        for site, cache, indices in zip(self._sites, caches, self._projection_indices, strict=True):
            weights = [arguments[index] for index in indices]
            self._key_weights_of_steps.add(weights)
            if model_identity.belongs_to_other_layer(cache.key_projections, weights, self._key_weights_of_steps):
                raise CacheHandleError(
                    f"{walk.source_line(site.call)}: the caches of layers were exchanged: this layer received the "
                    "cache of another layer, or of another copy of the model"
                )
            if site.sharding != cache.layout.sharding:
                raise CacheHandleError(
                    f"{walk.source_line(site.call)}: the cache was made with its heads sharded over processes as "
                    f"{cache.layout.sharding}, and this step has {site.sharding}; run both by the same model"
                )
        for site, cache in zip(self._sites, caches, strict=True):
            if site.window != cache.window:
                here, before = ("all" if n is None else f"the last {n}" for n in (site.window, cache.window))
                raise UnsupportedGraph(
                    f"{walk.source_line(site.call)}: this call stores {here} of the layer's tokens, and the prompt "
                    f"stored {before}: let every call cut the cache by the same subscript, as k[:, :, -n:], or leave "
                    "the cache whole and hide old tokens in the attention mask"
                )

    def check_positions(self, cache: LayerCache, arguments: tuple[Any, ...], valid: Callable[[], Tensor]) -> None:
        """Check that the position ids count the real tokens, if the layers use cache positions.

        Args:
            valid: returns bool [B, q], False for padding.

        Raises:
            UnsupportedGraph: the ids do not continue those of earlier tokens.
        """
        if not cache.layout.ranked:
            return
        self._positions = self._positions or PositionCheck(self._gm, self._sites)
        fits = self._positions.continues(arguments, valid(), cache.first, cache.valid_seen)
        if fits.is_cuda:
            cache.deferred_checks.add(fits)
        elif not bool(fits):
            raise UnsupportedGraph(self._positions.refusal)

    def check_rotation(self, cache: LayerCache, arguments: tuple[Any, ...], sizes: Callable[[], Sizes]) -> None:
        """Check that this graph rotates keys as the graph did that cached them, up to rounding.

        The check is for cache positions, where keys are rotated when they are read.

        Raises:
            UnsupportedGraph: a key is rotated differently.
        """
        if not cache.layout.ranked or cache.rotated_key is None:
            return
        rotated = self._rotation.rotated_key(arguments, sizes, cache.layout.device)
        if rotated is cache.rotated_key:
            return
        if rotated is None or not _are_equal_rotations(rotated, cache.rotated_key, cache.layout.dtype):
            raise UnsupportedGraph(f"{walk.source_line(self._sites[0].call)}: {OTHER_ANGLES}")
        cache.rotated_key = rotated


def _are_equal_rotations(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    tolerance = max(1e-4, 2 * torch.finfo(dtype).eps)
    return one.shape == other.shape and torch.allclose(one, other.to(one.device), rtol=tolerance, atol=tolerance)


SHOWN_AGAIN = (
    "the mask shows a token that it hid before, and that is therefore not in the cache; leave the mask of earlier "
    "tokens unchanged, or pass the whole conversation again"
)
HIDDEN_BEFORE = (
    "earlier masks hid padding, which is therefore not in the cache, and nothing proves that the mask of this call "
    "hides it too; pass rows of equal length, or one row at a time"
)


def describe_wrong_mask(
    gm: fx.GraphModule, sites: Sequence[AttentionSite], arguments: Sequence[Any], tokens: int
) -> str | None:
    """Describe what is wrong with an attention mask that does not have `tokens` columns; None if none is wrong.

    An encoder's mask, which no self-attention reads, has columns of its own.
    """
    masks = {each.mask for site in sites for each in site.all if isinstance(each.mask, fx.Node)}
    reads = {node for mask in masks for node in walk.ancestors(mask)}
    for node, given in zip(walk.placeholders(gm.graph), arguments, strict=True):
        if node not in reads or "attention_mask" not in node.name:
            continue
        if isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] != tokens:
            return (
                f"attention_mask has {given.shape[1]} columns, {tokens} are needed: one for each token that the cache "
                "has seen and for each new one"
            )
    return None


class PaddingTracker:
    """The padding among the new tokens of a step graph's calls.

    Attributes:
        inputs: for each site the inputs that mark padding: nodes, or argument indices for code of an artifact.
        indices: the argument index of each of these inputs.
    """

    def __init__(
        self, inputs: list[tuple[Any, ...]], indices: dict[Any, int], sites: Sequence[AttentionSite] = ()
    ) -> None:
        self.inputs, self.indices, self._sites = inputs, indices, sites

    @staticmethod
    def of(gm: fx.GraphModule, sites: list[AttentionSite]) -> PaddingTracker:
        """Return the tracker of a step graph."""
        holders, inputs = walk.placeholders(gm.graph), padding_inputs_of_sites(gm, sites, step=True)
        return PaddingTracker([*inputs], {node: holders.index(node) for nodes in inputs for node in nodes}, sites)

    def check_hidden(self, caches: list[LayerCache]) -> None:
        """Check that this step's mask can hide padding, which is not cached; some models mask only their prompts.

        Raises:
            UnsupportedGraph: padding was left out, and no input is known to mark padding in this graph.
        """
        for site, cache, nodes in zip(self._sites, caches, self.inputs, strict=True):
            if cache.absent.shape[1] and not nodes:
                raise UnsupportedGraph(f"{walk.source_line(site.call)}: {HIDDEN_BEFORE}")

    def unchanged_inputs(self, caches: list[LayerCache], arguments: tuple[Any, ...], queries: int) -> frozenset[int]:
        """Return the argument indices of the padding inputs that agree with their earlier values for all cached tokens.

        The rewritten graph takes these inputs to be one for every cached token; of other inputs, it looks up the entry
        of each slot.  On a GPU the host does not wait for the comparison: if it fails, a later step raises the error.

        Raises:
            CacheHandleError: the mask shows a token that was left out of the cache as padding.
        """
        known = set()
        for node, index in self.indices.items():
            cache = next(cache for cache, nodes in zip(caches, self.inputs, strict=True) if node in nodes)
            same, hides_absent = compare_with_cache(cache, arguments[index])
            if same.is_cuda and queries == 1:
                cache.deferred_checks.add(same & hides_absent)
                known.add(index)
                continue
            if not bool(hides_absent):
                raise CacheHandleError(SHOWN_AGAIN)
            if bool(same):
                known.add(index)
        return frozenset(known)

    def as_padding_inputs(self, known: frozenset[int]) -> PaddingInputs:
        """Return the inputs for a rewrite; `known` is a result of `unchanged_inputs`."""
        return PaddingInputs(tuple(self.inputs), frozenset(n for n, index in self.indices.items() if index in known))

    def valid_tokens(self, layer: int, cache: LayerCache, arguments: tuple[Any, ...], queries: int) -> Tensor:
        """Return bool [B, q] for a layer, False for padding among the new tokens."""
        columns = self._columns(self.inputs[layer], arguments, cache.seen, queries)
        return ~padding_from_columns(columns, cache.layout.batch, queries, cache.layout.device)

    def valid_rows(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> list[list[bool] | None]:
        """Return for each layer which rows of a single token are not padding, for policies with a clock.

        The entry of a layer is None if no row has padding.
        """
        if not any(cache.clocks for cache in caches):
            return [None] * len(caches)
        found = self._padding(caches, arguments, caches[0].seen, 1)
        return [None if padding is None else (~padding[:, 0]).tolist() for padding in found]

    def record_padding(self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int, queries: int) -> None:
        """Add the positions of new padding to the caches, except for one token on a GPU, which the device counts.

        Args:
            before: the number of tokens seen before the call.
        """
        for cache, padding in zip(caches, self._padding(caches, arguments, before, queries), strict=True):
            if padding is not None:
                cache.absent = torch.cat([cache.absent, true_indices(padding, before)], 1)

    def _padding(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int, queries: int
    ) -> list[Tensor | None]:
        """Return for each layer bool [B, q], True for padding; None without padding, or if the host would wait."""
        found: dict[tuple[Any, ...], Tensor | None] = {}
        for cache, nodes in zip(caches, self.inputs, strict=True):
            if nodes not in found:
                columns = self._columns(nodes, arguments, before, queries)
                waits = queries == 1 and bool(columns) and columns[0].is_cuda
                if waits or all(bool(column.all()) for column in columns):
                    found[nodes] = None
                else:
                    found[nodes] = padding_from_columns(columns, cache.layout.batch, queries, columns[0].device)
        return [found[nodes] for nodes in self.inputs]

    def _columns(self, nodes: tuple[Any, ...], arguments: tuple[Any, ...], before: int, queries: int) -> list[Tensor]:
        """Return the new tokens' entries in the inputs that mark padding, each [B or 1, q] or [q]."""
        return [new_columns(arguments[self.indices[node]], before, queries) for node in nodes]


def true_indices(mask: Tensor, start: int = 0) -> Tensor:
    """Return the indices where bool [B, n] is true: int64 [B, P], padded with -1."""
    most = int(mask.sum(-1).max())
    indices = torch.arange(start, start + mask.shape[1], device=mask.device)
    ordered = torch.where(mask, indices, INT64_MAX).sort(-1).values[:, :most]
    return torch.where(ordered == INT64_MAX, -1, ordered)


def compare_with_cache(cache: LayerCache, column: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the earlier tokens' entries in an input that marks padding with the contents of the cache.

    Args:
        column: the input, [B or 1, S] or [S].

    Returns:
        Two bools on the device: whether the input has one for every real token and zero for all others, and whether it
        has zero for every token that was left out of the cache as padding.
    """
    before, absent = column.reshape(-1, column.shape[-1])[:, : cache.seen], cache.absent
    shown = torch.zeros((), dtype=torch.bool, device=absent.device)
    if absent.shape[1]:
        row = torch.arange(absent.shape[0], device=absent.device)[:, None].clamp(max=before.shape[0] - 1)
        shown = ((before[row, absent.clamp(min=0)] != 0) & (absent >= 0)).any()
    same = ((before == 1).sum(-1) == cache.valid_seen) & ((before != 0).sum(-1) == cache.valid_seen)
    return same.all(), ~shown


def padding_from_columns(columns: list[Tensor], rows: int, queries: int, device: torch.device) -> Tensor:
    """Mark the tokens that are zero in any of the columns: bool [B, q]."""
    none = torch.zeros(rows, queries, dtype=torch.bool, device=device)
    return torch.stack([none, *((column == 0).expand(rows, -1) for column in columns)]).any(0)
