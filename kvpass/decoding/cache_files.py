"""Save the cache of a conversation to a file, and continue it in another process: `save_cache`, `load_cache`.

A file is one of safetensors: tensors, and a header of plain JSON.  Nothing in it is unpickled or run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from kvpass import model_access, policies, tensor_files
from kvpass.arguments import check_arguments
from kvpass.backend import Backend, backend
from kvpass.cache import serial
from kvpass.cache.handle import Handle, current_cache
from kvpass.cache.layer_cache import KeyOrValue, LayerCache
from kvpass.cache.model_cache import caches_in
from kvpass.decoding.conversations import Conversations, LoopState
from kvpass.decoding.loop import DecodeLoop
from kvpass.errors import CacheFileError, CacheHandleError, KVPassError
from kvpass.policies.base import Policy
from kvpass.runtime.backend_base import CACHE_SETTINGS
from kvpass.runtime.cache_changes import mark_addresses_static
from kvpass.runtime.model_identity import differences, digests, settings_of, weak_references
from kvpass.torch_private import dynamo

VERSION = 4
"""The version of the format; another one if an entry, its meaning, or `kvpass.cache.layer_cache.PROBED` changes."""
OLDER = "run the text of the conversation as a prompt and save the cache again"
KEY = "kvpass.cache"
"""The entry of the file's metadata that holds the header."""
_SCALARS = (bool, int, float, str, type(None))
_LOOP = "loop."

FilePath = str | os.PathLike[str]


@check_arguments
@torch.no_grad()
def save_cache(cache: Any, path: FilePath) -> None:
    """Write the cache of a conversation to a file, which `load_cache` reads in this or another process.

    The file appears when it is complete.  The cache itself may be continued.  After `load_cache`, tokens from before
    the save cannot be cropped.

    >>> kvpass.save_cache(out.cache, "talk.safetensors")
    >>> kvpass.save_cache(loop, "talk.safetensors")

    Args:
        cache: a model's cache object, its output, nested tuples of handles, or a DecodeLoop after a prompt, whose
            tokens that were not handed out yet and generator's state are saved too.
        path: of the safetensors file, which is replaced if it exists.

    Raises:
        CacheHandleError: there is no cache of kvpass, the cache cannot be continued, or it has more than plain values
            and tensors.
        CacheFileError: the file cannot be written.
        KVPassError: safetensors is not installed.
    """
    loop = cache if isinstance(cache, DecodeLoop) else None
    with contextlib.nullcontext() if loop is None else loop.lock:
        _write(cache, path, loop)


def _write(cache: Any, path: FilePath, loop: DecodeLoop | None) -> None:
    """Write a cache to a file; of `loop`, if it is one, whose calls in other threads wait."""
    state = loop.driver.state if loop is not None and isinstance(loop.driver, Conversations) else None
    if loop is not None and state is None:
        raise CacheHandleError(
            "a DecodeLoop is saved after a prompt, and not while it serves requests (`rows`): save the tokens of each "
            "GenerationOutput, to add them again as prompts, and the cache of a `prefix` that requests share"
        )
    cache_object = model_access.cache_in(cache)
    layers = caches_in(cache_object)
    if not layers:
        raise CacheHandleError(f"there is no kvpass cache in this {type(cache).__name__}: nothing can be saved")
    tensors: dict[str, Tensor] = {}
    chosen = cast("Backend", layers[0].backend)
    weights = {tensor for layer in layers for ref in layer.model_tensors if (tensor := ref()) is not None}
    header = dict(
        version=VERSION,
        settings=settings_json(chosen),
        weights=sorted(digests(weights)),
        config={} if loop is None else settings_of(loop.model),
        object=CacheObjectWriter(layers, chosen, tensors).encode(cache_object, "cache"),
        layers=[_layer_header(layer, f"{index}.", tensors) for index, layer in enumerate(layers)],
    )
    if state is not None:
        header["loop"], parts = state.to_saved()
        tensors.update({f"{_LOOP}{name}": tensor for name, tensor in parts.items()})
    tensor_files.write(path, tensors, KEY, header, CacheFileError)


