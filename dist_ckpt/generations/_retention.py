"""Which generations stay, and why each does. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dist_ckpt.errors import SettingError

__all__ = ["Retention", "plan_bins", "plan_retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """What retention keeps.

    Attributes:
        keep_last: So many newest verified generations; None keeps all.
        keep_every: Also each whose step is a multiple of it; None for none.
        keep_bins: ``step_N.bin`` files of only so many newest generations; None keeps one with each
            generation.

    Raises:
        SettingError: A setting would keep nothing, or isn't a count.
    """

    keep_last: int | None = 3
    keep_every: int | None = None
    keep_bins: int | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be meant: a typo here would remove everything."""
        for name, least in (("keep_last", 1), ("keep_every", 1), ("keep_bins", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise SettingError(
                    f"{name}={value!r} isn't a whole number from {least} up.",
                    next_step=f"Give {name} a number from {least} up, or None.",
                    setting=name,
                    found=value,
                )

    def to_json(self) -> dict[str, int | None]:
        """Return the settings by name."""
        return {name: getattr(self, name) for name in ("keep_last", "keep_every", "keep_bins")}


def plan_retention(
    verified: Sequence[int], *, pinned: Collection[int], retention: Retention
) -> dict[int, str]:
    """Return step → why it is kept; a verified step that isn't there may go.

    Args:
        verified: Steps of the verified generations of the run's own line; others don't count and
            aren't touched.
        pinned: Steps that somebody pinned.
        retention: The settings.
    """
    steps = sorted(verified)
    kept: dict[int, str] = {}
    newest = steps if retention.keep_last is None else steps[-retention.keep_last :]
    for step in steps:
        if step in pinned:
            kept[step] = "pinned"
        elif step in newest:
            kept[step] = "keep_last"
        elif retention.keep_every is not None and step % retention.keep_every == 0:
            kept[step] = "keep_every"
    return kept


def plan_bins(kept: Collection[int], *, retention: Retention) -> list[int]:
    """Return the steps, of generations that stay, whose ``step_N.bin`` may go, ascending."""
    if retention.keep_bins is None:
        return []
    steps = sorted(kept)
    return steps[: max(0, len(steps) - retention.keep_bins)]
