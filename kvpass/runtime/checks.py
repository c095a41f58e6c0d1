"""Check that a call continues the conversation in its caches: layers, position ids and the rotation of keys."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture import projections
from kvpass.capture.canonical import AttentionSite, attention_calls
from kvpass.capture.rotary import find_rotary, strip_reshapes
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.fx import splicing, walk
from kvpass.fx.shapes import SizeResolver
from kvpass.rewrite.rotary_subgraph import RotaryProbe
from kvpass.runtime import model_identity
from kvpass.torch_private import dynamo
from kvpass.torch_private.tensors import write_count

OWN_POSITIONS = (
    "the position ids do not increase by one over the real tokens of a row, from call to call, and cached tokens are "
    "numbered 0, 1, 2, ... without gaps: leave position_ids out, or pass positions='absolute'"
)
PADDING_BETWEEN = (
    "the model's own position ids do not increase by one over the real tokens of a row, for example because they count "
    "padding in between, but kvpass numbers cached tokens 0, 1, 2, ... without gaps: pad on the left, pass "
    "position_ids that count real tokens, or pass positions='absolute'"
)
OTHER_STARTS = (
    "position ids of several rotary embeddings begin at different numbers in a row, but kvpass gives a cached token "
    "one number for all of them: use positions='absolute'"
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

    def __init__(self, canonical_gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        rotaries = [find_rotary(site) for site in sites]
        nodes = list(dict.fromkeys(strip_reshapes(rotary.position) for rotary in rotaries if rotary))
        self._are_arguments = [node.op == "placeholder" for node in nodes]
        # One first id is recorded for each row: the first of the model's own ids, if it makes ids.
        self._from_zero = [each and not all(self._are_arguments) for each in self._are_arguments]
        self._module = splicing.extract(canonical_gm, nodes)

    def first_ids(self, arguments: tuple[Any, ...], valid: Tensor) -> Tensor | None:
        """Return the position id of each row's first real token, int64 [B]; None if no ids rotate keys.

        Args:
            valid: bool [B, q], False for padding.

        Raises:
            UnsupportedGraph: the ids of a row do not increase by one, several rotary embeddings begin at different
                ids, or ids of the caller do not begin at 0 in a model that also makes ids itself.
        """
        result = None
        for ids, from_zero in zip(self._ids(arguments, valid), self._from_zero, strict=True):
            offsets = _offsets(ids, valid)
            first_ids = torch.where(valid.any(-1), offsets.gather(-1, valid.long().argmax(-1, keepdim=True))[:, 0], 0)
            if not bool(_is_constant(offsets, valid, torch.zeros_like(first_ids) if from_zero else first_ids)):
                raise UnsupportedGraph(self.refusal)
            if from_zero:
                continue
            if result is not None and not torch.equal(result, first_ids):
                raise UnsupportedGraph(OTHER_STARTS)
            result = first_ids
        return result

    def continues(self, arguments: tuple[Any, ...], valid: Tensor, first_ids: Tensor | None, seen: Tensor) -> Tensor:
        """Return whether a step's ids continue the ids of each row's earlier real tokens; a bool on the device.

        Args:
            valid: bool [B, q], False for padding.
            first_ids: the result of the method `first_ids`; None if the rows come from several prompts, in which ids of
                the caller begin at 0.
            seen: the number of earlier real tokens, int64 [B].
        """
        fits = torch.ones((), dtype=torch.bool, device=valid.device)
        for ids, from_zero, is_argument in zip(
            self._ids(arguments, valid), self._from_zero, self._are_arguments, strict=True
        ):
            begin = torch.zeros_like(seen) if from_zero or (first_ids is None and is_argument) else first_ids
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


def _is_constant(offsets: Tensor, valid: Tensor, expected: Tensor) -> Tensor:
    """Return whether the offsets [B, q] of real tokens equal the expected offset of their row [B]."""
    return ((offsets == expected.to(offsets.device)[:, None]) | ~valid).all()


class RotationCheck:
    """The rotation of one key by a graph, computed again when a tensor that it reads has changed.

    A tensor has changed if it was replaced or written to in place.  Tensors of inference mode do not count writes.
    """

    def __init__(self, canonical_gm: fx.GraphModule, sites: Sequence[AttentionSite]) -> None:
        self._make: Callable[[SizeResolver], RotaryProbe] | None = functools.partial(RotaryProbe, canonical_gm, sites)
        self._probe: RotaryProbe | None = None
        self._last: tuple[list[tuple[int, weakref.ref[Tensor], int]], Tensor | None] | None = None

    def rotated_key(
        self, arguments: Sequence[Any], sizes: Callable[[], SizeResolver], device: torch.device
    ) -> Tensor | None:
        """Return `RotaryProbe.run`, the same tensor as long as nothing changes."""
        last = self._last  # another thread may replace it
        if last is not None and all(
            arguments[index] is reference() and write_count(arguments[index]) == version
            for index, reference, version in last[0]
        ):
            return last[1]
        with dynamo.compile_lock():
            if self._make is not None:
                self._probe, self._make = self._make(sizes()), None  # which releases the graph
        assert self._probe is not None
        read = [(index, weakref.ref(arguments[index]), write_count(arguments[index])) for index in self._probe.indices]
        try:
            rotated = self._probe.run(arguments, device)
        except RuntimeError:
            if last is None:
                raise
            rotated = torch.full((1,), torch.nan)  # a tensor of another shape, which equals no other rotation
        self._last = read, rotated
        return rotated


class StepVerifier:
    """The checks of one step graph."""

    def __init__(self, canonical_gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        self._canonical_gm, self._sites = canonical_gm, sites
        self._projection_indices = [projections.key_projection_indices(site) for site in sites]
        self._positions: PositionCheck | None = None
        self._rotation = RotationCheck(canonical_gm, sites)

    def check_caches_match_layers(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> None:
        """Check that each cache belongs to the layer that reads it, and has the prompt's window.

        The tensors that project its keys identify a layer, for models whose layers are separate graphs.

        Raises:
            CacheHandleError: a cache is of another layer or model, or its heads are sharded differently.
            UnsupportedGraph: the windows differ.
        """
        for site, cache, indices in zip(self._sites, caches, self._projection_indices, strict=True):
            weights = [arguments[index] for index in indices]
            if model_identity.belongs_to_other_layer(cache.key_projections, weights):
                raise CacheHandleError(
                    f"{walk.source_line(site.call)}: the caches of layers were exchanged: this layer received the "
                    "cache of another layer, or of a model with other weights"
                )
            cache.key_projections = model_identity.weak_references(weights) or cache.key_projections
            if site.sharding != cache.layout.sharding:
                raise CacheHandleError(
                    f"{walk.source_line(site.call)}: the cache was made with its heads sharded over processes as "
                    f"{cache.layout.sharding}, and this step has {site.sharding}: run both by the same model"
                )
        for site, cache in zip(self._sites, caches, strict=True):
            if site.window != cache.window:
                here, before = ("all" if n is None else f"the last {n}" for n in (site.window, cache.window))
                why = f"this call stores {here} of the layer's tokens, and the prompt stored {before}"
                cut = "let every call cut the cache by the same subscript, as k[:, :, -n:]"
                whole = "leave the cache whole and hide old tokens in the attention mask"
                walk.refuse(site.call, f"{why}: {cut}, or {whole}")

    def check_positions(self, cache: LayerCache, arguments: tuple[Any, ...], valid: Callable[[], Tensor]) -> None:
        """Check that the position ids count the real tokens, if the layers use cache positions.

        Args:
            valid: returns bool [B, q], False for padding.

        Raises:
            UnsupportedGraph: the ids do not continue the ids of earlier tokens.
        """
        if not cache.layout.stores_unrotated_keys:
            return
        self._positions = self._positions or PositionCheck(self._canonical_gm, self._sites)
        fits = self._positions.continues(arguments, valid(), cache.first_ids, cache.slots.seen)
        if fits.is_cuda:
            cache.deferred_checks.add(fits, UnsupportedGraph(self._positions.refusal))
        elif not bool(fits):
            raise UnsupportedGraph(self._positions.refusal)

    def check_rotation(self, cache: LayerCache, arguments: tuple[Any, ...], sizes: Callable[[], SizeResolver]) -> None:
        """Check that this graph rotates keys like the graph that cached them, up to rounding.

        The check is for cache positions, where keys are rotated when they are read.

        Raises:
            UnsupportedGraph: a key is rotated differently.
        """
        if not cache.layout.stores_unrotated_keys or cache.rotated_key is None:
            return
        rotated = self._rotation.rotated_key(arguments, sizes, cache.layout.device)
        if rotated is cache.rotated_key or rotated is cache.equal_rotated_key:
            return
        if rotated is None or not _are_equal_rotations(rotated, cache.rotated_key, cache.layout.dtype):
            walk.refuse(self._sites[0].call, OTHER_ANGLES)
        cache.equal_rotated_key = rotated  # compared with the prompt's, because small differences would add up


def _are_equal_rotations(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    tolerance = max(1e-4, 2 * torch.finfo(dtype).eps)
    return one.shape == other.shape and torch.allclose(one, other.to(one.device), rtol=tolerance, atol=tolerance)


def describe_wrong_mask(
    canonical_gm: fx.GraphModule, sites: Sequence[AttentionSite], arguments: Sequence[Any], tokens: int
) -> str | None:
    """Describe an attention mask whose number of columns is not `tokens`; return None if all masks fit.

    An encoder's mask, which no self-attention reads, has other columns.
    """
    masks = {each.mask for each in attention_calls(sites) if isinstance(each.mask, fx.Node)}
    reads = {node for mask in masks for node in walk.ancestors(mask)}
    for node, argument in zip(walk.placeholders(canonical_gm.graph), arguments, strict=True):
        if node not in reads or "attention_mask" not in node.name:
            continue
        if isinstance(argument, Tensor) and argument.ndim == 2 and argument.shape[1] != tokens:
            return (
                f"attention_mask has {argument.shape[1]} columns, but needs {tokens}: one for each token that the "
                "cache has seen and for each new one"
            )
    return None
