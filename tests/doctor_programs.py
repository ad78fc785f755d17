"""Training programs with a fault, the same without it, and others that only look like it.

Each function makes a program and returns its step. The name says what it is: ``NAME__fault``,
``NAME__cure``, ``NAME__innocent``. The line that a finding has to name ends in ``# here``.
"""

# Written as users write, without types:
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportOptionalCall=false

import weakref
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

KINDS = {
    "losses_in_a_list": {"graph kept"},
    "a_running_sum": {"graph kept"},
    "a_sum_on_an_object": {"graph kept"},
    "outputs_in_a_dict": {"graph kept"},
    "a_default_argument": {"graph kept"},
    "a_class_attribute": {"graph kept"},
    "a_long_queue": {"graph kept"},
    "a_hidden_state": {"graph kept"},
    "a_generator": {"graph kept"},
    "a_module_that_remembers": {"graph kept"},
    "a_graph_into_the_next_step": {"graph kept", "unused graph"},
    "gradients_with_a_graph": {"graph kept", "graph retained"},
    "a_tuple_that_grows": {"graph kept"},
    "outputs_without_a_graph": {"tensors kept"},
    "batches_that_stay": {"tensors kept"},
    "a_hook_that_keeps": {"tensors kept"},
    "parent_and_child": {"reference cycle"},
    "a_function_on_its_object": {"reference cycle"},
    "a_caught_error": {"reference cycle"},
    "a_bound_method": {"reference cycle"},
    "a_linked_list": {"reference cycle"},
    "a_recursive_function": {"reference cycle"},
    "module_hooks": {"hooks pile up"},
    "parameter_hooks": {"hooks pile up"},
    "a_retained_graph": {"graph retained"},
    "a_second_order_for_nobody": {"graph retained"},
    "both_losses_retain": {"graph retained"},
    "evaluation": {"evaluation builds graphs"},
    "a_validation_loss": {"evaluation builds graphs"},
    "a_teacher": {"unused graph"},
    "a_metric": {"unused graph"},
    "no_zero_grad": {"gradients add up"},
    "an_update_by_hand": {"gradients add up"},
    "zeros_for_gradients": {"gradients zeroed"},
    "zeros_by_hand": {"gradients zeroed"},
    "an_empty_cache": {"cache emptied"},
    "a_head_that_nobody_calls": {"parameters without gradient"},
    "a_trunk_cut_off": {"parameters without gradient"},
    "a_wide_mask": {"float64 tensors"},
    "a_wide_parameter": {"float64 tensors"},
    "a_wide_scale": {"float32 tensors"},
    "a_long_history": {"large optimizer state"},
    "a_third_moment": {"large optimizer state"},
}
"""What is to be found in each fault, and in no other program of its name."""


def parts(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)
    model = nn.Sequential(*layers).to(dtype)
    return model, torch.optim.SGD(model.parameters(), 0.01), torch.randn(256, 64, dtype=dtype)


