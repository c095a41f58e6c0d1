"""Compare vectors in int8 and int4 with plain rows: perplexity at equal tokens and equal bytes, and step times.

    python -m benchmarks.quantised quality --budget 128
    python -m benchmarks.quantised step --budgets 1024 8192 --clock processor
    python -m benchmarks.quantised products --clock processor
    python -m benchmarks.quantised outliers
    python -m benchmarks.quantised peers

Quality is measured with the bundled model on held-out documents, token by token. Equal bytes mean twice as many tokens
in int8, and four times as many in int4, as in half precision; the last table has the deviation. docs/quantised.md has
the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm

import kvpass
from benchmarks.model import DIM, HEADS, KV_HEADS, Conversation, build
from benchmarks.model import tokens as random_tokens
from benchmarks.refusals import with_policy
from benchmarks.timing import Local, Plan, interleaved, medians
from kvpass import model_access, policies
from kvpass.apps import corpus
from kvpass.apps.evaluation.perplexity import exponential
from kvpass.apps.evaluation.scoring import ScoringBatch, score
from kvpass.apps.models import load
from kvpass.decoding.model_call import ModelCall
from kvpass.errors import KVPassError
from kvpass.lowering.formats import KV_DTYPES, EncodedVectors, KVDtype, code_products, format_of

TIMES: dict[KVDtype, int] = {"int8": 2, "int4": 4}  # about as many tokens in equal bytes
KINDS: tuple[KVDtype | None, ...] = (None, *KV_DTYPES)
PROMPT = 64  # tokens before the timed steps
CLOCKS = {"wall": time.perf_counter, "processor": time.thread_time}
Cells = dict[tuple[KVDtype | None, int], float | str]


@dataclasses.dataclass(frozen=True)
class Documents:
    """Held-out documents int64 [B, T] of a model, fed one by one after a prompt."""

    model: Any
    tokens: Tensor
    prompt: int

    def perplexity(self, policy: str, budget: int, kv_dtype: KVDtype | None) -> float | str:
        """Return the perplexity under a policy, or the reason for its refusal."""
        tokens, evicts = self.tokens, policies.get(policy).evicts
        slots = policies.resolve(policy, {}).fitting_budget(budget) if evicts else tokens.shape[1]
        with torch.inference_mode():
            outcome = with_policy(self.model, policy, slots, "eager", self._streamed, kv_dtype)
        return str(outcome) if isinstance(outcome, KVPassError) else outcome

    def _streamed(self) -> float:
        batch = ScoringBatch(self.tokens, torch.ones_like(self.tokens), self.prompt)
        scored = score(ModelCall.of(self.model, self.model), batch, None).log_likelihoods
        return exponential((-scored[:, 1:]).flatten().tolist())  # the prompt, which sees all, predicts the first


def asked(policy: str, budget: int) -> list[tuple[KVDtype | None, int]]:
    """Return the measurements of a policy: equally many tokens in each format, then equal bytes."""
    same: list[tuple[KVDtype | None, int]] = [(kind, 1) for kind in KINDS]
    return [*same, *TIMES.items()] if policies.get(policy).evicts else same


def quality(given: argparse.Namespace) -> None:
    """Print a line for every policy as soon as it is measured."""
    loaded = load(None)
    texts = loaded.encode(corpus.read(corpus.held_out_files()))
    made = torch.tensor(corpus.documents(texts, given.documents, given.length, loaded.bos))
    documents, budget = Documents(loaded.model, made, given.prompt), given.budget
    header = ["policy", f"plain, {budget}", *(f"{kind}, {budget}" for kind in KV_DTYPES)]
    header += [f"{kind}, {times * budget}" for kind, times in TIMES.items()]
    _print_line(header)
    _print_line(["---", *["---:"] * (len(header) - 1)])
    for policy in given.policies:
        found: Cells = {}
        for kind, times in tqdm(asked(policy, budget), desc=policy, leave=False):
            found[kind, times] = documents.perplexity(policy, times * budget, kind)
        _print_line([policy, *_cells(found)])


def _cells(found: Cells) -> Iterator[str]:
    """Yield perplexities, with their difference from plain rows of equally many tokens or equal bytes."""
    plain = found[None, 1]
    for value in found.values():
        if isinstance(value, str) or isinstance(plain, str) or value is plain:
            yield value if isinstance(value, str) else f"{value:.3f}"
        else:
            yield f"{value:.3f} ({100 * (value / plain - 1):+.2f} %)"


def _print_line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def sizes() -> None:
    """Print the bytes of a row in each format."""
    _print_line(["head size", "bfloat16", *KV_DTYPES, *(f"{kind}, of bfloat16" for kind in KV_DTYPES)])
    _print_line(["---:"] * (2 + 2 * len(KV_DTYPES)))
    for dim in (32, 64, 128):
        row = torch.randn(1, 1, 1, dim, dtype=torch.bfloat16)
        stored = [EncodedVectors.of(format_of(kind, dim, torch.bfloat16), row) for kind in KINDS]
        taken = [sum(part.nbytes for part in rows.parts) for rows in stored]
        _print_line([str(dim), *map(str, taken), *(f"{size / taken[0]:.3f}" for size in taken[1:])])


def outliers() -> None:
    """Print the error of logits for keys with a few larger dimensions.

    Queries and keys are random with 128 dimensions, four of which are larger by a factor in all keys. The error is the
    mean difference of a logit, relative to the mean logit.
    """
    _print_line(["larger by", *KV_DTYPES])
    _print_line(["---:"] * (1 + len(KV_DTYPES)))
    for times in (1, 10, 50):
        _print_line([str(times), *(f"{logit_error(kind, times):.4f}" for kind in KV_DTYPES)])


def logit_error(kv_dtype: KVDtype, times: float) -> float:
    """Return the error that `outliers` describes."""
    drawn, dim = torch.Generator().manual_seed(0), 128
    query, key = (torch.randn(1, 8, count, dim, generator=drawn) for count in (16, 1024))
    key[..., torch.arange(4) * dim // 4 + 5] *= times
    exact = query @ key.transpose(-1, -2)
    stored = EncodedVectors.of(format_of(kv_dtype, dim, torch.float32), key)
    return float((stored.format.products(query, stored.parts) - exact).abs().mean() / exact.abs().mean())


HQQ = {"q_group_size": 32, "axis_key": 1, "axis_value": 1}
PEERS: dict[str, dict[str, Any]] = {
    "quanto, 4 bits": {"backend": "quanto", "nbits": 4, "q_group_size": 32},
    "quanto, 4 bits, no token unrounded": {"backend": "quanto", "nbits": 4, "q_group_size": 32, "residual_length": 1},
    "hqq, 4 bits": {"backend": "hqq", "nbits": 4, **HQQ},
    "hqq, 4 bits, no token unrounded": {"backend": "hqq", "nbits": 4, "residual_length": 1, **HQQ},
    "hqq, 8 bits": {"backend": "hqq", "nbits": 8, **HQQ},
    "hqq, 8 bits, no token unrounded": {"backend": "hqq", "nbits": 8, "residual_length": 1, **HQQ},
    "fp8": {"backend": "fp8"},
}
"""Quantised caches of transformers, with groups as large as those of kvpass in four bits."""


@torch.inference_mode()
def peers(given: argparse.Namespace) -> None:
    """Print the error of logits with a full cache in few bits, for kvpass and for caches of transformers.

    After a prompt, tokens of held-out text are fed one by one. The error is the difference from the model's logits with
    an ordinary cache: root mean square over all tokens and words, relative to the spread of the logits.

    Two of the peers are separate packages: `pip install optimum-quanto hqq termcolor`. hqq imports termcolor without
    requiring it; without termcolor, transformers cannot import hqq's caches.
    """
    loaded = load(None)
    texts = loaded.encode(corpus.read(corpus.held_out_files()))
    ids = torch.tensor(corpus.documents(texts, given.documents, given.prompt + given.steps, loaded.bos))
    exact = _logits(loaded.model, ids, given.prompt, transformers.DynamicCache())
    _print_line(["cache", "logits off by", "the likeliest word is another"])
    _print_line(["---", "---:", "---:"])
    for name, settings in PEERS.items():
        try:
            held = transformers.QuantizedCache(config=loaded.model.config, **settings)
        except ImportError as error:
            _print_line([name, f"{str(error).splitlines()[0]} (pip install optimum-quanto hqq termcolor)", ""])
            continue
        _print_line([name, *_off(_logits(loaded.model, ids, given.prompt, held), exact)])
    for kind in KV_DTYPES:
        torch._dynamo.reset()
        chosen = kvpass.backend("full", budget=ids.shape[1], kv_dtype=kind, inner="eager")
        found = _logits(torch.compile(loaded.model, backend=chosen), ids, given.prompt, None)
        _print_line([f"kvpass, {kind}", *_off(found, exact)])


def _logits(model: Any, ids: Tensor, prompt: int, cache: Any) -> Tensor:
    """Return the logits [B, n, V] of the tokens after a prompt, fed one by one."""
    out, found = model_access.call_model(model, ids[:, :prompt], cache), []
    for column in ids[:, prompt:].split(1, 1):
        out = model_access.call_model(model, column, model_access.cache_of_output(out))
        found.append(out.logits)
    return torch.cat(found, 1)


def _off(found: Tensor, exact: Tensor) -> list[str]:
    spread = exact - exact.mean(-1, keepdim=True)
    other = (found.argmax(-1) != exact.argmax(-1)).float().mean()
    return [f"{float((found - exact).norm() / spread.norm()):.4f}", f"{100 * float(other):.2f} %"]


@torch.inference_mode()
def step(given: argparse.Namespace) -> None:
    """Print the milliseconds of a step in each format, for contenders that take turns."""
    torch._dynamo.config.recompile_limit = 256
    kinds: list[KVDtype | None] = [None, *given.formats]
    _print_line(["policy", "slots", "dtype", *map(str, kinds), *(f"{kind}, times plain" for kind in given.formats)])
    _print_line(["---", "---:", "---", *["---:"] * (2 * len(kinds) - 1)])
    for budget in given.budgets:
        for dtype in given.dtypes:
            for policy in given.policies:
                model = build(dtype, given.layers)
                talks = {str(kind): _conversation(model, policy, budget, kind) for kind in kinds}
                _print_line([policy, str(budget), dtype, *_step(talks, CLOCKS[given.clock])])


def _step(talks: dict[str, Conversation], clock: Callable[[], float]) -> list[str]:
    """Return the milliseconds of each contender, and those of all but the first relative to the first."""
    taken = medians(interleaved([Local(name, talk.step, clock) for name, talk in talks.items()], Plan()))
    first, *others = taken.values()
    return [*(f"{ms:.2f}" for ms in taken.values()), *(f"{ms / first:.2f}" for ms in others)]


def _conversation(model: Any, policy: str, budget: int, kv_dtype: KVDtype | None) -> Conversation:
    """Return a conversation after a short prompt, because a step reads all slots whatever they hold."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend(policy, budget=budget, kv_dtype=kv_dtype))
    talk = Conversation(compiled, model_access.cache_of_output(compiled(random_tokens(PROMPT), use_cache=True)))
    for _ in range(3):
        talk.step()
    return talk


