"""What is fuzzed: each kind of file that a run reads, as a function of its bytes.

A target ends by itself, or with a `DistCkptError`: anything else is a finding, and its bytes are
kept in ``tests/hostile/TARGET/``, which the default suite goes through. ``python fuzzing.py TARGET
SECONDS [SEED]`` looks for more, with atheris where it is installed, else by mutations of the same
beginnings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

if __name__ == "__main__":  # the paths that pytest sets for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1 + up]) for up in range(2)]
    with contextlib.suppress(ImportError):
        import atheris

        # What is imported from here on tells which of its lines were reached.
        atheris.instrument_imports(include=["dist_ckpt"]).__enter__()

from dist_ckpt.canonical import parse_state
from dist_ckpt.errors import DistCkptError
from dist_ckpt.generations._pins import parse_pins
from dist_ckpt.history import canonical, parse_loss, parse_settings, replay_summary
from dist_ckpt.history._gap import find_gap, mark_of_columns
from dist_ckpt.history._journal import parse_journal
from dist_ckpt.history._loss_format import parse_appended, scan_loss
from dist_ckpt.history._marks import nonfinite_kinds, void_counts
from dist_ckpt.history._metrics import parse_metrics
from dist_ckpt.history._samples import canonical_samples, parse_samples
from dist_ckpt.identity import check
from dist_ckpt.lifecycle._request import read_request
from dist_ckpt.resume_point import encode_resume_point, parse_resume_point
from dist_ckpt.snapshot_index import parse_index
from dist_ckpt.staging import parse_tail, tail_start
from dist_ckpt.storage import FileDigest
from dist_ckpt.tree import decode_tree

HOSTILE = Path(__file__).resolve().parents[1] / "hostile"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
_RUN = GOLDEN / "generation_v1" / "golden"
_HOME = _RUN / "checkpoints" / "step_000100"
_FOLDER = Path(tempfile.mkdtemp(prefix="dist_ckpt-fuzz-"))


def _bin(data: bytes) -> None:
    state = parse_state(data, path="x.bin")
    assert len(data) == 8 + 12 * state.num_params


def _resume_point(data: bytes) -> None:
    # The digest guards the rest, so that a forger's is made first.
    with contextlib.suppress(ValueError):
        from helpers.hostile import resealed

        data = resealed(data)
    point = parse_resume_point(data, path="x")
    for record in point.files.values():
        with contextlib.suppress(DistCkptError):
            FileDigest.from_json(record)
    assert parse_resume_point(encode_resume_point(point), path="x") == point
    with contextlib.suppress(DistCkptError):
        check(point.identity, {"structure": {}, "config": {"lr": 1}, "data": {"length": 3}})


def _index(data: bytes) -> None:
    sizes = {f"rank_{n:05d}.{kind}": 10_000 for n in range(2) for kind in ("shard", "state")}
    for tensor in parse_index(data, path="x", file_sizes=sizes).values():
        for place in tensor.placements:
            assert place.byte_range.stop <= sizes[place.location]


def _state(data: bytes) -> None:
    start = tail_start(data[-8:], file_size=len(data), path="x")
    tail = parse_tail(data[start:-8], limit=start, path="x")
    for own in (*tail.buffers.values(), *tail.tensors):
        assert own.byte_range.stop <= start
    for node in (tail.values, tail.shared):
        with contextlib.suppress(DistCkptError):
            decode_tree(node)


def _loss(data: bytes) -> None:
    entries = parse_loss(data, path="x", torn_ok=True)
    steps = [step for step, _ in canonical(entries)]
    assert steps == sorted(set(steps))
    columns, losses, scan = scan_loss(data, path="x")
    find_gap(1, {"losses": 3}, mark_of_columns(columns[:], losses[:]))
    if scan.whole:  # what a look behind any of its entries takes for appended is what was
        place = data.rfind(b",\n", 0, scan.end)
        appended = parse_appended(data[place:]) if place >= 0 else None
        assert appended is None or list(appended[0]) == list(columns[-len(appended[0]) :])


def _journal(data: bytes) -> None:
    events = parse_journal(data)
    assert all(isinstance(event["event"], str) for event in events)
    assert all(event["step"] is None or event["step"] >= 0 for event in events)
    void_counts(data)
    nonfinite_kinds(data)
    replay_summary(events)


def _metrics(data: bytes) -> None:
    parse_metrics(data)


def _samples(data: bytes) -> None:
    canonical_samples(parse_samples(data, path="x", torn_ok=True))


def _settings(data: bytes) -> None:
    assert isinstance(parse_settings(data, "x"), dict)


def _pins(data: bytes) -> None:
    parse_pins(data, path=Path("x"))


def _request(data: bytes) -> None:
    (_FOLDER / "request.json").write_bytes(data)
    request = read_request(_FOLDER)
    if request is not None and request.begun is not None:
        assert (_FOLDER / "archive" / request.begun.archive).resolve().parent.name == "archive"


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "bin": _bin,
    "resume_point": _resume_point,
    "index": _index,
    "state": _state,
    "loss": _loss,
    "journal": _journal,
    "metrics": _metrics,
    "samples": _samples,
    "settings": _settings,
    "pins": _pins,
    "request": _request,
}

_REQUEST = {
    "when": "boundary",
    "then": "pivot",
    "id": "ab" * 16,
    "time": 1.5,
    "policy": {"arms": [1, 2]},
    "begun": {"step": 100, "archive": "pivot_000100", "before": None},
}

_EVENTS = b"""\
{"event": "loss_not_finite", "step": 3, "kind": "nan", "attempt": 1, "time": 1.5}
{"event": "history_cut", "step": 0, "void_losses": 2, "void_samples": 1}
{"event": "replayed", "attempt": 2, "resumed_step": 3, "agreed": 1, "of": 2}
"""


def beginnings(target: str) -> list[bytes]:
    """Return good bytes of a target's kind, which mutations begin with."""
    journal = (_RUN / "golden.journal.jsonl").read_bytes()
    found: dict[str, list[bytes]] = {
        "bin": [(GOLDEN / "step_000007.bin").read_bytes(), b"\0" * 8],
        "resume_point": [(_HOME / "resume_point.json").read_bytes()],
        "index": [(_HOME / ".snapshot_metadata").read_bytes()],
        "state": [(_HOME / "rank_00000.state").read_bytes()],
        "loss": [(_RUN / "golden.loss.json").read_bytes(), b"[]", b"[\n[1, 0.5],\n[2, null]]"],
        "journal": [
            journal,
            _EVENTS,
        ],
        "metrics": [b'{"step": 1, "a": 0.5}\n{"step": 2, "a": null, "b": "nan"}\n'],
        "samples": [b'[\n{"step": 1, "loss": 0.5, "text": "a"},\n{"step": 2, "text": "b"}]'],
        "settings": [b'{"floor": 0.1, "arms": {"a": [1, 2]}}'],
        "pins": [b'{"100": "best", "' + b"ab" * 16 + b'": {"step": 7, "reason": "x"}}'],
        "request": [json.dumps(_REQUEST).encode()],
    }
    return found[target]


