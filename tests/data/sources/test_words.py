import pytest

from pale.data.sources.words import name_classes, read_words
from pale.errors import DataError
from pale.tasks.classification.data import Data


def test_the_first_name_of_each_id_is_read(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(
        "n01443537\tgoldfish, Carassius auratus\nn02012849 crane\n\n"
        "n1 too short\nroot:x:0:0:root:/root\nn01698640\t\nn01774384\t  black widow  \r\n"
    )
    expected = {"n01443537": "goldfish", "n02012849": "crane", "n01774384": "black widow"}
    assert read_words(path) == expected


def test_classes_that_are_not_listed_keep_their_names():
    words = {"n00000001": "crane", "n00000002": "crane", "n00000003": "wolf"}
    names = ["n00000001", "n00000002", "n00000003", "n00000004", "cat"]
    expected = ["crane (n00000001)", "crane (n00000002)", "wolf", "n00000004", "cat"]
    assert name_classes(names, words) == expected


def test_a_list_beside_the_data_is_found_and_a_given_one_goes_first(tmp_path):
    assert Data(root=tmp_path).read_words() == {}
    (tmp_path / "classes.txt").write_text("n00000001 one\n")
    assert Data(root=tmp_path).read_words() == {"n00000001": "one"}
    given = tmp_path / "mine.txt"
    given.write_text("n00000001 two\n")
    assert Data(root=tmp_path, words=given).read_words() == {"n00000001": "two"}
    assert Data(root="s3://bucket/data").read_words() == {}


def test_a_given_list_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"the list of words .*no\.txt cannot be read \(No such"):
        Data(words=tmp_path / "no.txt").read_words()
    with pytest.raises(DataError, match="a folder, not a regular file"):
        read_words(tmp_path)
    monkeypatch.setattr("pale.data.sources.words.MAX_BYTES", 10)
    (tmp_path / "long.txt").write_text("n00000001 one\n")
    with pytest.raises(DataError, match="the limit is 10"):
        read_words(tmp_path / "long.txt")
