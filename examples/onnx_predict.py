"""Predict a photo with an ONNX file that `pale export` wrote: numpy, Pillow and onnxruntime, no PyTorch.

    pale export runs/pets -o pets.onnx
    python onnx_predict.py pets.onnx photo.jpg              # the five best classes
    python onnx_predict.py pets.onnx photo.jpg --json
    python onnx_predict.py street.onnx photo.jpg -o mask.png  # a segmenter: shares of classes, and the mask
    python onnx_predict.py objects.onnx photo.jpg -o seen.jpg # a detector: objects, and the photo with them

The file says how pictures are resized and normalised and what the classes are called.
"""

import argparse
import json
import math

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageOps


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


def objects(session, images, size, about, least):
    """Of a detector: name, score, box (left, top, right, bottom) and mask of each object, in pixels of the photo."""
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, {"images": images}), strict=True))
    scale = np.array([size[0] / images.shape[3], size[1] / images.shape[2]] * 2)
    out = []
    for i in np.flatnonzero(found["scores"] >= least):
        box = found["boxes"][i] * scale
        label = int(found["labels"][i])
        entry = {"name": about["classes"][label - 1] if about["classes"] else str(label)}
        entry |= {"score": float(found["scores"][i]), "box": box.tolist()}
        if "masks" in found:
            entry["mask"] = pasted(found["masks"][i], box, size)
        out.append(entry)
    return out


def pasted(mask, box, size):
    """The mask of a box (28x28, 0 to 1) at its place in the photo: boolean (h, w)."""
    left, top = (math.floor(v) for v in box[:2])
    right, bottom = (
        max(math.ceil(v), low + 1) for v, low in zip(box[2:], (left, top), strict=True)
    )
    small = Image.fromarray(mask).resize((right - left, bottom - top), Image.Resampling.BILINEAR)
    whole = Image.new("F", size)
    whole.paste(small, (left, top))
    return np.asarray(whole) > 0.5


def drawn(picture, found):
    """The photo under shapes, boxes and names."""
    pixels = np.array(picture)
    for number, entry in enumerate(found):
        if "mask" in entry:
            colour = np.array([(97 * number + 230) % 256, (151 * number + 80) % 256, 90])
            pixels[entry["mask"]] = (pixels[entry["mask"]] // 2 + colour // 2).astype(np.uint8)
    canvas = Image.fromarray(pixels)
    pen = ImageDraw.Draw(canvas)
    for entry in found:
        pen.rectangle(entry["box"], outline="white", width=2)
        pen.text((entry["box"][0] + 3, entry["box"][1] + 2), entry["name"], "white")
    return canvas


def detect(session, picture, about, args):
    """Objects, printed and drawn."""
    found = objects(session, prepared(picture, about), picture.size, about, args.score)
    if args.output:
        drawn(picture, found).save(args.output)
    for entry in found:
        shape = entry.pop("mask", None)
        entry["pixels"] = None if shape is None else int(shape.sum())
    if args.json:
        print(json.dumps({"task": about["task"], "objects": found}))
        return
    for entry in found:
        left, top, right, bottom = (round(v) for v in entry["box"])
        print(f"{entry['score']:.2f}  {entry['name']}  {left},{top} to {right},{bottom}")


def main():
    """Parse, predict, print."""
    parser = argparse.ArgumentParser(
        description="Predict a photo with an ONNX file of pale export."
    )
    parser.add_argument("model")
    parser.add_argument("photo")
    parser.add_argument(
        "-o", "--output", help="segmentation: the mask, class numbers as grey; detection: a picture"
    )
    parser.add_argument("--score", type=float, default=0.5, help="detection: least score")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    session = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["pale"])
    picture = read(args.photo)
    if about["task"] == "detection":
        detect(session, picture, about, args)
        return
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
