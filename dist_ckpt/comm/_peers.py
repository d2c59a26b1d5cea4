"""Which process a rank is, and whether it still lives. Layer 2; reads /proc.

On one host a lost rank is noticed within a second this way. Ranks of other hosts, or of other
containers, are "unknown": for them the limits of the waits count.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Peer", "Place", "State", "gone_text", "this_process"]

State = Literal["alive", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class Peer:
    """One rank's process.

    Attributes:
        rank: Its number.
        host: What identifies kernel boot and pid namespace; "" where that can't be told.
        pid: Its process id, there.
        started: When it started, in the kernel's ticks; tells it from a later process with the same
            id.
    """

    rank: int
    host: str
    pid: int
    started: str

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self), allow_nan=False).encode()

    @classmethod
    def parse(cls, data: bytes) -> Peer:
        """Return the peer that `encode` wrote."""
        return cls(**json.loads(data))

    def state(self) -> State:
        """Say what is known of the process right now; "unknown" for one of another host."""
        if not self.host or self.host != _host():
            return "unknown"
        letter, started = _stat(self.pid)
        # A zombie has ended, though nobody has asked for its status yet.
        if letter in ("", "Z", "X") or started != self.started:
            return "gone"
        return "stopped" if letter in ("T", "t") else "alive"


@dataclass(frozen=True)
class Place:
    """Where one rank stands among all.

    Attributes:
        rank: This rank.
        peers: All ranks' processes, by rank.
        timeout_secs: The limit of every wait between ranks, in seconds.
    """

    rank: int
    peers: tuple[Peer, ...]
    timeout_secs: float

    @property
    def others(self) -> list[Peer]:
        """All processes but this rank's."""
        return [peer for peer in self.peers if peer.rank != self.rank]


def this_process(rank: int) -> Peer:
    """Return the peer that this process is."""
    pid = os.getpid()
    return Peer(rank, _host(), pid, _stat(pid)[1])


def gone_text(peer: Peer) -> str:
    """Say that the peer's process has ended."""
    return f"its process {peer.pid} has ended"


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """Return state letter and start time of a process; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold spaces and parentheses itself: count from its end.
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (OSError, IndexError):
        return "", ""
