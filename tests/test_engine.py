"""The engine's interface, backwards of all kinds, and what a training script does to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import clear, compare, record, step_memory, total
from fxrecals import InfeasibleLimitError
from fxrecals.engine import Recals, recals
from fxrecals.errors import LimitError, OptionError
from tests.engines import TIGHT, Net, check, equal, gradients, held, is_clean, made, under
from tests.test_engine_cases import feasible

# --- the interface --------------------------------------------------------------------------------


def test_arguments_by_name_and_whatever_is_returned_pass_through() -> None:
    engine, x = recals("1MB"), torch.randn(3, requires_grad=True)

    def f(a: Any, /, b: int, *rest: Any, fn: str, self: str, **more: Any) -> Any:
        return {"a": a.exp(), "more": more, "rest": rest, "b": b, "fn": fn, "self": self}

    out = engine(f, x, 2, 3, fn="fn", self="self", z=None)
    assert out["more"] == {"z": None}
    assert out["rest"] == (3,)
    assert (out["b"], out["fn"], out["self"]) == (2, "fn", "self")
    out["a"].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.exp())


@pytest.mark.parametrize("devices", ["nowhere", True, 1.5, ["cpu", None], {"cpu"}])
def test_devices_that_are_none_are_refused(devices: Any) -> None:
    with pytest.raises(OptionError, match="devices"):
        recals("1MB", devices)


@pytest.mark.parametrize(
    "devices", ["all", "none", "cpu", torch.device("cpu"), torch.ones(1), ["cpu"], ("none", 0)]
)
def test_the_limit_holds_for_the_devices_asked_for(devices: Any) -> None:
    model, x = made()
    with pytest.raises(InfeasibleLimitError):
        recals(100, devices)(model, x)


@pytest.mark.parametrize("devices", ["meta", 0, [], ["cuda:1"]])
def test_bytes_elsewhere_have_no_limit(devices: Any) -> None:
    model, x = made()
    total(recals(100, devices)(model, x)).backward()


def test_a_limit_by_device_holds_there_alone() -> None:
    model, x = made()
    total(recals({"cuda:0": 100})(model, x)).backward()
    with pytest.raises(InfeasibleLimitError):
        recals({"cpu": 100})(model, x)


@pytest.mark.parametrize("limit", ["50%", "many", -1, {"cpu": "50%"}, 1.5])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(LimitError):
        recals(limit)


@pytest.mark.parametrize("options", [{"policy": "fifo"}, {"policy": None}, {"on_overflow": "hope"}])
def test_an_option_that_is_none_is_refused(options: Any) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        recals("1MB", **options)


def test_an_infeasible_limit_says_what_would_do() -> None:
    model, x = made()
    with pytest.raises(InfeasibleLimitError, match="on_overflow") as caught:
        recals(1000)(model, x)
    assert caught.value.floor_bytes > caught.value.limit_bytes == 1000
    assert "aten." in str(caught.value)


def test_a_step_that_may_exceed_warns_once_and_tells_a_limit_that_works() -> None:
    model, x = made()
    wanted = record(model, model, (x,))
    model, x = made()
    engine = recals(1000, on_overflow="exceed")
    with pytest.warns(UserWarning, match="limit 1.00 kB") as warned:
        assert compare(wanted, record(under(engine, model), model, (x,))) == []
    assert len(warned) == 1
    model, x = made()
    again = recals(engine.stats.peak)
    assert compare(wanted, record(under(again, model), model, (x,))) == []


def test_stats_tell_what_was_done() -> None:
    model, x = made()
    roomy, tight = recals("1GB"), recals(TIGHT)
    total(roomy(model, x)).backward()
    assert roomy.stats.evictions == roomy.stats.recomputes == roomy.stats.recomputed_seconds == 0
    assert roomy.stats.peak > TIGHT
    total(tight(model, x)).backward()
    assert tight.stats.evictions > 0
    assert tight.stats.recomputes > 0
    assert tight.stats.recomputed_seconds > 0
    assert 0 < tight.stats.peak <= TIGHT


def test_analyze_counts_what_a_forward_saves_once() -> None:
    x = torch.randn(100, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        y = x.exp()  # saved as the output of exp, and twice by the product
        return y * y.view(10, 10).reshape(100) * torch.ones(100)

    found = recals("1GB").analyze(f, x)
    assert found.largest == 400
    assert found.total == 2 * 400, "exp, and the ones"
    assert found == recals("1GB").analyze(f, x=x)


def test_analyze_keeps_nothing_and_leaves_the_object_alone() -> None:
    model, x = made()
    engine = recals(100)
    found = engine.analyze(model, x)
    assert found.total > found.largest > 0
    assert engine.stats == recals(100).stats
    assert is_clean(engine)


def test_there_is_no_backward_through_what_was_analyzed() -> None:
    x, kept = torch.randn(8, requires_grad=True), []
    recals("1GB").analyze(lambda: kept.append(x.exp().sum()))
    with pytest.raises(RuntimeError, match="analyze"):
        kept[0].backward()


# --- several calls, several objects ---------------------------------------------------------------


def test_one_object_holds_one_limit_over_the_sum_of_its_calls() -> None:
    models = nn.ModuleList([made(1)[0], made(2)[0]])
    x = made()[1]
    wanted = record(lambda x: [m(x) for m in models], models, (x,))

    def both(engine: Recals, x: Tensor) -> Any:
        return [engine(model, x) for model in models]

    def run(limit: int) -> int:
        nonlocal models
        models = nn.ModuleList([made(1)[0], made(2)[0]])
        engine = recals(limit)
        assert compare(wanted, record(lambda x: both(engine, x), models, (x,))) == []

        def whole() -> None:
            clear(models)
            loss = engine(lambda: total(models[0](x))) + engine(lambda: total(models[1](x)))
            loss.backward()

        return step_memory(whole, models).activations

    limit, measured = feasible(TIGHT, run)
    assert measured <= limit + 64, "the sum of two losses is outside"
    alone = recals("1GB")
    both(alone, x)
    assert limit < 0.7 * alone.stats.peak


def test_several_objects_do_not_disturb_each_other() -> None:
    (a, x), (b, _) = made(1), made(2)
    both = nn.ModuleList([a, b])
    wanted = record(lambda x: [m(x) for m in both], both, (x,))
    (a, x), (b, _) = made(1), made(2)
    both = nn.ModuleList([a, b])
    first, second = recals(TIGHT), recals("1GB")
    assert compare(wanted, record(lambda x: [first(a, x), second(b, x)], both, (x,))) == []
    assert first.stats.evictions > 0
    assert second.stats.evictions == 0


@pytest.mark.parametrize("is_same", [True, False])
def test_a_call_within_a_call(is_same: bool) -> None:
    """What is saved within belongs to the inner object: the outer one cannot evict it."""
    model, x = made()
    wanted = record(model, model, (x,))
    model, x = made()
    inner = recals(TIGHT if is_same else 70_000)
    outer = inner if is_same else recals("1GB")

    def nested(x: Tensor) -> Tensor:
        for layer, norm in zip(model.layers, model.norms, strict=True):
            x = inner(lambda x=x, layer=layer, norm=norm: torch.tanh(norm(layer(x))))
            x = F.dropout(x, 0.3, True)
        return x

    assert compare(wanted, record(under(outer, nested), model, (x,))) == []
    assert inner.stats.evictions > 0
    assert is_clean(outer)
    assert is_clean(inner)


def test_around_forward_backward_and_optimizer() -> None:
    def train(context: Any) -> Any:
        model, x = made()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        for _ in range(3):
            with context():
                optimizer.zero_grad()
                total(model(x)).backward()
                optimizer.step()
        return dict(model.state_dict()), torch.get_rng_state()

    engine = recals(2 * TIGHT)
    assert equal(train(lambda: engine), train(torch.enable_grad))


def test_a_long_stay_inside_does_not_grow() -> None:
    model, x = made()
    engine = recals(TIGHT)
    with engine:
        watch = engine._inside.entered[0]
        for _ in range(12):
            clear(model)
            total(model(x)).backward()
        assert len(watch._made) < 400


def test_gradients_add_up() -> None:
    def train(step: Callable[..., Any]) -> Any:
        model, x = made()
        torch.manual_seed(5)
        for part in x.chunk(4):
            total(step(model, part)).backward()
        return gradients(model)

    assert equal(train(recals(TIGHT)), train(lambda model, x: model(x)))


# --- backwards of all kinds -----------------------------------------------------------------------


def test_two_backwards_of_one_forward() -> None:
    def train(step: Callable[..., Any]) -> Any:
        model, x = made()
        torch.manual_seed(5)
        loss = total(step(model, x))
        loss.backward(retain_graph=True)
        first = gradients(model)
        loss.backward()
        return first, gradients(model)

    engine = recals(TIGHT)
    assert equal(train(engine), train(lambda model, x: model(x)))
    assert is_clean(engine)


def test_a_second_backward_without_a_retained_graph_is_eagers_error() -> None:
    model, x = made()
    loss = total(recals(TIGHT)(model, x))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_some_inputs_and_of_intermediates() -> None:
    def train(step: Callable[..., Any]) -> Any:
        model, x = made()
        x.requires_grad_()
        torch.manual_seed(5)
        middle = step(lambda: model.norms[0](model.layers[0](x)))
        out = step(lambda: torch.tanh(model.layers[1](middle).exp()))
        return torch.autograd.grad(total(out), [x, middle, model.layers[0].weight])  # pyright: ignore

    assert equal(train(recals(TIGHT)), train(lambda f: f()))


def test_gradients_of_many_vectors_at_once() -> None:
    def train(step: Callable[..., Any]) -> Any:
        x = torch.linspace(-1, 1, 32).requires_grad_()
        out = step(lambda: torch.tanh(x.exp()).sin())
        return torch.autograd.grad(out, x, torch.eye(32), is_grads_batched=True)

    wanted = train(lambda f: f())
    assert equal(feasible(512, lambda limit: train(recals(limit)))[1], wanted)


@pytest.mark.parametrize("inside", [True, False])
def test_a_gradient_penalty(inside: bool) -> None:
    def train(step: Callable[..., Any]) -> Any:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softplus())
        x = torch.randn(64, 16, requires_grad=True)

        def penalty(out: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return (slope.norm(dim=1) - 1).square().mean()

        if inside:
            loss = step(lambda: (lambda out: out.mean() + penalty(out))(model(x)))
        else:
            out = step(lambda: model(x))
            loss = out.mean() + penalty(out)
        loss.backward()
        return gradients(model), x.grad

    wanted = train(lambda f: f())
    _, found = feasible(1, lambda limit: train(recals(limit)))
    assert equal(wanted, found)


def test_a_hook_on_a_tensor_and_one_on_a_parameter_run_once() -> None:
    def train(step: Callable[..., Any]) -> Any:
        model, x = made()
        seen: list[str] = []

        def forward() -> Tensor:
            h = torch.tanh(model.layers[0](x))
            h.register_hook(lambda g: (seen.append("h"), g * 2)[1])
            return model.layers[1](h).exp().sin()

        model.layers[0].weight.register_hook(lambda g: seen.append("w"))  # pyright: ignore
        total(step(forward)).backward()
        return gradients(model), seen

    assert equal(train(recals(TIGHT)), train(lambda f: f()))


def test_a_hook_that_computes_under_its_own_graph() -> None:
    def train(step: Callable[..., Any]) -> Any:
        x = torch.linspace(-1, 1, 64).requires_grad_()

        def hook(g: Tensor) -> Tensor:
            with torch.enable_grad():
                y = g.detach().requires_grad_()
                (more,) = torch.autograd.grad(y.exp().tanh().sum(), y)
            return g + more

        def forward() -> Tensor:
            h = x.exp()
            h.register_hook(hook)
            return h.tanh().sin().exp()

        total(step(forward)).backward()
        return x.grad

    assert equal(train(recals(2048)), train(lambda f: f()))


# --- what the user does to tensors ----------------------------------------------------------------


def grads_or_error(f: Callable[[], Any]) -> Any:
    try:
        return f()
    except RuntimeError as error:
        if not ("in place" in str(error) or "inplace" in str(error)):
            raise
        return None


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda t: t.add_(1),
    "slice": lambda t: t[3:5].mul_(3),
    "view": lambda t: t.view(-1).view(8, 8)[::2].zero_(),
    "copy": lambda t: t.copy_(torch.ones(8, 8)),
    "out": lambda t: torch.exp(torch.zeros(8, 8), out=t),
    "index": lambda t: t.__setitem__((slice(None), 2), 7.0),
    "fill by mask": lambda t: t.masked_fill_(t > 0, 2.0),
    "detached": lambda t: t.detach().add_(1),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),  # pyright: ignore
}


@pytest.mark.parametrize("limit", [1, 10**9])
@pytest.mark.parametrize("when", ["inside", "outside"])
@pytest.mark.parametrize("what", ["input", "middle", "output", "leaf"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_after_saving_gives_the_right_gradient_or_eagers_error(
    write: str, what: str, when: str, limit: Any
) -> None:
    def train(step: Callable[..., Any], writes: bool = True) -> Any:
        torch.manual_seed(0)
        w = torch.randn(8, 8, requires_grad=True)
        given = torch.randn(8, 8)
        kept: dict[str, Tensor] = {"input": given, "leaf": w}

        def change() -> None:
            with torch.no_grad():
                if writes:
                    WRITES[write](kept[what])

        def forward() -> Tensor:
            kept["middle"] = middle = torch.exp(given * w)
            kept["output"] = out = torch.tanh(middle.sin() * given).exp()
            if when == "inside":
                change()
            return out

        out = step(forward)
        if when == "outside":
            change()
        (gradient,) = torch.autograd.grad(out, w, torch.ones(8, 8))
        return gradient

    wanted = grads_or_error(lambda: train(lambda f: f()))
    right = train(lambda f: f(), writes=False)
    _, found = feasible(limit, lambda limit: grads_or_error(lambda: train(recals(limit))))
    if wanted is None:
        assert found is None or torch.equal(found, right)
    elif found is None:
        assert what in ("input", "leaf"), "an input that is needed to compute something again"
    else:
        assert torch.equal(found, wanted)


def test_parameters_that_an_optimizer_changes_before_the_backward_are_an_error() -> None:
    for limit in (TIGHT, "1GB"):
        model, x = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total(model(x)).backward()
        out = recals(limit)(model, x)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            total(out).backward()


def test_what_the_user_holds_keeps_its_bits_and_is_not_charged_twice() -> None:
    engine, kept = recals(10_000), []
    x = nn.Parameter(torch.randn(256))

    def forward() -> Tensor:
        h = x
        for _ in range(6):
            h = h.exp().tanh()
            kept.append(h)
        return h

    loss = engine(lambda: forward().sum())
    wanted = [t.detach().clone() for t in kept]
    loss.backward()
    assert equal([t.detach() for t in kept], wanted)
    assert held(engine)[0] == len(kept) * 1024 + loss.nbytes
    kept.clear()
    del loss
    assert is_clean(engine)


# --- torch's own helpers inside -------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                h = torch.tanh(norm(layer(x)))
                x = checkpoint(lambda h: F.dropout(h, 0.3).sin(), h, use_reentrant=reentrant)
            return x

    def make() -> Any:
        torch.manual_seed(2)
        return Checkpointed(), (torch.randn(64, 32, requires_grad=True),)

    check(make, 60, floor=True)


@pytest.mark.parametrize("around", ["forward", "call", "all"])
def test_autocast(around: str) -> None:
    def train(step: Callable[..., Any]) -> Any:
        model, x = made()
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
        torch.manual_seed(5)
        if around == "forward":
            loss = step(lambda: total(cast(model)(x)))
        elif around == "call":
            with cast:
                loss = step(lambda: total(model(x)))
        if around == "all":
            with cast:
                loss = step(lambda: total(model(x)))
                loss.backward()
        else:
            loss.backward()
        return gradients(model)

    assert equal(train(recals(TIGHT)), train(lambda f: f()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(context: Any) -> None:
    model, x = made()
    model.eval()
    engine = recals(TIGHT)
    with context():
        found = engine(model, x)
        assert torch.equal(found, model(x))
    assert held(engine)[0] == found.untyped_storage().nbytes()
    del found
    assert is_clean(engine)


def test_saved_tensor_hooks_of_the_user_inside_win_there() -> None:
    def train(step: Callable[..., Any]) -> Any:
        model, x = made()
        torch.manual_seed(5)

        def forward() -> Tensor:
            h = torch.tanh(model.layers[0](x))
            with torch.autograd.graph.save_on_cpu():
                h = model.layers[1](h).exp()
            return model.layers[2](h).sin()

        total(step(forward)).backward()
        return gradients(model)

    assert equal(train(recals(TIGHT)), train(lambda f: f()))


def test_a_transform_that_refuses_saved_tensor_hooks_says_so() -> None:
    w = torch.linspace(-1, 1, 64)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        recals("1MB")(torch.func.grad(lambda w: w.exp().sum()), w)


def test_transforms_that_save_nothing() -> None:
    w = torch.linspace(-1, 1, 64)
    engine = recals("1MB")

    def f(w: Tensor) -> Tensor:
        return torch.tanh(w.exp()).sin()

    assert torch.equal(engine(torch.func.vmap(f), w.view(8, 8)), f(w.view(8, 8)))
    tangent = (torch.ones(64),)
    assert equal(engine(torch.func.jvp, f, (w,), tangent), torch.func.jvp(f, (w,), tangent))
    assert is_clean(engine)


def test_a_mapped_function_under_autograd() -> None:
    def train(step: Callable[..., Any]) -> Any:
        w = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
        mapped = torch.func.vmap(lambda row: torch.tanh(row.exp()) * row.sin())
        total(step(lambda: mapped(w).exp())).backward()
        return w.grad

    assert equal(train(recals(2000)), train(lambda f: f()))


def test_a_compiled_function_inside() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: torch.tanh(x @ w).exp(), backend="aot_eager")

    def train(step: Callable[..., Any]) -> Any:
        torch.manual_seed(2)
        x, w = torch.randn(32, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
        total(step(lambda: compiled(x.exp(), w).sin() * x.tanh())).backward()
        return x.grad, w.grad

    wanted = train(lambda f: f())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert equal(train(recals("1MB")), wanted)
    torch._dynamo.reset()


def chosen(x: Tensor) -> Tensor:
    (y,) = torch.cond(x.sum() > 0, lambda x: (x.sin() * x,), lambda x: (x.cos(),), (x * 2,))
    return y


def scanned(x: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        after = (carry * row).tanh()
        return after, after.clone()

    return scan(step, torch.ones(x.shape[1]), x * 2, dim=0)[1]


@pytest.mark.parametrize("program", [chosen, scanned])
def test_higher_order_ops_pass(program: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    program(x).sum().backward()
    wanted, x.grad = x.grad, None
    recals("1MB")(lambda: program(x).sum()).backward()
    assert equal(wanted, x.grad)