@check_arguments
@torch.no_grad()
def load_cache(path: FilePath, compiled_or_model: Any) -> Any:
    """Return the cache of a conversation from a file that `save_cache` has written.

    The conversation continues as in the process that saved it: with equal logits, bit for bit on the same
    machine with the same versions.

    >>> cache = kvpass.load_cache("talk.safetensors", compiled)
    >>> out = compiled(next_id, cache=cache, use_cache=True)
    >>> kvpass.load_cache("talk.safetensors", loop)      # of a DecodeLoop, which continues
    >>> loop.generate(200)
    >>> requests.add(ids, prefix=kvpass.load_cache("talk.safetensors", requests))      # of a DecodeLoop with rows

    Args:
        path: of the file.
        compiled_or_model: the model with the weights that made the cache: compiled by kvpass with the settings that the
            cache was made under, or not yet compiled; or a DecodeLoop, if one was saved; or a DecodeLoop of requests,
            for the prefix of a request.

    Returns:
        The model's cache object with the cache of every layer, on the device of the model.

    Raises:
        CacheFileError: the file cannot be read, is damaged, is of another format, or was made under other settings or
            by another model; the message says what differs.
        KVPassError: safetensors is not installed.
    """
    with torch.inference_mode(False):  # steps outside of inference mode also write to the tensors
        header, tensors = tensor_files.read(path, KEY, "a cache of kvpass", CacheFileError)
    loop = compiled_or_model if isinstance(compiled_or_model, DecodeLoop) else None
    model = _module_of(compiled_or_model if loop is None else loop.model)
    try:
        tensor_files.check_version(header["version"], VERSION, OLDER, CacheFileError)
        _check_owner(loop, "loop" in header)
        chosen = _backend_for(header["settings"], compiled_or_model if loop is None else loop.backend)
        _check_model(header, model)
        layers = list(_layers_of(header, tensors, chosen, model))
        cache = CacheObjectReader(layers, tensors, model).decode(header["object"])
        if loop is not None and isinstance(loop.driver, Conversations):
            parts = {name.removeprefix(_LOOP): x for name, x in tensors.items() if name.startswith(_LOOP)}
            with loop.lock:
                loop.driver.state = LoopState.from_saved(loop, cache, header["loop"], parts)
        return cache
    except KVPassError as error:
        raise CacheFileError(f"{os.fspath(path)}: {error}") from error.__cause__
    except Exception as error:  # whatever a file makes of the code that reads it
        raise CacheFileError(
            f"{os.fspath(path)}: its header cannot be read ({type(error).__name__}: {error})"
        ) from error


def _check_owner(loop: DecodeLoop | None, of_loop: bool) -> None:
    """Raise CacheFileError if a loop's file is loaded for a model, or a model's file for a loop."""
    if loop is not None and loop.rows is not None:
        if of_loop:
            raise CacheFileError("it holds one conversation, and this DecodeLoop serves requests: leave out rows=")
    elif (loop is not None) != of_loop:
        has, wanted = ("a DecodeLoop", "one") if loop is None else ("no DecodeLoop", "its model")
        raise CacheFileError(f"it holds {has}: pass {wanted} to load_cache")


# -- settings and the model --------------------------------------------------------------------------------------------


def settings_json(backend: Backend) -> dict[str, Any]:
    return {name: getattr(backend, name) for name in CACHE_SETTINGS} | {"policy": policies.to_values(backend.policy)}


def _layer_header(layer: LayerCache, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a layer's part of the header, with its policy if that is not the backend's."""
    policy = None if layer.layout.policy is layer.backend.policy else policies.to_values(layer.layout.policy)
    return {**serial.to_header(layer, prefix, tensors), "policy": policy}


def policy_of(saved: Any) -> Policy:
    name, options, *unregistered = saved
    if unregistered:
        raise CacheFileError(
            f"it was made under a policy of {unregistered[0]}, not registered: pass the compiled model"
        )
    if any(isinstance(value, dict) for value in options.values()):
        raise CacheFileError(f"it was made under a policy {name!r} with trained weights: pass the compiled model")
    return policies.from_values(saved)


def _backend_for(saved: Mapping[str, Any], compiled: Any) -> Backend:
    """Return the backend that continues the cache: the model's if it is compiled, or one with the file's settings."""
    own_backend = compiled if isinstance(compiled, Backend) else dynamo.backend_of(compiled)
    if not isinstance(own_backend, Backend):
        others: dict[str, Any] = {name: saved[name] for name in CACHE_SETTINGS if name != "policy"}
        return backend(policy_of(saved["policy"]), **others)
    here = settings_json(own_backend)
    wrong = [
        f"{name} {saved[name]!r} in the file and {here[name]!r} here" for name in here if saved[name] != here[name]
    ]
    if wrong:
        raise CacheFileError(f"it was made under other settings: {'; '.join(wrong)}")
    return own_backend


def _module_of(compiled_or_model: Any) -> torch.nn.Module:
    """Return the module that a compiled model or function belongs to."""
    inner = dynamo.before_compilation(compiled_or_model)
    inner = getattr(inner, "__self__", inner)
    if not isinstance(inner, torch.nn.Module):
        raise CacheFileError(f"a {type(compiled_or_model).__name__} is not a model: pass the model that made the cache")
    return inner


def _check_model(header: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise CacheFileError unless the model has the configuration and the weights that made the cache."""
    differing = differences(header["config"], settings_of(model))
    if differing:
        raise CacheFileError(f"it was made by a model of another configuration: {', '.join(differing[:5])}")
    missing = set(header["weights"]) - digests(model.parameters())
    if missing:
        raise CacheFileError(
            f"it was made by other weights: {len(missing)} of {len(header['weights'])} weight tensors are not in this "
            f"{type(model).__name__}: load the checkpoint, in the dtype, that made the cache"
        )


def _layers_of(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], backend: Backend, model: torch.nn.Module
) -> Iterator[LayerCache]:
    saved_layers = header["layers"]
    weights = weak_references(model.parameters())
    for index, saved in enumerate(saved_layers):
        mine = {name.removeprefix(f"{index}."): x for name, x in tensors.items() if name.startswith(f"{index}.")}
        spec = saved["policy"]
        layer_policy = backend.policy if spec is None else backend.policy.for_layer(index, len(saved_layers))
        if spec is not None and policies.to_values(layer_policy) != spec:
            layer_policy = policy_of(spec)
        cache = serial.from_header(saved, mine, backend, layer_policy, model_access.device_of(model))
        cache.model_tensors = weights
        mark_addresses_static(cache.slots)
        yield cache


