"""Time compilation in a fresh process, by depth, compared with stock torch.compile, with cold and warm caches.

A prompt of 64 tokens, two steps and a second prompt are timed from the first call on.  kvpass runs the first prompt
uncompiled, and compiles it at the second one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from tqdm import tqdm

import kvpass
from benchmarks import apart
from benchmarks.bounded import Case
from benchmarks.model import build, tokens
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from benchmarks.timing import timed
from kvpass import model_access

TITLE = "Compile time"
STATIC, DYNAMIC = "torch.compile, StaticCache", "torch.compile, DynamicCache"
DEPTHS: dict[str, tuple[int, ...]] = {
    STATIC: (4, 16, 32),
    DYNAMIC: (16,),
    "h2o": (4, 16, 32),
    **dict.fromkeys(("streaming", "tova", "buzz", "cascade", "d2o"), (16,)),
}
"""Numbers of layers to compile for each contender."""
PROMPT, ROOM = 64, 1024
OF_SHALLOW = 1.3  # h2o at the largest depth, relative to the smallest
OF_STOCK = {
    ("h2o", 16): 0.6,
    ("h2o", 32): 0.35,
    **{(name, 16): 0.8 for name in ("streaming", "buzz", "cascade", "d2o")},
}
FIRST_TOKEN = 10.0  # seconds to the first token in a second process, at the largest depth
SHALLOW, DEEP = 4, 32


def measure(settings: Settings) -> list[Row]:
    """Return rows of two processes for each contender and depth; the second finds the caches of the first."""
    depths = {STATIC: (4,), "h2o": (4,)} if settings.quick else DEPTHS
    pairs = [(name, layers) for name, each in depths.items() for layers in each]
    rows = []
    with tqdm(pairs, unit="pair", dynamic_ncols=True) as bar:
        for name, layers in bar:
            bar.set_description(f"compilation: {name}, {layers} layers")
            rows += _cold_and_warm(name, layers)
    return rows


def _cold_and_warm(name: str, layers: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for caches in ("cold", "warm"):
            environment, given = {"TORCHINDUCTOR_CACHE_DIR": folder}, {"name": name, "layers": layers}
            found = apart.run("benchmarks.compilation:first", environment=environment, **given)
            yield {"contender": name, "layers": layers, "caches": caches, **found}


@torch.inference_mode()
def first(name: str, layers: int) -> Row:
    """Return the seconds of a prompt, of two steps after it, and of a second prompt of the same length."""
    model = build(layers=layers)
    forward, begin = _contender(model, name)
    state: list[Any] = []

    def start() -> None:
        state[:] = [tokens(PROMPT), begin()]
        call()

    def call() -> None:
        out = model_access.call_model(forward, state[0], state[1], logits_to_keep=1)
        state[:] = [out.logits[:, -1:].argmax(-1), model_access.cache_of_output(out)]

    return {"prompt": timed(start), "steps": timed(call) + timed(call), "again": timed(start)}


def _contender(model: Any, name: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Return the compiled model, and a function that makes the first cache of a conversation."""
    if name == STATIC:
        return torch.compile(model), lambda: transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    if name == DYNAMIC:
        return torch.compile(model), lambda: None
    return torch.compile(model, backend=kvpass.backend(**Case(name).settings())), lambda: None


def _total(row: Row) -> float:
    return float(row["prompt"] + row["steps"] + row["again"])


def _found(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    """Return the cold and the warm row of each contender and depth."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["contender"], row["layers"]), {})[row["caches"]] = row
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    found = _found(rows)
    lines = [
        {
            "contender": name,
            "layers": layers,
            "prompt, s": pair["cold"]["prompt"],
            "two steps, s": pair["cold"]["steps"],
            "a second prompt, s": pair["cold"]["again"],
            "all, s": _total(pair["cold"]),
            "of StaticCache": _share(found, (name, layers), (STATIC, layers)),
            "warm: prompt, s": pair["warm"]["prompt"],
            "warm: all, s": _total(pair["warm"]),
        }
        for (name, layers), pair in found.items()
    ]
    return [Table(f"Prompts of {PROMPT} tokens and two steps in a fresh process, imports left out", lines)]


def _share(found: dict[tuple[str, int], dict[str, Row]], of: tuple[str, int], to: tuple[str, int]) -> float | None:
    """Return the seconds of one contender as a share of another, both with cold caches."""
    return _total(found[of]["cold"]) / _total(found[to]["cold"]) if of in found and to in found else None


def targets(rows: Sequence[Row]) -> list[Target]:
    found = _found(rows)
    deep, warm = ("h2o", DEEP), found.get(("h2o", DEEP), {}).get("warm")
    return [
        Target("compilation", f"h2o: {DEEP} layers, of {SHALLOW}", OF_SHALLOW, _share(found, deep, ("h2o", SHALLOW))),
        *(
            Target(
                "compilation",
                f"{name}: {layers} layers, of {STATIC}",
                limit,
                _share(found, (name, layers), (STATIC, layers)),
            )
            for (name, layers), limit in OF_STOCK.items()
        ),
        Target(
            "compilation",
            f"h2o: seconds to the first token in a second process, {DEEP} layers",
            FIRST_TOKEN,
            warm["prompt"] if warm else None,
        ),
    ]
