"""Weights in the package: this folder holds the files, a card for each, and index.json.

Only the standard library is needed here, so that a name can be looked up without importing torch. Every function
accepts another folder with such an index, as benchmarks/demo_weights.py writes it; None means this folder.
"""

from .files import FileCheck, file_sha256, require_intact, verify_files
from .index import (
    HEADLINE,
    ZooEntry,
    add_entry,
    best_start,
    default_name,
    find_file,
    get_entry,
    list_entries,
    write_index,
)

__all__ = [
    "HEADLINE",
    "FileCheck",
    "ZooEntry",
    "add_entry",
    "best_start",
    "default_name",
    "file_sha256",
    "find_file",
    "get_entry",
    "list_entries",
    "require_intact",
    "verify_files",
    "write_index",
]
