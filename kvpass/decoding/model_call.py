"""Call a model with the arguments that its forward takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.cache.model_cache import caches_in, is_cache_object
from kvpass.errors import CacheHandleError, LookupRangeError, PolicyError, UnsupportedGraph
from kvpass.policies.pinned_tokens import Pins
from kvpass.runtime.call_context import pinning
from kvpass.torch_private import dynamo

SPARE_ROWS = 2  # of a table of learned positions: OPT and BART begin theirs with two


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """A model and the arguments of a prompt or a step that its forward takes.

    Attributes:
        call: the model or its compiled version.
        parameter_names: the names of the parameters of its forward, and of a model that it wraps.
        cache_name: the keyword under which it takes its cache.
        name: its class, for errors.
        empty_cache: makes an empty cache; returns None for a model that makes its cache itself.
        vocabulary: the number of tokens that the model knows; None if the model does not report it.
    """

    call: Callable[..., Any]
    parameter_names: tuple[str, ...]
    cache_name: str
    name: str
    empty_cache: Callable[[], Any]
    vocabulary: int | None

    @staticmethod
    def of(call: Callable[..., Any], model: Any = None) -> ModelCall:
        """Return the call of a compiled model; `model` is the original, if it cannot be found from `call`."""
        model = dynamo.before_compilation(call) if model is None else model
        takes, name = model_access.keyword_names(model), model_access.cache_keyword(model)
        count = getattr(input_embedding(model), "num_embeddings", None)  # packed weights have another number of rows
        vocabulary = count if isinstance(count, int) else None
        empty_cache = functools.partial(model_access.empty_cache, model)
        return ModelCall(call, takes, name, type(model).__name__, empty_cache, vocabulary)

    def __call__(
        self,
        ids: Tensor,
        mask: Tensor,
        position: Tensor,
        cache: Any,
        logits_to_keep: int = 1,
        omit_mask: bool = False,
        pins: Pins | None = None,
    ) -> Any:
        """Call the model and return its output, with named parts if it is a tuple.

        Args:
            ids: int64 [B, q].
            mask: [B, tokens seen + q], 0 for padding.
            position: int64 [B, q], counted over the real tokens.
            cache: the cache to continue; None for an empty one.
            logits_to_keep: the number of last tokens for which to compute logits, 0 for all.
            omit_mask: whether to leave out mask and positions, for a prompt without padding.
            pins: the new tokens to pin.

        Raises:
            CacheHandleError: the returned cache does not count these tokens after the ones seen before, or it is not
                of kvpass and tokens were to be pinned in it.
        """
        inputs: dict[str, Any] = {} if omit_mask else dict(attention_mask=mask, position_ids=position)
        inputs["logits_to_keep"] = logits_to_keep
        named = {name: value for name, value in inputs.items() if name in self.parameter_names}
        cache = self.empty_cache() if cache is None else cache
        with pinning(pins):
            out = name_parts(self.call(ids, **{self.cache_name: cache}, use_cache=True, **named))
        found, fed, total = caches_in(model_access.cache_of_output(out)), ids.shape[1], mask.shape[1]
        if found and found[0].length != total:
            raise CacheHandleError(
                f"{self.name} was fed {fed} tokens after {total - fed}, and the cache that it returned counts "
                f"{found[0].length} tokens instead of {total}: the model does not continue the cache passed as "
                f"`{self.cache_name}`; let its forward take the cache under this name and return it"
            )
        if pins is not None and not found:
            raise CacheHandleError(f"pin: {self.name} returned no cache of kvpass: compile it with kvpass")
        return out

    def check_padding(self, mask: Tensor) -> None:
        """Raise PolicyError if the mask [B, T] has padding and the model takes no attention mask."""
        if "attention_mask" not in self.parameter_names and not bool(mask.all()):
            raise PolicyError(f"attention_mask: {self.name} takes none, so prompts cannot be padded")

    def logits(self, output: Any) -> Tensor:
        """Return the logits [B, n, vocabulary] in an output of a call, or raise UnsupportedGraph if it has none."""
        found = find_logits(output)
        if found is None:
            raise UnsupportedGraph(
                f"{self.name} returned a {type(output).__name__} in which no `logits` are found: let its forward "
                f"return an object with `logits` [B, tokens, vocabulary] and `{self.cache_name}`, or these two in a "
                "tuple"
            )
        return found

    def check_vocabulary(self, ids: Tensor) -> None:
        """Raise LookupRangeError for a token id outside of the vocabulary, as compiled code reads beyond a table.

        The check waits for the device, so prompts are checked and steps are not.
        """
        unknown = self.unknown_token(ids)
        if unknown is not None:
            raise LookupRangeError(f"ids: token {unknown} is not in the vocabulary of {self.vocabulary}")

    def unknown_token(self, ids: Tensor) -> int | None:
        """Return the lowest or highest of these token ids if it is outside of the vocabulary, else None."""
        low, high = (int(end) for end in ids.aminmax())
        above = self.vocabulary is not None and high >= self.vocabulary
        return low if low < 0 else high if above else None


class ModelOutput(NamedTuple):
    """The logits and the cache of a model that returns them in a tuple without names."""

    logits: Tensor
    cache: Any

    @property
    def past_key_values(self) -> Any:
        """Cache under the name that transformers used before 5.24."""
        return self.cache


def name_parts(output: Any) -> Any:
    """Name the logits and the cache in a tuple or list; return every other output unchanged.

    The cache is the only item with handles or layers, and the logits are the only floating-point tensor of three
    dimensions.  If several items can be either, the output stays unchanged too.
    """
    if not isinstance(output, (tuple, list)) or hasattr(output, "logits"):
        return output
    caches = [each for each in output if caches_in(each) or is_cache_object(each)]
    logits = [each for each in output if isinstance(each, Tensor) and each.is_floating_point() and each.ndim == 3]
    return ModelOutput(*logits, *caches) if len(logits) == len(caches) == 1 else output


def find_logits(output: Any) -> Tensor | None:
    """Return the logits [B, n, vocabulary] under their name in a model's output, or None."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) and found.ndim == 3 else None


def with_logits(output: Any, logits: Tensor) -> Any:
    """Return a model's output with other logits: the same object where its attributes can be set, else a copy."""
    if isinstance(output, Mapping) and not hasattr(output, "logits"):
        return {**output, "logits": logits}
    if isinstance(output, tuple):
        return output._replace(logits=logits)  # type: ignore[attr-defined]  # those without names have no logits
    try:
        output.logits = logits
    except dataclasses.FrozenInstanceError:
        return dataclasses.replace(output, logits=logits)
    return output


def input_embedding(model: Any) -> torch.nn.Module | None:
    """Return the module that embeds a model's token ids; None if the model does not report it."""
    try:
        embedding: torch.nn.Module | None = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return embedding


def learned_positions(model: Any) -> float:
    """Return the positions of a transformers model that learned a table of them; infinity for other models."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    inputs = input_embedding(model)
    if not isinstance(most, int) or inputs is None:
        return math.inf
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each is not inputs]
    return most if any(0 <= table.num_embeddings - most <= SPARE_ROWS for table in tables) else math.inf
