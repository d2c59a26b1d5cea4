"""What a step recorded, kept until writing it makes nobody wait. Layer 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dist_ckpt.comm import Comm
from dist_ckpt.errors import StorageError, UsageError
from dist_ckpt.history import History, NullHistory, check_metric_names
from dist_ckpt.wording import counted

__all__ = ["Losses"]


@dataclass
class _Entry:
    step: int
    loss: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    samples: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class _Line:
    """A finished entry: plain numbers."""

    step: int
    loss: float | None
    metrics: dict[str, Any]
    samples: list[tuple[str, float | None]]


class Losses:
    """Entries of at most two steps: the one being made and, on a device, the one before.

    Args:
        history: Where they go.
        comm: For the mean over ranks.
        warn: Told once when the disk refuses.
        mean: Log the mean of all ranks' losses instead of rank 0's.
    """

    def __init__(
        self,
        history: History | NullHistory,
        comm: Comm,
        warn: Callable[[str], None],
        *,
        mean: bool,
    ) -> None:
        self._history = history
        self._comm = comm
        self._warn = warn
        self._mean = mean
        self._pending: list[_Entry] = []
        # Agreed numbers that the disk didn't take yet; a full disk must not end training.
        self._unwritten: list[_Line] = []
        self._told_replay = False
        # Apart from the list, which holds a line for an instant at every step: another thread
        # looks.
        self._was_refused = False

    def record(self, step: int, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Keep detached copies; a later call in the same body adds to them.

        Raises:
            UsageError: Not one real number, or a metric has a name that each line needs for itself.
        """
        check_metric_names(metrics)
        kept = None if loss is None else _keep("loss", loss)
        others = {name: _keep(name, value) for name, value in metrics.items()}
        entry = self._entry(step)
        if kept is not None:
            entry.loss = kept
        entry.metrics.update(others)

    def sample(self, step: int, text: str, loss: Any) -> None:
        """Keep an audit sample of this step.

        Raises:
            UsageError: The text isn't text, or the loss no number.
        """
        if not isinstance(text, str):  # here, not where it is written: the caller's line is told
            raise UsageError(
                f"The text of a sample is {type(text).__name__}, not str.",
                next_step="Give text; decode bytes first.",
                expected="str",
                found=type(text).__name__,
            )
        self._entry(step).samples.append((text, None if loss is None else _keep("loss", loss)))

    def own(self, step: int) -> float | None:
        """Return what this rank recorded as the loss of ``step``; on a device it waits for it."""
        is_there = bool(self._pending) and self._pending[-1].step == step
        loss = self._pending[-1].loss if is_there else None
        return None if loss is None else float(loss)

    def agree(self, step: int) -> None:
        """Have the mean of this step's loss where the mean is logged; at its boundary. Collective.

        The same two sums on every rank whether it recorded or not: ranks that didn't don't count.
        """
        if not self._mean:
            return
        recorded = bool(self._pending) and self._pending[-1].step == step
        loss = self._pending[-1].loss if recorded else None
        total = self._comm.mean(0.0 if loss is None else float(loss))
        share = self._comm.mean(0.0 if loss is None else 1.0)
        if share:
            self._entry(step).loss = total / share

    def drop_after(self, step: int) -> None:
        """Forget entries of a body that was left: its update may not have been made."""
        self._pending = [entry for entry in self._pending if entry.step <= step]

    def flush(self, *, before: int | None = None) -> None:
        """Write what is there: all of it, or only what doesn't make the device wait.

        Args:
            before: Entries from this step on stay if they lie on a device; None writes everything.
        """
        while self._pending:
            entry = self._pending[0]
            if before is not None and entry.step >= before and _on_device(entry):
                break
            self._pending.pop(0)
            self._unwritten.append(self._line(entry))
        self._write()

    def sync(self) -> None:
        """Have all that was flushed on disk; on the background thread, before a commit.

        Raises:
            StorageError: The disk refused; a generation must not be newer than its history.
        """
        if self._was_refused:
            raise StorageError(
                f"{counted(len(self._unwritten), 'loss', 'losses')} could not be written to the "
                "history.",
                next_step="Make room on the disk.",
                operation="append",
            )
        self._history.sync()

    def _line(self, entry: _Entry) -> _Line:
        loss = None if entry.loss is None else float(entry.loss)
        samples = [(text, loss if own is None else float(own)) for text, own in entry.samples]
        metrics = {name: _plain(value) for name, value in entry.metrics.items()}
        return _Line(entry.step, loss, metrics, samples)

    def _write(self) -> None:
        while self._unwritten:
            line = self._unwritten[0]
            try:
                self._history.record(line.step, line.loss, line.metrics)
                for text, loss in line.samples:
                    self._history.sample(line.step, text, loss)
            except StorageError as error:
                if not self._was_refused:  # said once, not at every step
                    self._warn(f"the history could not be written, it is kept in memory: {error}")
                self._was_refused = True
                return
            self._unwritten.pop(0)
            self._tell_replay()
        self._was_refused = False

    def _tell_replay(self) -> None:
        """Say once why replayed losses differ, where that is no fault of the resume."""
        replay = self._history.replay
        if replay is None or self._told_replay:
            return
        self._told_replay = True
        if replay.likely_cause is not None:
            self._warn(
                f"replayed losses differ from those logged, from step {replay.first_difference} on "
                f"({replay.agreed} agreed). Likely cause: {replay.likely_cause}"
            )

    def _entry(self, step: int) -> _Entry:
        if not self._pending or self._pending[-1].step != step:
            self._pending.append(_Entry(step))
        return self._pending[-1]


