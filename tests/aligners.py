"""Make aligners with random weights, large enough to change the output of a layer visibly."""

from __future__ import annotations

import functools

import torch

from kvpass.policies.aligners import Aligner, AlignerScope, identity_aligner
from kvpass.policies.aligners.networks import DirectNetwork, PaperNetwork


@functools.cache
def random_aligner(
    recipe: str, layers: int = 1, heads: int = 2, dim: int = 8, window: int = 40, every: int = 1, seed: int = 0
) -> Aligner:
    """Return an untrained aligner for a model with these sizes."""
    scope = AlignerScope("random", layers, heads, dim, dim, window, every=every)
    if recipe == "nothing":
        return identity_aligner(scope)
    torch.manual_seed(seed)
    if recipe == "paper":
        return Aligner("paper", scope, PaperNetwork(scope, (12, 10), (10, 12)).to_tensors())
    network = DirectNetwork(scope, (12, 10), 6)
    with torch.no_grad():
        network.outer.normal_(std=0.1)
        network.shift.normal_(std=0.1)
        network.spread.uniform_(0.5, 2)
        network.mean.normal_()
    return Aligner("direct", scope, network.to_tensors())
