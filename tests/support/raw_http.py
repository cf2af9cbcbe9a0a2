"""HTTP for tests that answer on a bare socket."""

from __future__ import annotations

import socket


def read_request(connection: socket.socket) -> bytes:
    """A request with its body, or what came before the other side hung up.

    A server that closes a connection with bytes unread resets it, and may so lose its own answer.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while len(body) < length and (piece := connection.recv(65536)):
        body += piece
    return head + b"\r\n\r\n" + body