def _compiled(function: Callable[..., Tensor], *arguments: Tensor) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(make_fx(function, tracing_mode="fake")(*arguments))
    return compiled


LOADS = {"words": code_products.fills_vectors, "bytes": lambda codes, together: False}
"""Ways to load codes: chosen by the processor, or byte by byte."""


@torch.inference_mode()
def products(given: argparse.Namespace) -> None:
    """Print the microseconds of a layer's products with keys and with values, by format and way to load codes.

    The layer is that of the benchmark's model: two queries for each of four KV heads of 64 dimensions.
    """
    _print_line(["slots", "format", "loaded in", "with keys", "with values"])
    _print_line(["---:", "---", "---", "---:", "---:"])
    for slots in given.slots:
        calls: dict[tuple[str, str, int], Callable[[], object]] = {}
        for kind in given.formats:
            for loads, fill in LOADS.items():
                with mock.patch.object(code_products, "fill", fill):
                    calls |= {(kind, loads, n): call for n, call in enumerate(_products(kind, slots))}
        taken = interleaved([Local(str(key), call, CLOCKS[given.clock]) for key, call in calls.items()], Plan())
        for kind in given.formats:
            for loads in LOADS:
                both = [1e3 * medians(taken)[str((kind, loads, n))] for n in (0, 1)]
                _print_line([str(slots), kind, loads, *(f"{microseconds:.0f}" for microseconds in both)])


