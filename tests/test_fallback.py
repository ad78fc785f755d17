"""`fxrecals.compile`: graphs where tracing works, the engine where it does not."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxrecals
from benchmarks.measure import compare, record
from fxrecals import fallback

LIMIT = 2_000_000


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layers(x), 0.5, True)


class Branching(Traced):
    """Goes on as its values say, so that ops run between its graphs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)
        for _ in range(2):
            if h.mean().item() > -100:
                h = F.dropout(h.sin(), 0.5, True)
        return h


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


class Failing(Traced):
    """Compiles up to a break, and then in no way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(16), 0

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(x), 0.5, True)
        torch._dynamo.graph_break()
        if torch.compiler.is_compiling():
            raise IndexError("what tracing trips over")
        return self.layers(h)


INPUT = {Recurrent: (8, 12, 16)}


def step_of(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return make(), torch.randn(INPUT.get(make, (64, 16)))  # type: ignore[call-overload]


@pytest.mark.filterwarnings("ignore:the engine runs the model")
@pytest.mark.parametrize(
    ("make", "way"),
    [(Traced, "graphs"), (Branching, "engine"), (Recurrent, "engine"), (Failing, "engine")],
)
def test_a_model_trains_as_eager_does_whatever_runs_it(
    make: Callable[[], nn.Module], way: str
) -> None:
    model, x = step_of(make)
    wanted = record(model, model, (x,))
    model, x = step_of(make)
    small = fxrecals.compile(model, LIMIT, inner="eager")
    assert compare(wanted, record(small, model, (x,))) == []
    assert fxrecals.ran(small).way == way


def test_the_engine_holds_the_limit() -> None:
    model, x = step_of(Branching)
    small = fxrecals.compile(model, 60_000, inner="eager")
    with pytest.warns(UserWarning, match="the engine runs the model from now on"):
        small(x)
    loss = small(x).sum()
    assert fxrecals.ran(small).stats.peak <= 60_000
    loss.backward()
    assert "the engine, because" in str(fxrecals.ran(small))


def test_it_says_once_which_break_it_was() -> None:
    model, x = step_of(Branching)
    small = fxrecals.compile(model, LIMIT, inner="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            small(x).sum().backward()
    texts = [str(w.message) for w in said if "the engine runs" in str(w.message)]
    assert len(texts) == 1
    assert "test_fallback.py" in fxrecals.ran(small).reason or "Dynamo" in texts[0]


def test_what_the_engine_cannot_do_either_is_the_users_own_error() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    small = fxrecals.compile(Wrong(), LIMIT, inner="eager")
    with (
        pytest.warns(UserWarning, match="the engine runs"),
        pytest.raises(KeyError, match="mine"),
    ):
        small(torch.ones(2))


def test_a_limit_under_the_floor_is_an_error_of_the_plan() -> None:
    model, x = step_of(Traced)
    small = fxrecals.compile(model, 1000, inner="eager")
    with pytest.raises(fxrecals.InfeasibleLimitError, match="the smallest limit that works"):
        small(x)


def test_a_share_works_for_graphs_and_is_refused_where_they_are_not_all() -> None:
    model, x = step_of(Traced)
    small = fxrecals.compile(model, "100%", inner="eager")
    small(x).sum().backward()
    assert fxrecals.ran(small).way == "graphs"
    model, x = step_of(Recurrent)
    with pytest.raises(fxrecals.OptionError, match="bytes, because"):
        fxrecals.compile(model, "100%", inner="eager")(x)


def test_it_shares_the_model_and_has_its_class() -> None:
    model, _ = step_of(Traced)
    small = fxrecals.compile(model, LIMIT, inner="eager")
    assert isinstance(small, Traced)
    assert small.state_dict().keys() == model.state_dict().keys()
    assert next(small.parameters()) is next(model.parameters())
    assert str(fxrecals.ran(small)) == "nothing has run yet"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"limit": "6"}, "limit='6'"),
        ({"inner": "jax"}, "inner='jax'"),
        ({"policy": "fifo"}, "policy='fifo'"),
        ({"on_overflow": "wait"}, "on_overflow='wait'"),
    ],
)
def test_options_are_checked_at_once(wrong: dict[str, str], text: str) -> None:
    with pytest.raises(fxrecals.OptionError, match=text):
        fxrecals.compile(nn.Linear(2, 2), **{"limit": "1MB", **wrong})  # type: ignore[arg-type]


def test_only_what_compile_returned_can_be_asked() -> None:
    with pytest.raises(fxrecals.OptionError, match=r"what fxrecals\.compile returned"):
        fxrecals.ran(nn.Linear(2, 2))
    with pytest.raises(fxrecals.OptionError, match=r"a torch\.nn\.Module"):
        fxrecals.compile(lambda x: x, "1MB")  # type: ignore[arg-type]


def test_a_failed_call_leaves_generators_and_buffers_as_they_were() -> None:
    model = nn.BatchNorm1d(4)
    state = fallback._State(model)
    before, drawn = model.running_mean.clone(), torch.get_rng_state()  # type: ignore[union-attr]
    model(torch.rand(8, 4))
    state.put_back()
    assert torch.equal(model.running_mean, before)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), drawn)


def unfolded(x: Tensor) -> Tensor:
    """AOTAutograd does not trace a write to overlapping windows; eager runs it."""
    a = x * 1
    windows = a.unfold(0, 2, 2)
    torch._dynamo.graph_break()
    windows = a.unfold(0, 2, 1)
    windows[0] += 1
    return torch.tanh(a).exp()


def test_a_backend_hands_a_graph_that_is_not_traced_to_the_engine() -> None:
    def wanted(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
        x = torch.linspace(-1, 1, 4096, requires_grad=True)
        out = call(x)
        out.sum().backward()
        return out.detach(), x.grad

    eager = wanted(unfolded)
    compiled = torch.compile(unfolded, backend=fxrecals.backend("1MB", inner="eager"))
    with pytest.warns(UserWarning, match=r"AOTAutograd does not trace the graph at test_fallback"):
        found = wanted(compiled)
    assert all(map(torch.equal, eager, found))  # type: ignore[arg-type]


def test_a_share_cannot_be_held_by_the_engine() -> None:
    compiled = torch.compile(unfolded, backend=fxrecals.backend("50%", inner="eager"))
    with pytest.raises(Exception, match="backend='fxrecals' raised"):
        compiled(torch.ones(8, requires_grad=True))
