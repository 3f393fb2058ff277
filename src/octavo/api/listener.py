"""The listening socket, taken before the model is loaded: a port in use should cost nobody the wait."""

from __future__ import annotations

import errno
import os
import socket

BACKLOG = 512
"""Connections that may wait for `accept`; those made while the model loads are answered when it is ready."""


class CannotListen(Exception):
    """One sentence: the address and the fault."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. `port` 0 takes a free one. Raises CannotListen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CannotListen(f"'{host}' is not an address of this machine: {why}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # Otherwise the port stays refused for a minute after a server with open connections has ended.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(f"port {port} on {host} is in use; choose another with --port") from error
        raise CannotListen(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from error
    return listener


def base_url(listener: socket.socket) -> str:
    """Where a client on this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
