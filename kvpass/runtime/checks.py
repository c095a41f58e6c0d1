"""Checks that a call of a step graph continues the conversation in its caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.rotary import find_rotary, unreshaped
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.fx import splicing, walk
from kvpass.fx.shapes import Sizes
from kvpass.rewrite.rotary_slice import probe_rotaries
from kvpass.runtime import model_identity
from kvpass.runtime.model_identity import SeenTensors

OWN_POSITIONS = (
    "the position ids are not 0, 1, 2, ... over the real tokens of a row, and held tokens are numbered by their rank "
    "instead: leave position_ids out, or pass positions='absolute'"
)
PADDING_BETWEEN = (
    "the position ids that the model makes do not go on one by one over the real tokens of a row, as where padding "
    "between these counts, and held tokens are numbered by their rank instead: pad on the left, give position_ids that "
    "count real tokens, or pass positions='absolute'"
)
OTHER_ANGLES = (
    "this call rotates keys by other angles than the calls before, as where the length decides on the frequencies, and "
    "all held keys are rotated when they are read: use positions='absolute'"
)


class PositionCheck:
    """A check that the position ids which rotate the keys of a graph are consecutive.

    The ids are computed from the arguments of each call.  The check is for layers with cache positions, which replace
    position ids by the rank among cached tokens.  This keeps the distances between real tokens only if the ids of a row
    increase by one, from any first id.
    """

    def __init__(self, gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        rotaries = [find_rotary(site) for site in sites]
        nodes = list(dict.fromkeys(unreshaped(rotary.position) for rotary in rotaries if rotary))
        self._given = [node.op == "placeholder" for node in nodes]
        self._module = splicing.computing(gm, nodes)

    def first(self, arguments: tuple[Any, ...], valid: Tensor) -> Tensor | None:
        """Return the position id of each row's first real token, int64 [B]; None if no ids rotate keys.

        Args:
            valid: bool [B, q], False for padding.

        Raises:
            UnsupportedGraph: the ids of a row do not increase by one, or ids from the caller begin above 0.
        """
        first = None
        for ids, given in zip(self._ids(arguments, valid), self._given, strict=True):
            offsets = _offsets(ids, valid)
            first = torch.where(valid.any(-1), offsets.gather(-1, valid.long().argmax(-1, keepdim=True))[:, 0], 0)
            if not bool(_is_constant(offsets, valid, torch.zeros_like(first) if given else first)):
                raise UnsupportedGraph(self.refusal)
        return first

    def go_on(self, arguments: tuple[Any, ...], valid: Tensor, first: Tensor | None, seen: Tensor) -> Tensor:
        """Return whether the ids of a step continue those of each row's earlier real tokens; a bool on the device.

        Args:
            valid: bool [B, q], False for padding.
            first: the result of the method `first`; None if the rows come from several prompts.
            seen: the number of earlier real tokens, int64 [B].
        """
        fits = torch.ones((), dtype=torch.bool, device=valid.device)
        for ids, given in zip(self._ids(arguments, valid), self._given, strict=True):
            begin = torch.zeros_like(seen) if given else first
            if begin is not None:
                fits = fits & _is_constant(_offsets(ids, valid), valid, begin + seen)
        return fits

    @property
    def refusal(self) -> str:
        """Error message for ids that are not consecutive."""
        return OWN_POSITIONS if any(self._given) else PADDING_BETWEEN

    def _ids(self, arguments: tuple[Any, ...], valid: Tensor) -> list[Tensor]:
        """Return the position ids of each distinct rotary embedding, as [B or 1, q]."""
        queries = valid.shape[1]
        made = [ids if ids.shape[-1] == queries or ids.ndim != 2 else ids.T for ids in self._module(*arguments)]
        return [ids.reshape(-1, queries).to(valid.device) for ids in made]


def _offsets(ids: Tensor, valid: Tensor) -> Tensor:
    """Return by how much ids [B or 1, q] exceed the rank among the real tokens of the call, int64 [B, q]."""
    return ids - (valid.long().cumsum(-1) - 1)


def _is_constant(offsets: Tensor, valid: Tensor, wanted: Tensor) -> Tensor:
    """Return whether the offsets [B, q] of real tokens equal the wanted offset of their row [B]."""
    return ((offsets == wanted.to(offsets.device)[:, None]) | ~valid).all()


class StepVerifier:
    """The checks of one step graph."""

    def __init__(self, gm: fx.GraphModule, sites: list[AttentionSite], stepped: SeenTensors) -> None:
        """
        Args:
            stepped: the tensors that make the keys of layers which have run a step.
        """
        self._gm, self._sites, self._stepped = gm, sites, stepped
        self._projecting = [model_identity.projecting(site) for site in sites]
        self._positions: PositionCheck | None = None
        self._angles: Tensor | None = None

    def check_layers(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> None:
        """Check that each cache belongs to the layer that reads it, and is cut to as many last tokens as in the prompt.

        A layer is known by the tensors that project its keys, for models whose layers are graphs of their own.

        Raises:
            CacheHandleError: a cache is of another layer or model, or its heads are sharded differently.
            UnsupportedGraph: the windows differ.
        """
        for site, cache, indices in zip(self._sites, caches, self._projecting, strict=True):
            weights = [arguments[index] for index in indices]
            self._stepped.add(weights)
            if model_identity.made_elsewhere(cache.weights, weights, self._stepped):
                raise CacheHandleError(
                    f"{walk.source_line(site.call)}: the caches of layers were exchanged: what was given here is of "
                    "another layer, or of another copy of the model"
                )
            if site.spread != cache.layout.spread:
                raise CacheHandleError(
                    f"{walk.source_line(site.call)}: the cache was made with its heads spread over processes as "
                    f"{cache.layout.spread}, and this step has {site.spread}; run both by the same model"
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
        fits = self._positions.go_on(arguments, valid(), cache.first, cache.valid_seen)
        if fits.is_cuda:
            cache.deferred_checks.add(fits)
        elif not bool(fits):
            raise UnsupportedGraph(self._positions.refusal)

    def check_angles(self, cache: LayerCache, arguments: tuple[Any, ...], sizes: Callable[[], Sizes]) -> None:
        """Check that this graph rotates keys by the same angles as the graph that cached them, up to rounding.

        The check is for cache positions, where keys are rotated when they are read.

        Raises:
            UnsupportedGraph: the angles differ.
        """
        if not cache.layout.ranked or cache.angles is None or cache.angles is self._angles:
            return
        if self._angles is None:
            self._angles = probe_rotaries(self._gm, self._sites, sizes(), arguments, cache.layout.device)
        if self._angles is None or not _alike(self._angles, cache.angles):
            raise UnsupportedGraph(f"{walk.source_line(self._sites[0].call)}: {OTHER_ANGLES}")
        cache.angles = self._angles


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other.to(one.device), rtol=1e-2, atol=1e-2)
