"""Small steps on which planners go wrong, one for each kind of fault.

Each factory gives a module and what it is called with. The faults were reported of other systems:
random numbers drawn anew, statistics counted twice, values read after they changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Made = tuple[nn.Module, tuple[Any, ...]]

CASES: dict[str, Callable[[], Made]] = {}


def case(make: Callable[[], Made]) -> Callable[[], Made]:
    """Puts a factory among the cases, seeded."""

    @functools.wraps(make)
    def seeded() -> Made:
        torch.manual_seed(0)
        return make()

    CASES[make.__name__] = seeded
    return seeded


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# --- random numbers -----------------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.a(x)), 0.5, True)
        return F.dropout(torch.tanh(self.b(h)), 0.3, True)


@case
def dropout() -> Made:
    return Dropped(), (leaf(16, 32),)


@case
def every_random_op() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x * w)
        h = h * torch.bernoulli(torch.full_like(h, 0.5))
        h = h + 0.1 * torch.randn(h.shape)
        i = torch.multinomial(torch.ones(h.shape[0], 8), h.shape[1], replacement=True)
        h = h * (1 + i.to(h.dtype)) * torch.rand_like(h)
        h = h + torch.empty_like(h).uniform_(-1, 1) + torch.normal(h, 0.1)
        h = F.rrelu(h, training=True) + torch.poisson(h.abs())
        return (h * h.sin())[torch.randperm(h.shape[0])]

    return Calls(f), (leaf(16, 8), leaf(16, 8))


@case
def dropout_in_a_checkpoint() -> Made:
    def g(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x * w), 0.5, True).sin()

    def f(x: Tensor, w: Tensor) -> Any:
        return checkpoint(g, torch.exp(x), w, use_reentrant=False)

    return Calls(f), (leaf(16, 8), leaf(16, 8))


@torch.library.custom_op("fxrecals_cases::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws random numbers, and says so to nobody."""
    return x * torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output / inputs[0])


noisy.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=_keep)


@case
def an_op_of_the_user_that_draws() -> Made:
    return Calls(lambda x, w: noisy(torch.tanh(x * w)).sin()), (leaf(16, 8), torch.randn(16, 8))


@case
def draws_from_a_generator_of_its_own() -> Made:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.drawn = nn.Linear(16, 16), torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.l(x))
            h = h * torch.rand(h.shape, generator=self.drawn)
            m = torch.bernoulli(torch.full_like(h, 0.5), generator=self.drawn)
            # The last draw is returned: it shows in which state the others left the generator.
            return torch.tanh(self.l(h.exp())) * m, torch.rand(4, generator=self.drawn)

    return Own(), (leaf(32, 16),)


@case
def draws_that_nobody_reads() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        torch.rand(5)
        h = F.dropout(torch.tanh(x @ w), 0.5, True).exp()
        F.dropout(h, 0.5, True)
        return F.dropout(h.sin(), 0.3, True)

    return Calls(f), (leaf(32, 16), leaf(16, 16))


@case
def draws_in_an_order_of_their_own() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        early, h = torch.rand(16, 16), torch.tanh(x @ w)
        h, noise = F.dropout(h, 0.5, True).exp(), torch.randn(32, 16)
        late = torch.sin(h @ early) * F.dropout(noise, 0.3, True)
        return F.dropout(late.exp().tanh(), 0.1, True) + torch.randn_like(late) * late.cos()

    return Calls(f), (leaf(32, 16), leaf(16, 16))


class NoisyGradient(torch.autograd.Function):
    """``exp``, with random numbers in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.exp() + torch.randn_like(grads[0])


@case
def draws_in_the_backward() -> Made:
    def f(x: Tensor, w: Tensor) -> Any:
        return NoisyGradient.apply(torch.tanh(F.dropout(x @ w, 0.5, True)))

    return Calls(f), (leaf(32, 16), leaf(16, 16))


@case
def a_seed_set_within() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout(torch.tanh(x @ w).exp(), 0.5, True).sin()

    return Calls(f), (leaf(32, 16), leaf(16, 16))


# --- mutation and aliases -----------------------------------------------------------------------


@case
def an_input_that_is_written() -> Made:
    def f(x: Tensor, c: Tensor) -> Tensor:
        y = torch.sin(x + c)
        c.add_(1.0)
        return y.exp()

    return Calls(f), (leaf(64), torch.zeros(64))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.l = nn.InstanceNorm1d(2, affine=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x).relu_()
        h = h + 1
        h[:, 0] *= 2
        h.add_(self.l(x))
        return h


@case
def activations_in_place() -> Made:
    return InPlace(), (leaf(3, 2, 4),)


@case
def batch_norm() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
    ), (leaf(4, 3, 12, 12),)  # fmt: skip


@case
def a_buffer_read_before_and_after() -> Made:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Tensor
            self.register_buffer("mean", torch.zeros(8))
            self.l = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            before = torch.tanh(x - self.mean)
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return torch.tanh(self.l(before)) * torch.sin(x - self.mean)

    return Running(), (leaf(16, 8),)


@case
def tied_weights_and_a_module_called_twice() -> Made:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.l = nn.Embedding(16, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.e.weight

        def forward(self, i: Tensor) -> Tensor:
            h = torch.tanh(self.l(torch.tanh(self.l(self.e(i)))))
            return self.head(h).log_softmax(-1)

    return Tied(), (torch.randint(0, 16, (4, 6)),)


@case
def outputs_that_share_memory() -> Made:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(x.exp())
        return h, h[1:], x.view(-1)

    return Calls(f), (leaf(8, 8),)


# --- structure ----------------------------------------------------------------------------------


class Squared(torch.autograd.Function):
    """``x * exp(x)``, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y, x)
        return y * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        y, x = ctx.saved_tensors
        return grads[0] * (y + y * x)


