"""Run llama.cpp, with a full cache and with its context shift.

The context shift keeps the first tokens and drops half of the others whenever the context is full, like llama.cpp's
own server. Keys and values have llama.cpp's default type, float16.
"""

from __future__ import annotations

import dataclasses

import llama_cpp as lib
import numpy as np

from benchmarks.rivals.engine import Engine, Setup

FIRST = 4  # tokens that a shift keeps
BATCH = 2048  # tokens of a prompt in each call, llama.cpp's default


@dataclasses.dataclass
class _Row:
    """One sequence: its number, the number of tokens it holds, and its last token."""

    number: int
    held: int = 0
    token: int = 0


class LlamaCpp(Engine):
    """Sequences of llama.cpp, one for each row, with separate caches."""

    def __init__(self, setup: Setup) -> None:
        lib.llama_backend_init()
        parameters = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(setup.weights.encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {setup.weights}")
        self.words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.threads, self.budget = setup.threads, setup.budget
        self.context, self.size, self.rows = None, (0, 0), list[_Row]()

    def prompt(self, ids: list[list[int]], room: int) -> list[int]:
        self._begin(len(ids), self.budget or -(-(len(ids[0]) + room) // 256) * 256)
        for row, tokens in zip(self.rows, ids, strict=True):
            # Half of the tokens that a shift can drop: then one shift always makes room for the next part.
            part = BATCH if self.budget is None else (self.budget - FIRST) // 2
            for start in range(0, len(tokens), part):
                self._decode([(row, tokens[start : start + part])])
            row.token = self._likeliest(-1)
        return [row.token for row in self.rows]

    def steps(self, count: int) -> list[list[int]]:
        made: list[list[int]] = [[] for _ in self.rows]
        for _ in range(count):
            self._decode([(row, [row.token]) for row in self.rows])
            for number, row in enumerate(self.rows):
                row.token = self._likeliest(number)
                made[number].append(row.token)
        return made

    def _begin(self, rows: int, tokens: int) -> None:
        """Clear the context, or make one for this many rows and tokens."""
        self.rows = [_Row(number) for number in range(rows)]
        if self.size == (rows, tokens):
            lib.llama_memory_clear(self.memory, True)
            return
        if self.context:
            lib.llama_batch_free(self.batch)
            lib.llama_free(self.context)
        parameters = lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max, parameters.n_batch = rows * tokens, rows, BATCH
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.kv_unified = False
        self.context = lib.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {rows} rows of {tokens} tokens")
        self.memory, self.size = lib.llama_get_memory(self.context), (rows, tokens)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)

    def _decode(self, parts: list[tuple[_Row, list[int]]]) -> None:
        """Feed tokens of one or more rows; the last token of each row gets logits."""
        batch, used = self.batch, 0
        for row, tokens in parts:
            if self.budget is not None and row.held + len(tokens) > self.budget:
                self._shift(row)
            for offset, token in enumerate(tokens):
                batch.token[used], batch.pos[used] = token, row.held + offset
                batch.n_seq_id[used], batch.seq_id[used][0] = 1, row.number
                batch.logits[used] = offset == len(tokens) - 1
                used += 1
            row.held += len(tokens)
        batch.n_tokens = used
        self.outputs = [n for n in range(used) if batch.logits[n]]
        code = lib.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def _shift(self, row: _Row) -> None:
        """Drop half of the tokens after the first ones, and move the others up."""
        dropped = (row.held - FIRST) // 2
        lib.llama_memory_seq_rm(self.memory, row.number, FIRST, FIRST + dropped)
        lib.llama_memory_seq_add(self.memory, row.number, FIRST + dropped, row.held, -dropped)
        row.held -= dropped

    def _likeliest(self, number: int) -> int:
        """Return the most likely token after the n-th row of the last call."""
        logits = lib.llama_get_logits_ith(self.context, self.outputs[number])
        return int(np.ctypeslib.as_array(logits, (self.words,)).argmax())