_PIECES = (
    b"", b"0", b"-1", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"1" + b"0" * 400,
    b"9" * 5000, b"9223372036854775808", b"[" * 2000, b'{"a":' * 2000, b"\0", b"\xff\xfe", b"\n",
    b'"\\ud800"', b'"../x"', b"]", b"}", b",", b":", b'"', b"\\",
)  # fmt: skip


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Return other bytes, not far from ``data``."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        start = dice.randrange(len(data) + 1)
        stop = min(len(data), start + dice.choice((0, 1, 1, 4, 40)))
        kind = dice.random()
        if kind < 0.4 and stop > start:
            bits = 1 << dice.randrange(8)
            data = data[:start] + bytes([data[start] ^ bits]) + data[start + 1 :]
        elif kind < 0.5:
            data = data[:start]
        elif kind < 0.7:
            other = dice.randrange(len(data) + 1)
            data = data[:start] + data[other : other + 60] + data[stop:]
        else:
            data = _value_or_bytes(data, start, stop, dice.choice(_PIECES), dice)
    return data


def _value_or_bytes(data: bytes, start: int, stop: int, piece: bytes, dice: random.Random) -> bytes:
    """Put a piece in the place of what lies between two marks of JSON, or anywhere."""
    if dice.random() < 0.7:
        begin = max(data.find(mark, start) for mark in (b": ", b", ", b"["))
        ends = [end for mark in b",]}\n" if (end := data.find(bytes([mark]), begin + 2)) > begin]
        if begin >= 0 and ends:
            start, stop = begin + 2, min(ends)
    return data[:start] + piece + data[stop:]


def attempt(target: str, data: bytes) -> None:
    """Give the bytes to the target.

    Raises:
        Exception: A finding: anything but a named error.
    """
    with contextlib.suppress(DistCkptError):
        TARGETS[target](data)


def found_earlier() -> Iterator[tuple[str, Path]]:
    """Yield what was found, by target."""
    for target in TARGETS:
        for path in sorted((HOSTILE / target).glob("*")):
            yield target, path


def keep(target: str, data: bytes) -> Path:
    """Have the bytes in ``tests/hostile/``; return where."""
    path = HOSTILE / target / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def look(target: str, *, secs: float, seed: int) -> int:
    """Try mutations for so long, return how many; a finding is kept and raised."""
    dice = random.Random(f"{seed}/{target}")
    seeds = [
        *beginnings(target),
        *(path.read_bytes() for t, path in found_earlier() if t == target),
    ]
    end = time.monotonic() + secs
    count = 0
    while time.monotonic() < end:
        data = mutate(dice.choice(seeds), dice)
        count += 1
        _try(target, data)
    return count


def look_often(target: str, *, count: int, seed: int) -> None:
    """Try so many mutations; a finding is kept and raised."""
    dice = random.Random(f"{seed}/{target}")
    for _ in range(count):
        _try(target, mutate(dice.choice(beginnings(target)), dice))


def _try(target: str, data: bytes) -> None:
    try:
        attempt(target, data)
    except Exception as error:
        error.add_note(f"{target}: kept as {keep(target, data)}")
        raise


def look_guided(target: str, *, secs: float, seed: int) -> None:
    """Have atheris look, guided by what of the code is reached; ends the process."""
    import atheris

    corpus = _FOLDER / "corpus"
    corpus.mkdir()
    for number, data in enumerate(beginnings(target)):
        (corpus / str(number)).write_bytes(data)

    def one(data: bytes) -> None:
        _try(target, data)

    options = [f"-max_total_time={int(secs)}", f"-seed={seed}", "-max_len=65536", "-timeout=30"]
    atheris.Setup([sys.argv[0], *options, "-rss_limit_mb=4096", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    name, limit, number = (*sys.argv[1:], str(os.getpid()))[:3]
    try:
        look_guided(name, secs=float(limit), seed=int(number))
    except ImportError:
        print(f"{name}: {look(name, secs=float(limit), seed=int(number))} mutations, no finding")