# -- the model's cache object ------------------------------------------------------------------------------------------


class CacheObjectWriter:
    """Encodes a model's cache object: handles by the index of their layer, tensors by name, and plain values."""

    def __init__(self, layers: list[LayerCache], backend: Backend, tensors: dict[str, Tensor]) -> None:
        self.index = {id(layer): index for index, layer in enumerate(layers)}
        self.backend, self.tensors = backend, tensors

    def encode(self, value: Any, where: str) -> Any:
        if isinstance(value, Handle):
            layer = self.index[id(current_cache(value, value.kv, self.backend))]
            return {"handle": [layer, value.kv, value.token_dim]}
        if isinstance(value, Tensor):
            self.tensors[f"object.{where}"] = value
            return {"tensor": f"object.{where}"}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, _SCALARS):
            return {"value": value}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.encode(each, f"{where}.{i}") for i, each in enumerate(value)]}
        if isinstance(value, dict) and all(isinstance(key, _SCALARS) for key in value):
            return {"dict": [[key, self.encode(each, f"{where}.{key}")] for key, each in value.items()]}
        layers = getattr(value, "layers", None)
        if isinstance(layers, list) and where == "cache":
            parts = [
                [type(x).__name__, {name: self.encode(part, f"layer.{i}.{name}") for name, part in vars(x).items()}]
                for i, x in enumerate(layers)
            ]
            return {"object": type(value).__name__, "layers": parts}
        raise CacheHandleError(
            f"the model's cache holds a {type(value).__name__} ({where}), neither a tensor nor a plain value: it "
            "cannot be saved; keep the conversation in one process, or save the text"
        )


class CacheObjectReader:
    """Rebuilds a model's cache object: makes an empty one, and fills its layers from the file."""

    def __init__(self, layers: list[LayerCache], tensors: Mapping[str, Tensor], model: torch.nn.Module) -> None:
        self.layers, self.tensors, self.model = layers, tensors, model

    def decode(self, encoded: Mapping[str, Any]) -> Any:
        (kind, value), *_ = encoded.items()
        if kind == "object":
            return self._object(value, encoded["layers"])
        readers: dict[str, Callable[[Any], Any]] = {
            "handle": lambda found: self._handle(*found),
            "tensor": lambda name: self.tensors[name].to(model_access.device_of(self.model)),
            "dtype": lambda name: torch.empty(0, dtype=getattr(torch, name)).dtype,
            "device": lambda _: model_access.device_of(self.model),
            "value": lambda plain: plain,
            "list": lambda items: [self.decode(each) for each in items],
            "tuple": lambda items: tuple(self.decode(each) for each in items),
            "dict": lambda items: {key: self.decode(each) for key, each in items},
        }
        return readers[kind](value)

    def _handle(self, layer: int, kv: KeyOrValue, token_dim: int = 2) -> Handle:
        if token_dim not in (1, 2):
            raise CacheFileError(f"it has tokens in dimension {token_dim!r}")
        return Handle.of(self.layers[layer], kv, token_dim)

    def _object(self, name: str, layers: list[Any]) -> Any:
        result = model_access.empty_cache(self.model)
        kinds, here = [kind for kind, _ in layers], [type(layer).__name__ for layer in getattr(result, "layers", ())]
        if type(result).__name__ != name or kinds != here:
            raise CacheFileError(
                f"it holds a {name} of {len(kinds)} layers, {', '.join(dict.fromkeys(kinds))}, and this model makes a "
                f"{type(result).__name__} of {len(here)}, {', '.join(dict.fromkeys(here))}"
            )
        for layer, (_, attributes) in zip(result.layers, layers, strict=True):
            for attribute, value in attributes.items():
                if hasattr(type(layer), attribute):
                    raise CacheFileError(f"it has a value for {attribute!r}, which every {type(layer).__name__} has")
                setattr(layer, attribute, self.decode(value))
        return result
