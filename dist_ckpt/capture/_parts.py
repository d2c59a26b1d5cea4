"""The parts of a training besides its tensors; schedulers, scalers, user state. Layer 3."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import nn

from dist_ckpt.capture._optim import label_of
from dist_ckpt.capture._values import Mismatches, Stateful, is_accepted
from dist_ckpt.errors import UnsupportedValueError, UsageError
from dist_ckpt.tree import JSON, encode_tree

__all__ = [
    "ExtraState",
    "check_parts",
    "check_stateful",
    "encode_stateful",
    "load_stateful",
    "named",
    "state_of",
    "stateful_kind",
    "words_of",
]


def named(kind: str, value: Any) -> dict[str, Any]:
    """Return ``value`` as a dict by name: ``{}`` for None, ``{"": value}`` for a single object."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {"": value}
    for key in value:
        if not isinstance(key, str) or not key:
            raise UsageError(
                f"{kind} has the key {key!r}, which is no name.",
                next_step="Use non-empty text as keys.",
            )
    return dict(value)


def check_stateful(label: str, value: object) -> None:
    """Return if ``value`` has ``state_dict()`` and ``load_state_dict()``.

    Raises:
        UnsupportedValueError: It hasn't; ``path`` is ``label``.
    """
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(value, method, None)):
            step = "Give an object with state_dict() and load_state_dict()"
            if label == "data":
                step += "; over a map-style dataset dist_ckpt.ResumableLoader is one"
            _refuse(label, f"is a {type(value).__name__} without {method}()", f"{step}.")


def _refuse(path: str, what: str, next_step: str) -> NoReturn:
    raise UnsupportedValueError(f"{path} {what}.", next_step=next_step, path=path)


def stateful_kind(value: object) -> str:
    """Return the type's name and those inside it: ``SequentialLR[LinearLR, StepLR]``."""
    inner = getattr(value, "_schedulers", None)
    name = type(value).__name__
    if not isinstance(inner, list | tuple):
        return name
    return f"{name}[{', '.join(stateful_kind(item) for item in inner)}]"


class ExtraState:
    """A module's extra state, told and taken like any other state."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> Any:
        """Return what the module keeps besides tensors."""
        return self.module.get_extra_state()

    def load_state_dict(self, state: Any, /) -> None:
        """Give it back to the module."""
        self.module.set_extra_state(state)


def encode_stateful(label: str, value: Stateful) -> JSON:
    """Return ``{"kind", "state"}`` of a scheduler or scaler, its small tensors inline."""
    return {
        "kind": stateful_kind(value),
        "state": encode_tree(state_of(label, value), path=label),
    }


def state_of(label: str, value: Stateful) -> Any:
    """Return the state of ``value``; an error of its own says which part it was."""
    try:
        return value.state_dict()
    except Exception as error:
        error.add_note(f"while asking {label} for its state")
        raise


def load_stateful(label: str, value: Stateful, state: Any) -> None:
    """``value`` has taken over ``state``, by its own ``load_state_dict``."""
    if isinstance(value, nn.Module) and isinstance(state, dict):
        # Versions of modules' formats travel beside the dict's items, and JSON keeps items only.
        metadata = getattr(value.state_dict(), "_metadata", None)
        if metadata is not None and hasattr(state, "__dict__"):
            state._metadata = metadata  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        value.load_state_dict(state)
    except Exception as error:
        error.add_note(f"while giving {label} its saved state")
        raise


def check_parts(
    saved: Mapping[str, JSON],
    live: Mapping[str, Any],
    found: Mismatches,
    *,
    accept: Collection[str],
    omit: Collection[str] = (),
) -> None:
    """Note in ``found`` every part that only one side has, or that is of another kind there.

    Args:
        saved: Part (``"scheduler"``, ``"extra.ema"``) → its kind when saved, None where kinds don't
            matter.
        live: The same of the live objects.
        found: Where to note.
        accept: Parts, or kinds of parts, whose difference is accepted; optimizers can't be left
            out.
        omit: Parts, or kinds of parts, that aren't restored, so that nothing about them matters.
    """
    for word in [*saved, *(word for word in live if word not in saved)]:
        if is_accepted(word, omit):
            continue
        is_optional = word.split(".", 1)[0] != "optimizer"
        accepted = is_accepted(word, accept)
        if word in saved and word in live:
            if saved[word] == live[word]:
                continue
            if accepted:
                found.accepted.append(f"{word}: {saved[word]} saved, {live[word]} here")
            else:
                found.differ(word, saved[word], live[word])
                found.acceptable.append(word)
        elif accepted and is_optional:
            found.accepted.append(
                f"{word}: " + ("saved, not here" if word in saved else "not saved")
            )
        else:
            (found.unexpected if word in saved else found.missing).append(word)
            found.acceptable += [word] if is_optional else []


def words_of(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"scheduler.KEY": value}``, or ``{"scheduler": value}`` for a single one."""
    return {label_of(kind, key): value for key, value in values.items()}
