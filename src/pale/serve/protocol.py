"""HTTP/1.1 connections with time limits: uvicorn's protocol, which closes slow senders, slow readers and idle clients.

uvicorn itself closes only connections that are idle after a response. The rate of a request's body is checked where it
is read (`request.ServedRequest.body`), so that the response can give the reason.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import HEADER_SECONDS, MAX_CONNECTIONS, WRITE_SECONDS

TOO_SLOW = b'{"error": "the headers of the request did not arrive in time"}'
RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(TOO_SLOW), TOO_SLOW)
)
CLOSE_SECONDS = 2.0  # for the last bytes of a closed connection


class Protocol(H11Protocol):
    """Closes a connection whose headers do not arrive, whose response is not read, or that exceeds the maximum."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._started = False  # whether bytes of the next request have arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for headers; with too many connections, close the one that has waited longest."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._headers_late)
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = [c for c in self.connections if isinstance(c, Protocol) and c._header_timer]
            min(waiting, key=lambda c: c._header_timer.when()).transport.abort()  # type: ignore[union-attr]

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        self._stop_header_timer()
        self._stop_write_timer()

    def data_received(self, data: bytes) -> None:
        """Handle the bytes, and start or stop the timer of the headers."""
        self._started = True
        super().data_received(data)
        state = self.conn.states
        # Headers are incomplete, or a body arrives that is not read because its response was sent.
        if state[h11.CLIENT] is h11.IDLE or state == {
            h11.CLIENT: h11.SEND_BODY,
            h11.SERVER: h11.DONE,
        }:
            if self._header_timer is None and not self.transport.is_closing():
                self._header_timer = self.loop.call_later(HEADER_SECONDS, self._headers_late)
        else:
            self._started = False
            self._stop_header_timer()

    def pause_writing(self) -> None:
        """Start the timer in which the client must read what was written."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer and continue to write."""
        super().resume_writing()
        self._stop_write_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if the client has not read the last bytes."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(CLOSE_SECONDS, self.transport.abort)

    def _headers_late(self) -> None:
        self._header_timer = None
        if self._started and self.conn.our_state is h11.IDLE:
            self.transport.write(RESPONSE)
        self.transport.close()
        self.loop.call_later(CLOSE_SECONDS, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
