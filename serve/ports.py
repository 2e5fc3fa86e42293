"""TCP ports of this machine: is one free, and which."""

import socket

from recipes.errors import UserError


def require_free_port(host: str, port: int) -> None:
    """Raises UserError when a server could not listen there."""
    try:
        _listen_briefly(host, port)
    except OSError as refused:
        raise UserError(
            f"cannot listen on {host} port {port}: {refused.strerror or refused};"
            f" --port {find_free_port()} is free on 127.0.0.1"
        ) from refused


def find_free_port(host: str = "127.0.0.1") -> int:
    return _listen_briefly(host, 0)


def _listen_briefly(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # as the server itself does: a port whose last connections are still closing is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return probe.getsockname()[1]
