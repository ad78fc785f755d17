"""Trains a model along an exported plan; needs torch and the files beside this one, no fxrecals.

    from out.runtime import attach

    step = attach(model)                  # the model that was planned, whatever its weights
    step(*example).mean().backward()      # called as the model was when it was planned

``forward.py`` and ``backward.py`` are the program, ``model.json`` says what they take. A step takes
and returns what the model does, at the sizes that were planned; dicts stand for its classes.
"""

import json
import runpy
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves


def attach(model, folder=Path(__file__).parent):
    """A function that runs the step of `model` as planned, on the model's own parameters.
    Raises ValueError, with the difference, if the model is another, or later the call.
    """
    about = json.loads((Path(folder) / "model.json").read_text())
    if "cannot" in about:
        raise ValueError(f"this step cannot be run from its files: {about['cannot']}")
    check("the model", about["tensors"], describe(tensors_of(model)))
    files = {x: runpy.run_path(str(Path(folder) / f"{x}.py")) for x in ("forward", "backward")}

    def step(*args, **kwargs):
        check("the mode", {"training": about["training"]}, {"training": model.training})
        given = {f"argument {i}": x for i, x in enumerate(tree_leaves((args, kwargs)))}
        check("the call", about["leaves"], describe(given))
        given |= tensors_of(model)
        inputs = [given[name] for name in about["inputs"]]
        return filled(about["result"], Step.apply(about, files, *inputs))

    return step


class Step(torch.autograd.Function):
    """The two halves of the program as one op of autograd."""

    @staticmethod
    def forward(ctx, about, files, *inputs):
        """Runs the forward, and keeps what the backward takes."""
        made = files["forward"]["forward"](*inputs)
        outputs = made[: about["outputs"]]
        for k, i in about["updates"]:
            inputs[i].copy_(outputs[k])
        held = {id(x) for x in (*inputs, *outputs)}
        saved = [made[i] for i in about["saved"]]
        # What nobody else holds is given away to the backward, which frees it on the way.
        ctx.kept = [None if id(x) in held else x for x in saved]
        ctx.save_for_backward(*(x if id(x) in held else None for x in saved))
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        ctx.about, ctx.backward_of = about, files["backward"]["backward_of"]
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *tangents):
        """Runs the backward, once."""
        if ctx.kept is None:
            raise RuntimeError("the backward of this step has run: call the forward again")
        given = [x if y is None else y for x, y in zip(ctx.kept, ctx.saved_tensors, strict=True)]
        given += [tangents[k] for k in ctx.about["tangents"]]
        ctx.kept = None
        gradients = ctx.backward_of(given)
        return (None, None, *(None if k is None else gradients[k] for k in ctx.about["gradients"]))


def tensors_of(model):
    """Parameters and buffers, by kind and name."""
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    return {f"{kind} {name}": x for kind, named in kinds.items() for name, x in named}


def describe(values):
    """Tensors by type and shape, everything else as Python prints it."""
    tensors = {k: x for k, x in values.items() if torch.is_tensor(x)}
    words = {k: f"{str(x.dtype)[6:]}{[*x.shape]}" for k, x in tensors.items()}
    return {k: words.get(k, repr(x)) for k, x in values.items()}


def check(what, planned, found):
    """Raises ValueError with what is not as it was planned."""
    for name in [*planned, *found]:
        now, then = found.get(name, "absent"), planned.get(name, "absent")
        if now != then:
            raise ValueError(f"{what} is not what was planned: {name} is {now}, not {then}")


def filled(nest, outputs):
    """The model's result: outputs in place of their numbers."""
    if isinstance(nest, dict):
        return {key: filled(x, outputs) for key, x in nest.items()}
    if isinstance(nest, list):
        return tuple(filled(x, outputs) for x in nest)
    return None if nest is None else outputs[nest]
