"""What every answer carries, and who may ask: around the whole app, without touching bodies."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Adds headers; refuses other sites' pages, and names that this server is not asked by.

    Args:
        app: what is guarded.
        hosts: names that a request may ask for; empty: any. With a server on loopback a page from elsewhere could
            otherwise reach it by pointing its own name there.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = ()) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def adorned(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        app = self._app
        if (refusal := self._refusal(Headers(scope=scope))) is not None:
            app = refusal
        await app(scope, receive, adorned)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        host = host_name(headers.get("host", ""))
        if self._hosts and host not in self._hosts:
            words = f"this server is not called {host!r}; start it with --allow-host for that name"
            return JSONResponse({"error": words}, 403)
        if headers.get("sec-fetch-site") == "cross-site" and "origin" in headers:
            return JSONResponse({"error": "pages of other sites may not ask this server"}, 403)
        return None


def host_name(value: str) -> str:
    """A Host header without its port, in lower case."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.partition(":")[0].lower()
