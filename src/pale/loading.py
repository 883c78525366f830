"""A model to use, with all that must be known to feed it: from a run, from weights, by name, or as it is."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from . import weights as weight_files
from . import zoo
from .data.instance_transforms import resized
from .data.mask_transforms import fit
from .data.masks import Colour, palette
from .data.transforms import eval_transform, to_tensor
from .pale_transformer import VARIANTS
from .recipes import get
from .recipes.schema import Classification, Detection, Recipe, Segmentation, parse
from .settings import vary
from .tasks.detection import MaskRCNN, Testing
from .tasks.segmentation.inference import Inference, resize_image
from .tasks.segmentation.upernet import UperNet

Kind = Literal["classification", "segmentation", "detection"]
KINDS: tuple[Kind, ...] = ("classification", "segmentation", "detection")
UNTRAINED_SEED = 0  # two commands about one untrained model speak of the same weights


@dataclass(frozen=True)
class Loaded:
    """A model and how it sees pictures.

    Attributes:
        model: in evaluation mode, in float32 on the CPU.
        kind: what it gives: a class an image, one a pixel, or objects.
        name: of the architecture.
        source: where it comes from, in words.
        trained: whether weights were loaded; else they are as initialised.
        classes: names, in the order of the logits; empty if not known.
        size: classification: side of the square that it is given.
        crop: classification: the short side is brought to size / crop, then the centre is taken.
        test: segmentation and detection: how a picture is looked at.
        colours: segmentation: of the classes.
        categories: detection: ids of the classes in COCO's json.
        interpolation: of resizing.
        mean: of the pixels, 0 to 1, by channel.
        std: likewise.
    """

    model: nn.Module
    kind: Kind
    name: str
    source: str
    trained: bool
    classes: tuple[str, ...] = ()
    size: int = 224
    crop: float = 0.875
    test: Inference | Testing | None = None
    colours: tuple[Colour, ...] = ()
    categories: tuple[int, ...] = ()
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = field(default=IMAGENET_DEFAULT_MEAN)
    std: tuple[float, ...] = field(default=IMAGENET_DEFAULT_STD)

    @property
    def short(self) -> int | None:
        """Segmentation and detection: the short side is brought to this; none: it stays."""
        return self.test.short if self.test else None

    @property
    def long(self) -> int | None:
        """Segmentation and detection: unless the long side would exceed this."""
        return self.test.long if self.test else None

    def pixels(self, picture: Image.Image) -> Tensor:
        """The picture as the model is evaluated on it: (3, h, w), uint8."""
        if self.kind == "classification":
            return eval_transform(self.size, self.crop, self.interpolation)(picture)
        if self.kind == "detection":
            return torch.from_numpy(resized(picture, self.short, self.long)).permute(2, 0, 1)
        image = to_tensor(picture)
        return resize_image(image, fit(image.shape[1], image.shape[2], self.short, self.long))

    def normalise(self, images: Tensor) -> Tensor:
        """Uint8 (b, 3, h, w) -> what the model takes."""
        mean, std = (
            torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (self.mean, self.std)
        )
        return (images.float() / 255 - mean) / std

    def about(self) -> dict[str, Any]:
        """What a file that leaves Python should carry, as JSON holds it."""
        seen: dict[str, Any] = {"size": self.size, "crop": self.crop}
        if self.kind != "classification":
            seen = {"short": self.short, "long": self.long}
        return {
            "task": self.kind,
            "model": self.name,
            "trained": self.trained,
            "classes": list(self.classes),
            **seen,
            "interpolation": self.interpolation,
            "mean": [float(v) for v in self.mean],
            "std": [float(v) for v in self.std],
        }


def load(source: str | Path | nn.Module | Loaded, recipe: str | None = None) -> Loaded:
    """The model of a run's folder, a file of weights, a name of the zoo or of a model, or a module.

    Args:
        source: where it is.
        recipe: for foreign weights: the name of the recipe that says the model.
    """
    if isinstance(source, Loaded):
        return source
    if isinstance(source, nn.Module):
        return _module(source)
    path = Path(source)
    if not path.exists() and (known := zoo.find(str(source))) is not None:
        path = known
    # What is no path on this machine, and does not look like one, is a name.
    if not path.exists() and path.name == str(source) and path.suffix != ".safetensors":
        if recipe is not None:
            raise ValueError(f"there are no weights at {source} for the recipe {recipe}")
        return _named(str(source))
    return _weights(path, recipe)


def _weights(path: Path, recipe: str | None) -> Loaded:
    weights = weight_files.load(path)
    if recipe is None and "recipe" not in weights.about:
        raise ValueError(
            f"{path} does not say which model it is for; name a recipe: --recipe imagenet.pale_t"
        )
    chosen = get(recipe) if recipe else parse(weights.about["recipe"], str(path))
    classes = tuple(weights.about.get("classes") or ())
    loaded = _built(chosen, classes, weights, path)
    weight_files.put(loaded.model, weights, path, new_head=False)
    return loaded


def _built(
    recipe: Recipe, classes: tuple[str, ...], weights: weight_files.Weights, path: Path
) -> Loaded:
    if isinstance(recipe, Classification):
        settings = vary(recipe.model, weights=None, new_head=False)
        model = settings.build(len(classes) or 1000, recipe.data.size)
        how = recipe.augment.interpolation
        return Loaded(
            model.eval(),
            "classification",
            recipe.model.name,
            str(path),
            True,
            classes,
            recipe.data.size,
            recipe.data.crop,
            interpolation="bicubic" if how == "random" else how,
        )
    if isinstance(recipe, Segmentation):
        known = _class_list(recipe)
        classes = _known(classes or known[0], path)
        segmenter = vary(recipe.model, weights=None, init=None, new_head=False)
        return Loaded(
            segmenter.build(len(classes), recipe.augment.crop).eval(),
            "segmentation",
            f"UperNet on {recipe.model.name}",
            str(path),
            True,
            classes,
            test=recipe.test,
            colours=known[1] if known[0] == classes else tuple(palette(len(classes))),
            interpolation="bilinear",
        )
    if isinstance(recipe, Detection):
        names, categories = _categories(recipe)
        classes = _known(classes or names, path)
        settings = vary(recipe.model, weights=None, init=None, new_head=False)
        side = recipe.augment.crop or recipe.augment.short or recipe.data.size
        return Loaded(
            settings.build(len(classes), side).eval(),
            "detection",
            f"Mask R-CNN on {recipe.model.name}",
            str(path),
            True,
            classes,
            test=recipe.test,
            categories=categories if names == classes else tuple(range(1, len(classes) + 1)),
            interpolation="bilinear",
        )
    raise ValueError(f"{path} is of an unknown kind, {type(recipe).__name__}")


def _known(classes: tuple[str, ...], path: Path) -> tuple[str, ...]:
    if not classes:
        raise ValueError(
            f"{path} does not name its classes, and the data of its recipe is not here to tell them; "
            "give weights of a run, or a recipe whose data is at hand"
        )
    return classes


def _class_list(recipe: Segmentation) -> tuple[tuple[str, ...], tuple[Colour, ...]]:
    """Names and colours of the recipe's own list, where it can still be read."""
    try:
        listed = recipe.data.class_list()
    except ValueError:
        return (), ()
    return tuple(listed.names), tuple(listed.colours)


