"""The terminal of commands: cells of tables and lines show what cannot be printed, and do not obey it."""

import io

from rich.table import Table

from harmofl.app.console import PrintableConsole, plain_console


def test_cells_and_lines_are_printable() -> None:
    stream = io.StringIO()
    console = PrintableConsole(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, width=80)
    table = Table("case\x1b[31m", box=None)
    table.add_row("Case\x1b]0;title\x07\u202e00")
    console.print(table)
    console.print("\nfirst\x1b[2J\nsecond [bold]")
    assert [line.strip() for line in stream.getvalue().splitlines()] == [
        *("case?[31m", "Case?]0;title??00", "", "first?[2J", "second [bold]")
    ]
    assert isinstance(plain_console(), PrintableConsole)
