"""A TCP proxy that harms connections on request: dropped, stalled, cut short."""

import contextlib
import socket
import threading


class Proxy:
    """Forwards connections to a port of this machine.

    Attributes:
        port: to connect to.
        faults: consumed one per connection: "drop" closes it at once, "stall" never answers, an integer closes it after
            so many bytes of the answer, None forwards everything.
        always: fault of the connections after those.
        connections: number of connections so far.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.faults: list[str | int | None] = []
        self.always: str | int | None = None
        self.connections = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            fault = self.faults.pop(0) if self.faults else self.always
            self._open.append(client)
            threading.Thread(target=self._serve, args=(client, fault), daemon=True).start()

    def _serve(self, client: socket.socket, fault: str | int | None) -> None:
        if fault == "drop":
            client.close()
            return
        if fault == "stall":
            return
        server = socket.create_connection(("127.0.0.1", self.target))
        self._open.append(server)
        threading.Thread(target=self._copy, args=(client, server, None), daemon=True).start()
        self._copy(server, client, fault if isinstance(fault, int) else None)

    def _copy(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        left = limit
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if left is not None and len(data) >= left:
                    target.sendall(data[:left])
                    break
                target.sendall(data)
                left = None if left is None else left - len(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._server.close()
        for each in self._open:
            each.close()