def _categories(recipe: Detection) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and ids of the recipe's own data, where it can still be read."""
    try:
        source = recipe.data.val_source(recipe.seed)
    except ValueError:
        return (), ()
    return tuple(source.classes), tuple(source.categories)


def _named(name: str) -> Loaded:
    base = name.partition(".")[0]
    if base not in timm.list_models():
        near = timm.list_models(f"*{name[:8]}*")[:3]
        raise ValueError(
            f"there is no run, file or model {name!r}; give a run's folder, a .safetensors file, or "
            f"one of {', '.join(VARIANTS)}" + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(UNTRAINED_SEED)
        model: nn.Module = timm.create_model(name)
    return replace(_module(model), name=name, source=f"{name}, untrained", trained=False)


def _module(model: nn.Module) -> Loaded:
    """A module as it is; timm's own notes say how it sees pictures."""
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    kind: Kind = "classification"
    test: Inference | Testing | None = None
    if isinstance(model, UperNet):
        kind, test = "segmentation", Inference(short=None, long=None)
    elif isinstance(model, MaskRCNN):
        kind, test = "detection", Testing()
    size = cfg.get("input_size", (3, 224, 224))[-1]
    known = ("mean", "std", "interpolation")
    given = {name: cfg[name] for name in known if name in cfg}
    return Loaded(
        copy.deepcopy(model).cpu().float().eval(),
        kind,
        cfg.get("architecture") or type(model).__name__,
        type(model).__name__,
        True,
        size=size,
        crop=cfg.get("crop_pct", 0.875),
        test=test,
        **given,
    )


def read_pixels(picture: Image.Image, short: int, longest: int) -> Tensor:
    """All of a picture, no crop, with its short side at `short`, the long one at most `longest`: (3, h, w), uint8."""
    w, h = picture.size
    size = fit(h, w, short, longest)
    return to_tensor(picture.resize((size[1], size[0]), Image.Resampling.BICUBIC))
