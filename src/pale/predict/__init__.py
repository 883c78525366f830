"""Inference on images: one interface for all tasks.

```python
predictor = pale.Predictor("runs/mine")
print(predictor("photo.jpg").words())
predictor("photo.jpg").draw().save("drawn.jpg")
```
"""

from ..tasks.classification.inference import Classified
from ..tasks.detection.inference import Detected
from ..tasks.prediction import Prediction
from ..tasks.segmentation.inference import Segmented
from .images import ImageLike, as_image
from .predictor import Failed, Predictor

__all__ = [
    "Classified",
    "Detected",
    "Failed",
    "ImageLike",
    "Prediction",
    "Predictor",
    "Segmented",
    "as_image",
]
