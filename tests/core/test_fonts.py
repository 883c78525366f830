"""Fonts for text in images."""

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
        pytest.skip("no font of SYSTEM_FONTS is installed")


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
