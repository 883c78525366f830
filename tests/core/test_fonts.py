"""Fonts for text in images."""

from pathlib import Path

import pytest
from PIL import ImageFont
from PIL.ImageFont import FreeTypeFont

from pale.core import fonts


def glyph(font: fonts.Font, text: str) -> bytes:
    return bytes(font.getmask(text))


@pytest.fixture
def no_system_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "SYSTEM_FONTS", ())


@pytest.fixture
def system_font() -> None:
    if not any(map(fonts._find, fonts.SYSTEM_FONTS)):
        pytest.skip("no font of SYSTEM_FONTS is installed: apt install fonts-dejavu-core")


def test_ascii_is_drawn_in_the_font_of_pillow() -> None:
    font, texts = fonts.prepare_labels(["pug", "29.0 %"], 12)
    assert isinstance(font, FreeTypeFont)
    assert font.getname() == ("Aileron", "Regular")
    assert texts == ["pug", "29.0 %"]


@pytest.mark.usefixtures("system_font")
def test_umlauts_are_drawn_in_a_font_that_has_them() -> None:
    font, texts = fonts.prepare_labels(["pug", "Möpse groß"], 12)
    assert texts == ["pug", "Möpse groß"]
    # The font of Pillow draws one box for all of them.
    plain = ImageFont.load_default(12)
    assert glyph(plain, "ö") == glyph(plain, "ß")
    assert len({glyph(font, c) for c in ["ö", "ß", "\uffff"]}) == 3


@pytest.mark.usefixtures("no_system_fonts")
def test_without_a_font_accents_are_removed() -> None:
    _, texts = fonts.prepare_labels(["Möpse groß", "Смоленск 1", "pug"], 12)
    assert texts == ["Mopse gross", "???????? 1", "pug"]


@pytest.mark.usefixtures("system_font")
def test_only_characters_that_are_missing_are_replaced() -> None:
    # A private-use character is in no text font.
    _, texts = fonts.prepare_labels(["Möpse \U000f0000"], 12)
    assert texts == ["Möpse ?"]


def test_the_font_with_most_of_all_characters_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    has = {"a": set("éж"), "b": set("猫")}
    monkeypatch.setattr(fonts, "SYSTEM_FONTS", ("a", "b"))
    monkeypatch.setattr(fonts, "_find", lambda name: name)
    monkeypatch.setattr(fonts, "_has", lambda path, character: character in has[path])
    monkeypatch.setattr(ImageFont, "truetype", lambda path, *_, **__: path)
    assert fonts.prepare_labels(["éж猫"], 12) == ("a", ["éж?"])


def test_a_font_in_the_working_folder_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_font(path: str | Path, *_: object) -> None:
        opened.append(Path(path))
        raise OSError("no such font")

    monkeypatch.setattr(ImageFont, "FreeTypeFont", open_font)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DejaVuSans.ttf").write_bytes(b"hostile")
    fonts._find.cache_clear()
    assert fonts._find("DejaVuSans.ttf") == ""
    fonts._find.cache_clear()
    assert opened
    assert all(path.is_absolute() and tmp_path not in path.parents for path in opened)