@case
def a_function_with_its_own_backward() -> Made:
    def f(x: Tensor, w: Tensor) -> Any:
        return Squared.apply(torch.tanh(x @ w)).sin()

    return Calls(f), (leaf(32, 16), leaf(16, 16))


@case
def autocast_in_parts() -> Made:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.m = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.m(torch.relu(self.l(x)))
                with torch.autocast("cpu", enabled=False):
                    z = self.l(y.float())
                return self.l(z).float() + y.float()

    return Mixed(), (leaf(8, 16),)


@case
def a_part_without_gradients() -> Made:
    class Distil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s, self.t = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                t = torch.softmax(self.t(x), -1)
            s = torch.log_softmax(self.s(x), -1)
            return -(t * s).sum(), t

    return Distil(), (leaf(8, 16),)


@case
def frozen_weights_with_adapters() -> Made:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(16, 16).requires_grad_(False)
            self.a = nn.Parameter(torch.randn(16, 2))
            self.b = nn.Parameter(torch.randn(2, 16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.w(x) + x @ self.a @ self.b)

    return nn.Sequential(Adapted(), Adapted(), Adapted()), (torch.randn(4, 16),)


@case
def dicts_none_and_numbers() -> Made:
    def f(x: Tensor, cfg: Any = None) -> Any:
        d: dict[str, Any] = {"a": x + 1.0}
        c = (x * 10.0, d["a"].sin())
        return {"y": d["a"] * c[1], "aux": (cfg, x.shape[0], "tag", c[0].detach())}

    return Calls(f), (leaf(64),)


@case
def decisions_with_ties() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        scores = torch.relu(x @ w).round()  # many ties
        top, chosen = scores.topk(3, dim=-1)
        order = scores.argsort(dim=-1, descending=True)
        routed = torch.tanh(x).gather(1, chosen) * top.exp()
        first = torch.sin(x).gather(1, scores.argmax(-1, keepdim=True))
        return (routed * first).cos().sum(-1) + x.exp().gather(1, order).sigmoid().prod(-1)

    return Calls(f), (leaf(32, 8), leaf(8, 8))


@case
def sorted_with_ties() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        scores = torch.relu(x @ w).round()
        values, order = scores.sort(dim=-1)
        stable, kept = scores.sort(dim=-1, descending=True, stable=True)
        middle, where = scores.median(-1, keepdim=True)
        others = scores.kthvalue(2, -1)[0] * scores.mode(-1)[0] * scores.max(-1)[0]
        h = torch.tanh(x).gather(1, order) * values.exp() + x.sin().gather(1, kept) * stable.cos()
        return h.sin() * others.unsqueeze(1).cos() + (x.gather(1, where) * middle).sigmoid()

    return Calls(f), (leaf(32, 8), leaf(8, 8))


@case
def rows_added_up_by_index() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h, i = torch.tanh(x @ w).exp(), torch.arange(32)
        o = torch.zeros(4, 16).index_add(0, i % 4, h)
        e = h.scatter_add(0, (i % 3).unsqueeze(1).expand(32, 16), h.sin())
        p = torch.zeros(4, 16).index_put((i % 4,), e.cumsum(0).exp().tanh(), accumulate=True)
        return (o.sin() + p.exp()).tanh()

    return Calls(f), (leaf(32, 16), leaf(16, 16))


def of_any_size(make: Callable[[], Made]) -> Callable[[], Made]:
    """A case whose sizes the data decide, traced as one graph."""
    CASES[f"{make.__name__}_in_one_graph"] = CASES[make.__name__]
    return make


@of_any_size
@case
def a_number_of_rows_that_the_data_decide() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x @ w)
        i = (h > 0).nonzero()
        t = h.exp()[i[:, 0], i[:, 1]]
        return (t * t.sin()).sum() + x.exp().sum()

    return Calls(f), (leaf(32, 16), leaf(16, 16))


@of_any_size
@case
def values_that_a_mask_selects() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x @ w).exp()
        return h[h > 1].sin().sum()

    return Calls(f), (leaf(32, 16), leaf(16, 16))


