"""Predict a folder of images on a Ray cluster and write Parquet files; needs the extra `ray`.

python examples/ray_predict.py photos/ --weights runs/mine -o out --workers 4 --gpus 1
"""

import argparse
from pathlib import Path

from pale.predict.inputs import find_items
from pale.predict.ray_data import predict_to_parquet


def main() -> None:
    """Predict; list images that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="that all machines can read under this name")
    parser.add_argument("--weights", help="run folder or .safetensors file")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="of each worker")
    parser.add_argument("--embeddings", action="store_true")
    args = parser.parse_args()
    paths = [str(item.load()) for item in find_items([args.folder])]
    predict_to_parquet(
        paths,
        args.weights,
        args.output,
        workers=args.workers,
        gpus=args.gpus,
        embeddings=args.embeddings,
    )

    import pyarrow.dataset

    rows = pyarrow.dataset.dataset(args.output).to_table(columns=["path", "error"]).to_pylist()
    failed = [row for row in rows if row["error"]]
    print(f"{args.output}: {len(rows)} images, {len(failed)} failed")
    for row in failed:
        print(row["error"])


if __name__ == "__main__":
    main()
