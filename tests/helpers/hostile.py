"""Bytes that nobody wrote: flipped, cut, and made by somebody who knows the format.

A run of two small generations; whatever is done to the newer one, the older has to be gone on from.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from dist_ckpt.capture import Captured
from dist_ckpt.comm import SoloComm
from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume import Resumed, restore_newest
from dist_ckpt.resume_point import INDEX_NAME, RESUME_POINT_NAME, encode_resume_point
from dist_ckpt.storage import FileDigest, digest_bytes
from helpers.generating import part_of, write_generation

OLDER, NEWER = 50, 100
SHARD, STATE = "rank_00000.shard", "rank_00000.state"
#: Every file of a generation but what only says that it was read back.
FILES = (RESUME_POINT_NAME, INDEX_NAME, SHARD, STATE)

#: Values in the place of others.
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**400,
    0.5,
    1e308,
    "",
    "../../etc/passwd",
    "\0",
    "rank_00001.shard",
    [],
    {},
    [[]],
    {"": None},
    {"at": 10**9},
    {"$tensor": {"at": 10**9}},
    {"$tensor": None},
    {"$ndarray": {"at": 0}},
    {"$unknown": 1},
    {"$range": [0, 10**18, 1]},
    {"$device": "meta"},
    {"$ndarray": {"dtype": "<U0", "shape": [10**12], "data": ""}},
)


class Anything:
    """Data that take whatever state they are given: what it means is the user's."""

    def __init__(self) -> None:
        self.state: Any = {"at": 0, "seen": torch.arange(3), "more": (1, {2: "two"})}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Small:
    """A model of few bytes with everything that has a place of its own in a generation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.data = Anything()
        self.captured = Captured(
            self.model, self.optimizer, scheduler=self.scheduler, data=self.data
        )

    def step(self) -> None:
        self.model(torch.randn(4, 2)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, Any]:
        return {item.spec.key: item.tensor.tolist() for item in self.captured.tensors()}


@dataclass
class Victim:
    """A run whose newer generation is to be harmed, and what is to come back."""

    run_dir: Path
    older: dict[str, Any]
    newer: dict[str, Any]

    @property
    def store(self) -> GenerationStore:
        return GenerationStore(self.run_dir)

    @property
    def home(self) -> Path:
        return self.store.path(NEWER)

    def resume(self, small: Small | None = None) -> tuple[Resumed, dict[str, Any]]:
        """Resume as a start does, random state included; return it with what is live then."""
        live = small or Small()
        resumed = restore_newest(self.store, SoloComm(), live.captured, admit=lambda _point: None)
        assert resumed is not None
        resumed.restore_rng()
        return resumed, live.values()


def victim(run_dir: Path) -> Victim:
    """Have the run, its files writable."""
    small, states = Small(), []
    for step in (OLDER, NEWER):
        small.step()
        write_generation(run_dir, [part_of(small.captured)], step=step, id_=f"{step:032x}")
        states.append(small.values())
        for path in GenerationStore(run_dir).path(step).iterdir():
            path.chmod(0o600)
    return Victim(run_dir, *states)


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of a file is the other one."""
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, bit // 8)
        os.pwrite(fd, bytes([byte[0] ^ 1 << bit % 8]), bit // 8)
        assert os.pread(fd, 1, bit // 8) != byte, "the bit wasn't flipped"
        yield
        os.pwrite(fd, byte, bit // 8)
    finally:
        os.close(fd)


@contextlib.contextmanager
def cut(path: Path, size: int) -> Iterator[None]:
    """A file ends early."""
    data = path.read_bytes()
    assert size < len(data)
    os.truncate(path, size)
    yield
    path.write_bytes(data)


@contextlib.contextmanager
def little_memory(more: int = 1 << 30) -> Iterator[None]:
    """This process can't take more than so many bytes beside what it has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Made by somebody who knows the format: every digest is right


def resealed(data: bytes) -> bytes:
    """Return the bytes of a resume point with the digest of what they are now."""
    head, tail = data[: data.rindex(b'"xxh3_128:') + 10], b'"\n}\n'
    return head + xxhash.xxh3_128_hexdigest(head + tail).encode() + tail


def reseal(home: Path, changed: dict[str, bytes]) -> None:
    """Have other bytes in files of a generation, and a resume point that vouches for them."""
    body = json.loads((home / RESUME_POINT_NAME).read_bytes())
    for name, data in changed.items():
        if name == RESUME_POINT_NAME:
            body = json.loads(data)
        (home / name).write_bytes(data)
    for name, data in changed.items():
        if name == INDEX_NAME:
            body["index"] = {"size_bytes": len(data), "digest": digest_bytes(data)}
        elif name != RESUME_POINT_NAME:
            body["files"][name] = FileDigest.of(data).to_json()
    (home / RESUME_POINT_NAME).write_bytes(sealed(body))


def sealed(body: dict[str, Any]) -> bytes:
    """Return the bytes of a resume point that says ``body``."""
    rest = {key: value for key, value in body.items() if key != "digest"}
    text = json.dumps(rest, indent=1)
    return resealed(f'{text[: text.rindex(chr(10))]},\n "digest": "xxh3_128:"\n}}\n'.encode())


def tail_of(data: bytes) -> tuple[bytes, Any]:
    """Return the tensors' bytes and the JSON of a ``.state`` file."""
    length = int.from_bytes(data[-8:], "little")
    return data[: -8 - length], json.loads(data[-8 - length : -8])


def with_tail(tensors: bytes, body: Any) -> bytes:
    """Return a ``.state`` file of these tensors with another JSON."""
    text = json.dumps(body).encode()
    return tensors + text + len(text).to_bytes(8, "little")


def mutated(body: Any, dice: random.Random) -> Any:
    """Return JSON with a strange value in some place, or without something, or with more."""
    changed = copy.deepcopy(body)
    places: list[tuple[Any, Any]] = []
    stack = [changed]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                stack.append(node[key])
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        node, key = dice.choice(places)
        with contextlib.suppress(LookupError):  # an earlier change took it away
            kind = dice.random()
            if kind < 0.15:
                del node[key]
            elif kind < 0.25:
                other, place = dice.choice(places)
                node[key] = copy.deepcopy(other[place])
            else:
                node[key] = copy.deepcopy(dice.choice(STRANGE))
    return changed


def forge(home: Path, dice: random.Random) -> str:
    """Have a generation that vouches for strange JSON in one of its files; return which."""
    name = dice.choice((RESUME_POINT_NAME, RESUME_POINT_NAME, INDEX_NAME, STATE, STATE))
    data = (home / name).read_bytes()
    if name == STATE:
        tensors, body = tail_of(data)
        reseal(home, {name: with_tail(tensors, mutated(body, dice))})
    elif name == INDEX_NAME:
        reseal(home, {name: json.dumps(mutated(json.loads(data), dice)).encode()})
    else:
        (home / name).write_bytes(sealed(mutated(json.loads(data), dice)))
    return name


def encode_other(point: Any, **changes: Any) -> bytes:
    """Return the bytes of a resume point with other fields."""
    return encode_resume_point(replace(point, **changes))
