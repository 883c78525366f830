"""Console and table of rich for text from files, printed without markup and control sequences."""

from __future__ import annotations

from typing import Any

from rich import console as rich_console
from rich import table as rich_table
from rich.console import RenderableType
from rich.text import Text

from .escaping import escape_controls, escape_line


class Console(rich_console.Console):
    """A console that prints strings as they are: no markup, no emoji codes, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a string as rich prints it, in lines and in cells of tables."""
        return super().render_str(escape_controls(text, keep="\n\t"), **options)


class Table(rich_table.Table):
    """A table whose cells are single lines."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row and escape line breaks in its cells."""
        safe = [escape_line(cell) if isinstance(cell, str) else cell for cell in cells]
        super().add_row(*safe, **options)

    def add_column(
        self, header: RenderableType = "", footer: RenderableType = "", **options: Any
    ) -> None:
        """Add a column and escape line breaks in its title."""
        safe = escape_line(header) if isinstance(header, str) else header
        super().add_column(safe, footer, **options)
