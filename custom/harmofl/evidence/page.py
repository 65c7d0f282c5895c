"""Self-contained pages: a template of this package with its values, and figures as inline SVG."""

import io
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmofl.files import current_umask, remove_leftovers, replaced_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_page(template: str, path: Path, **values: Any) -> None:
    """Render a template of this package to a file, which is replaced as a whole."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = (files(__package__) / template).read_text(encoding="utf-8")
    page = environment.from_string(text).render(values)
    replace_text(path, page)


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole, with the rights that a new file has."""
    remove_leftovers(path.parent, path.name)
    with replaced_file(path, "w", encoding="utf-8") as file:
        file.write(text)
        os.chmod(file.fileno(), 0o666 & ~current_umask())


def inline_svg(figure: "Figure", name: str) -> str:
    """A figure as SVG without date and random ids, so that equal numbers give equal pages; `name` once a page."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=metadata, transparent=True)
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def whole_rounds(axes: "Axes", first: int, last: int) -> None:
    """Let an axis of rounds have whole numbers alone, also where there is one round."""
    from matplotlib.ticker import MaxNLocator

    margin = max(0.5 if first >= last else 0.0, 0.03 * (last - first))
    axes.set_xlim(first - margin, max(first, last) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
