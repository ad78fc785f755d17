"""Tensors and modules of all kinds under the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import step_memory
from fxrecals.engine import recals
from tests.engines import check, equal
from tests.test_engine_cases import feasible, step_of

# --- tensors of other kinds -----------------------------------------------------------------------


def of(f: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
    class Called(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return f(*args)

    def make() -> Any:
        return Called(), tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)

    return make


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "complex": of(
        lambda z: torch.view_as_real(
            (z.conj() * z.exp()).mT.conj().resolve_conj() * torch.fft.fft(z.sin()).conj()
        ),
        random(16, 16, dtype=torch.complex64),
    ),
    "negated": of(
        lambda z: (z.exp().conj().imag * z.real).tanh() * z.sin().conj().imag.exp(),
        random(16, 16, dtype=torch.complex64),
    ),
    "another dtype of the same bytes": of(
        lambda x: x.exp() * x.exp().detach().view(torch.int32).bitwise_and(7).float().sin(),
        random(32, 32),
    ),
    "strides": of(
        lambda x: (x.exp().t()[::2, 1::3].sin() * x.tanh().t()[::2, 1::3]).flip(0).cumsum(1),
        random(32, 32),
    ),
    "dimensions in another order in memory": of(
        lambda x: F.avg_pool2d(x.to(memory_format=torch.channels_last).exp().tanh(), 2).exp(),
        random(2, 4, 8, 8),
    ),
    "expanded": of(
        lambda x: (x.exp().expand(32, 32).sin() * x.tanh().expand(32, 32)).exp(), random(32, 1)
    ),
    "overlapping": of(
        lambda x: (x.exp().unfold(0, 8, 2).sin() * x.tanh().unfold(0, 8, 2)).exp(), random(64)
    ),
    "no element": of(lambda x: (x[:0].exp() @ x.tanh()).sin().sum() + x.exp().sum(), random(8, 8)),
    "one number": of(lambda x: (x.sum().exp().tanh() * x).sin() * x.mean().cos(), random(16)),
    "several of each": of(
        lambda x, y: torch._foreach_mul(  # pyright: ignore
            torch._foreach_exp([x, y]),  # pyright: ignore
            torch._foreach_add(torch._foreach_sin([x, y]), 1.0),  # pyright: ignore
        ),
        random(16, 16),
        random(8, 8),
    ),
    "sparse": of(
        lambda x: torch.sparse.mm(torch.eye(16).to_sparse(), x.exp()).tanh().exp(), random(16, 16)
    ),
    "sparse by rows": of(
        lambda x: (torch.eye(16).to_sparse_csr() @ x.exp()).tanh().exp(), random(16, 16)
    ),
    "made sparse": of(lambda x: x.exp().to_sparse().to_dense().tanh().exp(), random(16, 16)),
    "of one number": of(lambda x: x.exp() * torch.tensor(2.0) + torch.scalar_tensor(3), random(9)),
    "selected": of(lambda x: x.exp()[x > 0].tanh().exp(), random(16, 16)),
    "unique": of(
        lambda x: x.exp()[torch.unique((x * 2).long().clamp(0, 3).flatten())].tanh(), random(16, 16)
    ),
    "split": of(
        lambda x: torch.cat([p.sin() for p in x.exp().split(5)][::-1]).tanh().unbind(1)[2],
        random(16, 16),
    ),
    "a branch on a value": of(
        lambda x: x.exp().tanh() if x.sum() > 0 else x.sin().cos(), random(16, 16)
    ),
    "solved": of(
        lambda x: torch.linalg.solve(x @ x.mT + torch.eye(8), x.exp()).tanh(), random(8, 8)
    ),
    "decomposed": of(lambda x: sum(torch.linalg.qr(x.exp())).tanh(), random(8, 8)),  # pyright: ignore
    "einsum": of(
        lambda x, y: torch.einsum("ij,kj->ik", x.exp(), y.tanh()).sin(), *[random(9, 9)] * 2
    ),
    "attention": of(
        lambda q: F.scaled_dot_product_attention(q.exp(), q.tanh(), q, dropout_p=0.2).sin(),
        random(2, 2, 16, 8),
    ),
    "written through a view": of(
        lambda x: (lambda h: (h[1:3].mul_(2), h.view(-1)[5:9].zero_(), h.sin())[-1])(x * 2),
        random(16, 16),
    ),
    "resized": of(
        lambda x: (lambda o: (torch.exp(x.detach(), out=o), x.tanh() * o)[-1])(torch.empty(0)),
        random(16, 16),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_of_other_kinds(name: str) -> None:
    check(FUNCTIONS[name], 150, 70, floor=True)


def test_a_tensor_of_a_class_of_its_own_passes() -> None:
    class Mine(Tensor):
        pass

    def train(step: Callable[..., Any]) -> Any:
        x = random(16, 16).detach().as_subclass(Mine).requires_grad_()
        out = step(lambda: torch.tanh(x.exp()).sin())
        assert type(out) is Mine
        out.sum().backward()
        return torch.Tensor(x.grad)

    wanted = train(lambda f: f())
    assert equal(feasible(1, lambda limit: train(recals(limit)))[1], wanted)


def test_two_of_one_tensor_wrapped_as_one() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def train(step: Callable[..., Any]) -> Any:
        x = TwoTensor(random(8, 8).detach(), random(8, 8).detach()).requires_grad_()
        w = random(8, 8)
        out = step(lambda: (torch.tanh(x.exp()) * w.sin()).sin())
        out.sum().backward()
        return x.grad.a, x.grad.b, w.grad.a  # pyright: ignore

    assert equal(train(recals("1MB")), train(lambda f: f()))


# --- modules --------------------------------------------------------------------------------------


def module(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Any]:
    def seeded() -> Any:
        torch.manual_seed(0)
        return make(), (torch.randn(*shape, requires_grad=True),)

    return seeded


class Only(nn.Module):
    """A module, of which only the first result is returned."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(*[x] * self.times)[0]


