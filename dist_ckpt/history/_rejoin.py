"""A history as it stood before a rewind has cut it: read, and brought back. Layer 4, I/O.

Nothing of a history is ever removed, so what counted at an earlier time can be read from the
beginning of each file up to where it ended then. To bring it back is to append it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from dist_ckpt.history._array_file import read_or_none
from dist_ckpt.history._journal import encode_event
from dist_ckpt.history._json_array import encode_array
from dist_ckpt.history._lines_file import encode_line
from dist_ckpt.history._loss_format import LossEntry, canonical, encode_entry, parse_loss
from dist_ckpt.history._marks import (
    HISTORY_CUT,
    LOSS_NOT_FINITE,
    nonfinite_kinds,
    void_counts,
)
from dist_ckpt.history._metrics import parse_metrics
from dist_ckpt.history._paths import FILES, history_path, run_name
from dist_ckpt.history._samples import canonical_samples, parse_samples
from dist_ckpt.storage import write_durable

if TYPE_CHECKING:
    from dist_ckpt.history._history import History
    from dist_ckpt.history._journal import Journal
    from dist_ckpt.history._loss_file import LossFile
    from dist_ckpt.history._metrics import Metrics
    from dist_ckpt.history._samples import Samples

__all__ = [
    "Past",
    "bookmark_history",
    "carry_kinds",
    "encode_kinds",
    "encode_past",
    "read_past",
    "rejoin_history",
    "write_past",
]


@dataclass(frozen=True, slots=True)
class Past:
    """What counted up to some step, rising in step.

    Attributes:
        loss: The entries of the loss file.
        metrics: Each step's.
        samples: The audit samples.
        kinds: Step → what the loss was that is null in ``loss``, as far as the journal knew.
    """

    loss: list[LossEntry]
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    kinds: Mapping[int, str] = field(default_factory=dict)


def read_past(
    run_dir: str | os.PathLike[str], step: int, mark: Mapping[str, Any] | None = None
) -> Past:
    """Return the history of a run up to ``step``, as it stood at ``mark``; None: as it is now.

    Args:
        run_dir: The run's directory.
        step: Nothing later is returned.
        mark: What `bookmark_history` returned once, or the event with it.

    Raises:
        CorruptFileError: A file is something else.
    """
    name = run_name(run_dir)
    paths = {what: history_path(run_dir, name, what) for what in ("loss", "metrics", "samples")}
    loss, metrics, samples = (read_or_none(path) for path in paths.values())
    event, journal = mark, read_or_none(history_path(run_dir, name, "journal")) or b""
    if mark is None:
        void_losses, void_samples = void_counts(journal)
        mark = {"void_losses": void_losses, "void_samples": void_samples}
    entries = parse_loss(loss or b"[]", path=paths["loss"], torn_ok=True)
    items = parse_samples(samples or b"[]", path=paths["samples"], torn_ok=True)
    lines = parse_metrics((metrics or b"")[: mark.get("metrics_bytes")])
    counted = canonical(islice(entries, mark["void_losses"], mark.get("num_losses")))
    shown = canonical_samples(islice(items, mark["void_samples"], mark.get("num_samples")))
    kept = [entry for entry in counted if entry[0] <= step]
    null = {at for at, loss in kept if loss is None}
    kinds = nonfinite_kinds(journal, event) if null else {}
    return Past(
        loss=kept,
        metrics=[line for line in lines if line["step"] <= step],
        samples=[sample for sample in shown if sample["step"] <= step],
        kinds={at: kind for at, kind in kinds.items() if at in null},
    )


def bookmark_history(history: History) -> dict[str, int]:
    """Return where a history stands, for `read_past` after a cut."""
    path = history.loss.path.removesuffix(FILES["loss"]) + FILES["journal"]
    void_losses, void_samples = void_counts(read_or_none(path) or b"")
    return {
        "num_losses": history.loss.num_entries,
        "void_losses": void_losses,
        "num_samples": history.samples.num_items,
        "void_samples": void_samples,
        "metrics_bytes": history.metrics.num_bytes,
    }


def rejoin_history(history: History, past: Past) -> None:
    """Make a history, up to where ``past`` ends, the one that ``past`` is. Durable on return.

    What differs is appended again; call it again where it was cut off. For a run that nobody
    trains: what an attempt knows of its replay isn't looked after.
    """
    added = _rejoin_loss(history.loss, past.loss)
    _rejoin_metrics(history.metrics, past.metrics)
    void_samples = _rejoin_samples(history.samples, past.samples)
    history.sync()  # before the journal: what it counts has to be there
    carry_kinds(history.journal, past)  # durable with the next event
    last = past.loss[-1][0] if past.loss else None
    history.journal.append("history_rejoined", step=last, added=added)
    if void_samples:
        history.journal.append(HISTORY_CUT, step=last, void_samples=void_samples)


def write_past(run_dir: str | os.PathLike[str], name: str, past: Past) -> None:
    """Have new files of a history that hold nothing but ``past``, each synced.

    Raises:
        StorageError: One of them exists, or the file system refused.
    """
    for what, data in encode_past(past).items():
        write_durable(history_path(run_dir, name, what), data, mode=0o600)


def encode_past(past: Past) -> dict[str, bytes]:
    """Return the bytes of the files that hold nothing but ``past``, by what they are of."""
    entries = [encode_entry(step, loss) for step, loss in past.loss]
    samples = [json.dumps(sample, allow_nan=False).encode() for sample in past.samples]
    return {
        "loss": encode_array(entries),
        "samples": encode_array(samples),
        "metrics": b"".join(encode_line(line) for line in past.metrics),
    }


def carry_kinds(journal: Journal, past: Past) -> None:
    """Have a journal say of what kind the null losses of ``past`` are; not durable yet.

    The loss file can't, so it belongs wherever these losses are brought. What the journal says of
    them already isn't said again; what it says of others of the same step, on another branch, was
    the last word until now.
    """
    if not past.kinds:
        return
    told = nonfinite_kinds(read_or_none(journal.file.path) or b"")
    for step, kind in past.kinds.items():
        if told.get(step) != kind:
            # Not synced on its own: training that has gone to NaN has one of every step.
            journal.append(LOSS_NOT_FINITE, step=step, sync=False, kind=kind)


def encode_kinds(past: Past, *, when: float) -> bytes:
    """Return the lines that `carry_kinds` adds to a new journal, of attempt 0 and ``when``."""
    lines = (
        encode_event(LOSS_NOT_FINITE, step, {"kind": kind}, when=when, attempt=0)
        for step, kind in past.kinds.items()
    )
    return b"".join(lines)


def _rejoin_loss(file: LossFile, old: Sequence[LossEntry]) -> int:
    """Have the ``old`` entries count again; return how many were added.

    Entries of later steps stay where all before them are the same: they are what training from
    there is compared with.
    """
    first = _first_difference(old, file.entries())
    for entry in old[first:]:
        file.append(*entry)
    return len(old) - first


def _rejoin_metrics(file: Metrics, old: Sequence[dict[str, Any]]) -> None:
    """Likewise, of the metrics."""
    now = parse_metrics(read_or_none(file.path) or b"")
    first = _first_difference(old, now)
    if first < min(len(old), len(now)):
        file.cut(old[first - 1]["step"] if first else -1)
    for line in old[first:]:
        file.repeat(line)


def _rejoin_samples(file: Samples, old: Sequence[dict[str, Any]]) -> int:
    """Likewise, of the samples; return how many the journal has to call void, 0 mostly."""
    now = file.items()
    first = _first_difference(old, now)
    void = 0
    if first < min(len(old), len(now)):
        void = file.cut(old[first - 1]["step"] if first else -1)
    for sample in old[first:]:
        file.repeat(sample)
    return void


def _first_difference(old: Sequence[Any], now: Sequence[Any]) -> int:
    """Return how many of the first items are the same."""
    same = 0
    for one, other in zip(old, now, strict=False):
        if one != other:
            break
        same += 1
    return same
