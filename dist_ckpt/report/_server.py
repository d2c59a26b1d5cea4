"""The live page over HTTP: read only, on loopback by default. Layer 7.

One request a connection, each on a thread of its own, no more than `_MAX_CONNECTIONS` at a time and
none for longer than `_LIMIT_SECS`: a slow or silent client costs one place for that long.
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dist_ckpt.errors import UsageError
from dist_ckpt.report._catalog import Catalog
from dist_ckpt.report._routes import Reply, answer

__all__ = ["DEFAULT_PORT", "Server"]

DEFAULT_PORT = 8088
_MAX_CONNECTIONS = 64
_READ_SECS = 10.0
_LIMIT_SECS = 60.0
_POLL_SECS = 0.2
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class Server(ThreadingHTTPServer):
    """A bound server; `serve` answers until it is told to stop.

    Args:
        places: Run directories, or directories that hold some.
        host: Where to listen.
        port: 0 takes a free one.
        allow_hosts: Names by which browsers may call it, beside ``localhost`` and addresses in
            numbers. A page of somebody else's can make its own name lead here, and read what it
            was then given: so other names are refused.
        allow_origins: Pages that may read the answers (``https://dashboard.example``).

    Raises:
        UsageError: It can't listen there.
        NotFoundError, ForeignFileError: No such run.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        places: Sequence[Path],
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        allow_hosts: Collection[str] = (),
        allow_origins: Collection[str] = (),
    ) -> None:
        self.catalog = Catalog(places)
        self.allow_hosts = {"localhost", *(name.lower() for name in allow_hosts)}
        self.allow_origins = set(allow_origins)
        self._open: dict[socket.socket, float] = {}
        self._open_lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"It can't listen on {host}:{port}: {getattr(error, 'strerror', None) or error}.",
                next_step="Give another --port (0 takes a free one) or --host.",
            ) from error

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self.server_address[:2]
        text = host.decode() if isinstance(host, bytes | bytearray) else host
        return f"http://[{text}]:{port}/" if ":" in text else f"http://{text}:{port}/"

    def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer until SIGTERM; then, or on an error, nothing listens any more. Main thread.

        Args:
            ready: Called once SIGTERM is waited for: whoever hears of the server may end it.
        """
        with _ending_on_sigterm(self):
            try:
                ready()
                self.serve_forever(poll_interval=_POLL_SECS)
            finally:
                self.server_close()

    def server_bind(self) -> None:
        """Bind; unlike the base class, ask no name server who we are."""
        super(ThreadingHTTPServer, self).server_bind()  # socketserver's
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)

    def is_own_name(self, host: str) -> bool:
        """Return whether a request's ``Host`` is a name that this server goes by."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self.allow_hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    # Connections

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or drop it where there are too many."""
        with self._open_lock:
            is_full = len(self._open) >= _MAX_CONNECTIONS
            if not is_full:
                self._open[request] = time.monotonic()
        if is_full:
            with contextlib.suppress(OSError):
                request.settimeout(1.0)
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 5\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are open for too long; called between requests."""
        now = time.monotonic()
        with self._open_lock:
            late = [sock for sock, since in self._open.items() if now - since > _LIMIT_SECS]
        for sock in late:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _READ_SECS
    server_version = "dist_ckpt"
    sys_version = ""

    def refuse(self) -> None:
        """Answer to a method that would change something."""
        self.close_connection = True
        self._send(_error(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD: nothing can be done."))

    def answer(self) -> None:
        """Answer to GET and HEAD."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.is_own_name(hosts[0]):
            text = "This server doesn't go by that name; see `dist-ckpt serve --allow-host`."
            self._send(_error(HTTPStatus.FORBIDDEN, text))
            return
        try:
            reply = answer(self.server.catalog, self.path)
        except Exception:  # noqa: BLE001 - the client is told, the server goes on
            reply = _error(HTTPStatus.INTERNAL_SERVER_ERROR, "This should not happen.")
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(reply.body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if reply.policy is not None:
            self.send_header("Content-Security-Policy", reply.policy)
        if reply.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        origin = self.headers.get("Origin")
        if origin in self.server.allow_origins:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Say nothing: the terminal is the user's."""


for _method in ("GET", "HEAD"):
    setattr(_Handler, f"do_{_method}", _Handler.answer)
for _method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
    setattr(_Handler, f"do_{_method}", _Handler.refuse)


def _error(status: HTTPStatus, message: str) -> Reply:
    return Reply(status, "text/plain; charset=utf-8", f"{message}\n".encode())


@contextlib.contextmanager
def _ending_on_sigterm(server: Server) -> Iterator[None]:
    def end(_number: int, _frame: Any) -> None:
        # `shutdown` waits for the loop that this thread is in.
        threading.Thread(target=server.shutdown, daemon=True).start()

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
