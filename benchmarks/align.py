"""Compare KV-Align with recomputation, and with sinks and a window.

    python -m benchmarks.align --model kvpass/apps/data/tiny-gpt2 \
        --aligner kvpass/apps/data/tiny-gpt2-align/direct.safetensors kvpass/apps/data/tiny-gpt2-align/paper.safetensors

For each window M, over the same labels of the same documents:

- recompute: every token is predicted from a forward over it and the M tokens before it, from position 0 on;
- window: 4 sinks and the last M - 4 tokens, positions count cached tokens, nothing is repaired;
- streaming, for rotary models: the same tokens, but keys are stored unrotated, and rotated at read;
- one line for each aligner.

Perplexity is measured on a batch of documents token by token, in the rewritten graphs, without a compiler or with
`--inner inductor`, which is faster for large models. Time per token is measured afterwards: one row, Inductor, methods
in turns of 16 tokens. It is the median over all turns, so that with --every 8 each turn holds two repairs. "closed" is
the share of the gap in log-perplexity between window and recompute.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import kvpass
from benchmarks import books
from kvpass import model_access
from kvpass.apps import corpus, models
from kvpass.policies import aligners
from kvpass.policies.aligners.scope import scope_of
from kvpass.policies.base import Policy
from kvpass.policies.kv_align import KVAlign
from kvpass.policies.streaming import Streaming

Policies = dict[str, Policy]
Row = dict[str, float]
Results = dict[str, dict[str, Row]]
"""Rows by window, then by method."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the comparison.

    The predicted tokens are skip + 1 to skip + labels of `rows` documents. Times are taken in `turns`. Perplexity is
    measured with the compiler `inner`.
    """

    rows: int
    skip: int
    labels: int
    turns: int
    inner: str

    @property
    def length(self) -> int:
        return self.skip + self.labels + 1


def prose() -> list[str]:
    """Return text other than source code: the docstrings of torch.nn's modules."""
    classes = [getattr(torch.nn, name) for name in sorted(dir(torch.nn)) if name[0].isupper()]
    found = [inspect.getdoc(cls) or "" for cls in classes if isinstance(cls, type)]
    return ["\n\n".join(text for text in dict.fromkeys(found) if len(text) > 400)]


TEXTS: dict[str, Callable[[], list[str]]] = {
    "held-out": lambda: corpus.read(corpus.held_out_files()),
    "prose": prose,
    "books": lambda: corpus.read(books.paths()),
}


def tokens_of(chosen: models.LoadedModel, texts: list[str], settings: Settings) -> Tensor:
    """Return tokens of documents, int64 [rows, skip + labels + 1]."""
    return torch.tensor(corpus.documents(chosen.encode(texts), settings.rows, settings.length, chosen.bos))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each row, float64 [B]."""
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none").double()


@torch.inference_mode()
def recomputed(model: Any, ids: Tensor, window: int, settings: Settings) -> float:
    """Return the mean loss in nats of predicting each token from a window before it."""
    losses = []
    for t in tqdm(range(settings.skip, settings.length - 1), desc=f"recompute {window}", leave=False):
        logits = model(ids[:, t - window : t + 1], use_cache=False, logits_to_keep=1).logits[:, -1]
        losses.append(loss_of(logits, ids[:, t + 1]))
    return float(torch.stack(losses).mean())


@torch.inference_mode()
def streamed(model: Any, ids: Tensor, policy: Policy, window: int, settings: Settings) -> float:
    """Return the mean loss in nats of a stream under a policy, over the same labels."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend(policy, budget=window, inner=settings.inner))
    out = compiled(ids[:, :window], use_cache=True)
    losses = []
    for t in tqdm(range(window, settings.length - 1), desc=f"{policy.name} {window}", leave=False):
        out = model_access.call_model(compiled, ids[:, t : t + 1], model_access.cache_of_output(out))
        if t >= settings.skip:
            losses.append(loss_of(out.logits[:, -1], ids[:, t + 1]))
    return float(torch.stack(losses).mean())


def loss_under(policy: Policy | None, model: Any, ids: Tensor, window: int, settings: Settings) -> float:
    """Return the mean loss in nats under a policy; None recomputes."""
    if policy is None:
        return recomputed(model, ids, window, settings)
    return streamed(model, ids, policy, window, settings)


def recomputing(model: Any, ids: Tensor, window: int) -> Callable[[], None]:
    """Return a compiled step of recomputation; each call is one token."""
    compiled = torch.compile(lambda x: model(x, use_cache=False, logits_to_keep=1).logits)
    piece = ids[:1, : window + 1].contiguous()
    return lambda: compiled(piece)


