"""The documentation site: Sphinx, pages in Markdown (MyST), tutorials as notebooks.

`make docs` builds it into site/; every warning is an error. Nothing is asked of another host: the
theme brings no fonts and no scripts from elsewhere, and search works from the disk.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

project = "gpmil"
copyright = "the gpmil developers, BSD-3-Clause. For research, not a medical device."
html_title = "gpmil"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings", "notebooks"]
exclude_patterns = ["_static"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4  # page.md#a-heading, as on GitHub
myst_links_external_new_tab = False

suppress_warnings = ["ref.python"]  # types in docstrings are words, not names to be found

# --- API: numpy docstrings; single backticks are code, as everywhere else in gpmil
default_role = "literal"
autodoc_typehints = "none"  # shapes are in the docstrings
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "inherited-members": "object, BaseEstimator, ClassifierMixin",
}
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
