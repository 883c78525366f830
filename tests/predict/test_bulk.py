"""Prediction in shards: partition, atomic parts, repeated and killed jobs, damage, and merging."""

import csv
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.processes import full_disk
from support.weights import pixels, weights

from pale.cli.main import main
from pale.data.sources.items import Shard, local_items
from pale.data.sources.paths import output_stem
from pale.errors import DataError, PaleError, RunError, SettingsError
from pale.predict import Predictor
from pale.predict.bulk import merge_parts, predict_shard
from pale.predict.bulk.parts import line_name, list_parts, shard_folder, verify_part


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def classifier(made) -> Predictor:
    return Predictor(made["classification"], device="cpu", batch=4)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Write 23 images in two folders, one of them damaged, and a file that is not an image."""
    root = tmp_path_factory.mktemp("photos")
    (root / "inner").mkdir()
    for i in range(22):
        where = root / ("inner" if i % 3 else "") / f"{i:02d}.png"
        Image.fromarray(np.roll(pixels(40, 30), i, 0)).save(where)
    (root / "inner/bad.jpg").write_bytes(b"\xff\xd8 cut short")
    (root / "notes.md").write_text("no image")
    return root


def run(predictor, source, output, shard="0/1", **options):
    chosen = Shard.parse(shard)
    return predict_shard(predictor, local_items([Path(source)], chosen), output, chosen, **options)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(path: Path) -> list[str]:
    return [line["picture"] for line in lines(path)]


class TestShards:
    @given(
        names=st.lists(st.text(), unique=True, max_size=60), count=st.integers(1, 9), data=st.data()
    )
    def test_every_name_is_in_exactly_one_shard_whatever_the_order(self, names, count, data):
        order = data.draw(st.permutations(names))
        owners = {n: [i for i in range(count) if Shard(i, count).owns(n)] for n in order}
        assert all(len(found) == 1 for found in owners.values())
        assert owners == {n: [i for i in range(count) if Shard(i, count).owns(n)] for n in names}

    def test_the_partition_is_that_of_every_machine_and_version(self):
        # A job array that is repeated after an upgrade must find its own images.
        found = [next(i for i in range(7) if Shard(i, 7).owns(f"{n}.jpg")) for n in range(12)]
        assert found == [5, 6, 6, 0, 3, 5, 5, 6, 4, 6, 6, 3]

    def test_shards_are_of_nearly_one_size(self):
        sizes = [sum(Shard(i, 8).owns(f"img/{n:06d}.jpg") for n in range(8000)) for i in range(8)]
        assert 900 < min(sizes) <= max(sizes) < 1100  # 3.3 standard deviations

    @pytest.mark.parametrize("text", ["", "3", "4/4", "-1/4", "1/0", "a/b", "1/2/3", "0/2000000"])
    def test_anything_else_is_refused(self, text):
        with pytest.raises(SettingsError, match="a shard is i/n with i from 0 to n - 1"):
            Shard.parse(text)


class TestItems:
    def test_folders_lists_and_archives_give_the_same_images(self, photos, tmp_path):
        found = list(local_items([photos]))
        assert [item.name for item in found] == sorted(item.name for item in found)
        assert len(found) == 23
        (tmp_path / "all.txt").write_text(
            "# images\n\n" + "\n".join(os.path.relpath(photos / i.name, tmp_path) for i in found)
        )
        listed = list(local_items([tmp_path / "all.txt"]))
        with tarfile.open(tmp_path / "all.tar", "w") as tar:
            for item in found:
                tar.add(photos / item.name, item.name)
            tar.add(photos / "notes.md", "notes.md")
            tar.add(photos / "notes.md", "inner/._0.png")  # hidden; macOS writes such files
        packed = list(local_items([tmp_path / "all.tar"]))
        assert [item.name for item in packed] == [f"all.tar/{item.name}" for item in found]
        for one, two, three in zip(found, listed, packed, strict=True):
            content = Path(one.load()).read_bytes()
            assert content == Path(two.load()).read_bytes() == three.load()

    def test_shards_of_a_folder_are_disjoint_and_complete(self, photos):
        parts = [[i.name for i in local_items([photos], Shard(k, 3))] for k in range(3)]
        assert sorted(name for part in parts for name in part) == [
            item.name for item in local_items([photos])
        ]

    def test_the_shard_does_not_depend_on_where_the_folder_is(self, photos, tmp_path):
        (tmp_path / "elsewhere").symlink_to(photos)
        for k in range(3):
            one, two = (local_items([p], Shard(k, 3)) for p in (photos, tmp_path / "elsewhere"))
            assert [i.name for i in one] == [i.name for i in two]

    def test_archives_are_distributed_by_their_names(self, photos, tmp_path):
        for n in range(5):
            with tarfile.open(tmp_path / f"{n}.tar", "w") as tar:
                tar.add(photos / "00.png", "x.png")
        found = [[i.name for i in local_items([tmp_path], Shard(k, 2))] for k in range(2)]
        assert found == [
            ["0.tar/x.png", "2.tar/x.png", "4.tar/x.png"],
            ["1.tar/x.png", "3.tar/x.png"],
        ]

    def test_a_damaged_archive_gives_its_images_up_to_the_damage_and_an_error(
        self, photos, tmp_path
    ):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for n in ("00", "03", "06"):
                tar.add(photos / f"{n}.png", f"{n}.png")
        content = (tmp_path / "a.tar").read_bytes()
        (tmp_path / "a.tar").write_bytes(content[: len(content) // 2 - 5000])
        *good, bad = local_items([tmp_path / "a.tar"])
        assert [item.name for item in good][:1] == ["a.tar/00.png"]
        with pytest.raises(ValueError, match="cannot be read as an uncompressed tar archive"):
            bad.load()

    def test_an_address_in_a_list_is_refused(self, tmp_path):
        (tmp_path / "all.txt").write_text("a.jpg\nhttp://169.254.169.254/latest/meta-data/x.jpg\n")
        with pytest.raises(DataError, match="line 2: a list names files relative to itself"):
            list(local_items([tmp_path / "all.txt"]))

    def test_two_sources_of_one_name_are_refused(self, photos, tmp_path):
        (tmp_path / photos.name).mkdir()
        with pytest.raises(DataError, match="two sources have the name"):
            list(local_items([photos, tmp_path / photos.name]))

    def test_a_missing_source_is_an_error(self, tmp_path):
        with pytest.raises(DataError, match="there is no image, folder, list or archive"):
            list(local_items([tmp_path / "gone"]))


class TestParts:
    def test_all_shards_merged_are_the_prediction_of_the_folder(self, classifier, photos, tmp_path):
        results = [run(classifier, photos, tmp_path, f"{i}/4", part_images=3) for i in range(4)]
        assert sum(r.predicted for r in results) == 22
        merged = merge_parts(tmp_path)
        assert (merged.shards, merged.predicted, merged.failed, merged.repeated) == (4, 22, 1, 0)
        found = {line["picture"]: line for line in lines(tmp_path / "predictions.jsonl")}
        assert len(found) == 22
        for item in local_items([photos]):
            if "bad" in item.name:
                continue
            alone = classifier(item.load(), item.name).plain()
            assert found[item.name]["classes"][0]["class"] == alone["classes"][0]["class"]
            assert found[item.name]["classes"][0]["probability"] == pytest.approx(
                alone["classes"][0]["probability"], abs=1e-5
            )
        with (tmp_path / "predictions.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 22 * 5
        assert {row["picture"] for row in rows} == set(found)
        (failure,) = lines(tmp_path / "failures.jsonl")
        assert failure["picture"] == "inner/bad.jpg"
        assert "cannot be read as an image" in failure["reason"]

    def test_a_repeated_job_predicts_nothing(self, classifier, photos, tmp_path):
        run(classifier, photos, tmp_path, part_images=5)
        parts = list_parts(shard_folder(tmp_path, Shard()))
        before = {p: p.stat().st_mtime_ns for p in parts}
        again = run(classifier, photos, tmp_path, part_images=7)
        assert (again.predicted, again.failed, again.kept, again.kept_failed) == (0, 0, 23, 1)
        assert {p: p.stat().st_mtime_ns for p in list_parts(parts[0].parent)} == before

    def test_failed_images_are_read_again_on_request(self, classifier, photos, tmp_path):
        source = tmp_path / "source"
        source.mkdir()
        (source / "a.png").write_bytes((photos / "00.png").read_bytes())
        (source / "b.png").write_bytes(b"not yet")
        assert run(classifier, source, tmp_path / "out").failed == 1
        (source / "b.png").write_bytes((photos / "03.png").read_bytes())
        assert run(classifier, source, tmp_path / "out").predicted == 0
        assert merge_parts(tmp_path / "out").failed == 1
        again = run(classifier, source, tmp_path / "out", retry_failed=True)
        assert (again.predicted, again.kept) == (1, 1)
        merged = merge_parts(tmp_path / "out")
        assert (merged.predicted, merged.failed) == (2, 0)

    @pytest.mark.parametrize("after", [1, 6, 14])
    def test_an_interrupted_job_resumes(self, classifier, photos, tmp_path, after):
        def interrupted():
            for number, item in enumerate(local_items([photos])):
                if number == after:
                    raise KeyboardInterrupt
                yield item

        with pytest.raises(KeyboardInterrupt):
            predict_shard(classifier, interrupted(), tmp_path, Shard(), part_images=4)
        with pytest.raises(RunError, match="not complete: 0/1; run them again"):
            merge_parts(tmp_path)
        result = run(classifier, photos, tmp_path, part_images=4)
        assert result.kept + result.predicted + result.failed == 23
        assert merge_parts(tmp_path).predicted == 22
        assert len(set(names(tmp_path / "predictions.jsonl"))) == 22

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["sigint", "sigterm"])
    @pytest.mark.parametrize("place", ["plain", "rows"])
    def test_a_signal_while_an_image_is_written_loses_nothing_of_it(
        self, classifier, photos, tmp_path, number, place, monkeypatch
    ):
        """Its line without its rows in the CSV, or a count without its line, which merging refuses."""
        kind = type(classifier(photos / "00.png"))
        original, count = getattr(kind, place), 0

        def interrupted(self):
            nonlocal count
            count += 1
            if count == 6:
                signal.raise_signal(number)
            return original(self)

        monkeypatch.setattr(kind, place, interrupted)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                run(classifier, photos, tmp_path, part_images=4)
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGTERM, before)
        monkeypatch.undo()
        assert run(classifier, photos, tmp_path, part_images=4).kept == 6
        assert merge_parts(tmp_path).predicted == 22
        with (tmp_path / "predictions.csv").open() as file:
            assert len(list(csv.DictReader(file))) == 22 * 5

    def test_an_error_while_an_image_is_written_leaves_no_part_without_its_rows(
        self, classifier, photos, tmp_path, monkeypatch
    ):
        kind = type(classifier(photos / "00.png"))
        monkeypatch.setattr(kind, "rows", lambda self: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            run(classifier, photos, tmp_path)
        assert list(shard_folder(tmp_path, Shard()).iterdir()) == []

    @pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "manifest"])
    def test_a_damaged_part_is_predicted_again(self, classifier, photos, tmp_path, damage):
        run(classifier, photos, tmp_path, part_images=6)
        part = list_parts(shard_folder(tmp_path, Shard()))[1]
        file = part / "predictions.jsonl"
        content = bytearray(file.read_bytes())
        content[40] ^= 1
        if damage == "cut":
            file.write_bytes(content[:-30])
        elif damage == "flipped":
            file.write_bytes(content)
        elif damage == "gone":
            file.unlink()
        else:
            (part / "part.json").write_text('{"files": {"../../x": {}}}')
        with pytest.raises(RunError, match="are damaged: 0/1"):
            merge_parts(tmp_path)
        result = run(classifier, photos, tmp_path)
        assert len(result.damaged) == 1
        assert result.predicted + result.failed == 6
        assert merge_parts(tmp_path).predicted == 22

    def test_two_jobs_of_one_shard_give_each_image_once(self, classifier, photos, tmp_path):
        def meanwhile():
            items = list(local_items([photos]))
            # Before the first result: unfinished parts are named after the process, which both jobs share here.
            yield from items[:5]
            run(classifier, photos, tmp_path, part_images=4)
            yield from items[5:]

        predict_shard(classifier, meanwhile(), tmp_path, Shard(), part_images=8)
        merged = merge_parts(tmp_path)
        assert merged.predicted == 22
        assert merged.repeated >= 14
        assert len(names(tmp_path / "predictions.jsonl")) == 22
        with (tmp_path / "predictions.csv").open() as file:
            assert len(list(csv.DictReader(file))) == 22 * 5

    def test_added_images_are_predicted_and_others_are_not(self, classifier, photos, tmp_path):
        items = list(local_items([photos]))
        predict_shard(classifier, items[::2], tmp_path, Shard())
        result = run(classifier, photos, tmp_path)
        assert result.predicted + result.failed == len(items[1::2])

    def test_other_options_weights_or_shards_are_refused(self, classifier, made, photos, tmp_path):
        run(classifier, photos, tmp_path)
        with pytest.raises(RunError, match="was started with shards 1, now it is 2; use the same"):
            run(classifier, photos, tmp_path, "0/2")
        other = Predictor(made["classification"], device="cpu", top=3)
        with pytest.raises(RunError, match="was started with top 5, now it is 3"):
            run(other, photos, tmp_path)
        with pytest.raises(
            RunError, match="was started with task 'classification', now it is 'seg"
        ):
            run(Predictor(made["segmentation"], device="cpu"), photos, tmp_path)

    def test_a_full_disk_ends_the_job_and_keeps_complete_parts(self, classifier, photos, tmp_path):
        def filled():
            for number, item in enumerate(local_items([photos])):
                if number == 20:
                    limit.__enter__()
                yield item

        limit = full_disk(100)
        try:
            with pytest.raises(PaleError, match=r"could not be written .* complete parts are kept"):
                predict_shard(classifier, filled(), tmp_path, Shard(), part_images=4)
        finally:
            limit.__exit__(None, None, None)
        kept = [verify_part(part) for part in list_parts(shard_folder(tmp_path, Shard()))]
        assert kept
        result = run(classifier, photos, tmp_path)
        assert result.kept == sum(part.predicted + part.failed for part in kept)
        assert merge_parts(tmp_path).predicted == 22

    def test_a_folder_without_parts_cannot_be_merged(self, tmp_path):
        with pytest.raises(RunError, match="holds no parts"):
            merge_parts(tmp_path)

    @pytest.mark.parametrize("task", ["segmentation", "detection"])
    def test_masks_and_objects_of_all_parts(self, made, task, photos, tmp_path):
        options = {"score": 0.0, "most": 4} if task == "detection" else {}
        chosen = Predictor(made[task], device="cpu", **options)
        for i in range(2):
            run(chosen, photos, tmp_path, f"{i}/2", part_images=4)
        assert merge_parts(tmp_path).predicted == 22
        if task == "segmentation":
            assert len(list(tmp_path.glob("**/[0-9]*_mask.png"))) == 22
            with Image.open(tmp_path / "inner/01.png_mask.png") as mask:
                assert mask.size == (40, 30)
            return
        content = json.loads((tmp_path / "objects.json").read_text())
        found = {image["id"]: image["file_name"] for image in content["images"]}
        assert sorted(found) == list(range(1, 23))
        by_name = {
            line["picture"]: line["objects"] for line in lines(tmp_path / "predictions.jsonl")
        }
        for number, name in found.items():
            own = [e for e in content["annotations"] if e["image_id"] == number]
            assert [e["bbox"] for e in own] == [e["bbox"] for e in by_name[name]]
        assert len(content["categories"]) == 8


KILLED = """
import sys, time
from pathlib import Path
from pale.cli.main import main
from pale.data.sources.items import Shard, local_items
from pale.predict import Predictor
from pale.predict.bulk import predict_shard

