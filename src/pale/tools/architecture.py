"""A model whose architecture is changed by options. This module imports nothing heavy, for a fast `pale --help`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.options import option, settings_class
from ..errors import SettingsError

if TYPE_CHECKING:
    from ..model.pale_transformer import PaleConfig

PALE_SIZE = "rows and columns per pale: one number, or one per stage (default 7)"


@settings_class
class ImageAndPales:
    """Sizes of the image and of the pales."""

    size: tuple[int, int] = option("image height and width", default=(224, 224), metavar=("H", "W"))
    pale_size: list[int] | None = option(PALE_SIZE, default=None, metavar="S")

    def config(self, model: str) -> PaleConfig:
        """Return the configuration of a model for this size, with all changes that are not None."""
        from ..model.pale_transformer import variant

        if min(self.size) < 1:
            h, w = self.size
            raise SettingsError(f"--size needs a height and a width of at least 1, got {h} {w}")
        pale_size = self.pale_size
        changes: dict[str, Any] = {
            "pale_size": pale_size[0] if pale_size and len(pale_size) == 1 else pale_size,
            **{
                name: getattr(self, name, None) for name in ("attention", "position", "stem_stride")
            },
        }
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(variant(model), img_size=self.size, **given)


@settings_class
class Architecture(ImageAndPales):
    """Options of a model that change its cost."""

    attention: str | None = option(
        "attention mode: parallel (default), sequential, vanilla, axial or cross", default=None
    )
    position: str | None = option("position encoding: cpe (default), ape or none", default=None)
    stem_stride: int | None = option("stride of the stem: 4 (default), 2 or 1", default=None)
    num_classes: int = option("classes of the classifier", default=1000)
    in_chans: int = option("channels of the image", default=3)
