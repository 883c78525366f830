"""Host names that requests may use, and the warning about an address that other machines reach."""

from __future__ import annotations

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN = "PALE_SERVE_TOKEN"  # environment variable of the token


def allowed_hosts(host: str, allowed: list[str]) -> list[str]:
    """Return the host names that requests may use, empty for any.

    Args:
        host: address that the server listens on.
        allowed: further names, of a proxy in front of it.
    """
    if host in LOOPBACK:
        return [*LOOPBACK, *allowed]
    return [host, *LOOPBACK, *allowed] if allowed else []


def exposure_warning(host: str, token: bool) -> str | None:
    """Return the warning about an address that other machines can reach; None for a local address."""
    if host in LOOPBACK:
        return None
    if token:
        return (
            f"warning: {host} can be reached by others, and the token is sent without encryption; put a reverse "
            "proxy with TLS in front, or serve on 127.0.0.1"
        )
    return (
        f"warning: {host} can be reached by others, and no token is set: anyone who reaches it may use it; "
        f"set {TOKEN} and put a reverse proxy with TLS in front, or serve on 127.0.0.1"
    )
