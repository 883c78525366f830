"""Models behind HTTP: a page, a JSON API, batches made of what arrives together. The extra `serve`.

A request goes through `app` (what is asked), `reading` (the body and its picture, bounded), `batching` (a queue and a
thread for each model) and back. Nothing is written, and no path of a request is opened.
"""

from .app import create_app
from .limits import Limits
from .models import Models, default_weights

__all__ = ["Limits", "Models", "create_app", "default_weights"]
