from types import SimpleNamespace

import pytest
import torch

import kvpass
from kvpass.apps.demo import stream


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    loss = stream.negative_log_likelihood(torch.zeros(3, 2, 17), torch.tensor([[0, 5], [16, 1], [2, 3]]))
    assert loss.shape == (3, 2)
    assert stream.perplexity(loss) == pytest.approx(17)


def test_running_perplexity_is_that_of_each_window_over_all_rows():
    losses = torch.rand(2, 10)
    curve = stream.running_perplexity(losses, 4)
    assert curve.shape == (7,)
    for start in range(7):
        assert curve[start].item() == pytest.approx(stream.perplexity(losses[:, start : start + 4]), rel=1e-6)


def test_a_stream_shorter_than_the_window_is_one_window():
    losses = torch.rand(1, 5)
    assert stream.running_perplexity(losses, 100).tolist() == pytest.approx([stream.perplexity(losses)], rel=1e-6)


def test_steps_that_compile_are_not_timed(make_run):
    assert make_run().tokens_per_second == pytest.approx(2 / 0.5)


def test_speed_is_unknown_when_every_step_compiled(make_run):
    run = make_run(tokens=3)
    assert run.tokens_per_second is None


class Successor(torch.nn.Module):
    """Expects the token after the last one, with a fixed confidence; its cache is what it has been fed."""

    def forward(self, input_ids, use_cache, past_key_values=None):
        fed = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], 1)
        logits = 3.0 * torch.nn.functional.one_hot((input_ids + 1) % 50, 50)
        return SimpleNamespace(logits=logits, past_key_values=fed)


def inspect(cache):
    """As kvpass.inspect, for a cache of the last 4 tokens."""
    seen = cache.shape[1]
    positions = torch.arange(seen - 4, seen).flip(0).expand(2, 3, 4)
    return SimpleNamespace(layers=[SimpleNamespace(positions=positions)], nbytes=4, full_nbytes=seen, seen=seen)


def test_every_token_is_fed_once_and_judged_by_the_next(monkeypatch):
    monkeypatch.setattr(kvpass, "inspect", inspect, raising=False)
    ticks = []
    tokens = torch.stack([torch.arange(20), torch.arange(20) * 2])
    run = stream.run(Successor(), tokens, every=8, tick=lambda: ticks.append(1))
    assert run.losses.shape == (2, 19)
    right, wrong = run.losses[0, 0].item(), run.losses[1, 3].item()
    assert wrong == pytest.approx(right + 3)
    torch.testing.assert_close(run.losses[0], torch.full((19,), right))
    torch.testing.assert_close(run.losses[1], torch.full((19,), wrong))
    assert len(ticks) == len(run.seconds) == len(run.busy) == 20 - stream.PROMPT
    assert (run.cache_bytes, run.full_bytes) == (4, 20)
    assert [(taken.step, taken.positions) for taken in run.snapshots] == [(8, [4, 5, 6, 7]), (16, [12, 13, 14, 15])]
