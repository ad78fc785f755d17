"""The page: whole in itself, safe with any name, and looked at in a browser."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxrecals.formats import format_bytes
from fxrecals.ir import Graph, Kind, Op, Peak, Phase, Trait, Value, Where
from fxrecals.page import text
from fxrecals.plans import Choice, Plan
from fxrecals.schedule import Schedule
from tests.browser import opened
from tests.strategies import graphs_with_schedules

F, B = Phase.FORWARD, Phase.BACKWARD
MB = 10**6

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "'; window.hacked = 1; //",
    "&lt;b&gt;",
    "]]>\u2028<!--",
    "\ud800",
    "$title ${style}",
)
"""Names that a page must show and nothing else."""


def chain(blocks: int, names: tuple[str, ...] = ("f",), seconds: float = 1e-3) -> Plan:
    """Blocks whose values the backward reads in reverse; every other one is made again."""
    values = {"x": Value("x", 8, "x", Kind.PRIMAL), "t": Value("t", 8, "t", Kind.TANGENT)}
    ops: list[Op] = []
    last = "x"
    for i in range(blocks):
        name = f"{names[i % len(names)]}_{i}"
        where = Where(f"{names[i % len(names)]}.{i}.mlp", f"{names[i % len(names)]}:{i}")
        values[name] = Value(name, 10 * MB, name)
        ops.append(Op(name, f"aten.{name}", (last,), (name,), F, seconds, where=where))
        last = name
    forward = tuple(op.name for op in ops)
    ops.append(Op("loss", "caller", (last,), ("t",), B, 0.0, traits=frozenset({Trait.CALLER})))
    gradient = "t"
    backward = ["loss"]
    for i, name in reversed(list(enumerate(forward))):
        made = f"b_{i}"
        kind = Kind.GRADIENT if i % 3 == 0 else Kind.BACKWARD
        values[made] = Value(made, MB, made, kind)
        ops.append(Op(made, "aten.mul", (gradient, name), (made,), B, seconds))
        # What runs again must be there to start from, so only what follows a kept value does.
        backward += [name, made] if i % 2 else [made]
        gradient = made
    graph = Graph(tuple(ops), values, (last, "t", gradient))
    schedule = Schedule(forward, tuple(backward))
    plan = Plan(graph, schedule, None, floor_bytes=20 * MB, bound_seconds=seconds)
    return replace(plan, limit_bytes=plan.peak_bytes + MB)


CHOICES = (Choice(300 * MB, 290 * MB, 0.0), Choice(200 * MB, 190 * MB, 4e-3, 3e-3))


class Reader(HTMLParser):
    """Checks that elements are closed in order, and notes what they are and say."""

    VOID = frozenset({"meta", "wbr", "br", "img", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


@given(graphs_with_schedules(), st.sampled_from(Peak), st.sampled_from([None, 1, 100]))
def test_the_page_of_any_plan_is_well_formed_and_says_its_peak(
    drawn: tuple[Graph, Schedule], peak: Peak, limit: int | None
) -> None:
    plan = Plan(*drawn, limit_bytes=limit, floor_bytes=5, peak=peak)
    page = text(plan)
    assert page == text(plan)
    said = "".join(read(page).said)
    assert f"{format_bytes(plan.bounded.peak_bytes)} peak" in said


def test_the_page_of_a_plan_without_ops_is_one() -> None:
    page = text(Plan(Graph((), {}, ()), Schedule((), ()), None, floor_bytes=0))
    assert "nothing runs again" in "".join(read(page).said)


def test_nothing_is_fetched_and_no_script_runs_but_its_own() -> None:
    page = text(chain(8))
    reader = read(page)
    assert not re.search(r"(src|href)=|url\(|@import|https?:", page)
    policy = next(a["content"] for tag, a in reader.elements if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy
    kinds = [attributes.get("type") for tag, attributes in reader.elements if tag == "script"]
    assert kinds == ["application/json", None]


def test_hostile_names_are_shown_and_nothing_else() -> None:
    plan = chain(14, HOSTILE)
    plan = replace(plan, notes=HOSTILE, choices=CHOICES)
    reader, plain = read(text(plan)), read(text(replace(chain(14), choices=CHOICES)))
    tags = {tag for tag, _ in reader.elements}
    assert tags <= {tag for tag, _ in plain.elements} | {"ul", "li"}
    assert not any(
        name.startswith("on") for _, attributes in reader.elements for name in attributes
    )
    said = "".join(reader.said)
    assert all(name in said for name in HOSTILE if name.isprintable() and "\ud800" not in name)
    assert r"\ud800" in said
    assert sum(tag == "script" for tag, _ in reader.elements) == 2


def test_every_section_has_a_table_for_who_cannot_see_the_picture() -> None:
    reader = read(text(replace(chain(8), choices=CHOICES)))
    tables = [a.get("aria-label") for tag, a in reader.elements if tag == "table"]
    assert {"Live bytes over the step", "Limits and the extra time that they cost"} <= set(tables)
    assert "Bytes kept for the backward, by block" in tables
    pictures = [a for tag, a in reader.elements if a.get("role") == "img"]
    assert all(a.get("aria-label") for a in pictures)
    shapes = [a for tag, a in reader.elements if tag == "svg"]
    assert all(a.get("aria-hidden") == "true" for a in shapes)


def test_a_limit_far_above_the_step_is_said_and_does_not_flatten_the_picture() -> None:
    near, far = chain(8), replace(chain(8), limit_bytes=10**12)
    assert "above this picture" not in text(near)
    assert "limit 1.00 TB, above this picture" in text(far)
    assert re.findall(r' d="[^"]*"', text(far)) == re.findall(r' d="[^"]*"', text(near))


def test_a_plan_over_its_limit_says_so() -> None:
    assert "does not fit 5 B" in text(replace(chain(8), limit_bytes=5))


def test_ten_thousand_ops_make_a_page_of_bounded_size() -> None:
    small, large = text(chain(500)), text(chain(5000))
    assert len(large) < 2 * len(small) < 3 * MB


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened() as browser:
        yield browser


@pytest.fixture
def complaints() -> list[str]:
    return []


def visit(browser: Any, plan: Plan, folder: Path, complaints: list[str], **options: Any) -> Any:
    """Opens the page of a plan, and collects what the browser has to complain of."""
    plan.to_html(folder / "plan.html")
    page = browser.new_context(**options).new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith("file:") else complaints.append(r.url))
    page.goto((folder / "plan.html").as_uri())
    return page


def point_at(page: Any, across: float) -> str:
    """What the tip says when the pointer is so far across the chart of live bytes."""
    box = page.locator("#memory .plot").bounding_box()
    page.mouse.move(box["x"] + across * box["width"], box["y"] + box["height"] / 2)
    return page.inner_text("#tip")


def test_pointing_at_a_moment_tells_op_module_line_and_bytes(
    browser: Any, tmp_path: Path, complaints: list[str]
) -> None:
    plan = chain(8)
    page = visit(browser, plan, tmp_path, complaints)
    assert page.locator("#tip").is_hidden()
    said = point_at(page, 0.001)
    assert "10.0 MB while f_0 in the forward" in said
    assert "f_0 in f.0.mlp" in said
    assert "f:0" in said
    assert format_bytes(plan.peak_bytes) in point_at(page, 0.45) + page.inner_text("#memory")
    page.mouse.move(1, 1)
    assert page.locator("#tip").is_hidden()
    assert complaints == []


def test_arrow_keys_go_from_op_to_op(browser: Any, tmp_path: Path, complaints: list[str]) -> None:
    page = visit(browser, chain(8), tmp_path, complaints)
    page.focus("#memory")
    page.keyboard.press("Home")
    assert "while f_0" in page.inner_text("#tip")
    page.keyboard.press("ArrowRight")
    assert "while f_1" in page.inner_text("#tip")
    page.keyboard.press("ArrowLeft")
    assert "while f_0" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    assert complaints == []


def test_tiles_bars_and_points_have_tips(
    browser: Any, tmp_path: Path, complaints: list[str]
) -> None:
    page = visit(browser, replace(chain(8), choices=CHOICES), tmp_path, complaints)
    page.locator(".block .tile").first.hover()
    assert "f." in page.inner_text("#tip")
    page.locator(".again i").first.hover()
    assert "runs again" in page.inner_text("#tip")
    page.locator(".dot").first.hover()
    assert "limit 300 MB" in page.inner_text("#tip")
    assert complaints == []


def test_hostile_names_run_nothing_and_are_shown_as_they_are(
    browser: Any, tmp_path: Path, complaints: list[str]
) -> None:
    plan = replace(chain(14, HOSTILE), notes=HOSTILE, choices=CHOICES)
    page = visit(browser, plan, tmp_path, complaints)
    assert HOSTILE[0] in point_at(page, 0.001)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_phone_and_desk_and_follows_light_and_dark(
    width: int, scheme: str, browser: Any, tmp_path: Path, complaints: list[str]
) -> None:
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    page = visit(browser, replace(chain(12), choices=CHOICES), tmp_path, complaints, **options)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", shown)[:3])) / 3
    assert (brightness > 128) == (scheme == "light")
    ratio = page.evaluate(CONTRAST)
    assert ratio >= 4.5, "text can be read"
    assert len(page.screenshot()) > 10_000
    assert complaints == []


CONTRAST = """() => {
  const light = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255);
    const [r, g, b] = parts.map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const section = getComputedStyle(document.querySelector("section")).backgroundColor;
  const texts = ["section h2", "section .soft", "td", "th", ".ticks-y span", ".limit span"];
  return Math.min(...texts.map((which) => {
    const both = [getComputedStyle(document.querySelector(which)).color, section].map(light);
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  }));
}"""
"""The smallest contrast of text, as WCAG 2.2 defines it; 4.5 is its level AA."""


def test_without_scripts_it_can_be_read(
    browser: Any, tmp_path: Path, complaints: list[str]
) -> None:
    page = visit(browser, chain(8), tmp_path, complaints, java_script_enabled=False)
    assert page.locator("#memory path").count() >= 5
    assert "Kept for the backward" in page.inner_text("main")


def test_ten_thousand_ops_answer_to_the_pointer(
    browser: Any, tmp_path: Path, complaints: list[str]
) -> None:
    page = visit(browser, chain(5000), tmp_path, complaints)
    assert "while" in point_at(page, 0.7)
    assert page.evaluate("document.querySelectorAll('*').length") < 10_000
    assert complaints == []
