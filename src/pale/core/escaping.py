"""Escape text from files for HTML pages, terminals and CSV cells.

File names, class names and the content of run folders from others may contain anything. Every page, command
and table of the package passes such text through one of these functions.
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from collections.abc import Iterable
from html import escape

# Characters that reverse the direction of the text after them: "gpj.exe" is displayed as "exe.jpg".
BIDIRECTIONAL = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})  # controls, surrogates, line and paragraph separators
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
INDENT = "  "


def escape_controls(text: object, keep: str = "") -> str:
    r"""Return the text with control characters and line breaks written as \x1b or \n.

    Args:
        text: anything; its `str`.
        keep: characters that stay as they are.
    """
    text = str(text)
    if text.isprintable() and BIDIRECTIONAL.isdisjoint(text):
        return text
    return "".join(c if c in keep or not _hides(c) else _escaped(c) for c in text)


def _hides(character: str) -> bool:
    return character in BIDIRECTIONAL or unicodedata.category(character) in HIDDEN


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def escape_line(text: object) -> str:
    """Return one line for a terminal: no escape sequence, no second line."""
    return escape_controls(text)


def escape_message(text: object) -> str:
    """Return a message of several lines for a terminal; lines after the first are indented.

    A name with a line break therefore cannot look like another message.
    """
    return escape_controls(text, keep="\n\t").replace("\n", f"\n{INDENT}")


def escape_html(text: object) -> str:
    """Return text for an HTML element or a quoted attribute."""
    return escape(escape_controls(text, keep="\n\t"), quote=True)


def csv_cell(value: object) -> object:
    """Return a cell that no spreadsheet interprets as a formula; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    # A surrogate stands for a byte of a file name that is not UTF-8: no file in UTF-8 can hold it.
    value = value.encode("utf-8", "backslashreplace").decode()
    return f"'{value}" if value.startswith(FORMULA) and not NUMBER.fullmatch(value) else value


def csv_row(cells: Iterable[object]) -> list[object]:
    """Return a row for `csv.writer`, each cell escaped by `csv_cell`."""
    return [csv_cell(cell) for cell in cells]


def content_policy(scripts: Iterable[str] = ()) -> str:
    """Return the meta tag that lets a page run these inline scripts and no other, and load nothing from elsewhere.

    Args:
        scripts: the text between `<script>` and `</script>` of each.
    """
    hashes = [hashlib.sha256(script.encode()).digest() for script in scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    allowed = allowed or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}">'


def html_page(title: str, style: str, body: str) -> str:
    """Return a whole page without scripts; `title` is text, `body` is HTML."""
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8>{content_policy()}"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{escape_html(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )
