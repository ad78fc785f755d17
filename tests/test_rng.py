import pytest
import torch
from torch import Tensor

from fxrecals import rng

DRAWS = {
    "rand": lambda: torch.rand(7),
    "randn": lambda: torch.randn(7),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(5), 8, replacement=True),
    "randperm": lambda: torch.randperm(11),
    "native_dropout": lambda: torch.native_dropout(torch.ones(16), 0.5, True)[0],
    "rrelu": lambda: torch.rrelu(-torch.ones(6), training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_replay_draws_what_was_drawn_before(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(3)
    torch.randn(3)  # leaves half of a pair of normals waiting in the generator
    drawn_from = rng.state("cpu")
    first = draw()
    draw()
    assert torch.equal(rng.replay(drawn_from, "cpu", draw), first)


@pytest.mark.parametrize("name", DRAWS)
def test_a_replay_leaves_the_generator_where_it_was(name: str) -> None:
    torch.manual_seed(3)
    drawn_from = rng.state("cpu")
    DRAWS[name]()
    now = rng.state("cpu")
    rng.replay(drawn_from, "cpu", DRAWS[name])
    assert torch.equal(rng.state("cpu"), now)


def test_a_replay_that_fails_leaves_the_generator_where_it_was() -> None:
    drawn_from = rng.state("cpu")
    torch.rand(5)
    now = rng.state("cpu")

    def fails() -> Tensor:
        torch.rand(2)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        rng.replay(drawn_from, "cpu", fails)
    assert torch.equal(rng.state("cpu"), now)


def test_a_device_without_a_generator_cannot_be_replayed() -> None:
    assert not rng.can_replay("meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replay_is_exact_on_a_gpu_and_touches_no_other_generator() -> None:
    device = f"cuda:{torch.cuda.device_count() - 1}"
    drawn_from = rng.state(device)
    first = torch.rand(1000, device=device)
    here, there = rng.state("cpu"), rng.state(device)
    assert torch.equal(rng.replay(drawn_from, device, torch.rand, 1000, device=device), first)
    assert torch.equal(rng.state("cpu"), here)
    assert torch.equal(rng.state(device), there)
