"""Predictions for pictures: one interface for classes, pixels and objects.

```python
predictor = pale.Predictor("runs/mine")
print(predictor("photo.jpg").words())
predictor("photo.jpg").draw().save("seen.jpg")
```
"""

from .picture import Picture, as_picture
from .predictor import Failed, Predictor
from .results import Classified, Detected, Prediction, Segmented

__all__ = [
    "Classified",
    "Detected",
    "Failed",
    "Picture",
    "Prediction",
    "Predictor",
    "Segmented",
    "as_picture",
]
