"""A plan as one HTML page that needs nothing else: no network, no library.

`text` is all of it. Pictures are drawn here, from `charts`; the script only shows what is under
the pointer, so that the page can be read, printed and searched without it. What comes from a
model (names, source lines) is escaped, and the page forbids any script but its own.
"""

from fxrecals.page.document import text

__all__ = ["text"]