class Bagged(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(32, 8, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        places = (x.detach() * 4).long().abs().clamp(0, 31)
        return self.bag(places).tanh().exp() * x.mean(1, keepdim=True).sin()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.BatchNorm2d(8, momentum=None),
        nn.SiLU(),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(8, 4, 3, stride=2),
        nn.GroupNorm(2, 4),
    )


MODULES: dict[str, Callable[[], Any]] = {
    "lstm": module(lambda: Only(nn.LSTM(8, 8, 2, dropout=0.2)), 6, 4, 8),
    "lstm both ways": module(lambda: Only(nn.LSTM(8, 8, bidirectional=True)), 6, 4, 8),
    "gru": module(lambda: Only(nn.GRU(8, 8, 2)), 6, 4, 8),
    "rnn": module(lambda: Only(nn.RNN(8, 8, batch_first=True)), 6, 4, 8),
    "attention": module(
        lambda: Only(nn.MultiheadAttention(16, 2, 0.1, batch_first=True), 3), 4, 8, 16
    ),
    "encoder": module(lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4, 8, 16),
    "encoder in eval": module(
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), 4, 8, 16
    ),
    "bag of sums": module(lambda: Bagged("sum"), 8, 6),
    "bag of largest": module(lambda: Bagged("max"), 8, 6),
    "convolutions": module(convolutional, 4, 3, 12, 12),
    "convolutions in eval": module(lambda: convolutional().eval(), 4, 3, 12, 12),
    "norms": module(
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Tanh(), nn.RMSNorm(16), nn.PReLU()), 8, 16
    ),
    "spectral norm": module(
        lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh()
        ),
        8,
        16,
    ),
    "weight norm": module(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Tanh()),
        8,
        16,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    check(MODULES[name], 150, 60, floor=True)


def test_the_workspace_of_an_lstm_counts_from_its_first_run_on() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(64, 64, 3, batch_first=True), torch.randn(64, 40, 64)

    def measured(limit: int) -> int:
        engine = recals(limit)
        step = step_of(lambda x: engine(lambda: model(x)[0].square().mean()), model, (x,))
        step()
        step()
        return step_memory(step, model).activations

    plain = step_memory(step_of(lambda x: model(x)[0].square().mean(), model, (x,)), model)
    limit, peak = feasible(plain.activations * 6 // 10, measured)
    assert peak <= limit < plain.activations
