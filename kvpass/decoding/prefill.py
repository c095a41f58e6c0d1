"""Prompts in chunks: each attends to the held tokens and itself, then the policy evicts (`prefill`).

The memory of a prompt is then that of the budget and a chunk, however long it is, and its time grows as its length.
The first chunk takes the rest that the others leave, and has up to twice their length: a prompt graph serves all
lengths, while each length of a chunk on live slots is a graph of its own.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.arguments import Condition, Positive, checked
from kvpass.budget import Budget
from kvpass.cache.handle import caches_in
from kvpass.errors import BudgetError, CacheHandleError, PolicyError
from kvpass.policies.base import require
from kvpass.runtime.compiled_call import dense
from kvpass.torch_private import dynamo

Logits = Literal["last", "all"]


def are_token_ids(x: Tensor) -> bool:
    """Whether a tensor holds integers that can be read one by one."""
    return _has_values(x) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _has_values(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta


TokenIds = Annotated[
    Tensor,
    Condition(
        holds=lambda ids: ids.ndim == 2 and ids.numel() > 0 and are_token_ids(ids),
        message="must be an integer tensor of token ids, [rows, tokens], with one token at least",
    ),
]
PaddingMask = Annotated[
    Tensor,
    Condition(
        holds=lambda mask: mask.ndim == 2 and _has_values(mask) and bool(((mask == 0) | (mask == 1)).all()),
        message="must be a tensor [rows, tokens] of 1 for tokens and 0 for padding",
    ),
]


@dataclasses.dataclass(frozen=True)
class Caller:
    """A model's call with what it takes of what a prompt or a step has.

    Attributes:
        call: the model or what torch.compile made of it.
        takes: the names of its arguments.
        cache_name: the keyword under which it takes its cache.
        name: its class, for errors.
        begin: makes an empty cache, or None for a model that makes it itself.
        vocabulary: how many tokens the model knows; None if it does not say.
    """

    call: Callable[..., Any]
    takes: frozenset[str]
    cache_name: str
    name: str
    begin: Callable[[], Any]
    vocabulary: int | None

    @staticmethod
    def of(call: Callable[..., Any], model: Any = None) -> Caller:
        """From a compiled model; `model` is the one that was compiled, if that cannot be seen."""
        model = model or getattr(call, "_orig_mod", call)
        takes, name = cache_names.parameters(model), cache_names.keyword(model)
        return Caller(call, takes, name, type(model).__name__, lambda: dynamo.empty_cache(model), _vocabulary(model))

    def __call__(
        self, ids: Tensor, mask: Tensor, position: Tensor, cache: Any, keep: int = 1, plain: bool = False
    ) -> Any:
        """The model's own output.

        Args:
            ids: int64 [B, q]; position: int64 [B, q], among the real tokens.
            mask: [B, tokens seen + q].
            keep: of how many of the last tokens logits are wanted, 0 for all.
            plain: leave mask and positions to the model, for a prompt without padding.

        Raises:
            CacheHandleError: the returned cache does not count these tokens behind those that it had seen.
        """
        given = dict(logits_to_keep=keep) | ({} if plain else dict(attention_mask=mask, position_ids=position))
        named = {name: value for name, value in given.items() if name in self.takes}
        cache = self.begin() if cache is None else cache
        out = self.call(ids, **{self.cache_name: cache}, use_cache=True, **named)
        self._check_count(cache_names.returned(out), ids.shape[1], mask.shape[1])
        return out

    def _check_count(self, cache: Any, fed: int, total: int) -> None:
        """Raise CacheHandleError if a cache of kvpass counts another number of tokens than `total`."""
        found = caches_in(cache)
        if found and found[0].seen != total:
            raise CacheHandleError(
                f"{self.name} was fed {fed} tokens behind {total - fed}, and the cache that it returned counts "
                f"{found[0].seen} tokens instead of {total}: the model does not continue the cache passed as "
                f"`{self.cache_name}`; let its forward take the cache under this name and return it"
            )

    def check_padding(self, mask: Tensor) -> None:
        """Raise PolicyError for padding, [B, T], that the model could not be told of."""
        if "attention_mask" not in self.takes and not bool(mask.all()):
            raise PolicyError(f"attention_mask: {self.name} takes none, so prompts cannot be padded")

    def check_known(self, ids: Tensor) -> None:
        """Raise PolicyError for a token id that the model does not have.

        That waits for the device, so it is done for prompts and not for steps; compiled code would read beyond a table.
        """
        unknown = self.unknown_token(ids)
        if unknown is not None:
            raise PolicyError(f"ids: token {unknown} is not in the vocabulary of {self.vocabulary}")

    def unknown_token(self, ids: Tensor) -> int | None:
        """The lowest or highest of these token ids if the model does not have it."""
        low, high = (int(end) for end in ids.aminmax())
        above = self.vocabulary is not None and high >= self.vocabulary
        return low if low < 0 else high if above else None


def _vocabulary(model: Any) -> int | None:
    """How many tokens a model knows; None if it does not say."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    count = getattr(embedding, "num_embeddings", None)  # weights that are packed have another number of rows
    return count if isinstance(count, int) else None


