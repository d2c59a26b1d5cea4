"""What ranks other than 0 have in place of a `History`. Layer 4, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dist_ckpt.history._gap import LossGap
from dist_ckpt.history._journal import NullJournal
from dist_ckpt.history._replay import ReplayResult

if TYPE_CHECKING:
    from typing import Self

__all__ = ["NullHistory"]


class NullHistory:
    """A history that keeps nothing: what ranks other than 0 have. Any thread."""

    def __init__(self) -> None:
        self.journal = NullJournal()
        self.replay: ReplayResult | None = None
        self.damage: tuple[str, ...] = ()

    def begin(self, resumed_step: int | None, *, comparable: bool = True) -> None:
        """Do nothing."""

    def replays_until(self, step: int) -> int | None:
        """Return nothing."""

    def mark(self, step: int) -> dict[str, Any] | None:
        """Return nothing."""

    def gap(self, step: int, mark: Any) -> LossGap | None:
        """Return nothing."""

    def explain_by(self, explain: Callable[[], str | None]) -> None:
        """Do nothing."""

    def record(self, step: int, loss: float | None, metrics: Mapping[str, Any]) -> None:
        """Do nothing."""

    def sample(self, step: int, text: str, loss: float | None) -> None:
        """Do nothing."""

    def cut(self, step: int) -> None:
        """Do nothing."""

    def lost_names(self) -> list[str]:
        """Return nothing."""
        return []

    def revive(self) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
