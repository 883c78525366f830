"""Archives that make Python's own reader hang, recurse or allocate are reported like damaged ones."""

import io
import tarfile

import pytest
from support.hostile_tars import HOSTILE_TARS, header, long_name

from pale.cli.main import main
from pale.data.sources.items import BadItem, tar_items
from pale.data.sources.shards import build_index
from pale.data.sources.tar_files import tar_members


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE_TARS)
def test_hostile_archives_end_with_their_reason(tmp_path, name):
    path = tmp_path / "a.tar"
    path.write_bytes(HOSTILE_TARS[name])
    *_, last = tar_items(str(path), "a.tar")
    assert isinstance(last, BadItem)
    assert "cannot be read as an uncompressed tar archive" in last.reason
    with pytest.raises(ValueError, match=r"a\.tar cannot be read as a shard"):
        build_index([path])


def test_pythons_own_reader_would_not_end():
    with tarfile.open(fileobj=io.BytesIO(HOSTILE_TARS["leads back"])) as tar:
        found: list[str] = []
        while len(found) < 5:
            try:
                member = tar.next()
            except tarfile.TarError:  # newer versions of Python refuse it
                return
            if member is None:
                return
            found.append(member.name)
    assert found[1:] == ["b.jpg"] * 4


@pytest.mark.timeout(60)
def test_other_archives_of_a_call_are_predicted(tmp_path, capsys):
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (40, 40)).save(content, "PNG")
    with tarfile.open(tmp_path / "good.tar", "w") as tar:
        member = tarfile.TarInfo("a.png")
        member.size = len(content.getvalue())
        tar.addfile(member, io.BytesIO(content.getvalue()))
    for i, archive in enumerate(HOSTILE_TARS.values()):
        (tmp_path / f"{i}.tar").write_bytes(archive)
    sources = sorted(map(str, tmp_path.glob("*.tar")))
    assert main(["predict", *sources, "-o", str(tmp_path / "out"), "--device", "cpu"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert '"good.tar/a.png"' in (tmp_path / "out" / "predictions.jsonl").read_text()


def test_long_names_and_many_members_are_read():
    name = "b" * 300 + ".jpg"
    content = io.BytesIO(header("a.jpg") + long_name(name.encode()) + header("x") + bytes(1024))
    assert [member.name for member in tar_members(content)] == ["a.jpg", name]
