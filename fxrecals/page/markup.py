"""Pieces of HTML in which every text is escaped.

>>> element("td", "</script>", cls="name")
'<td class="name">&lt;/script&gt;</td>'
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Markup(str):
    """Text that is HTML already."""


def escaped(text: object) -> Markup:
    """HTML that shows a text, also as the value of an attribute."""
    if isinstance(text, Markup):
        return text
    # A name may hold half of a surrogate pair, which no encoding can write.
    return Markup(html.escape(str(text).encode("utf-8", "backslashreplace").decode()))


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """An element; ``cls`` is its class, ``_`` in a name of an attribute is ``-``, and an attribute
    that is True has no value."""
    given = "".join(
        f" {name}" if value is True else f' {name}="{escaped(value)}"'
        for name, value in (
            ({"cls": "class"}.get(key, key.replace("_", "-")), value)
            for key, value in attributes.items()
            if value is not None and value is not False
        )
    )
    return Markup(f"<{tag}{given}>{''.join(map(escaped, content))}</{tag}>")


def joined(*content: object) -> Markup:
    """Pieces behind one another."""
    return Markup("".join(map(escaped, content)))


def breakable(name: str) -> Markup:
    """A dotted name that may be broken behind its dots.

    >>> breakable("layers.0")
    'layers.<wbr>0'
    """
    return Markup("<wbr>".join(escaped(part) for part in re.split(r"(?<=[._])", name)))


def data(value: Any) -> Markup:
    """JSON that can stand in a ``<script>``: no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


MOST = 200
"""Rows of a table; more than that nobody reads, and browsers are slow with."""


@dataclass(frozen=True)
class Column:
    """Of a table.

    Attributes:
        title: its header.
        kind: the class of its cells: "n" for numbers, "name" for what a model calls its things.
    """

    title: str
    kind: str = ""


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[object]],
    most: int | None = None,
) -> Markup:
    """A table that scrolls sideways where it is too wide.

    Args:
        caption: what it shows, for who cannot see the heading above it.
        columns: headers and kinds.
        rows: cells; an item after the last column is the class of the row.
        most: rows past these are shown on demand, as far as `MOST`.
    """
    shown = rows if most is None or len(rows) <= most + 1 else rows[:most]
    found = _scrolled(caption, columns, shown)
    if len(shown) == len(rows):
        return found
    rest = rows[len(shown) : MOST]
    more = element("summary", f"{len(rows) - len(shown)} more")
    left = f"and {len(rows) - MOST} more that are not listed" if len(rows) > MOST else ""
    return joined(
        found,
        element("details", more, _scrolled(caption, columns, rest), element("p", left, cls="soft")),
    )


def _scrolled(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> Markup:
    head = (element("th", c.title, scope="col", cls=c.kind or None) for c in columns)
    body = (_row(columns, row) for row in rows)
    found = element(
        "table",
        element("thead", element("tr", *head)),
        element("tbody", *body),
        aria_label=caption,
    )
    return element("div", found, cls="scroll", role="group", aria_label=caption, tabindex=0)


def _row(columns: Sequence[Column], row: Sequence[object]) -> Markup:
    cells = (
        element("td", _cell(column, cell), cls=column.kind or None)
        for column, cell in zip(columns, row, strict=False)
    )
    return element("tr", *cells, cls=row[len(columns)] if len(row) > len(columns) else None)


def _cell(column: Column, cell: object) -> object:
    return breakable(cell) if column.kind == "name" and isinstance(cell, str) else cell
