"""Serve requests of mixed lengths by a DecodeLoop, by `generate` in batches, and by continuous batching.

Requests arrive at random from a fixed seed, and their lengths have a heavy tail. `generate` takes the waiting
requests, up to the number of rows, and runs to the end of the longest one; its caches are bounded too. The continuous
batching of transformers runs uncompiled, on pages for as many tokens as the rows have slots. Each way runs in a
separate process, and compiles before it is timed.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tqdm import tqdm

import kvpass
from benchmarks import apart, memory
from benchmarks.model import VOCABULARY, build
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings

TITLE = "Requests of mixed lengths"
LOOP, BATCHES, PAGES = "DecodeLoop, rows", "generate, batch by batch", "transformers, generate_batch"
POLICY, BUDGET, ROWS, CHUNK = "h2o", 256, 8, 256
REQUESTS, RATE, SEED = 64, 8.0, 0
PROMPTS, ANSWERS = (16, 1000), (8, 256)
TAIL = 1.1  # exponent of the Pareto distribution of lengths
BLOCK = 32
FASTER = {BATCHES: 1.5, PAGES: 1.0}


@dataclasses.dataclass
class Arrival:
    """A request: its arrival in seconds, its prompt, and the times of its first and last token."""

    at: float
    prompt: list[int]
    most: int
    first: float = 0.0
    last: float = 0.0
    made: int = 0

    def note(self, now: float, tokens: int) -> None:
        """Record that the request has `tokens` tokens now."""
        self.first = self.first or now
        self.last, self.made = now, tokens


def arrivals(count: int) -> list[Arrival]:
    """Return requests of a Poisson process with heavy-tailed lengths; every way gets the same."""
    drawn, now, found = random.Random(SEED), 0.0, []
    for _ in range(count):
        now += drawn.expovariate(RATE)
        prompt, most = (min(high, int(low * drawn.paretovariate(TAIL))) for low, high in (PROMPTS, ANSWERS))
        found.append(Arrival(now, [drawn.randrange(3, VOCABULARY) for _ in range(prompt)], most))
    return found


def measure(settings: Settings) -> list[Row]:
    """Return a row for each way."""
    count, threads, rows = 12 if settings.quick else REQUESTS, max(settings.threads), []
    for way in tqdm(WAYS, unit="process", desc="requests", dynamic_ncols=True):
        given: dict[str, Any] = dict(way=way, count=count)
        row = apart.run(
            "benchmarks.serving:serve", threads=threads, environment=memory.RETURNING | memory.SHARING, **given
        )
        rows.append({"threads": threads, **row})
    return rows


def serve(way: str, count: int) -> Row:
    """Return tokens per second, seconds to the first token, and the peak MiB added."""
    asked = arrivals(count)
    run = WAYS[way](build())
    began = time.process_time()
    most = memory.added(lambda: run(asked))
    used = time.process_time() - began
    waits = sorted(request.first - request.at for request in asked)
    tokens = sum(request.made for request in asked)
    assert tokens == sum(request.most for request in asked)
    return {
        "way": way,
        "requests": count,
        "tokens a second": tokens / max(request.last for request in asked),
        "tokens a CPU second": tokens / used,
        "first token, p50, s": statistics.median(waits),
        "first token, p95, s": waits[int(0.95 * (len(waits) - 1))],
        "MiB": most,
    }


Run = Callable[[list[Arrival]], None]


class Clock:
    """Seconds since the start, and the requests that have arrived."""

    def __init__(self, asked: Sequence[Arrival]) -> None:
        self.waiting, self.began = list(asked), time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    def arrived(self, most: int | None = None) -> list[Arrival]:
        """Return the requests that arrived since the last call, at most `most`."""
        come = [request for request in self.waiting if request.at <= self.now][:most]
        self.waiting = self.waiting[len(come) :]
        return come

    def rest(self) -> None:
        """Sleep until the next request arrives."""
        if self.waiting:
            time.sleep(max(0.0, self.waiting[0].at - self.now))


def by_rows(model: Any) -> Run:
    """Serve by a `DecodeLoop` with rows."""
    loop = kvpass.DecodeLoop(model, POLICY, budget=BUDGET, rows=ROWS, prefill_chunk=CHUNK, read_interval=8)
    warm = arrivals(4)
    loop.generate_batch([part * 8 for part in (request.prompt for request in warm)], max_new_tokens=20)
    loop.generate_batch([list(range(3, 3 + 4 * CHUNK)), [5, 6, 7]], max_new_tokens=20)

    def run(asked: list[Arrival]) -> None:
        clock, known = Clock(asked), dict[str, Arrival]()
        while clock.waiting or loop.pending:
            for request in clock.arrived():
                known[loop.add(request.prompt, max_new_tokens=request.most)] = request
            if not loop.pending:
                clock.rest()
            for output in loop.step():
                known[output.request_id].note(clock.now, len(output.generated_tokens))

    return run


def by_batches(model: Any) -> Run:
    """Serve by `generate` of the compiled model, ROWS requests at a time."""
    kvpass.compile(model, POLICY, budget=BUDGET)

    def generate(prompts: list[list[int]], most: int, tick: Callable[[], object] = lambda: None) -> None:
        prompts = (prompts * ROWS)[:ROWS]  # always the same number of rows, for one graph
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(part)) + part for part in prompts])
        mask = torch.tensor([[0] * (longest - len(part)) + [1] * len(part) for part in prompts])
        how: dict[str, Any] = dict(max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, stopping_criteria=[lambda *_, **__: _never(tick, ids)], **how)

    for count in (40, 300, 700):
        generate([list(range(3, 3 + count)), [5, 6]], 6)

    def run(asked: list[Arrival]) -> None:
        clock = Clock(asked)
        while clock.waiting:
            clock.rest()
            batch, made = clock.arrived(ROWS), [0]

            def tick(batch: list[Arrival] = batch, made: list[int] = made) -> None:
                made[0] += 1
                for request in batch:
                    if made[0] <= request.most:
                        request.note(clock.now, made[0])

            generate([request.prompt for request in batch], max(request.most for request in batch), tick)

    return run


def _never(tick: Callable[[], object], ids: torch.Tensor) -> torch.Tensor:
    """Stop nothing, and report a new token."""
    tick()
    return torch.zeros(len(ids), dtype=torch.bool)


def by_pages(model: Any) -> Run:
    """Serve by the continuous batching of transformers, with pages for as many tokens as the rows have slots."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model.set_attn_implementation("paged|sdpa")
    pages = ContinuousBatchingConfig(block_size=BLOCK, num_blocks=max(ROWS * (BUDGET + 1), 1280) // BLOCK)
    how = GenerationConfig(max_new_tokens=ANSWERS[1], do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(asked: list[Arrival]) -> None:
        clock, known, ended = Clock(asked), dict[str, Arrival](), 0
        with model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=pages
        ) as served:
            clock.began = time.perf_counter()
            while ended < len(asked):
                for request in clock.arrived():
                    name = served.add_request(request.prompt, max_new_tokens=request.most, streaming=True)
                    known[name] = request
                output = served.get_result(timeout=0.01)
                if output is not None:
                    assert output.error is None, output.error
                    known[output.request_id].note(clock.now, len(output.generated_tokens))
                    ended += output.is_finished()

    run(arrivals(2))
    return run


WAYS: dict[str, Callable[[Any], Run]] = {LOOP: by_rows, BATCHES: by_batches, PAGES: by_pages}


def tables(rows: Sequence[Row]) -> list[Table]:
    names = ("way", "tokens a second", "tokens a CPU second", "first token, p50, s", "first token, p95, s", "MiB")
    under = f"{POLICY}, budget {BUDGET}, {ROWS} rows, float32, {rows[0]['threads']} thread(s)"
    return [Table(f"{rows[0]['requests']} requests, {under}", [{name: row[name] for name in names} for row in rows])]


def targets(rows: Sequence[Row]) -> Iterable[Target]:
    """Compare the loop with the other ways."""
    found = {row["way"]: row for row in rows}
    ours = found[LOOP]
    for way, limit in FASTER.items():
        ratio = ours["tokens a second"] / found[way]["tokens a second"] if way in found else None
        yield Target("serving", f"tokens per second, of {way}", limit, ratio, at_least=True)
    waits = "first token, p95, s"
    ratio = ours[waits] / found[BATCHES][waits] if BATCHES in found else None
    yield Target("serving", f"p95 to the first token, of {BATCHES}", 1.0, ratio)