def slowly(items):
    for item in items:
        time.sleep(0.1)
        yield item

predictor = Predictor(sys.argv[1], device="cpu", batch=4)
predict_shard(predictor, slowly(local_items([Path(sys.argv[2])])), Path(sys.argv[3]), Shard(), part_images=4)
"""


@pytest.mark.slow
def test_a_job_that_was_killed_loses_only_the_part_that_it_was_writing(
    made, classifier, photos, tmp_path
):
    words = [made["classification"], photos, tmp_path]
    child = subprocess.Popen([sys.executable, "-c", KILLED, *map(str, words)])
    folder = shard_folder(tmp_path, Shard())
    while len(list_parts(folder)) < 2 or not list(folder.glob(".part-*")):
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    kept = 4 * len(list_parts(folder))
    result = run(classifier, photos, tmp_path)
    assert not list(folder.glob(".part-*"))
    assert result.kept == kept
    assert result.predicted + result.failed == 23 - kept
    assert merge_parts(tmp_path).predicted == 22


@pytest.mark.slow
def test_the_commands_of_a_job_array(made, photos, tmp_path, capsys):
    words = ["predict", str(photos), "--weights", str(made["classification"]), "--device", "cpu"]
    words += ["-o", str(tmp_path)]
    codes = [main([*words, "--shard", f"{i}/3"]) for i in range(3)]
    assert sorted(codes) == [0, 0, 1]  # one has the damaged file
    assert main([*words, "--shard", "0/4"]) == 1
    assert "was started with shards 3, now it is 4" in capsys.readouterr().err
    assert main(["predict", "--merge", str(tmp_path)]) == 1
    assert "22 images of 3 parts and 3 shards; 1 failed" in capsys.readouterr().out
    assert main(["predict"]) != 0
    assert "there is nothing to predict" in capsys.readouterr().err
    assert main(["predict", str(photos), "--shard", "0/3"]) != 0
    assert "--shard writes parts into a folder" in capsys.readouterr().err


class TestNames:
    @given(name=st.text(min_size=1))
    def test_output_stays_in_its_folder(self, name):
        found = os.path.normpath(os.path.join("/out", output_stem(name)))
        assert found.startswith("/out/")

    @pytest.mark.parametrize(
        "name", ["/etc/x.jpg", "../x.jpg", "a/../../x.jpg", "C:\\x.jpg", "a" * 300]
    )
    def test_a_name_that_leads_elsewhere_gets_a_hash(self, name):
        assert output_stem(name).startswith("other/")

    @given(name=st.text())
    def test_the_name_of_a_line_is_read_without_the_rest(self, name):
        assert line_name(json.dumps({"picture": name, "reason": "x"}) + "\n") == name
        assert line_name(json.dumps({"reason": "x", "picture": name}) + "\n") == name
