"""Train an aligner for a model.

Every step draws windows of the text, runs the model on them and on the rest of them after a deletion, and learns from
the difference; no rows are stored.  A step always draws the same windows, so a run that was stopped continues from its
last checkpoint as if it had not been stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvpass import tensor_files
from kvpass.apps.align import data
from kvpass.apps.align.data import TrainingPairs
from kvpass.errors import AlignerError
from kvpass.model_access import device_of
from kvpass.policies.aligners.aligner import Aligner, Recipe
from kvpass.policies.aligners.networks import DirectNetwork, Hidden, PaperNetwork
from kvpass.policies.aligners.scope import AlignerScope, scope_of
from kvpass.policies.weights import weights_digest
from kvpass.runtime import model_identity

StepData = list[TrainingPairs]
"""The pairs of one step, for each number of deleted tokens."""
SAVE_EVERY = 100
HELD_OUT = 0.05
KEYS_OF_THE_PAPER, VALUES_OF_THE_PAPER = (256, 64), (64, 128)  # hidden numbers, for DistilGPT2


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Settings of training.

    Attributes:
        window: the largest window M that the aligner is for.
        recipe: "direct", or "paper" for rows that move by `every` positions at a time.
        tokens: the tokens of a step, before any deletion.
        parts: for "paper": parts of a step's rows, each for a separate update.
        deletions: how many numbers of deleted tokens a step of "direct" draws.
        rate: the highest learning rate; it falls to a hundredth along a cosine.
        decay, clip: weight decay and the norm that gradients are clipped to.
        hidden: sizes of the two hidden layers, for "paper" of the key network; None for (96, 96), and for "paper"
            the paper's sizes on DistilGPT2.
        hidden_values: for "paper", the sizes of the value network; None for `hidden`, or else the paper's.
        embedding: for "direct", how many numbers encode a position.
    """

    window: int = 255
    recipe: Recipe = "direct"
    every: int = 1
    sinks: int = 4
    steps: int = 1000
    tokens: int = 1024
    parts: int = 8
    deletions: int = 3
    rate: float = 2e-3
    decay: float = 0.01
    clip: float = 1.0
    hidden: Hidden | None = None
    hidden_values: Hidden | None = None
    embedding: int = 144
    seed: int = 0

    def __post_init__(self) -> None:
        if self.recipe not in ("direct", "paper"):
            raise AlignerError(f"recipe={self.recipe!r}: must be 'direct' or 'paper'")
        if self.hidden_values and self.recipe != "paper":
            raise AlignerError(f"hidden_values={self.hidden_values}: recipe {self.recipe!r} has one network for both")
        if not self.rate > 0:
            raise AlignerError(f"rate={self.rate}: must be above zero")
        if self.every < 1 or self.window <= self.sinks + self.every:
            raise AlignerError(
                f"window={self.window} with every={self.every} leaves nothing to move after {self.sinks} sinks"
            )


@dataclasses.dataclass(frozen=True)
class AlignmentErrors:
    """Mean squared errors of keys and values on held-out text, with and without repair.

    Attributes:
        key_ratio, value_ratio: the error with repair as a share of the error without.
        ratio: the mean of both.
    """

    key: float
    value: float
    key_alone: float
    value_alone: float

    @property
    def key_ratio(self) -> float:
        return self.key / self.key_alone

    @property
    def value_ratio(self) -> float:
        return self.value / self.value_alone

    @property
    def ratio(self) -> float:
        return (self.key_ratio + self.value_ratio) / 2


@dataclasses.dataclass(frozen=True)
class TrainedAligner:
    """A trained aligner, its errors, and the seconds of training, earlier runs included."""

    aligner: Aligner
    errors: AlignmentErrors
    seconds: float


def train(model: Any, stream: Tensor, settings: TrainingSettings, checkpoint: Path | None = None) -> TrainedAligner:
    """Train an aligner.

    Args:
        model: see `kvpass.policies.aligners.scope.scope_of`; its weights stay unchanged.
        stream: int64 [T], the text; its last twentieth is held out to measure errors on.
        checkpoint: file from which a later run continues.

    Raises:
        AlignerError: a model without a cache of keys and values, too little text, or a checkpoint of another run.
    """
    scope = scope_of(model, settings.window, settings.sinks, settings.every)
    split = int(len(stream) * (1 - HELD_OUT))
    with _without_gradients(model):
        trainer = _Trainer(model, scope, settings, stream[:split], checkpoint)
        seconds = trainer.run()
    aligner = Aligner(settings.recipe, scope, trainer.network.to_tensors())
    return TrainedAligner(aligner, measure(aligner, model, stream[split:], settings), seconds)


