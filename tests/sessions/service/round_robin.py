"""A proxy that gives each connection to the next of several services in turn."""

from __future__ import annotations

import contextlib
import itertools
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence


class RoundRobin(socketserver.ThreadingTCPServer):
    """`upstreams` says at which ports services are now; one that does not answer is passed over, as proxies
    do. What breaks on one side is broken on the other. `given` counts the connections by port."""

    request_queue_size = 128

    def __init__(self, upstreams: Callable[[], Sequence[int]]) -> None:
        self._upstreams = upstreams
        self._turn = itertools.count()
        self.given: Counter[int] = Counter()
        super().__init__(("127.0.0.1", 0), _Connection)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next(self) -> socket.socket:
        """A connection to the next service. Raises ConnectionError where none answers."""
        ports = self._upstreams()
        first = next(self._turn)
        for at in range(len(ports)):
            port = ports[(first + at) % len(ports)]
            try:
                connected = socket.create_connection(("127.0.0.1", port))
            except OSError:
                continue
            self.given[port] += 1
            return connected
        raise ConnectionError("no service answers")


class _Connection(socketserver.BaseRequestHandler):
    server: RoundRobin

    def handle(self) -> None:
        client: socket.socket = self.request
        with contextlib.suppress(ConnectionError), self.server.next() as service:
            there = threading.Thread(target=_copy, args=(client, service))
            there.start()
            _copy(service, client)
            # The service said all it has to say, or died: its client is told so.
            _shut(client, socket.SHUT_RDWR)
            there.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    _shut(sink, socket.SHUT_WR)


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)


@contextlib.contextmanager
def round_robin(upstreams: Callable[[], Sequence[int]]) -> Iterator[RoundRobin]:
    """The proxy, in a thread of its own."""
    with RoundRobin(upstreams) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join(30)
