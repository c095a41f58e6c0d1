"""Test that caches belong to layers, which are identified by their tensors."""

from __future__ import annotations

import pytest
import torch

from kvpass.runtime.model_identity import TensorSet, belongs_to_other_layer, weak_references


@pytest.mark.parametrize("gone", [True, False])
def test_a_tensor_at_an_old_address_is_another_one(gone: bool) -> None:
    known, tensor = TensorSet(), torch.ones(1)
    known.add([tensor])
    key = id(tensor)
    if gone:
        del tensor
        known._references[key] = next(iter(known._references.values()))
        assert not any(torch.ones(1) in known for _ in range(100))
    else:
        assert tensor in known


def test_a_cache_of_another_known_layer_is_recognised() -> None:
    here, there, known = torch.ones(1), torch.ones(1), TensorSet()
    assert not belongs_to_other_layer(weak_references([there]), [here], known)  # a copy that ran only the prompt
    known.add([there])
    assert belongs_to_other_layer(weak_references([there]), [here], known)
    assert not belongs_to_other_layer(weak_references([there, here]), [here], known)  # an adapter
    assert not belongs_to_other_layer((), [here], known)