def network_of(scope: AlignerScope, settings: TrainingSettings) -> DirectNetwork | PaperNetwork:
    """Return the untrained network of a recipe."""
    if settings.recipe == "direct":
        return DirectNetwork(scope, settings.hidden or (96, 96), settings.embedding)
    keys, values = settings.hidden, settings.hidden_values or settings.hidden
    return PaperNetwork(scope, keys or KEYS_OF_THE_PAPER, values or VALUES_OF_THE_PAPER)


@contextlib.contextmanager
def _without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Turn off the gradients of the model's weights inside the block."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in learning:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_(True)


class _Trainer:
    def __init__(
        self, model: Any, scope: AlignerScope, settings: TrainingSettings, stream: Tensor, checkpoint: Path | None
    ) -> None:
        self.model, self.settings, self.stream, self.checkpoint = model, settings, stream, checkpoint
        torch.manual_seed(settings.seed)
        network = network_of(scope, settings)
        self.network: Any = network.to(device_of(model))
        if isinstance(network, DirectNetwork):
            self._fit_scales(network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), settings.rate, weight_decay=settings.decay)
        self.steps_done, self.seconds_spent = 0, 0.0
        weights = sorted(model_identity.digests(model.parameters()))
        self.data_digest = weights_digest(repr((scope, weights)), {"stream": stream})
        self.scale = self._errors_of_nothing()
        self._resume()

    def run(self) -> float:
        settings, start = self.settings, time.perf_counter() - self.seconds_spent
        steps = range(self.steps_done, settings.steps)
        bar_options = dict[str, Any](unit="step", desc="align", dynamic_ncols=True)
        bar = tqdm(steps, initial=self.steps_done, total=settings.steps, mininterval=2, **bar_options)
        for step in bar:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(settings, step)
            for step_data in self._parts(draw(self.model, self.stream, settings, self._seed(step)), self._seed(step)):
                loss = self._update(step_data)
            if (step + 1) % 20 == 0:
                bar.set_postfix(error=f"{loss.item():.3f}")
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == settings.steps:
                self._save(step + 1, time.perf_counter() - start)
        return time.perf_counter() - start

    def _parts(self, step_data: StepData, seed: int) -> list[StepData]:
        """Return the drawn pairs; for "paper" random parts of their rows, as an update costs less than the model."""
        if self.settings.recipe != "paper":
            return [step_data]
        position = step_data[0].position
        order = torch.randperm(len(position), generator=torch.Generator().manual_seed(seed)).to(position.device)
        return [[pairs.select(rows) for pairs in step_data] for rows in order.chunk(self.settings.parts)]

    def _update(self, step_data: StepData) -> Tensor:
        """Make a step of the optimiser, and return the loss before it."""
        loss = self._loss(step_data)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _seed(self, step: int) -> int:
        return self.settings.seed * 1_000_003 + step + 1

    def _loss(self, step_data: StepData) -> Tensor:
        repaired = [self.network(pairs.key, pairs.value, pairs.position, pairs.rank) for pairs in step_data]
        return torch.stack([self._error(rows, pairs) for rows, pairs in zip(repaired, step_data, strict=True)]).mean()

    def _error(self, repaired: tuple[Tensor, Tensor], pairs: TrainingPairs) -> Tensor:
        """Return the mean squared error over layers, keys and values, as a share of the error without repair."""
        scales = self.scale
        errors = [_error_by_layer(repaired[0], pairs.target_key), _error_by_layer(repaired[1], pairs.target_value)]
        if self.settings.recipe == "paper":  # a plain mean squared error
            errors, scales = [error.mean() for error in errors], [scale.mean() for scale in scales]
        return torch.stack([error / scale for error, scale in zip(errors, scales, strict=True)]).mean()

    def _samples(self) -> list[TrainingPairs]:
        steps = [draw(self.model, self.stream, self.settings, self._seed(step)) for step in range(-8, 0)]
        return [pairs for sets in steps for pairs in sets]

    def _errors_of_nothing(self) -> list[Tensor]:
        """Return the errors without repair, [L] each for keys and values; the largest for rows that never change."""
        sets = self._samples()
        keys = torch.stack([_error_by_layer(pairs.key, pairs.target_key) for pairs in sets]).mean(0)
        values = torch.stack([_error_by_layer(pairs.value, pairs.target_value) for pairs in sets]).mean(0)
        return [scale.where(scale > 1e-6 * scale.max(), scale.max()) for scale in (keys, values)]

    def _fit_scales(self, network: DirectNetwork) -> None:
        sets = self._samples()
        rows = torch.cat([torch.cat([pairs.key.flatten(2), pairs.value.flatten(2)], -1) for pairs in sets], 1)
        targets = torch.cat(
            [torch.cat([pairs.target_key.flatten(2), pairs.target_value.flatten(2)], -1) for pairs in sets], 1
        )
        network.fit_scales(rows, targets)
        network.fit_positions(data.mean_rows(self.model, self.stream[: self.settings.window + 1]))

    def _resume(self) -> None:
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            settings, digest = str(state["settings"]), state["data"]
            if (settings, digest) == (repr(self.settings), self.data_digest):
                self.network.load_state_dict(state["network"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.steps_done, self.seconds_spent = int(state["step"]), float(state["seconds"])
                return
        except Exception as error:  # a file of another program may raise any error
            raise AlignerError(
                f"{self.checkpoint} is damaged or not a training checkpoint ({type(error).__name__}); remove it to "
                "start anew"
            ) from error
        other = "another model or text" if settings == repr(self.settings) else settings
        raise AlignerError(f"{self.checkpoint} is of another run, with {other}; remove it to start again")

    def _save(self, step: int, seconds: float) -> None:
        """Write the checkpoint; a run that is killed meanwhile leaves the previous checkpoint."""
        if self.checkpoint is None:
            return
        state = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        about = {"settings": repr(self.settings), "data": self.data_digest, "step": step, "seconds": seconds}
        content = io.BytesIO()
        remedy = "; free space there, and run the command again: it continues after its last checkpoint"
        torch.save(state | about, content)  # to a file it raises a RuntimeError of its own if the disk is full
        with tensor_files.whole_file(self.checkpoint, AlignerError, remedy) as unfinished:
            unfinished.write_bytes(content.getbuffer())


def draw(model: Any, stream: Tensor, settings: TrainingSettings, seed: int) -> StepData:
    """Return the pairs of one step."""
    generator = torch.Generator().manual_seed(seed)
    sinks, window = settings.sinks, settings.window
    if settings.recipe == "paper":
        dropped = [settings.every]
    else:
        window = data.lengths(window, sinks, generator)
        dropped = torch.randint(1, window - sinks + 1, (settings.deletions,), generator=generator).tolist()
    rows = max(1, settings.tokens // (window + 1))
    windows = data.run_windows(model, data.windows(stream, rows, window + 1, sinks, generator))
    return [data.pair(model, windows, count, sinks) for count in dropped]


def learning_rate(settings: TrainingSettings, step: int) -> float:
    """Return the learning rate of a step: a cosine after 50 steps of warm-up."""
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return settings.rate * cosine * min(1.0, (step + 1) / 50)


def _error_by_layer(rows: Tensor, targets: Tensor) -> Tensor:
    return (rows - targets).square().mean((1, 2, 3))


@torch.no_grad()
def measure(aligner: Aligner, model: Any, stream: Tensor, settings: TrainingSettings) -> AlignmentErrors:
    """Return an aligner's errors on pairs that are drawn as in training from another text int64 [T]."""
    rounds = 20
    error_sum = torch.zeros(4, dtype=torch.float64)
    for seed in range(rounds):
        for pairs in draw(model, stream, settings, -1 - seed):
            key, value = _repair(aligner, pairs)
            errors = [(key, pairs.target_key), (value, pairs.target_value)]
            errors += [(pairs.key, pairs.target_key), (pairs.value, pairs.target_value)]
            error_sum += torch.stack([_error_by_layer(*pair).mean() for pair in errors]).double().cpu()
    sets = rounds * (1 if settings.recipe == "paper" else settings.deletions)
    return AlignmentErrors(*(error_sum / sets).tolist())


def _repair(aligner: Aligner, pairs: TrainingPairs) -> tuple[Tensor, Tensor]:
    keys, values = [], []
    positions = pairs.position[None], pairs.rank[None], torch.ones_like(pairs.position[None], dtype=torch.bool)
    for layer in range(len(pairs.key)):
        rows = [tensor[layer].transpose(0, 1)[None] for tensor in (pairs.key, pairs.value)]  # [1, H, N, D]
        weights = [tensor.to(pairs.key.device) for tensor in aligner.layer_weights(layer)]
        key, value = aligner.repair(weights, rows[0], rows[1], *positions)
        keys.append(key[0].transpose(0, 1))
        values.append(value[0].transpose(0, 1))
    return torch.stack(keys), torch.stack(values)