def update(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


# --- graphs that are kept -----------------------------------------------------------------------


def losses_in_a_list__fault():
    model, optimizer, x = parts()
    losses = []

    def step():
        losses.append(update(model, optimizer, x))  # here

    return step


def losses_in_a_list__cure():
    model, optimizer, x = parts()
    losses = []

    def step():
        losses.append(update(model, optimizer, x).item())

    return step


def losses_in_a_list__innocent():
    model, optimizer, x = parts()
    losses = []

    def step():
        losses.append(update(model, optimizer, x).detach())

    return step


def a_running_sum__fault():
    model, optimizer, x = parts()
    total = torch.zeros(())

    def step():
        nonlocal total
        total = total + update(model, optimizer, x)  # here

    return step


def a_running_sum__cure():
    model, optimizer, x = parts()
    total = torch.zeros(())

    def step():
        nonlocal total
        total = total + update(model, optimizer, x).detach()

    return step


def a_running_sum__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in x.chunk(4):
            total = total + model(part).square().mean()
        total.backward()
        optimizer.step()

    return step


class Meter:
    def __init__(self):
        self.total = 0.0


def a_sum_on_an_object__fault():
    model, optimizer, x = parts()
    meter = Meter()

    def step():
        meter.total += update(model, optimizer, x)  # here

    return step


def a_sum_on_an_object__cure():
    model, optimizer, x = parts()
    meter = Meter()

    def step():
        meter.total += update(model, optimizer, x).item()

    return step


def a_sum_on_an_object__innocent():
    model, optimizer, x = parts()
    meter = Meter()

    def step():
        meter.total = update(model, optimizer, x)

    return step


def outputs_in_a_dict__fault():
    model, optimizer, x = parts()
    outputs = {}

    def step():
        outputs[len(outputs)] = update(model, optimizer, x)  # here

    return step


def outputs_in_a_dict__cure():
    model, optimizer, x = parts()
    outputs = {}

    def step():
        outputs[len(outputs)] = update(model, optimizer, x).item()

    return step


def outputs_in_a_dict__innocent():
    model, optimizer, x = parts()
    outputs = {}

    def step():
        outputs["last"] = update(model, optimizer, x)

    return step


def a_default_argument__fault():
    model, optimizer, x = parts()

    def step(history=[]):  # noqa: B006
        history.append(update(model, optimizer, x))  # here

    return step


def a_default_argument__cure():
    model, optimizer, x = parts()

    def step(history=[]):  # noqa: B006
        history.append(update(model, optimizer, x).item())

    return step


def a_default_argument__innocent():
    model, optimizer, x = parts()

    def step(history=None):
        history = [] if history is None else history
        history.append(update(model, optimizer, x))

    return step


def a_class_attribute__fault():
    model, optimizer, x = parts()

    class Log:
        values = []  # noqa: RUF012

    def step():
        Log.values.append(update(model, optimizer, x))  # here

    return step


def a_class_attribute__cure():
    model, optimizer, x = parts()

    class Log:
        values = []  # noqa: RUF012

    def step():
        Log.values.append(update(model, optimizer, x).item())

    return step


def a_class_attribute__innocent():
    model, optimizer, x = parts()

    class Log:
        def __init__(self):
            self.values = []

    def step():
        log = Log()
        for _ in range(3):
            log.values.append(update(model, optimizer, x))

    return step


def a_long_queue__fault():
    model, optimizer, x = parts()
    recent = deque(maxlen=1000)

    def step():
        recent.append(update(model, optimizer, x))  # here

    return step


def a_long_queue__cure():
    model, optimizer, x = parts()
    recent = deque(maxlen=1000)

    def step():
        recent.append(update(model, optimizer, x).item())

    return step


def a_long_queue__innocent():
    model, optimizer, x = parts()
    recent = deque(maxlen=4)

    def step():
        optimizer.zero_grad()
        out = model(x)
        recent.append(out.detach())
        out.square().mean().backward()
        optimizer.step()

    return step


def a_hidden_state__fault():
    cell, x = nn.RNNCell(64, 64), torch.randn(32, 64)
    state = torch.zeros(32, 64)

    def step():
        nonlocal state
        cell.zero_grad()
        state = cell(x, state)  # here
        state.square().mean().backward(retain_graph=True)

    return step


def a_hidden_state__cure():
    cell, x = nn.RNNCell(64, 64), torch.randn(32, 64)
    state = torch.zeros(32, 64)

    def step():
        nonlocal state
        cell.zero_grad()
        state = cell(x, state.detach())
        state.square().mean().backward()

    return step


def a_hidden_state__innocent():
    cell, x = nn.RNNCell(64, 64), torch.randn(32, 64)

    def step():
        cell.zero_grad()
        state = torch.zeros(32, 64)
        for _ in range(5):
            state = cell(x, state)
        state.square().mean().backward()

    return step


def _steps(model, optimizer, x, keep):
    history = []
    while True:
        history.append(keep(update(model, optimizer, x)))  # here
        yield


def a_generator__fault():
    program = _steps(*parts(), lambda loss: loss)
    return lambda: next(program)


def a_generator__cure():
    program = _steps(*parts(), lambda loss: loss.item())
    return lambda: next(program)


def a_generator__innocent():
    def losses(model, optimizer, x):
        while True:
            yield update(model, optimizer, x)

    program = losses(*parts())
    return lambda: next(program)


class Remembers(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.layer, self.keep, self.seen = nn.Linear(64, 64), keep, []

    def forward(self, x):
        h = self.layer(x).square()
        self.seen.append(self.keep(h))  # here
        return h


class RemembersOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(64, 64), None

    def forward(self, x):
        self.seen = self.layer(x).square()
        return self.seen


def _trained(model):
    optimizer, x = torch.optim.SGD(model.parameters(), 0.01), torch.randn(256, 64)
    return lambda: update(model, optimizer, x)


def a_module_that_remembers__fault():
    return _trained(Remembers(lambda h: h))


def a_module_that_remembers__cure():
    return _trained(Remembers(lambda h: h.detach().norm()))


def a_module_that_remembers__innocent():
    return _trained(RemembersOne())


def a_graph_into_the_next_step__fault():
    model, optimizer, x = parts()
    preview = None

    def step():
        nonlocal preview
        update(model, optimizer, x)
        preview = model(x)  # here

    return step


def a_graph_into_the_next_step__cure():
    model, optimizer, x = parts()
    preview = None

    def step():
        nonlocal preview
        update(model, optimizer, x)
        with torch.no_grad():
            preview = model(x)

    return step


def a_graph_into_the_next_step__innocent():
    model, optimizer, x = parts()
    preview = None

    def step():
        nonlocal preview
        optimizer.zero_grad()
        preview = model(x)
        preview.square().mean().backward()
        optimizer.step()

    return step


def gradients_with_a_graph__fault():
    model, _, x = parts()

    def step():
        model.zero_grad()
        model(x).square().mean().backward(create_graph=True)

    return step


def gradients_with_a_graph__cure():
    model, _, x = parts()

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def gradients_with_a_graph__innocent():
    model, _, x = parts()

    def step():
        model.zero_grad()
        loss = model(x).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in first).backward()

    return step


def a_tuple_that_grows__fault():
    model, optimizer, x = parts()
    history = ()

    def step():
        nonlocal history
        history = (*history, update(model, optimizer, x))  # here

    return step


def a_tuple_that_grows__cure():
    model, optimizer, x = parts()
    history = ()

    def step():
        nonlocal history
        history = (*history, update(model, optimizer, x).item())

    return step


def a_tuple_that_grows__innocent():
    model, optimizer, x = parts()
    history = ()

    def step():
        nonlocal history
        history = (*history[-1:], update(model, optimizer, x).detach())

    return step


# --- tensors that are kept ----------------------------------------------------------------------


def outputs_without_a_graph__fault():
    model, _, x = parts()
    predictions = []

    def step():
        with torch.no_grad():
            predictions.append(model(x))  # here

    return step


def outputs_without_a_graph__cure():
    model, _, x = parts()
    predictions = []

    def step():
        with torch.no_grad():
            predictions.append(model(x).mean())

    return step


def outputs_without_a_graph__innocent():
    model, _, x = parts()
    predictions = torch.zeros(5, 256, 64)
    count = 0

    def step():
        nonlocal count
        with torch.no_grad():
            predictions[count] = model(x)
        count += 1

    return step


def batches_that_stay__fault():
    model, optimizer, _ = parts()
    batches = {}

    def step():
        x = torch.randn(256, 64)
        batches[len(batches)] = x  # here
        update(model, optimizer, x)

    return step


def batches_that_stay__cure():
    model, optimizer, _ = parts()

    def step():
        update(model, optimizer, torch.randn(256, 64))

    return step


def batches_that_stay__innocent():
    model, optimizer, _ = parts()
    batches = {}

    def step():
        x = torch.randn(256, 64)
        batches[0] = x
        update(model, optimizer, x)

    return step


def a_hook_that_keeps__fault():
    model, optimizer, x = parts()
    seen = []
    model[0].register_forward_hook(lambda _, args, out: seen.append(out.detach()))  # here
    return lambda: update(model, optimizer, x)


def a_hook_that_keeps__cure():
    model, optimizer, x = parts()
    seen = []
    model[0].register_forward_hook(lambda _, args, out: seen.append(out.detach().norm()))
    return lambda: update(model, optimizer, x)


def a_hook_that_keeps__innocent():
    model, optimizer, x = parts()
    seen = {}
    model[0].register_forward_hook(lambda _, args, out: seen.update(last=out.detach()))
    return lambda: update(model, optimizer, x)


# --- cycles -------------------------------------------------------------------------------------


class Node:
    def __init__(self):
        self.out = self.up = self.down = None


def parent_and_child__fault():
    model, optimizer, x = parts()

    def step():
        update(model, optimizer, x)
        parent, child = Node(), Node()
        parent.down = child
        child.up = parent  # here
        parent.out = torch.zeros(256, 64)

    return step


def parent_and_child__cure():
    model, optimizer, x = parts()

    def step():
        update(model, optimizer, x)
        parent, child = Node(), Node()
        parent.down = child
        child.up = weakref.ref(parent)
        parent.out = torch.zeros(256, 64)

    return step


def parent_and_child__innocent():
    model, optimizer, x = parts()

    def step():
        update(model, optimizer, x)
        parent, child = Node(), Node()
        parent.down = child
        child.up = parent  # a cycle that holds no tensor

    return step


class Task:
    def __init__(self, x):
        self.x, self.run = x, None


def a_function_on_its_object__fault():
    model, optimizer, x = parts()

    def step():
        task = Task(x.clone())
        task.run = lambda: update(model, optimizer, task.x)  # here
        task.run()

    return step


def a_function_on_its_object__cure():
    model, optimizer, x = parts()

    def step():
        task = Task(x.clone())
        task.run = lambda batch: update(model, optimizer, batch)
        task.run(task.x)

    return step


def a_function_on_its_object__innocent():
    model, optimizer, x = parts()

    def step():
        task = Task(x.clone())
        task.run = lambda: update(model, optimizer, task.x)
        task.run()
        task.run = None

    return step


def a_caught_error__fault():
    model, optimizer, x = parts()

    def step():
        copy = x.clone()
        try:
            update(model, optimizer, copy)
            raise ValueError(len(copy))
        except ValueError as error:
            seen = error  # here
            assert seen

    return step


def a_caught_error__cure():
    model, optimizer, x = parts()

    def step():
        copy = x.clone()
        try:
            update(model, optimizer, copy)
            raise ValueError(len(copy))
        except ValueError as error:
            seen = str(error)
            assert seen

    return step


def a_caught_error__innocent():
    model, optimizer, x = parts()

    def step():
        copy = x.clone()
        try:
            update(model, optimizer, copy)
            raise ValueError(len(copy))
        except ValueError as error:
            seen = error.with_traceback(None)
            assert seen

    return step


class Loop:
    def __init__(self, x):
        self.x, self.callback = x, None

    def log(self):
        return self.x.shape


def a_bound_method__fault():
    model, optimizer, x = parts()

    def step():
        loop = Loop(x.clone())
        loop.callback = loop.log  # here
        update(model, optimizer, loop.x)

    return step


def a_bound_method__cure():
    model, optimizer, x = parts()

    def step():
        loop = Loop(x.clone())
        loop.callback = weakref.WeakMethod(loop.log)
        update(model, optimizer, loop.x)

    return step


def a_bound_method__innocent():
    model, optimizer, x = parts()

    def step():
        loop = Loop(x.clone())
        loop.callback = loop.log
        update(model, optimizer, loop.x)
        loop.x = None  # the cycle stays, the tensor goes

    return step


def a_linked_list__fault():
    def step():
        first = Node()
        last = first
        for _ in range(3):
            last.down = Node()
            last.down.up = last  # here
            last = last.down
        last.out = torch.zeros(64, 64)

    return step


def a_linked_list__cure():
    def step():
        first = Node()
        last = first
        for _ in range(3):
            last.down = Node()
            last = last.down
        last.out = torch.zeros(64, 64)

    return step


def a_linked_list__innocent():
    def step():
        first = Node()
        last = first
        for _ in range(3):
            last.down = Node()
            last.down.up = last
            last = last.down
        first.out = torch.zeros(64, 64)
        while last is not None:
            last.down, last = None, last.up

    return step


def a_recursive_function__fault():
    model, optimizer, x = parts()

    def step():
        batch = x.clone()

        def halves(lo, hi):
            return update(model, optimizer, batch[lo:hi]) if hi - lo < 99 else halves(lo, hi // 2)

        halves(0, 256)

    return step


def a_recursive_function__cure():
    model, optimizer, x = parts()

    def halves(batch):
        return update(model, optimizer, batch) if len(batch) < 99 else halves(batch[::2])

    def step():
        halves(x.clone())

    return step


def a_recursive_function__innocent():
    model, optimizer, x = parts()

    def step():
        def halves(n):
            return n if n < 99 else halves(n // 2)

        update(model, optimizer, x[: halves(256)])

    return step


# --- hooks --------------------------------------------------------------------------------------


def module_hooks__fault():
    model, optimizer, x = parts()

    def step():
        model[0].register_forward_hook(lambda *_: None)  # here
        update(model, optimizer, x)

    return step


def module_hooks__cure():
    model, optimizer, x = parts()

    def step():
        handle = model[0].register_forward_hook(lambda *_: None)
        update(model, optimizer, x)
        handle.remove()

    return step


def module_hooks__innocent():
    model, optimizer, x = parts()
    for _ in range(9):
        model[0].register_forward_hook(lambda *_: None)
    return lambda: update(model, optimizer, x)


def parameter_hooks__fault():
    model, optimizer, x = parts()

    def step():
        model[0].weight.register_hook(lambda grad: grad * 2)  # here
        update(model, optimizer, x)

    return step


def parameter_hooks__cure():
    model, optimizer, x = parts()
    model[0].weight.register_hook(lambda grad: grad * 2)
    return lambda: update(model, optimizer, x)


def parameter_hooks__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        out = model(x)
        out.register_hook(lambda grad: grad * 2)
        out.square().mean().backward()
        optimizer.step()

    return step


# --- backwards ----------------------------------------------------------------------------------


def a_retained_graph__fault():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward(retain_graph=True)  # here
        optimizer.step()

    return step


def a_retained_graph__cure():
    model, optimizer, x = parts()
    return lambda: update(model, optimizer, x)


def a_retained_graph__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()

    return step


def a_second_order_for_nobody__fault():
    model, optimizer, x = parts()

    def step():
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)  # here
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad.detach()
        optimizer.step()

    return step


def a_second_order_for_nobody__cure():
    model, optimizer, x = parts()

    def step():
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()

    return step


def a_second_order_for_nobody__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        inputs = x.clone().requires_grad_()
        out = model(inputs).square().mean()
        (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
        (out + slope.square().sum()).backward()
        optimizer.step()

    return step


def both_losses_retain__fault():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward(retain_graph=True)  # here
        optimizer.step()

    return step


def both_losses_retain__cure():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        out = model(x)
        (out.square().mean() + out.abs().mean()).backward()
        optimizer.step()

    return step


def both_losses_retain__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        out = model(x)
        for row in range(3):
            out[row].square().mean().backward(retain_graph=row < 2)
        optimizer.step()

    return step


# --- graphs for nobody --------------------------------------------------------------------------


def evaluation__fault():
    model, optimizer, x = parts()

    def step():
        update(model, optimizer, x)
        model.eval()
        (model(x).argmax(1) == 0).sum().item()  # here
        model.train()

    return step


def evaluation__cure():
    model, optimizer, x = parts()

    def step():
        update(model, optimizer, x)
        model.eval()
        with torch.no_grad():
            (model(x).argmax(1) == 0).sum().item()
        model.train()

    return step


def evaluation__innocent():
    model, optimizer, x = parts()
    model.eval()  # fine-tuned with dropout off: the graph is used
    return lambda: update(model, optimizer, x)


def a_validation_loss__fault():
    model, _, x = parts()
    model.eval()
    criterion = nn.MSELoss()

    def step():
        out = model(x)  # here
        return criterion(out, x).item()

    return step


def a_validation_loss__cure():
    model, _, x = parts()
    model.eval()
    criterion = nn.MSELoss()

    @torch.inference_mode()
    def step():
        return criterion(model(x), x).item()

    return step


def a_validation_loss__innocent():
    model, _, x = parts()
    model.eval().requires_grad_(False)
    criterion = nn.MSELoss()

    def step():  # an adversarial example: a gradient of the input
        inputs = x.clone().requires_grad_()
        criterion(model(inputs), x).backward()

    return step


def a_teacher__fault():
    (model, optimizer, x), (teacher, _, _) = parts(), parts()

    def step():
        optimizer.zero_grad()
        target = teacher(x)  # here
        F.mse_loss(model(x), target.detach()).backward()
        optimizer.step()

    return step


def a_teacher__cure():
    (model, optimizer, x), (teacher, _, _) = parts(), parts()

    def step():
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(x)
        F.mse_loss(model(x), target).backward()
        optimizer.step()

    return step


def a_teacher__innocent():
    (model, optimizer, x), (teacher, _, _) = parts(), parts()
    teacher.requires_grad_(False)

    def step():
        optimizer.zero_grad()
        target = teacher(x)
        F.mse_loss(model(x), target).backward()
        optimizer.step()

    return step


def a_metric__fault():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        out = model(x)
        out.softmax(1).amax(1).mean().item()  # here
        out.square().mean().backward()
        optimizer.step()

    return step


def a_metric__cure():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        out = model(x)
        out.detach().softmax(1).amax(1).mean().item()
        out.square().mean().backward()
        optimizer.step()

    return step


def a_metric__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        out = model(x)
        penalty = out.softmax(1).amax(1).mean()
        (out.square().mean() + penalty).backward()
        optimizer.step()

    return step


# --- gradients ----------------------------------------------------------------------------------


def no_zero_grad__fault():
    model, optimizer, x = parts()

    def step():
        model(x).square().mean().backward()
        optimizer.step()  # here

    return step


def no_zero_grad__cure():
    model, optimizer, x = parts()
    return lambda: update(model, optimizer, x)


def no_zero_grad__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        for part in x.chunk(4):
            (model(part).square().mean() / 4).backward()
        optimizer.step()

    return step


def an_update_by_hand__fault():
    model, _, x = parts()

    def step():
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad

    return step


def an_update_by_hand__cure():
    model, _, x = parts()

    def step():
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None

    return step


def an_update_by_hand__innocent():
    model, _, x = parts()
    count = 0

    def step():
        nonlocal count
        model(x).square().mean().backward()
        count += 1
        if count % 2 == 0:
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
            model.zero_grad()

    return step


def zeros_for_gradients__fault():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()  # here

    return step


def zeros_for_gradients__cure():
    model, optimizer, x = parts()
    return lambda: update(model, optimizer, x)


def zeros_for_gradients__innocent():
    (model, first, x), (other, second, _) = parts(), parts()

    def step():  # two models train each other, one's gradients are spoiled and then reset
        first.zero_grad()
        other(model(x)).square().mean().backward()
        first.step()
        second.zero_grad()
        other(model(x).detach()).abs().mean().backward()
        second.step()

    return step


def zeros_by_hand__fault():
    model, _, x = parts()

    def step():
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad.zero_()

    return step


def zeros_by_hand__cure():
    model, _, x = parts()

    def step():
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None

    return step


def zeros_by_hand__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        for part in x.chunk(2):
            model(part).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    return step


# --- the cache ----------------------------------------------------------------------------------


def an_empty_cache__fault():
    model, optimizer, x = parts()

    def step():
        update(model, optimizer, x)
        torch.cuda.empty_cache()  # here

    return step


def an_empty_cache__cure():
    model, optimizer, x = parts()
    return lambda: update(model, optimizer, x)


def an_empty_cache__innocent():
    model, optimizer, x = parts()
    count = 0

    def step():
        nonlocal count
        update(model, optimizer, x)
        count += 1
        if count == 3:  # once, between two phases
            torch.cuda.empty_cache()

    return step


# --- parameters ---------------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self, cuts=False):
        super().__init__()
        self.trunk, self.head, self.spare = (nn.Linear(64, 64) for _ in range(3))
        self.cuts, self.count = cuts, 0

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.head(h.detach() if self.cuts else h)


class Alternating(Heads):
    def forward(self, x):
        self.count += 1
        return (self.head if self.count % 2 else self.spare)(self.trunk(x).tanh())


def a_head_that_nobody_calls__fault():
    return _trained(Heads())


def a_head_that_nobody_calls__cure():
    model = Heads()
    del model.spare
    return _trained(model)


def a_head_that_nobody_calls__innocent():
    return _trained(Alternating())


def a_trunk_cut_off__fault():
    model = Heads(cuts=True)
    del model.spare
    return _trained(model)


def a_trunk_cut_off__cure():
    model = Heads()
    del model.spare
    return _trained(model)


def a_trunk_cut_off__innocent():
    model = Heads()
    model.spare.requires_grad_(False)
    model.trunk.requires_grad_(False)
    return _trained(model)


# --- types --------------------------------------------------------------------------------------


def a_wide_mask__fault():
    model, optimizer, x = parts()
    mask = torch.ones(64, dtype=torch.float64)

    def step():
        optimizer.zero_grad()
        (model(x) * mask).square().mean().backward()  # here
        optimizer.step()

    return step


def a_wide_mask__cure():
    model, optimizer, x = parts()
    mask = torch.ones(64)

    def step():
        optimizer.zero_grad()
        (model(x) * mask).square().mean().backward()
        optimizer.step()

    return step


def a_wide_mask__innocent():
    model, optimizer, x = parts()
    mask = torch.tensor(2.0, dtype=torch.float64)  # a number: it widens nothing

    def step():
        optimizer.zero_grad()
        (model(x) * mask).square().mean().backward()
        optimizer.step()

    return step


class Scaled(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64, dtype=dtype))

    def forward(self, x):
        return self.second(self.first(x) * self.scale.float())


def a_wide_parameter__fault():
    return _trained(Scaled(torch.float64))


def a_wide_parameter__cure():
    return _trained(Scaled(torch.float32))


def a_wide_parameter__innocent():
    model, optimizer, x = parts(torch.float64)  # all of it, on purpose
    return lambda: update(model, optimizer, x)


def a_wide_scale__fault():
    model, optimizer, x = parts(torch.bfloat16)
    scale = torch.ones(64)

    def step():
        optimizer.zero_grad()
        (model(x) * scale).sigmoid().tanh().square().mean().backward()  # here
        optimizer.step()

    return step


def a_wide_scale__cure():
    model, optimizer, x = parts(torch.bfloat16)
    scale = torch.ones(64, dtype=torch.bfloat16)

    def step():
        optimizer.zero_grad()
        (model(x) * scale).sigmoid().tanh().square().mean().backward()
        optimizer.step()

    return step


def a_wide_scale__innocent():
    model, optimizer, x = parts()

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).softmax(1).square().mean()
        loss.backward()
        optimizer.step()

    return step


# --- optimizers ---------------------------------------------------------------------------------


def _stepped(kind, **options):
    model, _, x = parts()
    optimizer = kind(model.parameters(), **options)

    def step():
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # here

    return step


def a_long_history__fault():
    return _stepped(torch.optim.LBFGS, history_size=50, max_iter=4)


def a_long_history__cure():
    return _stepped(torch.optim.SGD, lr=0.01, momentum=0.9)


def a_long_history__innocent():
    return _stepped(torch.optim.Adam)


def a_third_moment__fault():
    return _stepped(torch.optim.Adam, amsgrad=True)


def a_third_moment__cure():
    return _stepped(torch.optim.Adam)


def a_third_moment__innocent():
    return _stepped(torch.optim.RMSprop, momentum=0.9)