def _on_device(entry: _Entry) -> bool:
    values = [entry.loss, *entry.metrics.values(), *(loss for _, loss in entry.samples)]
    return any(
        isinstance(value, _Coming) or (isinstance(value, torch.Tensor) and not value.is_cpu)
        for value in values
    )


class _Coming:
    """A number of a CUDA device, on its way to the host since it was recorded.

    Reading it waits for that copy alone. A tensor on the device would be copied when it is read,
    behind all that was queued meanwhile: the newest step.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._host, self._mark = _queue_copy(value.detach())

    def item(self) -> Any:
        self._mark.synchronize()
        return self._host.item()

    def __float__(self) -> float:
        return float(self.item())


def _queue_copy(value: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Queue a copy into pinned memory behind the work queued so far; return it and its end."""
    with torch.cuda.device(value.device):
        host = torch.empty_like(value, device="cpu", pin_memory=True)
        host.copy_(value, non_blocking=True)
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
    return host, mark


def _keep(name: str, value: Any) -> Any:
    """Return a copy that nothing changes: of a tensor a detached one, else Python's own number.

    Raises:
        UsageError: Not one real number; told where it was recorded, since at the boundary no line
            of the script could be named.
    """
    if isinstance(value, torch.Tensor):
        _check_tensor(name, value)
        # A DTensor's number takes its mesh to read.
        is_plain = value.device.type == "cuda" and not hasattr(value, "to_local")
        return _Coming(value) if is_plain else value.detach().clone()
    refused = f"{name} is a {type(value).__name__}, not a number."
    try:
        # NumPy's scalars and arrays of one element, which the body may go on changing.
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, str | bytes | bytearray):
            raise TypeError  # float() reads text, too
        number = float(plain)
    except OverflowError as error:
        raise _refusal(f"{name} is larger than any float.") from error
    except (TypeError, ValueError) as error:
        raise _refusal(refused) from error
    return plain if type(plain) in (int, bool) else number


def _check_tensor(name: str, value: torch.Tensor) -> None:
    if value.numel() != 1:
        raise UsageError(
            f"{name} is a tensor of shape {list(value.shape)}.",
            next_step="Record one number; take the mean first.",
        )
    if value.is_complex():
        raise _refusal(f"{name} is a tensor of {value.dtype}, not of a real number.")
    if value.is_meta:
        raise _refusal(f"{name} is a tensor on the meta device, which holds no number.")
    if value.layout is not torch.strided:
        raise _refusal(f"{name} is a tensor of layout {value.layout}, not a dense one.")


def _refusal(message: str) -> UsageError:
    return UsageError(message, next_step="Record numbers or tensors of one element.")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor | _Coming) else value
