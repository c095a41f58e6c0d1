"""Provide kvpass as a model of lm-evaluation-harness: `kvpass lm-eval --model_args ... --tasks ...`.

The harness's own Hugging Face model loads, tokenises and cuts texts to length.  Its calls of the model go through
`DecodeLoop` and `score` instead, so both give the same under the policy `full`.  The harness has no plugins: in Python
call `register`, or pass an instance of `BoundedLM` to `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from torch import Tensor
from tqdm import tqdm

from kvpass import policies
from kvpass.apps.evaluation.scoring import FEEDS, Feed, ScoringBatch, score
from kvpass.apps.models import stop_tokens
from kvpass.arguments import require
from kvpass.decoding.loop import DecodeLoop
from kvpass.lowering.formats import KVDtype
from kvpass.runtime.backend_base import Inner, Positions

NAME = "kvpass"
NO_CHANGE: dict[str, object] = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True, "min_p": 0.0}
"""Settings of `generate` that tasks give and that change nothing."""

HarnessRequest = tuple[Any, list[int], list[int]]  # the harness's key, the context, the continuation


def register() -> None:
    """Register the model under its name with the harness."""
    model_registry.register(NAME, target=BoundedLM)


def run(parsed: argparse.Namespace) -> None:
    """Run the harness's own command, with `kvpass` among its models and as the default of `--model`."""
    register()
    arguments: list[str] = parsed.rest
    named = any(argument.partition("=")[0] in ("--model", "-M") for argument in arguments)
    sys.argv = ["lm_eval", *([] if arguments[:1] == ["run"] else ["run"]), *arguments]
    sys.argv += [] if named else ["--model", NAME]
    cli_evaluate()


