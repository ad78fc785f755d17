import dataclasses

import pytest

from fxrecals.ir import (
    ONCE,
    Graph,
    Kind,
    Op,
    Peak,
    Phase,
    Trait,
    Value,
    bounded_graph,
    gradient_bytes,
    is_charged,
    verify,
)

X = Value("x", 8, "x", Kind.PRIMAL)
A = Value("a", 4, "a")
B = Value("b", 4, "b", Kind.BACKWARD)
F = Op("f", "aten.sin", ("x",), ("a",), Phase.FORWARD, seconds=1.5)
G = Op("g", "aten.cos", ("a", "x"), ("b",), Phase.BACKWARD, seconds=2.0)


def graph_of(*ops: Op, values: tuple[Value, ...] = (X, A, B), outputs: tuple[str, ...] = ("a",)):
    return Graph(ops, {value.name: value for value in values}, outputs)


def test_a_graph_is_looked_up_by_name_producer_and_phase() -> None:
    graph = graph_of(F, G)
    verify(graph)
    assert graph.op("g") is G
    assert graph.producer == {"a": F, "b": G}
    assert (graph.forward, graph.backward) == ((F,), (G,))
    assert graph.seconds == 3.5


def test_an_unknown_op_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        graph_of(F).op("nothing")


def test_an_empty_graph_is_valid() -> None:
    verify(Graph((), {}, ()))


@pytest.mark.parametrize("kind", [Value, Op, Graph])
def test_the_program_cannot_be_changed(kind: type) -> None:
    thing = {Value: A, Op: F, Graph: graph_of(F, G)}[kind]
    field = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, field, None)


@pytest.mark.parametrize("kind", Kind)
def test_inputs_and_parameter_gradients_are_not_charged(kind: Kind) -> None:
    assert is_charged(Value("v", 1, "v", kind)) == (kind not in (Kind.PRIMAL, Kind.GRADIENT))


def test_a_limit_on_the_step_charges_gradients_and_nothing_else_more() -> None:
    values = {kind.value: Value(kind.value, 8, kind.value, kind) for kind in Kind}
    graph = Graph((F, G), {"x": X, "a": A, "b": B, **values}, ("a",))
    assert bounded_graph(graph, Peak.ACTIVATIONS) is graph
    found = bounded_graph(graph, Peak.STEP)
    assert (found.ops, found.outputs) == (graph.ops, graph.outputs)
    changed = [name for name, value in found.values.items() if value != graph.values[name]]
    assert changed == ["gradient"]
    assert is_charged(found.values["gradient"])


def test_a_gradient_and_its_views_count_once() -> None:
    base = Value("w", 8, "w", Kind.GRADIENT)
    views = {n: dataclasses.replace(base, name=n) for n in ("w", "v")}
    other = {"u": Value("u", 3, "u", Kind.GRADIENT), "a": A}
    assert gradient_bytes(Graph((), {**views, **other}, ("v",))) == 11


@pytest.mark.parametrize("trait", Trait)
def test_only_a_pure_forward_op_may_run_again(trait: Trait) -> None:
    op = dataclasses.replace(F, traits=frozenset({trait}))
    wishes = (Trait.PREFER_SAVE, Trait.PREFER_RECOMPUTE, Trait.MUST_RECOMPUTE)
    assert op.may_run_again == (trait in (Trait.RANDOM, Trait.VIEW, *wishes))
    assert op.may_run_again == (trait not in ONCE)
    assert not G.may_run_again


def test_traits_tell_views_and_random_ops() -> None:
    view, random = (dataclasses.replace(F, traits=frozenset({t})) for t in ("view", "random"))
    assert (view.is_view, view.is_random) == (True, False)
    assert (random.is_view, random.is_random) == (False, True)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (graph_of(F, F), "op 'f' appears twice"),
        (graph_of(F, F), "op 'f' makes 'a' a second time"),
        (graph_of(G, F), "forward op 'f' follows a backward op"),
        (graph_of(G, F), "op 'g' reads 'a' before it is made"),
        (graph_of(F, outputs=("c",)), "output 'c' is not a value"),
        (graph_of(F, values=(X,)), "op 'f' makes 'a', which is not a value"),
        (graph_of(F, values=(A,)), "op 'f' reads 'x' before it is made"),
        (graph_of(values=(Value("v", -1, "v"),)), "value 'v' has -1 bytes"),
        (
            graph_of(values=(A, Value("v", 5, "a"))),
            "value 'v' gives storage 'a' another size",
        ),
        (Graph((), {"v": A}, ()), "value 'a' is filed under 'v'"),
    ],
)
def test_a_broken_graph_is_refused_with_the_reason(graph: Graph, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^not a valid graph:\n- ") as caught:
        verify(graph)
    assert f"- {reason}" in str(caught.value).splitlines()


def test_all_that_is_wrong_with_a_graph_is_told_at_once() -> None:
    graph = graph_of(G, F, outputs=("nothing",))
    with pytest.raises(ValueError, match="not a valid graph") as caught:
        verify(graph)
    assert len(str(caught.value).splitlines()) == 4