@checked
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
) -> Any:
    """Feed a prompt in chunks to a model that kvpass compiled; the cache is bounded between them.

    With `chunk=1` it is token by token, as in decoding.  What is left when a prompt is cut into chunks goes in with the
    first one; `generate(..., prefill_chunk_size=n)` has it at the end.

    Args:
        compiled: `torch.compile(model, backend=kvpass.backend(...))`, or a model after `kvpass.compile`; it takes
            `input_ids`, `cache` or `past_key_values`, and `use_cache`, and `attention_mask` and `position_ids` if there
            is padding, and returns an object with `logits` and the cache under the same name.
        ids: int64 [B, T].
        attention_mask: [B, tokens seen before + T], 0 for padding, which comes first in each row; None for no padding.
        chunk: tokens that go in together, from 1 on.
        cache: a cache of kvpass to go on with, None for an empty one.
        logits: "last" for those of the last token, [B, 1, V]; "all" for those of every token, [B, T, V], which is what
            scoring a text wants, and takes memory as T does.
        past_key_values: another name for `cache`.

    Returns:
        The model's output for the last chunk, with these `logits`, and the cache under the model's own name.

    Raises:
        PolicyError: an argument that cannot be, a token outside of the vocabulary, or a cache under both names.
        CacheHandleError: the cache is not of kvpass, or the model does not go on with it.
        BudgetError: an empty cache and a budget that is a share of the prompt, of whose length the first chunk knows
            nothing.
    """
    caller = Caller.of(compiled)
    require(cache is None or past_key_values is None, "past_key_values", "a cache", "is another name for `cache`")
    cache = past_key_values if cache is None else cache
    seen = _seen(cache)
    ids = ids.long()
    mask = padding(ids, attention_mask, seen)
    caller.check_padding(mask)
    caller.check_known(ids)
    made = chunks(caller, ids, mask, cache, chunk, keep=int(logits == "last"))
    if logits == "last":
        last = last_of(made)
        last.logits = last.logits[:, -1:]
        return last
    every: list[Tensor] = []
    last = last_of(_noted(made, every))
    last.logits = torch.cat(every, 1)
    return last


def chunks(caller: Caller, ids: Tensor, mask: Tensor, cache: Any, chunk: int | None, keep: int = 1) -> Iterator[Any]:
    """The model's output for each chunk of a prompt.

    Args:
        ids: int64 [B, T]; mask: [B, tokens seen before + T].
        chunk: None for the whole prompt at once.
    """
    done, before = 0, mask.shape[1] - ids.shape[1]
    plain = before == 0 and bool(mask.all())  # a mask costs the attention of a prompt twice the time
    position = (mask.cumsum(-1) - 1).clamp(min=0)[:, before:]
    for count in lengths(ids.shape[1], chunk, before == 0):
        part, upto = slice(done, done + count), before + done + count
        given = (growing(ids[:, part]), growing(mask[:, :upto]), growing(position[:, part]), cache)
        out = caller(*given, keep, plain and done == 0)
        cache, done = cache_names.returned(out), done + count
        # What goes on with a cache has the slots that its prompt came to.
        for layer in caches_in(cache)[:1] if chunk is not None and before == 0 else []:
            check_budget(layer.backend.budget)
        yield out


def last_of(outputs: Iterator[Any]) -> Any:
    """The last of them, once all are made; the others are let go."""
    return collections.deque(outputs, maxlen=1).pop()


def _noted(outputs: Iterator[Any], logits: list[Tensor]) -> Iterator[Any]:
    """The same outputs; their logits are added to the list."""
    for output in outputs:
        logits.append(output.logits)
        yield output


def lengths(tokens: int, chunk: int | None, first: bool) -> list[int]:
    """Of the chunks of so many tokens; the rest goes with the first one of a prompt, and else comes first by itself."""
    if chunk is None or tokens <= chunk:
        return [tokens]
    count, rest = divmod(tokens, chunk)
    if first:
        return [chunk + rest, *[chunk] * (count - 1)]
    return [*([rest] if rest else []), *[chunk] * count]


def growing(x: Tensor) -> Tensor:
    """Return a tensor by itself in memory, whose last dimension Dynamo traces as dynamic."""
    x = dense(x)
    if x.shape[-1] > 1:
        dynamo.mark_growing(x, x.ndim - 1)
    return x


def _seen(cache: Any) -> int:
    """Tokens that a cache has seen.

    Raises:
        CacheHandleError: there is something in it and nothing of kvpass.
    """
    if cache is None:
        return 0
    found = caches_in(cache)
    if not found:
        raise CacheHandleError(f"there is no kvpass cache in this {type(cache).__name__}; pass none for an empty one")
    return found[0].seen


def check_budget(budget: Budget) -> None:
    """Raise BudgetError for a budget that chunks of a prompt cannot have."""
    if isinstance(budget, float):
        raise BudgetError(
            f"budget={budget}: a share of the prompt is not known before all of it is; give a number of slots to "
            "prompts that come in chunks"
        )


def padding(ids: Tensor, mask: Tensor | None, seen: int) -> Tensor:
    """The padding mask, int64 [B, seen + T], of prompts [B, T] behind so many tokens.

    Raises:
        PolicyError: a mask of other tokens, or padding that does not come first in its row of the prompts.
    """
    wanted = (len(ids), seen + ids.shape[1])
    if mask is None:
        return torch.ones(wanted, dtype=torch.int64, device=ids.device)
    require(tuple(mask.shape) == wanted, "attention_mask", tuple(mask.shape), f"must be {wanted}: all tokens so far")
    mask = mask.to(ids.device, torch.int64)
    behind = (mask[:, seen:].diff(dim=-1) < 0).any(-1).tolist()
    if any(behind):
        row = behind.index(True)
        raise PolicyError(f"attention_mask: row {row} has padding behind a token; pad prompts on the left")
    return mask