class BoundedLM(HFLM):  # type: ignore[misc]
    """A Hugging Face causal model that decodes and scores with a bounded cache.

    >>> lm_eval.simple_evaluate(BoundedLM("gpt2", policy="h2o", budget=256, device="cpu"), tasks=["lambada_openai"])
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str = "full",
        budget: int | float | None = None,
        kv_dtype: KVDtype | None = None,
        positions: Positions | None = None,
        prefill_chunk: int | None = None,
        scoring: Feed | str = "token",
        inner: Inner = "inductor",
        device: str | None = None,
        **harness: Any,
    ) -> None:
        """
        Args:
            pretrained: a name or folder of a causal model, or the model itself with `tokenizer=`.
            policy: the policy, with options after colons: `cascade:cascades=8:sinks=4` (`kvpass.policies.parse`).
            budget, kv_dtype, positions, inner: see `kvpass.backend`.
            prefill_chunk: tokens of a context that are fed together, see `kvpass.prefill`; None for whole contexts.
            scoring: how log-likelihoods are computed: "token" and "chunk" feed continuations to a bounded cache, see
                `kvpass.apps.evaluation.scoring.score`; "full" is one forward without kvpass.
            device: None for a GPU where there is one, else the CPU.
            harness: the other arguments of the harness's model: `dtype`, `batch_size`, `max_length`, `tokenizer`, ...

        Raises:
            PolicyError: an invalid option.
            BudgetError: a budget that the policy cannot work with, or a share of the prompt for prompts in chunks.
        """
        ways = ("full", *(feed for feed in FEEDS if feed != "whole"))
        require(scoring in ways, "scoring", scoring, f"must be one of {', '.join(ways)}")
        fits = scoring != "chunk" or prefill_chunk is not None
        require(fits, "prefill_chunk", None, "must be a number of tokens for scoring=chunk")
        require(not harness.get("parallelize"), "parallelize", True, "is not supported: a loop is on one device")
        self._loop = functools.partial(
            DecodeLoop,
            policy=policies.parse(policy),
            budget=budget,
            kv_dtype=kv_dtype,
            positions=positions,
            prefill_chunk=prefill_chunk,
            inner=inner,
            read_interval=8,
        )
        self._chunk, self._scoring = prefill_chunk, scoring
        self._loops: dict[tuple[Any, ...], DecodeLoop] = {}
        super().__init__(pretrained, device=device or ("cuda" if torch.cuda.is_available() else "cpu"), **harness)
        require(self.backend == "causal", "backend", self.backend, "must be 'causal', a model with one cache to bound")
        self.loop()  # settings are refused before a task is prepared

    def loop(self, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None) -> DecodeLoop:
        """Return the loop for these settings of sampling; all loops share compiled code."""
        sampling = (temperature, top_k, top_p)
        if sampling not in self._loops:
            self._loops[sampling] = self._loop(
                self.model,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=sorted({*stop_tokens(self.model, self.tokenizer), self.eot_token_id} - {None}),
                pad=self.tokenizer.pad_token_id,
            )
        return self._loops[sampling]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **options: Any
    ) -> Tensor:
        """Generate instead of the harness's call of `model.generate`: int64 [B, T + n], until the last row ends."""
        loop = self.loop(**_sampling(options))
        loop.reset()
        loop.prompt(context, attention_mask)
        ends = _Ends(self.tokenizer, stop, loop.stop.tolist(), len(context))
        result = list(ends.until_all(loop.stream(max_length - context.shape[1])))
        return torch.cat([context.cpu(), *(column[:, None] for column in result)], 1)

    def _loglikelihood_tokens(
        self, requests: list[HarnessRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and whether greedy decoding gives it."""
        if self._scoring == "full" or not requests:
            batch_option = {} if override_bs is None else {"override_bs": override_bs}
            return cast(
                "list[tuple[float, bool]]", super()._loglikelihood_tokens(requests, disable_tqdm, **batch_option)
            )
        order = Collator(requests, sort_fn=lambda request: (-len(request[1]) - len(request[2]), request[1]))
        answers: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="log-likelihoods") as bar:
            for batch in order.get_batched(n=override_bs or self._rows(requests)):
                answers += self._score(batch)
                bar.update(len(batch))
        return cast("list[tuple[float, bool]]", order.get_original(answers))

    def _rows(self, requests: list[HarnessRequest]) -> int:
        """Return the rows of a batch; "auto" finds them by whole forwards of the longest text."""
        return cast(int, self._detect_batch_size() if self.batch_size == "auto" else self.batch_size)

    def _score(self, requests: list[HarnessRequest]) -> list[tuple[float, bool]]:
        cut = [self._cut_to_positions(context, continuation) for _, context, continuation in requests]
        batch = ScoringBatch.of([context for context, _ in cut], [continuation for _, continuation in cut], self.device)
        answers = score(self.loop().model_call, batch, self._chunk, cast(Feed, self._scoring)).rows()
        for (name, _, _), answer in zip(requests, answers, strict=True):
            if name is not None:  # windows of a text have none
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers

    def _cut_to_positions(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Return the part at the end of both that the model has positions for; the last token is never fed."""
        limit = self.max_length + 1
        require(0 < len(continuation) < limit, "continuation", len(continuation), f"must have 1 to {limit - 1} tokens")
        return context[-(limit - len(continuation)) :], continuation


class _Ends:
    """Finds the rows that have generated one of the texts, or one of the tokens, that end them."""

    def __init__(self, tokenizer: Any, texts: list[str], tokens: list[int], rows: int) -> None:
        self.tokenizer, self.texts, self.tokens = tokenizer, texts, tokens
        # A text may begin within a token and end within another.
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        self.lookback = max(lengths, default=0) + 2
        self.generated: list[list[int]] = [[] for _ in range(rows)]
        self.ended = [False] * rows

    def until_all(self, columns: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield columns int64 [B] up to the column that ends the last row."""
        for column in columns:
            yield column
            for row, token in enumerate(column.tolist()):
                self.generated[row].append(token)
                self.ended[row] = self.ended[row] or self._ends(self.generated[row])
            if all(self.ended):
                return

    def _ends(self, generated: list[int]) -> bool:
        recent = self.tokenizer.decode(generated[-self.lookback :])
        return generated[-1] in self.tokens or any(text in recent for text in self.texts)


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a loop for the settings of `generate`."""
    unused = {
        name: value for name, value in options.items() if name not in ("do_sample", "temperature", "top_k", "top_p")
    }
    for name, value in unused.items():
        require(
            value is None or NO_CHANGE.get(name) == value, name, value, "is not supported by DecodeLoop; leave it out"
        )
    if not options.get("do_sample"):
        return {}
    return {name: options[name] for name in ("temperature", "top_k", "top_p") if options.get(name) is not None}
