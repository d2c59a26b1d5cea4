"""What a supervisor is told, in systemd's words: one datagram a message. Layer 2, I/O; no torch.

``NOTIFY_SOCKET`` names the socket of whoever wants to know: systemd, or our launcher, which passes
messages on under its own pid. Without it everything here does nothing. Nothing here raises or waits
for long: a supervisor that doesn't listen costs no training. The protocol is that of
``sd_notify(3)``.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "NOTIFY_SOCKET_ENV",
    "NotifyReceiver",
    "encode_message",
    "is_heard",
    "parse_message",
    "send",
]

NOTIFY_SOCKET_ENV = "NOTIFY_SOCKET"

_MAX_BYTES = 8192
_MAX_NAME_BYTES = 107  # of a socket's path, in the kernel's structure
_MAX_MESSAGES = 64  # of one look: a flood must not keep the launcher from its signals


def encode_message(fields: Mapping[str, str | int]) -> bytes:
    """Return the datagram of these fields; a line break in a value becomes a blank. Pure."""
    lines = (f"{name}={' '.join(str(value).splitlines())}" for name, value in fields.items())
    return "\n".join(lines).encode("utf-8", "replace")[:_MAX_BYTES]


def parse_message(data: bytes) -> dict[str, str]:
    """Return the fields of a datagram; lines that assign nothing are left out. Pure."""
    pairs = (line.partition("=") for line in data.decode("utf-8", "replace").splitlines())
    return {name: value for name, equals, value in pairs if name and equals}


def is_heard() -> bool:
    """Return whether somebody wants to be told."""
    return bool(os.environ.get(NOTIFY_SOCKET_ENV))


def send(fields: Mapping[str, str | int], *, to: str | None = None, wait_secs: float = 0.0) -> bool:
    """The supervisor has the message in its queue, or False was returned. Any thread.

    Args:
        fields: ``READY``, ``STATUS``, ``WATCHDOG`` …
        to: The socket; None: the one that the environment names.
        wait_secs: How long to wait while its queue is full; 0 drops the message then.
    """
    name = os.environ.get(NOTIFY_SOCKET_ENV, "") if to is None else to
    if not name.startswith(("/", "@")):
        return False  # no socket, or of a kind that only virtual machines have
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(wait_secs)
        with _address(name) as address:
            sender.sendto(encode_message(fields), address)
        return True
    return False


class NotifyReceiver:
    """A socket that is told things; as a context manager it is there, and gone afterwards.

    Args:
        path: Where it lies; of any length, in a directory of its owner's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            with _address(str(path)) as address:
                self._socket.bind(address)
            path.chmod(0o600)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._socket.fileno()

    def take(self) -> list[dict[str, str]]:
        """Return the messages that have arrived, oldest first; some may be left for the next call.

        A descriptor that a sender attached is closed unseen.
        """
        found: list[dict[str, str]] = []
        with contextlib.suppress(OSError):
            while len(found) < _MAX_MESSAGES:
                found.append(parse_message(self._socket.recv(_MAX_BYTES)))
        return found

    def close(self) -> None:
        """Nobody can tell anything any more."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


@contextlib.contextmanager
def _address(name: str) -> Iterator[str]:
    """Give the address of a socket; a path that is too long is reached through its directory."""
    if name.startswith("@"):  # no file: a name in the network's name space
        yield "\0" + name[1:]
    elif len(os.fsencode(name)) <= _MAX_NAME_BYTES:
        yield name
    else:
        directory = os.open(os.path.dirname(name), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{directory}/{os.path.basename(name)}"
        finally:
            os.close(directory)
