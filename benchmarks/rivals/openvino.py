"""Run OpenVINO GenAI, with a full cache and with its cache eviction.

Weights are an IR folder that `convert` makes from a GGUF file. Requests run in the continuous-batching pipeline, whose
`step` makes one token of every request. Its prefix cache is off, because every prompt is new.
"""

from __future__ import annotations

import sys

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.rivals.engine import Engine, Setup

FIRST, RECENT = 32, 128  # tokens that eviction always keeps, OpenVINO's defaults
LONGEST = 1 << 30


def convert(file: str) -> None:
    """Write the IR of a GGUF file, including the tokenizer, into the folder of the file."""
    genai.LLMPipeline(file, "CPU", enable_save_ov_model=True)


class OpenVINO(Engine):
    """Requests of OpenVINO GenAI, one for each row."""

    def __init__(self, setup: Setup) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        if setup.budget is not None:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                FIRST, RECENT, setup.budget, genai.AggregationMode.NORM_SUM
            )
        precision = _precision()
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": setup.threads,
        }
        self.pipeline = genai.ContinuousBatchingPipeline(setup.weights, scheduler, "CPU", properties)
        self.greedy = genai.GenerationConfig()
        self.greedy.do_sample, self.greedy.ignore_eos, self.greedy.max_new_tokens = False, True, LONGEST
        self.requests: list[genai.GenerationHandle] = []
        self.made = 0

    def prompt(self, ids: list[list[int]], room: int) -> list[int]:
        for request in self.requests:
            request.cancel()
        if self.requests:
            self.pipeline.step()  # releases the cancelled requests' blocks
        rows = [openvino.Tensor(np.array([row], dtype=np.int64)) for row in ids]
        self.requests = [self.pipeline.add_request(self.made + n, row, self.greedy) for n, row in enumerate(rows)]
        self.made += len(rows)
        first: dict[int, int] = {}
        while len(first) < len(rows):
            self.pipeline.step()
            for number, request in enumerate(self.requests):
                if number not in first and request.can_read():
                    first[number] = _token(request)
        return [first[number] for number in range(len(rows))]

    def steps(self, count: int) -> list[list[int]]:
        made: list[list[int]] = [[] for _ in self.requests]
        for _ in range(count):
            self.pipeline.step()
            for tokens, request in zip(made, self.requests, strict=True):
                tokens.append(_token(request))
        return made


def _precision() -> str:
    """Return "bf16" if OpenVINO has products of bfloat16 on this processor, else "f32": nothing else runs then."""
    return "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"


def _token(request: genai.GenerationHandle) -> int:
    """Return the next token of a request."""
    (output,) = request.read().values()
    return int(output.generated_ids[-1])


if __name__ == "__main__":
    convert(*sys.argv[1:])