@case
def complex_numbers() -> Made:
    def f(x: Tensor) -> Tensor:
        h = torch.fft.fft(torch.tanh(x))
        return torch.fft.ifft(h * h.exp()).abs()

    return Calls(f), (leaf(8, 16),)


@case
def doubles_and_halves() -> Made:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x.exp()).sum() + torch.sin(y.exp()).double().sum()

    return Calls(f), (leaf(16, 16, dtype=torch.float64), leaf(16, 16, dtype=torch.bfloat16))


@case
def whole_model_in_bfloat16() -> Made:
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.LayerNorm(16))
    return model.bfloat16(), (leaf(32, 16, dtype=torch.bfloat16),)


@case
def eight_bits_in_between() -> Made:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x @ w).exp()
        q = h.to(torch.float8_e4m3fn).float() * h
        return q.sin().to(torch.float8_e5m2).float() * h.cos()

    return Calls(f), (leaf(32, 16), leaf(16, 16))


@case
def channels_last() -> Made:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU())
    to: Any = model.to
    x = torch.randn(2, 4, 12, 12).to(memory_format=torch.channels_last).requires_grad_()
    return to(memory_format=torch.channels_last), (x,)


@case
def scalars_empties_and_whole_numbers() -> Made:
    def f(x: Tensor, i: Tensor, nothing: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x) * i.sum()
        return h.exp() + nothing.sum(), torch.cat([nothing, x.flatten().sin()])

    return Calls(f), (leaf(), torch.arange(4), torch.empty(0))


@case
def a_large_embedding() -> Made:
    layers = (m for _ in range(2) for m in (nn.Linear(16, 16), nn.GELU()))
    return nn.Sequential(nn.Embedding(5000, 16), *layers), (torch.randint(5000, (8, 16)),)


# --- what users have decided, and breaks --------------------------------------------------------


@case
def products_that_must_be_kept() -> Made:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def g(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(torch.sin(x @ w) @ w)

    def f(x: Tensor, w: Tensor) -> Any:
        made: Any = checkpoint(g, x, w, use_reentrant=False, context_fn=contexts)
        return made.cos()

    return Calls(f), (leaf(8, 32), leaf(32, 32))


def with_policy(policy: CheckpointPolicy) -> Made:
    """A checkpoint whose policy says the same of every op."""

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy

    def g(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(torch.tanh(torch.sin(x @ w) @ w).exp())

    def f(x: Tensor, w: Tensor) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, decide)
        made: Any = checkpoint(g, x.exp(), w, use_reentrant=False, context_fn=contexts)
        return made.cos()

    return Calls(f), (leaf(32, 16), leaf(16, 16))


@case
def all_must_be_kept() -> Made:
    return with_policy(CheckpointPolicy.MUST_SAVE)


@case
def all_must_run_again() -> Made:
    return with_policy(CheckpointPolicy.MUST_RECOMPUTE)


@case
def some_must_run_again_and_some_had_better_stay() -> Made:
    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.PREFER_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.l, self.o = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

        def block(self, x: Tensor) -> Tensor:
            a, b, c = self.l(self.n(x)).split(16, -1)
            h = F.dropout(a.sin() * b.tanh(), 0.3, True).view(32, 2, 8).exp()
            return self.o(h.reshape(32, 16) * c).sin()

        def forward(self, x: Tensor) -> Any:
            contexts = functools.partial(create_selective_checkpoint_contexts, decide)
            made: Any = checkpoint(self.block, x.exp(), use_reentrant=False, context_fn=contexts)
            return made.cos()

    return Mixed(), (leaf(32, 16),)


@case
def a_checkpoint_around_everything() -> Made:
    def f(x: Tensor) -> Any:
        made: Any = checkpoint(lambda t: t.sinh().tanh().cosh(), x, use_reentrant=False)
        return made.sum()

    return Calls(f), (leaf(32, 32),)


@case
def a_reentrant_checkpoint() -> Made:
    def f(x: Tensor) -> Any:
        made: Any = checkpoint(lambda t: t.sinh().tanh().cosh(), x.exp(), use_reentrant=True)
        return made.sin()

    return Calls(f), (leaf(32, 32),)


@case
def a_break_within() -> Made:
    def inner(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    return Calls(lambda x: inner(x.exp()).tan()), (leaf(32, 32),)


@case
def two_halves() -> Made:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (
                nn.Sequential(*[m for _ in range(n) for m in (nn.Linear(32, 32), nn.GELU())])
                for n in (2, 6)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    return Halves(), (leaf(128, 32),)


@case
def a_device_in_the_trace() -> Made:
    def f(x: Tensor) -> Tensor:
        m = torch.ones((), device=x.device, dtype=torch.int64)
        return (x * m).to(x.device).sin() * int(x.dim())

    return Calls(f), (leaf(16, 16),)
