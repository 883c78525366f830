"""Read XML annotation files safely: no DTD and therefore no entities, bounded depth and size."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from ...errors import DataError
from ..reading import display_name
from .label_files import read_label_bytes

MAX_DEPTH = 20
MAX_ELEMENTS = 500_000  # an object has 10 to 25


def read_xml(path: Path) -> Element:
    """Return the root element of a file."""
    content = read_label_bytes(path)
    builder = TreeBuilder()
    depth = count = 0

    def start(tag: str, values: dict[str, str]) -> None:
        nonlocal depth, count
        depth += 1
        count += 1
        if count > MAX_ELEMENTS:
            raise DataError(f"{display_name(path)} has more than {MAX_ELEMENTS:,} elements")
        if depth > MAX_DEPTH:
            raise DataError(f"{display_name(path)}: elements are nested more than {MAX_DEPTH} deep")
        builder.start(tag, values)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def refuse(*_: object) -> None:
        raise DataError(
            f"{display_name(path)}: a document type (<!DOCTYPE ...>) is not supported, "
            "because it can define entities; remove it"
        )

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(content, True)
        return builder.close()
    except DataError:
        raise
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise DataError(f"{display_name(path)} is not XML ({error}); repair or remove it") from None
