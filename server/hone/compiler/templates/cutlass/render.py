"""CUDA sources from templates, by Jinja2. Nothing here knows what they compute."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

#: Where the templates of this package are.
SOURCES = Path(__file__).parent / "sources"
#: What their names end with.
SUFFIX = ".jinja"


def render(template: str, values: dict[str, Any]) -> str:
    """The template's text for the values. A value that is missing is an error, not an empty string.

    Raises jinja2's TemplateError: a template and its caller do not agree.
    """
    return str(_environment().get_template(template + SUFFIX).render(values))


@cache
def _environment() -> Any:
    # Here, since only what renders needs the package: naming and loading kernels does not.
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(SOURCES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # C++ and no web page
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
