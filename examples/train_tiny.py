"""Train the small language models that ship with kvpass, on the Python standard library's source.

    python examples/train_tiny.py llama     # 5M parameters, rotary positions, good up to 2,048 positions
    python examples/train_tiny.py gpt2      # 4M parameters, learned absolute positions, 512 of them

The text is whatever the running Python ships (`kvpass.apps.corpus`); the held-out modules are never
seen.  A run can be stopped and started again: it goes on from its last checkpoint.  The weights are
written as float16 beside `training.json`, which holds every figure that the documentation quotes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from tqdm import tqdm
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvpass.apps import corpus

VOCABULARY = 2048
END = "<|endoftext|>"
MODELS = Path(__file__).parents[1] / "kvpass" / "apps" / "data"


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training on windows of one length."""

    tokens: int
    context: int
    batch: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained and how; the learning rate is a cosine over all phases."""

    build: Callable[[], PreTrainedModel]
    phases: tuple[Phase, ...]
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.05


def tiny_llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def tiny_gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=256,
            n_layer=4,
            n_head=4,
            n_positions=512,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


RECIPES = {
    # Short windows first: on a CPU half of the time at 512 tokens is attention's backward pass.
    "llama": Recipe(tiny_llama, (Phase(9_000_000, 256, 16), Phase(2_500_000, 512, 8), Phase(1_500_000, 2048, 2))),
    "gpt2": Recipe(tiny_gpt2, (Phase(6_000_000, 256, 16), Phase(3_000_000, 512, 8))),
}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, pad_token=END)


def load_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """The tokenizer that both models share, trained on first use."""
    folder = MODELS / "tokenizer"
    if not folder.exists():
        train_tokenizer(texts).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """One long stream [N], every file introduced by the end-of-text token."""
    ids = []
    for text in texts:
        ids += [tokenizer.eos_token_id, *tokenizer.backend_tokenizer.encode(text).ids]
    return torch.tensor(ids)


def windows(stream: torch.Tensor, phase: Phase, step: int) -> torch.Tensor:
    """A batch of random windows [B, context + 1]; the same for the same step, so that runs resume exactly."""
    generator = torch.Generator().manual_seed(phase.context * 1_000_003 + step)
    starts = torch.randint(len(stream) - phase.context - 1, (phase.batch,), generator=generator)
    return torch.stack([stream[s : s + phase.context + 1] for s in starts])


def schedule(recipe: Recipe) -> Iterator[tuple[Phase, float]]:
    """The phase and the learning rate of every step."""
    lengths = [phase.tokens // (phase.context * phase.batch) for phase in recipe.phases]
    total, step = sum(lengths), 0
    for phase, length in zip(recipe.phases, lengths, strict=True):
        for _ in range(length):
            cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total))
            yield phase, recipe.learning_rate * cosine * min(1.0, (step + 1) / recipe.warmup_steps)
            step += 1


def loss_of(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: PreTrainedModel, stream: torch.Tensor, context: int) -> float:
    """Over consecutive windows of the held-out stream, every position counted."""
    count = (len(stream) - 1) // context
    inputs = stream[: count * context].view(count, context)
    targets = stream[1 : count * context + 1].view(count, context)
    model.eval()
    losses = [
        torch.nn.functional.cross_entropy(model(row[None], use_cache=False).logits[0], target).item()
        for row, target in zip(inputs, targets, strict=True)
    ]
    model.train()
    return math.exp(sum(losses) / count)


def train(recipe: Recipe, model: PreTrainedModel, stream: torch.Tensor, checkpoint: Path) -> float:
    """Train in place; returns the seconds spent, earlier runs included."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    done, spent = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, spent = state["step"], state["seconds"]
    model.compile()
    plan, start = list(schedule(recipe)), time.perf_counter() - spent
    bar = tqdm(range(done, len(plan)), initial=done, total=len(plan), mininterval=10)
    for step in bar:
        phase, rate = plan[step]
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, windows(stream, phase, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % 100 == 0 or step + 1 == len(plan):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1, "seconds": time.perf_counter() - start}, checkpoint)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=RECIPES)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    recipe, folder = RECIPES[arguments.model], MODELS / f"tiny-{arguments.model}"
    texts = corpus.read(corpus.training_files())
    tokenizer = load_tokenizer(texts)
    stream = encode(tokenizer, texts)
    held_out = encode(tokenizer, corpus.read(corpus.held_out_files()))
    model = recipe.build()
    folder.mkdir(parents=True, exist_ok=True)
    seconds = train(recipe, model, stream, folder / "checkpoint.pt")
    contexts = sorted({phase.context for phase in recipe.phases})
    figures = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": model.num_parameters(),
        "corpus_tokens": len(stream),
        "held_out_tokens": len(held_out),
        "trained_tokens": sum(phase.tokens for phase in recipe.phases),
        "seconds": round(seconds),
        "threads": arguments.threads,
        "held_out_perplexity": {str(c): round(perplexity(model, held_out, c), 3) for c in contexts},
    }
    (folder / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
