"""Errors that a user can cause and fix.

Their messages state the rule, the value and the way out, so the command line prints them without a traceback; any other
exception is a bug and is printed with one. Each is a `ValueError` or a `RuntimeError` too, for callers who catch those.
"""

from __future__ import annotations

import traceback
from pathlib import Path


class PaleError(Exception):
    """Base of all errors that a user can cause."""


class SettingsError(PaleError, ValueError):
    """A setting, option or argument is unknown or out of range, or settings contradict each other."""


class DataError(PaleError, ValueError):
    """A dataset, image, mask or annotation file is missing, damaged or inconsistent."""


class WeightsError(PaleError, ValueError):
    """A weights file or checkpoint is missing, damaged, or does not fit the model."""


class RunError(PaleError, ValueError):
    """A run folder is in use, incomplete, or belongs to other data or settings."""


class UnavailableError(PaleError, RuntimeError):
    """An optional dependency, a device or a feature of one is not available."""


class MemoryShortageError(PaleError, RuntimeError):
    """Memory ran out on the device or the host; the message names what to change."""


class NonFiniteError(PaleError, RuntimeError):
    """A loss, gradient or weight is NaN or Inf."""


def is_user_error(error: Exception) -> bool:
    """Return whether the message alone is enough, because the user can fix the cause."""
    if isinstance(error, PaleError) or (isinstance(error, OSError) and error.filename is not None):
        return True
    # Errors of this package that are not PaleErrors yet.
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = Path(frames[-1][0].f_code.co_filename).is_relative_to(Path(__file__).parent)
    return isinstance(error, ValueError | TypeError | OSError) or (
        isinstance(error, RuntimeError) and ours
    )
