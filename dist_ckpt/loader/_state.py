"""The loader's state: a place in the stream, as plain JSON, and its checks. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_ckpt.errors import MismatchError
from dist_ckpt.loader._order import ORDER_RULE, Stream

__all__ = ["make_state", "read_position"]

_KEYS = ("seed", "epoch", "cursor", "num_samples", "batch_size", "shuffle", "order_rule")


def make_state(stream: Stream, position: int) -> dict[str, Any]:
    """Return the state at ``position``; a finished epoch is the start of the next one."""
    epoch, cursor = divmod(position, stream.num_samples)
    return {
        "seed": stream.seed,
        "epoch": epoch,
        "cursor": cursor,
        "num_samples": stream.num_samples,
        "batch_size": stream.batch_size,
        "shuffle": stream.shuffle,
        "order_rule": ORDER_RULE,
    }


def read_position(stream: Stream, state: Mapping[str, Any]) -> int:
    """Return the position that ``state`` names.

    Another ``batch_size`` is fine. ``cursor == num_samples`` is read as the start of the next
    epoch.

    Raises:
        MismatchError: Keys are missing or unknown (``missing``, ``unexpected``), a value isn't what
            it must be, or the number of samples, seed, shuffling or the order's rule differ
            (``different``: key → (saved, now)).
    """
    if not isinstance(state, Mapping):
        raise MismatchError(
            f"A loader's state is a dictionary, not {type(state).__name__}.",
            next_step="Give what ResumableLoader.state_dict() returned.",
        )
    missing = [key for key in _KEYS if key not in state]
    unexpected = [str(key) for key in state if key not in _KEYS]
    if missing or unexpected:
        raise MismatchError(
            "This isn't the state of a ResumableLoader: "
            f"missing {', '.join(missing) or 'nothing'}; "
            f"unknown {', '.join(unexpected) or 'nothing'}.",
            next_step="Load it into the loader that saved it, or start this one afresh.",
            missing=missing,
            unexpected=unexpected,
        )
    _check_numbers(state)
    current = make_state(stream, 0)
    different = {
        key: (state[key], current[key])
        for key in ("num_samples", "seed", "shuffle", "order_rule")
        if state[key] != current[key]
    }
    if different:
        told = "; ".join(
            f"{key} {was!r} saved, {now!r} now" for key, (was, now) in different.items()
        )
        raise MismatchError(
            f"The saved place in the data means another sample here: {told}.",
            next_step="Build the loader with the saved values; only batch_size, the number of "
            "workers and the world size may change.",
            different=different,
        )
    return int(state["epoch"]) * stream.num_samples + int(state["cursor"])


def _check_numbers(state: Mapping[str, Any]) -> None:
    least = {"seed": 0, "epoch": 0, "cursor": 0, "num_samples": 1, "batch_size": 1, "order_rule": 1}
    for key, smallest in least.items():
        value = state[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise MismatchError(
                f"{key} is {value!r} in the loader's state; it must be an integer >= {smallest}.",
                next_step="Take the state of another generation.",
                different={key: (value, smallest)},
            )
    if not isinstance(state["shuffle"], bool):
        raise MismatchError(
            f"shuffle is {state['shuffle']!r} in the loader's state; it must be true or false.",
            next_step="Take the state of another generation.",
            different={"shuffle": (state["shuffle"], True)},
        )
    if state["cursor"] > state["num_samples"]:
        raise MismatchError(
            f"cursor is {state['cursor']} in the loader's state, beyond its "
            f"{state['num_samples']} samples.",
            next_step="Take the state of another generation.",
            different={"cursor": (state["cursor"], state["num_samples"])},
        )
