"""Parts of `pale predict --shard` that no job wrote: merging names the file, and neither hangs nor allocates."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from pale.errors import RunError
from pale.predict.bulk.merge import merge_parts
from pale.predict.bulk.parts import join_output

LINE = b'{"picture": "a.jpg", "class": "cat"}\n'  # kept name
DEEP = b"[" * 100_000


def write_parts(root: Path, lines: bytes = LINE, predicted: object = 1, **others: bytes) -> Path:
    """Write the only part of the only shard, with checksums that fit."""
    folder = root / "parts" / "0000-of-0001" / "part-000000"
    folder.mkdir(parents=True)
    (root / "bulk.json").write_text('{"version": 1, "shards": 1, "settings": {}}')
    (folder.parent / "done.json").write_text("{}")
    content = {"predictions.jsonl": lines, "predictions.csv": b"image,class\r\na.jpg,cat\r\n"}
    content |= {name.replace("_", "."): value for name, value in others.items()}
    files = {}
    for name, value in content.items():
        (folder / name).write_bytes(value)
        files[name] = {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    about = {"version": 1, "predicted": predicted, "failed": 0, "files": files}
    (folder / "part.json").write_text(json.dumps(about))
    return root


HOSTILE = {
    "count of terabytes": {"predicted": 10**12},
    "negative count": {"predicted": -1},
    "count that is too low": {"lines": LINE * 3},
    "count that is too high": {"lines": LINE, "predicted": 2},
    "not JSON": {"lines": b'{"picture"  :\n'},
    "no name": {"lines": b'{"class": "cat", "other": 1}\n'},
    "not UTF-8": {"lines": b'{"picture": "\xff"}\n'},
    "nested": {"lines": DEEP + b"\n"},
    "failures": {"failures_jsonl": DEEP + b"\n"},
    "objects that are a list": {"objects_json": b"[]"},
    "nested objects": {"objects_json": DEEP},
    "objects without names": {
        "objects_json": b'{"images": [{}], "categories": [], "annotations": []}'
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_parts_that_no_job_wrote_are_named(tmp_path, name):
    with pytest.raises(RunError, match=r"part-000000"):
        merge_parts(write_parts(tmp_path, **HOSTILE[name]))


def test_valid_parts_are_merged(tmp_path):
    assert merge_parts(write_parts(tmp_path)).predicted == 1
    assert (tmp_path / "predictions.jsonl").read_bytes() == LINE


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["predictions.jsonl", "predictions.csv"])
def test_a_fifo_among_the_files_of_a_part_does_not_block(tmp_path, name):
    folder = write_parts(tmp_path) / "parts" / "0000-of-0001" / "part-000000"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    about = json.loads((folder / "part.json").read_text())
    about["files"][name]["bytes"] = 0
    (folder / "part.json").write_text(json.dumps(about))
    with pytest.raises(RunError, match="a FIFO, not a regular file"):
        merge_parts(tmp_path)


@pytest.mark.parametrize("content", [DEEP.decode(), '{"shards": true}', '{"shards": 1e9}', "[]"])
def test_a_description_of_the_output_that_no_job_wrote_is_an_error(tmp_path, content):
    write_parts(tmp_path)
    (tmp_path / "bulk.json").write_text(content)
    with pytest.raises(RunError, match=r"bulk\.json"):
        merge_parts(tmp_path)


def test_settings_that_are_no_table_are_other_settings(tmp_path):
    (tmp_path / "bulk.json").write_text('{"shards": 1, "settings": []}')
    with pytest.raises(RunError, match="was started with task None"):
        join_output(tmp_path, 1, {"task": "detection"})
