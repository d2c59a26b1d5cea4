"""The history of a run, its files put together. Layer 4, I/O through ``storage`` only.

Rank 0 has a `History`, all others a `NullHistory` of the same shape (`_null`).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dist_ckpt.history._array_file import read_or_none
from dist_ckpt.history._gap import LossGap, find_gap
from dist_ckpt.history._journal import Journal
from dist_ckpt.history._lines_file import end_of_step
from dist_ckpt.history._loss_file import LossFile
from dist_ckpt.history._loss_format import loss_kind
from dist_ckpt.history._marks import (
    HISTORY_CUT,
    LOSS_NOT_FINITE,
    LOSSES_MISSING,
    nonfinite_kinds,
    void_counts,
)
from dist_ckpt.history._metrics import Metrics
from dist_ckpt.history._paths import FILES, history_path
from dist_ckpt.history._replay import REPLAYED, ReplayResult, ReplayWindow, spell_loss
from dist_ckpt.history._salvage import Salvage
from dist_ckpt.history._samples import Samples
from dist_ckpt.storage import sync_dir

if TYPE_CHECKING:
    from typing import Self

__all__ = ["History"]

#: On a network file system the time of a file is a request to the server.
_TOUCH_SECS = 1.0


class History:
    """The losses, metrics, samples and events of a run under way. Rank 0 only.

    Everything but `sync`, and the journal, belongs to the main thread; both may be used on
    another meanwhile, and neither makes `record` wait for the disk (in a replay it asks the file
    system once a second to renew a time). Losses may come a boundary late, but in the order of
    steps.

    Args:
        run_dir: The run's directory; it exists.
        name: The run's name, with which its files begin.
        attempt: Number of this lifetime of the job.

    Raises:
        CorruptFileError: A file of the history is something else; it isn't touched.
        StorageError: The file system refused.

    Attributes:
        damage: What was damaged in the middle of a file and is cut out, a sentence each.
    """

    def __init__(self, run_dir: str | os.PathLike[str], name: str, attempt: int) -> None:
        self._run_dir = os.fspath(run_dir)
        self._name = name
        self._attempt = attempt
        self._window: ReplayWindow | None = None
        self._resumed_step = 0
        self._comparable = True
        self._explain: Callable[[], str | None] = lambda: None
        self._logged_metrics: set[int] = set()
        self._touched = -math.inf
        self._sync_lock = threading.Lock()
        self._closed = False
        self.replay: ReplayResult | None = None
        data = read_or_none(self._path("journal")) or b""
        self._journal_before = data  # let go of at `begin`
        void_losses, void_samples = void_counts(data)
        with contextlib.ExitStack() as stack:
            kept = {what: self._salvage(what) for what in FILES}
            self.journal = Journal.open(
                self._path("journal"), attempt, data=data, keep_cut=kept["journal"].keep
            )
            stack.callback(self.journal.close)
            self.loss = LossFile.open(
                self._path("loss"), void_entries=void_losses, keep_cut=kept["loss"].keep
            )
            stack.callback(self.loss.close)
            self.metrics = Metrics.open(self._path("metrics"), keep_cut=kept["metrics"].keep)
            stack.callback(self.metrics.close)
            self.samples = Samples.open(
                self._path("samples"), void_items=void_samples, keep_cut=kept["samples"].keep
            )
            stack.callback(self.samples.close)
            # An attempt that was killed may have left names and bytes that are there and not yet
            # durable; what comes now stands on them.
            sync_dir(self._run_dir)
            self.sync()
            arrays = {"loss": self.loss.file, "samples": self.samples.file}
            behind = {what: file.num_behind for what, file in arrays.items()}
            told = [kept[what].report(self.journal, behind.get(what, 0)) for what in FILES]
            self.damage = tuple(filter(None, told))
            self._mend_marks(void_losses, void_samples)
            self._closing = stack.pop_all()

    def begin(self, resumed_step: int | None, *, comparable: bool = True) -> None:
        """Make what was logged after the resume point the window that is replayed.

        Args:
            resumed_step: Step of the resume point; None where the run begins at step 0.
            comparable: Whether bit-equality can be asked for: same world size, devices, versions
                and configuration. Differences are journalled and written either way.
        """
        self._resumed_step = resumed_step or 0
        self._comparable = comparable
        self.replay = self._window = None
        if entries := self.loss.after(self._resumed_step):
            null = any(loss is None for _, loss in entries)
            kinds = nonfinite_kinds(self._journal_before) if null else {}
            self._window = ReplayWindow(entries, kinds)
        self._journal_before = b""
        self._logged_metrics = self.metrics.steps_after(self._resumed_step)
        self.samples.begin(self._resumed_step)
        # What comes out the same isn't written again, and the attempt that wrote it may have been
        # killed after a sync that failed: the next generation must not stand on it unsynced.
        # Not what a rewind has voided: it was durable, and `undelete` may bring it back.
        for file, at_most in (
            (self.loss.file, self.loss.num_after_void),
            (self.metrics.file, None),
            (self.samples.file, self.samples.num_after_void),
        ):
            data = read_or_none(file.path) or b""
            file.doubt(end_of_step(data, self._resumed_step, at_most=at_most))

    def replays_until(self, step: int) -> int | None:
        """Return the last step that is logged behind ``step`` and counts, None where none is."""
        last = self.loss.last_step
        return last if last is not None and last > step else None

    def mark(self, step: int) -> dict[str, Any] | None:
        """Return what a resume point of ``step`` notes of the losses up to it. Main thread."""
        return self.loss.mark(step)

    def gap(self, step: int, mark: Any) -> LossGap | None:
        """Return what is missing of the losses that a resume point noted; journalled if any."""
        gap = find_gap(step, mark, self.loss.mark(step))
        if gap is not None:
            self.journal.append(
                LOSSES_MISSING,
                step=step,
                logged=gap.num_logged,
                found=gap.num_found,
                last_found=gap.last_found,
            )
        return gap

    def explain_by(self, explain: Callable[[], str | None]) -> None:
        """Have ``explain`` asked for a likely cause where a replayed loss differs.

        Not where the first one does: that needs nothing but a forward pass of what was restored.
        """
        self._explain = explain

    def record(self, step: int, loss: float | None, metrics: Mapping[str, Any]) -> None:
        """Log one step: its loss in the loss file, the rest in the metrics. O(1), not durable.

        A replayed step whose loss is bit-equal to the logged one is counted, not written again;
        the loss file's time is renewed, by which others see that training goes on. The first that
        differs is journalled, and written, as all after it.

        Args:
            step: The finished update; rising from call to call.
            loss: None where the step has none: no entry is written then.
            metrics: Numbers by name.

        Raises:
            UsageError: A metric has a name that each line needs for itself.
            StorageError: The file system refused.
        """
        if loss is not None:
            if self._is_replayed(step, float(loss)):
                self._touch()
            else:
                self._log_loss(step, float(loss))
        if metrics and step not in self._logged_metrics:
            self.metrics.append(step, metrics)

    def sample(self, step: int, text: str, loss: float | None) -> None:
        """Log an audit sample of ``step``; a replayed one that comes out the same is there."""
        self.samples.append(step, text, loss)

    def cut(self, step: int) -> None:
        """Make the history end at ``step``: a rewind. Durable on return.

        The entry of ``step``, or the last canonical one before it, is appended again, which voids
        the tail. Where there is none, the journal says that what is there doesn't count.
        """
        self._finish_replay(complete=False)
        self._logged_metrics.clear()
        last = self.loss.last_step
        anchor = None
        marks: dict[str, Any] = {}
        if last is not None and last > step:
            anchor = self.loss.at_or_before(step)
            if anchor is None:
                marks["void_losses"] = self.loss.num_entries
                self.loss.void_all()
            else:
                self.loss.append(*anchor)
        self.metrics.cut(step)
        if void_samples := self.samples.cut(step):
            marks["void_samples"] = void_samples
        self.sync()  # before the journal: what it counts has to be there
        marks |= {"last_step": last, "anchor_step": anchor[0] if anchor else None}
        self.journal.append(HISTORY_CUT, step=step, **marks)

    def sync(self) -> None:
        """Make all that was recorded before this call durable. Any thread, also during `record`.

        Raises:
            StorageError: The file system refused; it isn't tried again.
        """
        with self._sync_lock:
            self.loss.sync()
            self.metrics.sync()
            self.samples.sync()
            self.journal.sync()

    def lost_names(self) -> list[str]:
        """Return which files can't be found by their names any more. Any thread, reads only.

        Raises:
            StorageError: The file system refused to tell.
        """
        files = (part.file for part in self._parts())
        return [os.path.basename(file.path) for file in files if not file.has_its_name()]

    def revive(self) -> None:
        """Have all that was logged under its names again, durable. Main thread.

        For a directory whose files were removed: whoever has them open still has their bytes.

        Raises:
            StorageError: The file system refused; may be called again.
        """
        with self._sync_lock:
            for part in self._parts():
                part.file.revive()

    def _parts(self) -> tuple[LossFile, Metrics, Samples, Journal]:
        return self.loss, self.metrics, self.samples, self.journal

    def close(self) -> None:
        """Journal the replay where it is still open, sync, give the descriptors back; once."""
        if self._closed:
            return
        self._closed = True
        with self._closing:
            self._finish_replay(complete=False)
            self.sync()

    def abandon(self) -> None:
        """Give the descriptors back and write nothing: the files are somebody else's now."""
        self._closed = True
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_loss(self, step: int, loss: float) -> None:
        self.loss.append(step, loss)
        self._tell_kind(step, loss)

    def _tell_kind(self, step: int, loss: float) -> None:
        kind = loss_kind(loss)
        if kind is not None:
            # Not synced on its own: training that has gone to NaN says so at every step.
            self.journal.append(LOSS_NOT_FINITE, step=step, sync=False, kind=kind)

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._touched >= _TOUCH_SECS:
            self._touched = now
            self.loss.file.touch()

    def _is_replayed(self, step: int, loss: float) -> bool:
        window = self._window
        if window is None:
            return False
        if step > window.last_step:
            self._finish_replay(complete=True)
            return False
        agreed = window.agrees(step, loss)
        if not agreed:
            self._logged_metrics.clear()  # what is written from here on voids the rest
            self.journal.append(
                "replay_differs",
                step=step,
                logged=window.spelled(step),
                replayed=spell_loss(loss),
                comparable=self._comparable,
                likely_cause=self._cause(window),
            )
        elif window.lacks_kind(step):
            self._tell_kind(step, loss)  # a crash took that line
        if not agreed or step == window.last_step:
            self._finish_replay(complete=True)
        return agreed

    def _finish_replay(self, *, complete: bool) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        self.replay = ReplayResult(
            attempt=self._attempt,
            resumed_step=self._resumed_step,
            agreed=window.agreed,
            num_logged=window.num_logged,
            first_difference=window.first_difference,
            first_step=window.first_step,
            complete=complete,
            comparable=self._comparable,
            likely_cause=self._cause(window),
        )
        self.journal.append(REPLAYED, step=window.last_step, **self.replay.to_event())

    def _cause(self, window: ReplayWindow) -> str | None:
        if window.is_hole:
            return f"the loss file has no loss of step {window.first_difference}"
        return self._explain() if window.differs_later else None

    def _mend_marks(self, void_losses: int, void_samples: int) -> None:
        # More void than there are: damage took synced entries. New ones must not count as void.
        losses = min(void_losses, self.loss.num_entries)
        samples = min(void_samples, self.samples.num_items)
        if (losses, samples) != (void_losses, void_samples):
            self.journal.append(HISTORY_CUT, void_losses=losses, void_samples=samples)

    def _salvage(self, what: str) -> Salvage:
        return Salvage(self._run_dir, self._path(what), self._attempt)

    def _path(self, what: str) -> str:
        return history_path(self._run_dir, self._name, what)
