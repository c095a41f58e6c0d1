import pytest
import torch

from kvpass.demo import stream


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    loss = stream.negative_log_likelihood(torch.zeros(3, 17), torch.tensor([0, 5, 16]))
    assert loss.shape == (3,)
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
    run = make_run(tokens=2)
    run.busy[1] = True
    assert run.tokens_per_second is None
