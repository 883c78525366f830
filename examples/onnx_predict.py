"""Run inference on a photo with an ONNX file of `pale export`: numpy, Pillow and onnxruntime, no PyTorch.

    pale export runs/pets -o pets.onnx
    python onnx_predict.py pets.onnx photo.jpg              # the five best classes
    python onnx_predict.py pets.onnx photo.jpg --json
    python onnx_predict.py street.onnx photo.jpg -o mask.png  # segmentation: shares of classes, and the mask
    python onnx_predict.py objects.onnx photo.jpg -o drawn.jpg # detection: objects, and the photo with them

The metadata of the file holds the preprocessing and the class names.
"""

import argparse
import json
import math

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageOps


def read(path):
    """Return an image as RGB, with EXIF rotation applied and transparency blended with white."""
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            ground = Image.new("RGBA", image.size, "white")
            return Image.alpha_composite(ground, image).convert("RGB")
        return image.convert("RGB")


def resized_size(image, short, long=None):
    """Return the size (w, h) with the short side at `short`, or with the long side at `long` if it would exceed it."""
    w, h = image.size
    ratio = short / min(w, h) if short else 1
    if long and ratio * max(w, h) > long:
        ratio = long / max(w, h)
    return max(1, int(w * ratio + 0.5)), max(1, int(h * ratio + 0.5))


def prepared(image, about):
    """Return the input of the network, (1, 3, h, w), float32."""
    how = getattr(Image.Resampling, about["interpolation"].upper())
    if about["task"] == "classification":
        size = about["size"]
        short = math.floor(size / about["crop"])
        w, h = image.size
        # The long side is truncated to whole pixels, as in torchvision.
        box = (short, int(short * h / w)) if w <= h else (int(short * w / h), short)
        image = image.resize(box, how)
        left, top = round((box[0] - size) / 2), round((box[1] - size) / 2)
        image = image.crop((left, top, left + size, top + size))
    else:
        box = resized_size(image, about["short"], about["long"])
        image = image if box == image.size else image.resize(box, how)
    pixels = np.asarray(image, np.float32) / 255
    pixels = (pixels - np.array(about["mean"], np.float32)) / np.array(about["std"], np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)


def shares(logits, size):
    """Return the probability or share of pixels per class, and the mask of a segmenter at `size`, (w, h)."""
    if logits.ndim == 1:
        e = np.exp(logits - logits.max())
        return e / e.sum(), None
    if logits.shape[:0:-1] != size:
        maps = [Image.fromarray(m).resize(size, Image.Resampling.BILINEAR) for m in logits]
        logits = np.stack([np.asarray(m) for m in maps])
    mask = logits.argmax(0).astype(np.uint8)
    return np.bincount(mask.ravel(), minlength=len(logits)) / mask.size, mask


def objects(session, images, size, about, min_score):
    """Return name, score, box (left, top, right, bottom) and mask of each detected object, in pixels of the photo."""
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, {"images": images}), strict=True))
    scale = np.array([size[0] / images.shape[3], size[1] / images.shape[2]] * 2)
    out = []
    for i in np.flatnonzero(found["scores"] >= min_score):
        box = found["boxes"][i] * scale
        label = int(found["labels"][i])
        entry = {"name": about["classes"][label - 1] if about["classes"] else str(label)}
        entry |= {"score": float(found["scores"][i]), "box": box.tolist()}
        if "masks" in found:
            entry["mask"] = pasted(found["masks"][i], box, size)
        out.append(entry)
    return out


def pasted(mask, box, size):
    """Paste the mask of a box (28x28, 0 to 1) into the photo: boolean (h, w)."""
    left, top = (math.floor(v) for v in box[:2])
    right, bottom = (
        max(math.ceil(v), low + 1) for v, low in zip(box[2:], (left, top), strict=True)
    )
    small = Image.fromarray(mask).resize((right - left, bottom - top), Image.Resampling.BILINEAR)
    whole = Image.new("F", size)
    whole.paste(small, (left, top))
    return np.asarray(whole) > 0.5


def drawn(image, found):
    """Draw shapes, boxes and names on the photo."""
    pixels = np.array(image)
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


def detect(session, image, about, args):
    """Print and draw the objects."""
    found = objects(session, prepared(image, about), image.size, about, args.score)
    if args.output:
        drawn(image, found).save(args.output)
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
        description="Run inference on a photo with an ONNX file of pale export."
    )
    parser.add_argument("model")
    parser.add_argument("photo")
    parser.add_argument(
        "-o", "--output", help="segmentation: mask of class numbers; detection: drawn image"
    )
    parser.add_argument("--score", type=float, default=0.5, help="score threshold for detections")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    session = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["pale"])
    image = read(args.photo)
    if about["task"] == "detection":
        detect(session, image, about, args)
        return
    (logits,) = session.run(["logits"], {"images": prepared(image, about)})
    found, mask = shares(logits[0], image.size)
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