def _products(kind: KVDtype, slots: int) -> list[Callable[[], object]]:
    """Return both products, compiled."""
    torch._dynamo.reset()
    made, drawn = format_of(kind, DIM, torch.bfloat16), torch.Generator().manual_seed(0)
    query = torch.randn(1, KV_HEADS, HEADS // KV_HEADS, DIM, generator=drawn).to(torch.bfloat16)
    paid = torch.randn(1, KV_HEADS, HEADS // KV_HEADS, slots, generator=drawn).softmax(-1)
    parts = EncodedVectors.of(made, torch.randn(1, KV_HEADS, slots, DIM, generator=drawn).to(torch.bfloat16)).parts
    with_keys = _compiled(lambda query, *parts: made.products(query, parts), query, *parts)
    with_values = _compiled(lambda paid, *parts: made.weighted_sum(paid, parts, torch.bfloat16), paid, *parts)
    calls = [lambda: with_keys(query, *parts), lambda: with_values(paid, *parts)]
    for call in calls:
        call()
    return calls


def main(arguments: Sequence[str] | None = None) -> None:
    everything = [name for name in policies.names() if not policies.get(name).needs_weights]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default: 1)")
    parts = parser.add_subparsers(required=True)
    job = parts.add_parser("quality")
    job.add_argument("--policies", nargs="+", default=everything, metavar="NAME", help="default: all")
    job.add_argument("--budget", type=int, default=128, metavar="N", help="tokens in half precision (default: 128)")
    job.add_argument("--prompt", type=int, default=2, metavar="N", help="tokens fed at once (default: 2)")
    job.add_argument("--documents", type=int, default=4, metavar="N", help="rows of one batch (default: 4)")
    job.add_argument("--length", type=int, default=1024, metavar="N", help="tokens of a document (default: 1024)")
    job.set_defaults(run=quality)
    job = parts.add_parser("step")
    job.add_argument("--policies", nargs="+", default=["h2o", "streaming"], metavar="NAME")
    job.add_argument("--budgets", nargs="+", type=int, default=[1024, 8192], metavar="N")
    job.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], metavar="DTYPE")
    job.add_argument("--layers", type=int, default=4, metavar="N", help="of the benchmark's model (default: 4)")
    job.add_argument(
        "--formats", nargs="+", choices=KV_DTYPES, default=KV_DTYPES, metavar="FORMAT", help="default: all"
    )
    job.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: of the one thread, on a busy machine")
    job.set_defaults(run=step)
    job = parts.add_parser("products")
    job.add_argument("--slots", nargs="+", type=int, default=[1025, 8193], metavar="N")
    job.add_argument("--formats", nargs="+", choices=KV_DTYPES, default=[*TIMES], metavar="FORMAT")
    job.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: of the one thread, on a busy machine")
    job.set_defaults(run=products)
    job = parts.add_parser("peers")
    job.add_argument("--documents", type=int, default=4, metavar="N", help="rows of one batch (default: 4)")
    job.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens fed at once (default: 512)")
    job.add_argument("--steps", type=int, default=256, metavar="N", help="tokens fed one by one (default: 256)")
    job.set_defaults(run=peers)
    parts.add_parser("sizes").set_defaults(run=lambda _: sizes())
    parts.add_parser("outliers").set_defaults(run=lambda _: outliers())
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    given.run(given)


if __name__ == "__main__":
    main()