def streaming(model: Any, ids: Tensor, policy: Policy, window: int) -> Callable[[], None]:
    """Return a compiled step of a stream with a full window; each call is one token."""
    compiled = torch.compile(model, backend=kvpass.backend(policy, budget=window))
    state = {"out": compiled(ids[:1, :window], use_cache=True)}

    def step() -> None:
        state["out"] = model_access.call_model(compiled, ids[:1, :1], model_access.cache_of_output(state["out"]))

    return step


@torch.inference_mode()
def timed(model: Any, ids: Tensor, policies: Policies, window: int, turns: int, each: int = 16) -> dict[str, float]:
    """Return milliseconds per token, as medians over turns of `each` tokens."""
    torch._dynamo.reset()
    steps = {"recompute": recomputing(model, ids, window)}
    steps |= {name: streaming(model, ids, policy, window) for name, policy in policies.items()}
    for step in steps.values():
        for _ in range(each):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(each):
                step()
            seconds[name].append((time.perf_counter() - start) / each)
    return {name: round(1e3 * statistics.median(taken), 3) for name, taken in seconds.items()}


def compare(
    model: Any, ids: Tensor, policies: Policies, window: int, settings: Settings, known: dict[str, Row]
) -> dict[str, Row]:
    """Return a row for each method at one window; `known` losses of an earlier run are kept."""
    rows = {name: dict(known.get(name, {})) for name in ("recompute", *policies)}
    for name, row in rows.items() if settings.labels else ():
        if "loss" not in row:
            loss = loss_under(policies.get(name), model, ids, window, settings)
            row |= {"loss": loss, "perplexity": round(math.exp(loss), 3)}
    if settings.labels:
        gap = rows["window"]["loss"] - rows["recompute"]["loss"]
        for row in rows.values():
            row["closed"] = round((rows["window"]["loss"] - row["loss"]) / gap, 3)
    if settings.turns:
        for name, milliseconds in timed(model, ids, policies, window, settings.turns).items():
            rows[name]["milliseconds"] = milliseconds
    return rows


def show(results: Results) -> None:
    print(f"{'M':>5} {'method':<20} {'perplexity':>11} {'closed':>7} {'ms/token':>9}")
    for window, rows in results.items():
        for name, row in rows.items():
            cells = [f"{row[key]:.2f}" if key in row else "" for key in ("perplexity", "closed", "milliseconds")]
            print(f"{window:>5} {name:<20} {cells[0]:>11} {cells[1]:>7} {cells[2]:>9}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="kvpass/apps/data/tiny-gpt2")
    parser.add_argument("--aligner", nargs="*", type=Path, default=[])
    parser.add_argument(
        "--every", nargs="+", type=int, default=[1], help="tokens that go at once, for aligners of recipe direct"
    )
    parser.add_argument("--windows", nargs="+", type=int, default=[32, 64, 128, 255])
    parser.add_argument("--text", choices=list(TEXTS), default="held-out")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--skip", type=int, default=512, help="tokens before the first label")
    parser.add_argument("--labels", type=int, default=640, help="of each row; 0 for no perplexity")
    parser.add_argument("--turns", type=int, default=20, help="of 16 tokens for the time per token; 0 for none")
    parser.add_argument("--inner", choices=["eager", "inductor"], default="eager", help="compiler for perplexity")
    parser.add_argument("--out", type=Path, help="a json of all figures; what it holds already is not measured again")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    chosen = models.load(arguments.model)
    model: Any = chosen.model
    settings = Settings(arguments.rows, arguments.skip, arguments.labels, arguments.turns, arguments.inner)
    ids = tokens_of(chosen, TEXTS[arguments.text](), settings)
    policies: Policies = {"window": KVAlign(aligners.identity_aligner(scope_of(model, max(arguments.windows))))}
    if not chosen.has_position_table:
        policies["streaming"] = Streaming()
    for path in arguments.aligner:
        aligner = aligners.load(path, model)
        for every in [aligner.scope.every] if aligner.recipe == "paper" else arguments.every:
            policies[path.stem if every == 1 else f"{path.stem}, every {every}"] = KVAlign(aligner, every)
    about = {
        "model": Path(arguments.model).name,
        "text": arguments.text,
        "skip": settings.skip,
        "labels": settings.rows * settings.labels,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": 1,
    }
    results = earlier(arguments.out, about)
    for window in arguments.windows:
        known = results.get(str(window), {})
        results[str(window)] = known | compare(model, ids, policies, window, settings, known)
        if arguments.out:
            arguments.out.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")
    show(results)


def earlier(path: Path | None, about: dict[str, Any]) -> Results:
    """Return the results of an earlier run with the same settings."""
    if path is None or not path.exists():
        return {}
    written = json.loads(path.read_text())
    results: Results = written.pop("results")
    if written != about:
        raise SystemExit(f"{path} is of a run with other settings: {written}")
    return results


if __name__ == "__main__":
    main()
