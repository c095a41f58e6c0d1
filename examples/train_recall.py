"""Train the small language model on which memory matters: it recalls pairs that were planted far back.

    python -m examples.train_recall         # under an hour with one thread

The text is that of `examples/train_tiny.py`, with its tokenizer; among it stand lines of a key and a value
(`kvpass.apps.evaluation.recall`), most of which repeat an earlier one.  What a repeated line says after its key can be
known from the earlier one alone, however far back that is.  Windows are short at first: copying is learnt on them
within minutes and then carries over to longer ones.  Everything is drawn from the number of the step, so a run that was
stopped goes on as if it had not been.  Beside the weights, in float16, stand `training.json`, which holds the settings
and the recall by distance on held-out text, and `training.log`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from examples.train_tiny import MODELS, VOCABULARY, encode, load_tokenizer, perplexity
from kvpass.apps import corpus
from kvpass.apps.evaluation.recall import PairVocabulary, PlantedPairs, plant_pairs

FOLDER = MODELS / "tiny-recall"
POSITIONS = 2048
FIRST = 0  # the token that introduces a document
TESTED = (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2000)  # distances in `training.json`
TESTS = 32  # texts that they are measured on
EVERY = 100  # steps between two lines of the log, and two checkpoints


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training on windows of one length.

    Attributes:
        share: the least and the largest share of a window that pairs make up; drawn for each window, evenly in its
            logarithm.
        rate: of learning at the first and after the last step, in parts of the recipe's; in between it is a line.
        repeats: lines for each pair, on average.
        ends: lines crowd at both ends of the window; otherwise they stand anywhere alike.
    """

    steps: int
    context: int
    batch: int
    share: tuple[float, float]
    rate: tuple[float, float] = (1.0, 1.0)
    repeats: int = 4
    ends: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained and how."""

    phases: tuple[Phase, ...]
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    text: float = 0.3  # weight of the text's mean loss beside that of the answers
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    key_heads: int = 2
    head: int = 64
    base: float = 100_000.0
    values: int = 4  # words of a value, at most


RECIPE = Recipe(
    (
        Phase(1200, 64, 16, (0.8, 1.0)),
        Phase(700, 128, 16, (0.3, 1.0)),
        Phase(500, 256, 8, (0.1, 0.9)),
        Phase(300, 512, 4, (0.05, 0.8)),
        Phase(200, 1024, 2, (0.03, 0.6)),
        Phase(500, 2048, 2, (0.02, 0.5), rate=(1.0, 0.05)),
        # In the phases above a pair has mostly been said not long ago, and what is asked from 1,800 tokens on is rare.
        Phase(300, 2048, 2, (0.02, 0.3), rate=(0.5, 0.0), repeats=2, ends=True),
    )
)


def build(recipe: Recipe) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.hidden * 3,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.key_heads,
            head_dim=recipe.head,
            max_position_embeddings=POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": recipe.base},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


@dataclasses.dataclass(frozen=True)
class Source:
    """What windows are cut from: text int64 [N], and the tokens that pairs are said in."""

    text: Tensor
    vocabulary: PairVocabulary

    def excerpt(self, length: int, generator: torch.Generator) -> Tensor:
        start = int(torch.randint(len(self.text) - length, (), generator=generator))
        return self.text[start : start + length]


def window(source: Source, recipe: Recipe, phase: Phase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens int64 [context + 1] and which of them are answers, bool [context + 1].

    Words of a value are answers when the pair has been said before.
    """
    length = phase.context + 1
    value = int(torch.randint(1, recipe.values + 1, (), generator=generator))
    lines, answers = said(
        source.vocabulary, round(_share(phase, generator) * length / (3 + value)), value, phase.repeats, generator
    )
    text = source.excerpt(length, generator)
    # Where in the text the lines stand; what is left of it fills the window.
    room = max(1, length - lines.numel())
    places = _places(phase, len(lines), room, generator).sort().values
    order = torch.cat([torch.arange(length), places.repeat_interleave(lines.shape[1])]).argsort(stable=True)
    tokens = torch.cat([text.index_fill(0, torch.tensor([0]), FIRST), lines.flatten()])[order]
    marked = torch.cat([torch.zeros(length, dtype=torch.bool), answers.flatten()])[order]
    return tokens[:length], marked[:length]


def _places(phase: Phase, number: int, room: int, generator: torch.Generator) -> Tensor:
    """int64 [number], from 1 to `room`."""
    if not phase.ends:
        return torch.randint(1, room + 1, (number,), generator=generator)
    return 1 + ((room - 1) * torch.sin(torch.rand(number, generator=generator) * math.pi / 2) ** 2).long()


def _share(phase: Phase, generator: torch.Generator) -> float:
    low, high = map(math.log, phase.share)
    return math.exp(low + (high - low) * torch.rand((), generator=generator).item())


