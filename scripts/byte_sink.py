"""A server that reads a request and refuses it, whatever it is: what any server costs its neighbours on a machine.

Prints its port as JSON and serves one connection after the other until it is stopped.
"""

from __future__ import annotations

import json
import re
import socket

_RECEIVE_BYTES = 262_144
_MAX_HEAD_BYTES = 65_536
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def main() -> None:
    """Serve."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                if _read_request(connection):
                    connection.sendall(_REFUSAL)


def _read_request(connection: socket.socket) -> bool:
    """Read a request to the end of its body; False when it is broken off or has no length."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD_BYTES:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            return False
        head += data
    length = _LENGTH.search(head)
    if length is None:
        return False
    num_bytes_left = int(length[1]) - len(head.partition(b"\r\n\r\n")[2])
    while num_bytes_left > 0:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            return False
        num_bytes_left -= len(data)
    return True


if __name__ == "__main__":
    main()
