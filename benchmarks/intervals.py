"""Time the steps of policies that compact at intervals, and of one that evicts at every step.

python -m benchmarks.intervals [POLICY ...] [--budget 1024] [--rounds 8]

A real checkpoint (kvpass.apps.checkpoint) in bfloat16 decodes greedily in a DecodeLoop on one thread. All contenders
take turns in one process. Each turn has a multiple of the interval, and steps are averaged over it.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tqdm import tqdm

import kvpass
from benchmarks.report import Row
from kvpass import policies
from kvpass.apps import checkpoint, corpus
from kvpass.apps.evaluation.tables import markdown

COMPARED_WITH = "h2o"
REDRAWN = "random:redraw=True:recent=64:interval=64"
POLICIES = (COMPARED_WITH, "h2o:interval=128", REDRAWN, "keydiff", "vase", "vase:variant=dkv", "r_kv")
TURN, PROMPT = 128, 1100


def turn(loop: kvpass.DecodeLoop) -> float:
    """Return the milliseconds of processor time of a step, averaged over a turn."""
    start = time.process_time()
    loop.generate(TURN)
    return 1e3 * (time.process_time() - start) / TURN


@torch.inference_mode()
def rows(names: list[str], budget: int, rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 256  # each contender compiles the same `forward`
    model, tokenizer = checkpoint.load(torch.bfloat16)
    ids = tokenizer(corpus.read(corpus.held_out_files())[0], return_tensors="pt").input_ids[:, :PROMPT]
    assert ids.shape[1] > budget  # every policy has evicted
    loops = {}
    for name in tqdm(names, desc="compiling", dynamic_ncols=True):
        loops[name] = kvpass.DecodeLoop(model, policies.parse(name), budget=budget)
        loops[name].prompt(ids)
        for _ in range(2):  # the second turn has the first compaction after the prompt's
            turn(loops[name])
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in tqdm(range(rounds), desc="rounds", dynamic_ncols=True):
        for name, loop in loops.items():
            taken[name].append(turn(loop))
    least, middle = ({name: by(times) for name, times in taken.items()} for by in (min, statistics.median))
    return [
        {
            "policy": name,
            "compacted to": policies.parse(name).compacted(budget),
            "ms, least": least[name],
            "ms, median": middle[name],
            f"least, of {COMPARED_WITH}": least[name] / least[COMPARED_WITH],
            f"median, of {COMPARED_WITH}": middle[name] / middle[COMPARED_WITH],
        }
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", default=POLICIES)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    chosen = [COMPARED_WITH, *(name for name in given.policies if name != COMPARED_WITH)]
    print(markdown(rows(chosen, given.budget, given.rounds)))


if __name__ == "__main__":
    main()
