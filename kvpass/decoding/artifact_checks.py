"""Compare the versions, the processor and the model of an export with those of the process that loads it."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpass import versions
from kvpass.decoding.recording import named_tensors, tensor_names
from kvpass.errors import ArtifactError
from kvpass.runtime.model_identity import differences, digest, settings_of
from kvpass.torch_private import exported_code


def check(manifest: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise ArtifactError unless this process and this model can run the code of an artifact."""
    _check_same(manifest["made_by"], versions_here(), "was exported with", "this process has")
    _check_processor(manifest["processor"])
    _check_model(manifest["model"], model)


def versions_here() -> dict[str, str | None]:
    """Return the versions that exported code depends on."""
    return {
        "torch": torch.__version__,
        "transformers": versions.installed_version("transformers"),
        "kvpass": f"{versions.installed_version('kvpass')} ({_sources()[:12]})",
        "python": f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}",
    }


def _sources() -> str:
    """Return a digest of kvpass's own sources: a manifest has the indices that they work with."""
    result, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.cpp"))):
        if path.relative_to(root).parts[0] != "apps":
            result.update(path.read_bytes())
    return result.hexdigest()


def processor_here() -> dict[str, Any]:
    """Return the facts about the processor and the threads that exported code depends on."""
    return {
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "flags": sorted(exported_code.flags_of_processor()),
        "threads": torch.get_num_threads(),
    }


def _check_same(saved: Mapping[str, Any], here: Mapping[str, Any], was: str, now: str) -> None:
    """Raise ArtifactError for facts that differ; `was` and `now` begin the two parts of the message."""
    wrong = [name for name in saved if saved[name] != here.get(name)]
    if wrong:
        listed = "; ".join(f"{name} {saved[name]}, and {now} {here.get(name)}" for name in wrong)
        raise ArtifactError(f"{was} {listed}: export it again")


def _check_processor(saved: Mapping[str, Any]) -> None:
    """Raise ArtifactError unless this processor runs the code of the export, with as many threads."""
    here = processor_here()
    missing = sorted(set(saved["flags"]) - set(here["flags"]))
    if missing:
        raise ArtifactError(f"was exported for a processor with {', '.join(missing[:6])}, which this one has not")
    if saved["threads"] != here["threads"]:
        raise ArtifactError(
            f"was exported for {saved['threads']} thread(s), and this process has {here['threads']}: call "
            f"torch.set_num_threads({saved['threads']}) first"
        )
    _check_same({"vectors": saved["vectors"]}, here, "was exported for a processor with", "this one has")


def model_entry(model: torch.nn.Module) -> dict[str, Any]:
    """Return what an artifact's manifest has about the model."""
    return {
        "class": type(model).__name__,
        "config": settings_of(model),
        "weights": {tensor_names(model)[id(x)]: digest(x) for x in model.parameters()},
        "tensors": {name: _shape(tensor) for name, tensor in named_tensors(model)},
    }


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {list(tensor.stride())} {tensor.device}"


def _check_model(saved: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise ArtifactError unless the model has the class, the configuration and the weights of the export."""
    if type(model).__name__ != saved["class"]:
        raise ArtifactError(f"is for a {saved['class']}, not for a {type(model).__name__}")
    found = differences(saved["config"], settings_of(model))
    if found:
        raise ArtifactError(f"is for a model of another configuration: {', '.join(found[:5])}")
    tensors = dict(named_tensors(model))
    check_tensors(saved["tensors"], tensors)
    others = [name for name, result in saved["weights"].items() if digest(tensors[name]) != result]
    if others:
        raise ArtifactError(f"is for other weights: {', '.join(others[:3])} differ, {len(others)} in all")


def check_tensors(saved: Mapping[str, str], here: Mapping[str, Tensor]) -> None:
    """Raise ArtifactError unless the model's tensors have the shapes, strides and dtypes of the export."""
    wrong = [name for name, shape in saved.items() if name not in here or _shape(here[name]) != shape]
    if wrong:
        name = wrong[0]
        has = _shape(here[name]) if name in here else "none"
        raise ArtifactError(f"is for a model whose {name} is {saved[name]}, and here it is {has}")
