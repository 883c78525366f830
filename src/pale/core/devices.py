"""Choice of the device."""

from __future__ import annotations

import torch

from ..errors import SettingsError, UnavailableError


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """Return the named device, by default CUDA if available; raise `UnavailableError` if there is no CUDA device."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise SettingsError(f"device must be 'cpu' or 'cuda', got {str(name)[:40]!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            f"no CUDA device is available, got device {str(name)!r}; leave it out, or use 'cpu' (`pale doctor` "
            "lists the devices)"
        )
    return device
