"""Where to listen, and who could reach it there. Imports nothing heavy: it is looked at first."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from engine.errors import UsageError


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0: any that is free."""

    host: str
    port: int

    def reaches_elsewhere(self) -> bool:
        """Whether another machine could reach it. Raises UsageError for a host that there is not."""
        return not all(is_loopback(address) for _, address in self._found())

    def open(self) -> socket.socket:
        """A listening socket. Raises UsageError where there can be none."""
        family, address = self._found()[0]
        try:
            return socket.create_server((address, self.port), family=family, backlog=1024)
        except OSError as error:
            raise UsageError(f"cannot listen on {self.host}:{self.port}: {error.strerror}") from error

    def _found(self) -> list[tuple[socket.AddressFamily, str]]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(f"{self.host!r} is no address: {error.strerror}") from error
        return [(family, str(address[0])) for family, _, _, _, address in found]


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is this machine's own, which nobody else can reach."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
