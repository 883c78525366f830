"""Access control and security headers: ASGI middleware around the whole app, before a body is read."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import SettingsError

# Paths without a token: the page and its parts, which ask the user for it, the API documentation, and health checks.
# `/health` without a token reports only that the server is ready.
PAGES = {"/", "/serve.js", "/serve.css", "/attention.js", "/example", "/docs", "/openapi.json"}
OPEN = PAGES | {"/v2/health/live", "/v2/health/ready"}
HEALTH = "/health"
MIN_TOKEN = 16  # characters
LINGER_BYTES, LINGER_SECONDS = 160_000_000, 5.0  # of a refused body that are still received
HEADERS = {
    # The policy of the pages themselves, and the directives that only a header can set.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'; frame-ancestors 'none'",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Adds security headers; refuses requests from other sites, for other host names, or without the token.

    Args:
        app: the app behind it.
        hosts: host names that a request may use; empty: any. A page of another site could otherwise reach a server
            on loopback by pointing its own name there (DNS rebinding).
        token: bearer token of all requests except for the paths in `OPEN`; None: no token.
        status: returns the status of the server, for `/health` without a token.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Sequence[str] = (),
        token: str | None = None,
        status: Callable[[], str] = lambda: "ready",
    ) -> None:
        self._status = status
        self._app, self._hosts = app, {host.lower() for host in hosts}
        self._token = None if token is None else check_token(token).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers, path = Headers(scope=scope), scope["path"]
        refusal = self._wrong_origin(headers)
        if refusal is None and self._token is not None and path not in OPEN:
            if path == HEALTH and "authorization" not in headers:
                refusal = JSONResponse({"status": self._status(), "token": "required"})
            else:
                refusal = self._wrong_token(headers, self._token)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
            return
        await _drain(receive, headers)
        await refusal(scope, receive, send_with_headers)

    def _wrong_token(self, headers: Headers, token: bytes) -> JSONResponse | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compare in constant time, so that the time does not depend on how many characters are right.
        if scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("latin-1", "replace"), token
        ):
            return None
        message = "this server needs a token; send it as the header Authorization: Bearer TOKEN"
        return JSONResponse({"error": message}, 401, {"www-authenticate": "Bearer"})

    def _wrong_origin(self, headers: Headers) -> JSONResponse | None:
        host = host_name(headers.get("host", ""))
        if self._hosts and host not in self._hosts:
            message = (
                f"this server does not answer requests for the host {host!r}; start it with "
                f"--allow-host and that name to allow it"
            )
            return JSONResponse({"error": message}, 403)
        if headers.get("sec-fetch-site") == "cross-site" and "origin" in headers:
            message = "requests from pages of other sites are not allowed"
            return JSONResponse({"error": message}, 403)
        return None


async def _drain(receive: Receive, headers: Headers) -> None:
    """Receive and drop the body of a refused request: a client that is still sending may miss the response."""
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    if empty or headers.get("expect"):
        return
    left, more = LINGER_BYTES, True
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)


def check_token(token: str) -> str:
    """Return the token if it can be sent in a header and cannot be guessed; raise SettingsError otherwise."""
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise SettingsError("the token must be printable ASCII without spaces")
    if len(token) < MIN_TOKEN:
        raise SettingsError(
            f"the token must have at least {MIN_TOKEN} characters, got {len(token)}; make one: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


def host_name(value: str) -> str:
    """Return a Host header without its port, in lower case."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.partition(":")[0].lower()
