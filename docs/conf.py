"""Settings of the site. Its sources are those of the repository's own folder: links between its files are checked."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
# The kernels that run pages: on CPU devices, with the modules of this folder.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "docs")])

import checks  # noqa: E402

import jaxsparse  # noqa: E402

project = "jaxsparse"
author = "the jaxsparse authors"
copyright = author
version = release = jaxsparse.__version__
root_doc = "docs/index"
include_patterns = [
  "docs/**",
  "colabs/*.ipynb",
  "benchmarks/**.md",
  "CONTRIBUTING.md",
  "BUILD.md",
  "CHANGELOG.md",
]
exclude_patterns = [".*", "out", "tests", "jaxsparse", "dist"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "sphinx_book_theme"
html_title = "jaxsparse"
html_extra_path = ["static"]  # index.html, which leads to docs/index.html
html_static_path = ["style"]
html_css_files = ["code.css"]
html_theme_options = {
  "navbar_persistent": [],  # the side bar has a search field already
  "show_toc_level": 2,
  "use_download_button": False,
  "use_fullscreen_button": False,
}
html_show_sphinx = False
html_show_copyright = False

# Every page and notebook with code runs in every build, and an exception ends it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 900
nb_execution_show_tb = True
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # tables
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = (
  "none"  # the sections "Args:" name shapes and units, which types do not
)
napoleon_use_ivar = True
default_role = "code"

# Every name of the library that a page or a docstring mentions is in the reference; of
# others nothing is known.
nitpicky = True
nitpick_ignore_regex = [
  ("py:.*", r"(?!jaxsparse\.).*"),
  (
    "py:.*",
    r"jaxsparse\.([A-Z]+(_transform)?|ring_transform|PerWorker)",
  ),  # placeholders, an example, the past
  ("py:.*", r"jaxsparse\.partial\.(simulate|sharing)"),  # the past
  ("py:class", r"jaxsparse\.transform\.state\.Layout"),  # not public
  (
    "py:class",
    r"jaxsparse\.(costs\.calibration\.Algorithm|overlap\.(plans\.LayerGroup|network\.Sent))",
  ),  # of fields
  ("py:class", r"jaxsparse\.types\.Rounding"),  # of an argument
]
python_use_unqualified_type_names = True


def setup(app):
  """Adds the checks of `checks.py`, and links for names."""
  checks.connect(app)
