"""Prediction with Ray Data (the extra `ray`): a class for `map_batches`, and a function from images to Parquet.

```python
import ray
from pale.predict.ray_data import BatchPredictor

images = ray.data.read_binary_files("photos/", include_paths=True)
found = images.map_batches(
    BatchPredictor, fn_constructor_args=("runs/mine",), concurrency=4, num_gpus=1, batch_size=64
)
found.write_parquet("out")
```

Ray creates the class once per worker, so the model is loaded once, and repeats the batches of a lost worker or machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SettingsError, UnavailableError
from ..tasks.prediction import Prediction
from .predictor import Failed, Predictor

Columns = dict[str, Any]


class BatchPredictor:
    """Predicts batches of a Ray dataset.

    A batch has the column `path`, and a column `bytes` with the content of the files unless workers can read
    the paths. The result has one row for each image, in the order of the batch:

    - `path`: the path of the input.
    - `result`: the prediction as JSON, as in predictions.jsonl; empty if the image failed.
    - `error`: the reason of a failure; empty if there was none.
    - `embedding`: with `embeddings`, the pooled features before the classifier, float32; zeros if the image failed.

    Args:
        source: as for `Predictor`; workers on other machines must be able to read it.
        embeddings: add the column of that name; for classifiers.
        options: options of `Predictor`.
    """

    def __init__(
        self, source: str | Path | None = None, *, embeddings: bool = False, **options: Any
    ) -> None:
        self.predictor = Predictor(source, **options)
        self.embeddings = embeddings
        if embeddings and not self.predictor.loaded.pipeline.has_embedding:
            raise SettingsError(
                f"embeddings need a classifier, {self.predictor.loaded.source} is for {self.predictor.task}; leave "
                "them out, or give other weights"
            )

    def __call__(self, batch: Mapping[str, Any]) -> Columns:
        """Return the columns of the results."""
        names = [str(name) for name in batch["path"]]
        given: Sequence[Any] = list(batch["bytes"]) if "bytes" in batch else names
        results = list(self.predictor.stream(given))
        rows: Columns = {
            "path": np.array(names, dtype=object),
            "result": np.array([_json(r, n) for r, n in zip(results, names, strict=True)], object),
            "error": np.array([r.reason if isinstance(r, Failed) else "" for r in results], object),
        }
        if self.embeddings:
            rows["embedding"] = self._embed(results)
        return rows

    @torch.no_grad()
    def _embed(self, results: Sequence[Prediction | Failed]) -> NDArray[np.float32]:
        model: Any = self.predictor.loaded.model
        pipeline, size = self.predictor.loaded.pipeline, self.predictor.batch_size
        good = [i for i, result in enumerate(results) if isinstance(result, Prediction)]
        found = np.zeros((len(results), int(model.num_features)), np.float32)
        for start in range(0, len(good), size):
            part = good[start : start + size]
            tensors = [pipeline.prepare(results[i].image) for i in part]  # type: ignore[union-attr]
            images = pipeline.normalise(torch.stack(tensors).to(self.predictor.device))
            vectors = model.forward_head(model.forward_features(images), pre_logits=True)
            found[part] = vectors.float().cpu().numpy()
        return found


def _json(result: Prediction | Failed, name: str) -> str:
    if isinstance(result, Failed):
        return ""
    return json.dumps(result.plain() | {"picture": name})  # kept name


def predict_to_parquet(
    paths: Sequence[str],
    source: str | Path | None,
    output: str | Path,
    *,
    workers: int = 1,
    batch_size: int = 64,
    gpus: float = 0,
    embeddings: bool = False,
    **options: object,
) -> None:
    """Predict images with Ray Data and write Parquet files with the columns of `BatchPredictor`.

    Args:
        paths: images; every machine must be able to read these paths.
        source: as for `Predictor`.
        output: folder that every machine can write to.
        workers: number of processes, each with a model.
        batch_size: images per call of a worker.
        gpus: number of GPUs of each worker; may be a fraction.
        embeddings: add the column of that name.
        options: options of `Predictor`.
    """
    try:
        import ray.data
    except ImportError:
        raise UnavailableError(
            "this needs the package ray, which is not installed; pip install 'pale-transformer[ray]'"
        ) from None
    images = ray.data.from_items(
        [{"path": path} for path in paths],
        override_num_blocks=max(1, min(len(paths) // batch_size, 100 * workers)),
    )
    found = images.map_batches(
        BatchPredictor,
        fn_constructor_args=(source,),
        fn_constructor_kwargs={"embeddings": embeddings, **options},
        concurrency=workers,
        num_gpus=gpus,
        batch_size=batch_size,
    )
    found.write_parquet(str(output))
