"""The documentation as a site: `python -m sphinx --fail-on-warning docs site`."""

import fxrecals

project = "fxrecals"
version = release = fxrecals.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"

html_theme = "furo"
html_title = f"fxrecals {release}"
html_show_copyright = False

myst_heading_anchors = 3  # `reference.md#plan`, as forges have it

autodoc_typehints = "none"  # the text says the units
autodoc_member_order = "bysource"
default_role = "py:obj"  # `plan` in a docstring is a link where there is such a name
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
