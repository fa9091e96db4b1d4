"""TCP ports: is this one free, and which one is."""

from __future__ import annotations

import errno
import socket

from services.supervisor.failures import UpFailed


def claim_port(host: str, port: int, *, flag: str = "--port") -> int:
    """Return a port on ``host`` that can be listened on now: ``port``, or a free one for 0; ``flag`` sets it.

    Raises:
        UpFailed: when it is taken, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections that linger after a restart do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise UpFailed(f"The address {host!r} is not known: {error.strerror}.") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UpFailed(
                f"Port {port} on {host} is taken by another process; stop it or choose another with {flag}."
            ) from error
        raise UpFailed(f"Port {port} on {host} cannot be listened on: {error.strerror}.") from error
