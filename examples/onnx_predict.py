"""Predict a photo with an ONNX file that `pale export` wrote: numpy, Pillow and onnxruntime, no PyTorch.

    pale export runs/pets -o pets.onnx
    python onnx_predict.py pets.onnx photo.jpg              # the five best classes
    python onnx_predict.py pets.onnx photo.jpg --json
    python onnx_predict.py street.onnx photo.jpg -o mask.png  # a segmenter: shares of classes, and the mask

The file says how pictures are resized and normalised and what the classes are called.
"""

import argparse
import json
import math

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def read(path):
    """A picture as RGB, turned as its EXIF entry says, transparency laid on white."""
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            ground = Image.new("RGBA", image.size, "white")
            return Image.alpha_composite(ground, image).convert("RGB")
        return image.convert("RGB")


def resized(picture, short, long=None):
    """The sides keep their ratio; the short one becomes `short`, unless the long one would exceed `long`."""
    w, h = picture.size
    ratio = short / min(w, h) if short else 1
    if long and ratio * max(w, h) > long:
        ratio = long / max(w, h)
    return max(1, int(w * ratio + 0.5)), max(1, int(h * ratio + 0.5))


def prepared(picture, about):
    """(1, 3, h, w), float32: what the network takes."""
    how = getattr(Image.Resampling, about["interpolation"].upper())
    if about["task"] == "classification":
        size = about["size"]
        short = math.floor(size / about["crop"])
        w, h = picture.size
        # The long side is cut to whole pixels, as torchvision does.
        box = (short, int(short * h / w)) if w <= h else (int(short * w / h), short)
        picture = picture.resize(box, how)
        left, top = round((box[0] - size) / 2), round((box[1] - size) / 2)
        picture = picture.crop((left, top, left + size, top + size))
    else:
        box = resized(picture, about["short"], about["long"])
        picture = picture if box == picture.size else picture.resize(box, how)
    pixels = np.asarray(picture, np.float32) / 255
    pixels = (pixels - np.array(about["mean"], np.float32)) / np.array(about["std"], np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)


def shares(logits, size):
    """By class: probability, or the share of pixels; and the mask of a segmenter at `size`, (w, h)."""
    if logits.ndim == 1:
        e = np.exp(logits - logits.max())
        return e / e.sum(), None
    if logits.shape[:0:-1] != size:
        maps = [Image.fromarray(m).resize(size, Image.Resampling.BILINEAR) for m in logits]
        logits = np.stack([np.asarray(m) for m in maps])
    mask = logits.argmax(0).astype(np.uint8)
    return np.bincount(mask.ravel(), minlength=len(logits)) / mask.size, mask


def main():
    """Parse, predict, print."""
    parser = argparse.ArgumentParser(
        description="Predict a photo with an ONNX file of pale export."
    )
    parser.add_argument("model")
    parser.add_argument("photo")
    parser.add_argument(
        "-o", "--output", help="segmentation: the mask, class numbers as grey values"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    session = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["pale"])
    picture = read(args.photo)
    (logits,) = session.run(["logits"], {"images": prepared(picture, about)})
    found, mask = shares(logits[0], picture.size)
    names = about["classes"] or [str(i) for i in range(len(found))]
    best = [(names[i], float(found[i])) for i in np.argsort(-found, kind="stable")[:5]]
    if args.output and mask is not None:
        Image.fromarray(mask).save(args.output)
    if args.json:
        print(json.dumps({"task": about["task"], "best": best, "logits": logits[0].tolist()}))
        return
    for name, share in best:
        print(f"{100 * share:6.2f} %  {name}")


if __name__ == "__main__":
    main()
