"""Prefill a prompt in chunks: each attends to the cached tokens and to itself, then the policy evicts (`prefill`).

Prompts then need memory for the budget and one chunk only, and time in proportion to their length.  In an empty cache
the remainder of the division into chunks joins the first chunk, which is less than twice as long as the others.  The
reason is that the prompt graph serves any length, while on a GPU each length of a later chunk needs its own graph.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.arguments import Positive, check_arguments, require
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.model_cache import caches_in, returns_growing_cache
from kvpass.decoding.model_call import ModelCall, with_logits
from kvpass.decoding.prompt_inputs import PaddingMask, Pin, TokenIds, padding_mask, pin_mask
from kvpass.errors import BudgetError, CacheHandleError
from kvpass.policies.pinned_tokens import Pins
from kvpass.runtime.calling.model_arguments import with_dynamic_length
from kvpass.runtime.model_identity import digests
from kvpass.torch_private import dynamo
from kvpass.user_budget import Budget

Logits = Literal["last", "all"]


@check_arguments
@torch.no_grad()
def prefill(
    compiled: Callable[..., Any],
    ids: TokenIds,
    attention_mask: PaddingMask | None = None,
    *,
    chunk: Positive,
    cache: Any = None,
    logits: Logits = "last",
    past_key_values: Any = None,
    pin: Pin | None = None,
    on_top: bool = False,
) -> Any:
    """Feed a prompt in chunks to a model that kvpass compiled, with a bounded cache between the chunks.

    >>> compiled = kvpass.compile(model, policy="h2o", budget=1024)
    >>> out = kvpass.prefill(compiled, ids, chunk=512)
    >>> out.logits                       # [B, 1, V]

    Args:
        compiled: `torch.compile(model, backend=kvpass.backend(...))`, or a model after `kvpass.compile`, whose forward
            is as in `DecodeLoop`.
        ids: int64 [B, T].
        attention_mask: [B, tokens seen before + T], 0 for padding, which must be on the left of each row; None for no
            padding among the new tokens.
        chunk: the number of tokens in a chunk, at least 1.
        cache: a cache of kvpass to continue, or an output that has one; None for an empty one.
        logits: "last" for the logits of the last token, [B, 1, V]; "all" for the logits of every token, [B, T, V].
        past_key_values: another name for `cache`.
        pin: the tokens of this prompt that are never evicted: a mask, bool [B, T], or spans (start, stop) of the real
            tokens of a row, one list for each row or one for all rows.  They stay pinned in later calls.
        on_top: cache the pinned tokens in addition to the budget and not as a part of it.  Every row then has slots for
            the budget and for a power of two that the largest number of pinned tokens fits into.

    Returns:
        The model's output for the last chunk, with these `logits`, and the cache under the model's own name; a named
        tuple of both if the model returns a tuple.

    Raises:
        PolicyError: an invalid argument, an unknown token, a cache under both names, or pins that are not allowed.
        CacheHandleError: the cache is not of kvpass, or the model is not compiled or does not continue it.
        UnsupportedGraph: the model cannot be rewritten, or returns no logits.
        BudgetError: an empty cache and a budget that is a share of the prompt, or pins that leave too little budget.
    """
    model_call = ModelCall.of(compiled)
    require(cache is None or past_key_values is None, "past_key_values", "a cache", "is another name for `cache`")
    cache = model_access.cache_in(past_key_values if cache is None else cache)
    ids = ids.long()
    mask = _whole_mask(ids, attention_mask, cache)
    model_call.check_padding(mask)
    model_call.check_vocabulary(ids)
    pinned = pin_mask(pin, on_top, mask[:, -ids.shape[1] :])
    parts: list[Tensor] = []
    for out in run_chunks(model_call, ids, mask, cache, chunk, int(logits == "last"), pinned, on_top):
        _check_bounded(out, compiled, model_call.name)
        if logits == "last":
            parts = [model_call.logits(out)[:, -1:]]
        else:
            parts.append(model_call.logits(out))
    return with_logits(out, torch.cat(parts, 1))


def _check_bounded(out: Any, compiled: Any, name: str) -> None:
    """Raise CacheHandleError for an output with a growing cache, unless the model was compiled with strict=False."""
    if returns_growing_cache(out) and getattr(dynamo.backend_of(compiled), "strict", True):
        raise CacheHandleError(
            f"{name} returned an ordinary cache, which grows: pass the model after kvpass.compile, or the result of "
            "torch.compile(model, backend=kvpass.backend(...))"
        )


def run_chunks(
    model_call: ModelCall,
    ids: Tensor,
    mask: Tensor,
    cache: Any,
    chunk: int | None,
    logits_to_keep: int = 1,
    pinned: Tensor | None = None,
    on_top: bool = False,
) -> Iterator[Any]:
    """Yield the model's output for each chunk of a prompt.

    Args:
        ids: int64 [B, T].
        mask: [B, tokens seen before + T], 0 for padding.
        chunk: the number of tokens in a chunk; None for the whole prompt in one call.
        logits_to_keep: see `ModelCall`.
        pinned: bool [B, T], the tokens to pin; None for none.
        on_top: see `prefill`.
    """
    fed, before = 0, mask.shape[1] - ids.shape[1]
    without_mask = before == 0 and bool(mask.all())  # attention with a mask takes twice the time in a prompt
    position = (mask.cumsum(-1) - 1).clamp(min=0)[:, before:]
    for count in chunk_lengths(ids.shape[1], chunk, before == 0):
        part, upto = slice(fed, fed + count), before + fed + count
        new_ids, seen_mask, new_position = map(with_dynamic_length, (ids[:, part], mask[:, :upto], position[:, part]))
        pins = None if pinned is None else Pins.of(pinned, fed, fed + count, on_top)
        out = model_call(new_ids, seen_mask, new_position, cache, logits_to_keep, without_mask and fed == 0, pins)
        cache, fed = model_access.cache_of_output(out), fed + count
        # The first prompt of a continued cache has converted a share to slots, so only a new cache is checked.
        for layer in caches_in(cache)[:1] if chunk is not None and before == 0 else []:
            refuse_share(layer.backend.budget)
        yield out


def run_to_last(outputs: Iterator[Any]) -> Any:
    """Return the last output, and release each earlier one when the next is made."""
    return collections.deque(outputs, maxlen=1).pop()


def chunk_lengths(tokens: int, chunk: int | None, first: bool) -> list[int]:
    """Return the lengths of the chunks of `tokens` tokens; a remainder joins the first chunk, or precedes the others.

    Args:
        first: whether the cache is empty, so that the first chunk runs on a prompt graph, which serves all lengths.
    """
    if chunk is None or tokens <= chunk:
        return [tokens]
    count, rest = divmod(tokens, chunk)
    if first or rest == 1:  # a call of one token is a decode step, on another graph
        return [chunk + rest, *[chunk] * (count - 1)]
    return [*([rest] if rest else []), *[chunk] * count]


def prefix_mask(cache: Any, cache_settings: Any, model: torch.nn.Module) -> Tensor:
    """Return the padding mask, int64 [B, tokens seen], of a prefilled cache that a loop is to continue.

    Args:
        cache_settings: the settings of the loop's backend, `Backend.cache_settings`.
        model: the loop's model; a copy of it may have made the cache.

    Raises:
        CacheHandleError: there is no cache of kvpass, or it was made under other settings or by other weights.
    """
    if cache is None:
        raise CacheHandleError("a prefix must be a cache of kvpass, as kvpass.prefill or kvpass.load_cache returns it")
    layer = _first_layer(cache)
    if layer.backend.cache_settings != cache_settings:
        raise CacheHandleError(f"this prefix was made by {layer.backend}: give the loop the same settings")
    own = {id(weight) for weight in model.parameters()}
    others = {
        weight for reference in layer.model_tensors if (weight := reference()) is not None and id(weight) not in own
    }
    if others and not digests(others) <= digests(model.parameters()):
        raise CacheHandleError("this prefix was made by other weights than the loop's: make it by the loop's model")
    return _mask_of_seen(layer)


def _whole_mask(ids: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    """Return the padding mask of all tokens, [B, tokens seen + T]; without one, new tokens are real."""
    if cache is None:
        return padding_mask(ids, mask, 0)
    layer = _first_layer(cache)
    if layer.layout.batch != len(ids):
        raise CacheHandleError(f"a prompt of {len(ids)} rows after a prefix of {layer.layout.batch}")
    if mask is None:
        mask = torch.cat([_mask_of_seen(layer), torch.ones_like(ids)], 1)
    return padding_mask(ids, mask, layer.length)


def _mask_of_seen(cache: LayerCache) -> Tensor:
    """Return the padding mask of the tokens that a cache has seen, int64 [B, tokens seen]."""
    mask = torch.ones(cache.layout.batch, cache.length + 1, dtype=torch.int64, device=cache.absent.device)
    return mask.scatter_(1, torch.where(cache.absent < 0, cache.length, cache.absent), 0)[:, : cache.length]


def _first_layer(cache: Any) -> LayerCache:
    """Return the first layer of a model's cache, or raise CacheHandleError for one without handles."""
    found = caches_in(cache)
    if not found:
        raise CacheHandleError(f"there is no kvpass cache in this {type(cache).__name__}; pass None for an empty one")
    return found[0]


def refuse_share(budget: Budget) -> None:
    """Raise BudgetError for a budget that is a share of the prompt, which chunks of a prompt cannot have."""
    if isinstance(budget, float):
        raise BudgetError(
            f"budget={budget}: a share of the prompt is not known before its last chunk; give a number of slots to "
            "prompts in chunks"
        )
