"""Draws docs/policies/NAME.png: which positions a policy holds while held-out text goes by.

python docs/pictures.py [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvpass
from kvpass import policies
from kvpass.apps import corpus
from kvpass.apps.evaluation import plots
from kvpass.apps.evaluation.scoring import ScoringBatch, score
from kvpass.apps.evaluation.session import PositionRecorder
from kvpass.apps.models import load
from kvpass.decoding.model_call import ModelCall

BUDGET, PROMPT, LENGTH, EVERY = 68, 128, 512, 2
OPTIONS: dict[str, dict[str, Any]] = {  # defaults would leave few tokens for the selection, or none
    "snapkv": {"window": 16},
    "pyramid_kv": {"window": 16},
    "ada_kv": {"window": 16},
    "critical_kv": {"window": 16},
    "defensive_kv": {"window": 16},
    "keydiff": {"interval": 8},
    "r_kv": {"interval": 8},
    "vase": {"recent": 16, "interval": 8},
}


def draw(model: Any, tokens: Tensor, name: str) -> None:
    """One picture, of layer 0, head 0."""
    policy = policies.resolve(name, dict(OPTIONS.get(name, {})))
    budget = BUDGET if policy.evicts else LENGTH

    held = PositionRecorder()
    batch = ScoringBatch(tokens, torch.ones_like(tokens), PROMPT)
    torch.compiler.reset()
    kvpass.compile(model, policy=policy, budget=budget, inner="eager")
    score(ModelCall.of(model), batch, None, watch=held)
    snapshots = [snapshot for snapshot in held.snapshots if snapshot.step > PROMPT and snapshot.step % EVERY == 0]
    figure = plots.cached_positions({name: snapshots}, LENGTH, band=2)
    figure.savefig(Path(__file__).parent / "policies" / f"{name}.png", dpi=80, metadata={"Software": None})


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    subject = load(None)
    texts = subject.encode(corpus.read(corpus.held_out_files()))
    tokens = torch.tensor(corpus.documents(texts, 1, LENGTH, subject.bos))
    with torch.inference_mode():
        for name in names or [name for name in policies.names() if not policies.get(name).needs_weights]:
            draw(subject.model, tokens, name)


if __name__ == "__main__":
    main(sys.argv[1:])