def said(
    vocabulary: PairVocabulary, number: int, value: int, repeats: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """At least two lines int64 [number, 3 + value] that say some pairs again and again, and what is an answer, bool."""
    number = max(2, number)
    distinct = min(max(1, round(number / repeats)), len(vocabulary.words) // (1 + value))
    more = torch.randint(distinct, (number - distinct,), generator=generator)
    which = torch.cat([torch.arange(distinct), more])[torch.randperm(number, generator=generator)]
    again = (which[:, None] == which).tril(-1).any(1)
    answers = torch.zeros(number, 3 + value, dtype=torch.bool)
    answers[:, 2:-1] = again[:, None]
    return vocabulary.pairs(distinct, value, generator)[which], answers


def batch(source: Source, recipe: Recipe, phase: Phase, step: int) -> tuple[Tensor, Tensor]:
    """Windows and answers [batch, context + 1]; the same for the same step, so that runs resume exactly."""
    generator = torch.Generator().manual_seed(phase.context * 1_000_003 + step)
    rows = [window(source, recipe, phase, generator) for _ in range(phase.batch)]
    tokens, answers = zip(*rows, strict=True)
    return torch.stack(tokens), torch.stack(answers)


def schedule(recipe: Recipe) -> Iterator[tuple[Phase, float]]:
    """The phase and the learning rate of every step: a short rise, then what the phases say."""
    step = 0
    for phase in recipe.phases:
        first, last = phase.rate
        for place in range(phase.steps):
            part = first + (last - first) * place / phase.steps
            yield phase, recipe.learning_rate * part * min(1.0, (step + 1) / recipe.warmup_steps)
            step += 1


@dataclasses.dataclass(frozen=True)
class Losses:
    """Mean losses in nats, and the share of answers that were the likeliest token."""

    answers: Tensor
    text: Tensor
    right: Tensor

    @staticmethod
    def of(model: PreTrainedModel, tokens: Tensor, answers: Tensor) -> Losses:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1], use_cache=False).logits
        targets, asked = tokens[:, 1:].flatten(), answers[:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
        right = logits.detach().flatten(0, 1)[asked].argmax(-1) == targets[asked]
        return Losses(losses[asked].mean(), losses[~asked].mean(), right.float().mean())

    def __str__(self) -> str:
        return f"answers {self.answers.item():.3f}  right {self.right.item():.3f}  text {self.text.item():.3f}"


class Trainer:
    """Trains in place; goes on from `checkpoint` if there is one."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, checkpoint: Path) -> None:
        self.model, self.recipe, self.checkpoint = model, recipe, checkpoint
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.step, self.seconds = 0, 0.0
        if checkpoint.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.checkpoint)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def _save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"step": self.step, "seconds": self.seconds}, self.checkpoint)

    def train(self, source: Source, log: Path) -> None:
        plan = list(schedule(self.recipe))
        self.model.compile()
        with log.open("a") as lines:
            while self.step < len(plan):
                start = time.perf_counter()
                losses = self._one(source, *plan[self.step])
                self.step += 1
                self.seconds += time.perf_counter() - start
                if self.step % EVERY == 0 or self.step == len(plan):
                    context = plan[self.step - 1][0].context
                    print(f"{self.step:6} {self.seconds:6.0f} s  context {context:4}  {losses}", file=lines, flush=True)
                    self._save()

    def _one(self, source: Source, phase: Phase, rate: float) -> Losses:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = Losses.of(self.model, *batch(source, self.recipe, phase, self.step))
        (losses.answers + self.recipe.text * losses.text).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses


@torch.no_grad()
def recalled(model: PreTrainedModel, held_out: Tensor, vocabulary: PairVocabulary) -> dict[str, float]:
    """The share of planted words that are the likeliest ones, by distance, in plain transformers without a cache."""
    found = plant_pairs(held_out, FIRST, vocabulary, POSITIONS, TESTED, rows=TESTS, seed=POSITIONS, times=1)
    return {
        str(distance): round(share_without_cache(model, found, number), 4)
        for number, distance in enumerate(found.distances)
    }


def share_without_cache(model: Any, planted: PlantedPairs, number: int) -> float:
    """The share of a value's words that follow its key in a plain model that sees everything at once."""
    answer = planted.answer(number)
    tokens = torch.cat([planted.text, planted.question(number), answer[:, :-1]], 1)
    logits = model(tokens, use_cache=False, logits_to_keep=planted.value).logits
    share: float = (logits.argmax(-1) == answer).float().mean().item()
    return share


def figures(
    trainer: Trainer, text: Tensor, held_out: Tensor, vocabulary: PairVocabulary, arguments: argparse.Namespace
) -> object:
    """What the documentation quotes, and the settings that it comes from."""
    model = trainer.model.eval()
    tokens = sum(phase.steps * phase.batch * phase.context for phase in trainer.recipe.phases)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": model.num_parameters(),
        "corpus_tokens": len(text),
        "held_out_tokens": len(held_out),
        "trained_tokens": tokens,
        "seconds": round(trainer.seconds),
        "threads": arguments.threads,
        "seed": arguments.seed,
        "recipe": dataclasses.asdict(trainer.recipe),
        "recall": recalled(model, held_out, vocabulary),
        "held_out_perplexity": {"2048": round(perplexity(model, held_out, POSITIONS), 3)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="(default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    texts = corpus.read(corpus.training_files())
    tokenizer = load_tokenizer(texts)
    text, held_out = encode(tokenizer, texts), encode(tokenizer, corpus.read(corpus.held_out_files()))
    vocabulary = PairVocabulary.of(tokenizer)
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(build(RECIPE), RECIPE, arguments.out / "checkpoint.pt")
    trainer.train(Source(text, vocabulary), arguments.out / "training.log")
    written = json.dumps(figures(trainer, text, held_out, vocabulary, arguments), indent=2)
    (arguments.out / "training.json").write_text(written + "\n")
    trainer.model.to(torch.float16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(written)


if __name__ == "__main__":
    main()
