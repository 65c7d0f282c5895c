"""The terminal that commands write to: text of files, jobs and servers cannot command it."""

from typing import Any

from rich.console import Console
from rich.text import Text

from harmofl.sections import one_line


class PrintableConsole(Console):
    """Shows what cannot be printed as `?`, in lines and in the cells of tables: a file name may hold an escape."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text as it is shown; its line breaks stay."""
        return super().render_str("\n".join(one_line(line) for line in text.split("\n")), **options)


def plain_console() -> PrintableConsole:
    """A terminal without markup, on which a line wraps only where the terminal ends."""
    return PrintableConsole(highlight=False, markup=False, emoji=False, soft_wrap=True)
