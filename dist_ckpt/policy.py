"""What a user's policy may offer, and what is checked of it. Layer 1, pure, no torch.

A policy decides as training goes on: from which source the next batch comes, how long a phase
lasts. Any object with ``state_dict()`` and ``load_state_dict()`` is one. Two more things are used
where it has them:

* ``sources``: the names that can be pulled. Its state then keeps one entry for each under
  ``"arms"``. Saved arms whose source is gone (zombies) are taken out before it sees them.
* ``configure(settings)``: called once at each start, before anything is restored, with what stands
  in ``NAME.policy.json``; not called where there is no such file.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dist_ckpt.errors import CorruptFileError, UnsupportedValueError, UsageError

__all__ = [
    "ARMS",
    "Configurable",
    "HasSources",
    "Policy",
    "Sorted",
    "WithoutZombies",
    "check_policy",
    "check_settings",
    "sort_arms",
    "tell_zombies",
]

ARMS = "arms"
"""The key of a policy's state that maps each source to what was learned of it."""


@runtime_checkable
class Policy(Protocol):
    """What every policy is: state that can be told and taken."""

    def state_dict(self) -> Any:
        """Return what was learned, in types that can be kept; not the settings."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from what `state_dict` returned."""


@runtime_checkable
class HasSources(Protocol):
    """A policy with arms."""

    @property
    def sources(self) -> Collection[str]:
        """The names that can be pulled now."""


@runtime_checkable
class Configurable(Protocol):
    """A policy whose settings can be changed by a pivot."""

    def configure(self, settings: Mapping[str, Any], /) -> Any:
        """Take these settings in place of those it was built with; raise where it can't."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """A saved state, sorted by what can still be pulled.

    Attributes:
        state: The state without arms that have no source; the very same where all have one.
        zombies: Name → state of each arm without a source.
        new: Sources that the state doesn't know: they start clean.
    """

    state: Any
    zombies: Mapping[str, Any]
    new: tuple[str, ...]


def check_policy(policy: object) -> None:
    """Return if ``policy`` is what it has to be.

    Raises:
        UnsupportedValueError: A method is missing, or it declares sources and keeps no arms.
    """
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(policy, method, None)):
            raise UnsupportedValueError(
                f"policy is a {type(policy).__name__} without {method}().",
                next_step="Give an object with state_dict() and load_state_dict().",
                path="policy",
            )
    if _sources(policy) is None:
        return
    state = policy.state_dict()  # type: ignore[attr-defined]
    if not isinstance(state, Mapping) or not isinstance(state.get(ARMS), Mapping):
        raise UnsupportedValueError(
            f"policy declares sources, but its state has no mapping under {ARMS!r}.",
            next_step=f"Keep what was learned of each source under state_dict()[{ARMS!r}][name], "
            "so that arms whose source is gone can be told.",
            path=f"policy/{ARMS}",
        )


def sort_arms(policy: object, state: Any) -> Sorted:
    """Return a saved state without the arms that ``policy`` has no source for (A12).

    Raises:
        CorruptFileError: The policy has sources, and the state no arms: it is another's.
    """
    sources = _sources(policy)
    if sources is None:
        return Sorted(state, {}, ())
    arms = state.get(ARMS) if isinstance(state, Mapping) else None
    if not isinstance(arms, Mapping):
        raise CorruptFileError(
            f"The saved policy has no {ARMS!r}, though this one has sources.",
            next_step="Give the policy that the run was saved with, or pivot: the new one then "
            "starts fresh.",
            path=f"policy/{ARMS}",
        )
    zombies = {name: arm for name, arm in arms.items() if name not in sources}
    new = tuple(name for name in sources if name not in arms)
    if zombies:
        kept = type(arms)((name, arm) for name, arm in arms.items() if name in sources)  # type: ignore[call-arg]
        state = {**state, ARMS: kept}
    return Sorted(state, zombies, new)


class WithoutZombies:
    """A policy that is loaded from outside of a run: arms without a source are named and left out.

    Args:
        policy: The user's policy.
    """

    def __init__(self, policy: Policy) -> None:
        check_policy(policy)
        self.policy = policy

    def state_dict(self) -> Any:
        """Return the policy's own state."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Any, /) -> None:
        """The policy goes on from ``state``; a warning names the arms that it didn't get."""
        found = sort_arms(self.policy, state)
        if found.zombies:
            warnings.warn(tell_zombies(found.zombies), stacklevel=2)
        self.policy.load_state_dict(found.state)


def check_settings(policy: object, settings: Mapping[str, Any] | None, path: str) -> None:
    """Return if ``policy`` heeds the settings of a run, or there are none.

    Raises:
        UsageError: Nobody would heed them.
    """
    if settings is None or isinstance(policy, Configurable):
        return
    who = "there is no policy" if policy is None else f"{type(policy).__name__} has no configure()"
    raise UsageError(
        f"{path} holds settings that nobody would heed: {who}.",
        next_step="Give Checkpointer a policy with configure(settings), or move the file away.",
        path=path,
    )


def tell_zombies(zombies: Mapping[str, Any]) -> str:
    """Return a sentence that names each arm, with its weight where it has one."""
    names = [f"{name}{_weight(arm)}" for name, arm in zombies.items()]
    plural = "s" if len(names) > 1 else ""
    return (
        f"zombie arm{plural} set aside, never pulled: {', '.join(names)}; "
        f"no such source{plural} any more"
    )


def _weight(arm: Any) -> str:
    weight = arm.get("weight") if isinstance(arm, Mapping) else None
    return f" (weight {weight:.3f})" if isinstance(weight, int | float) else ""


def _sources(policy: object) -> tuple[str, ...] | None:
    sources = getattr(policy, "sources", None)
    return None if sources is None or callable(sources) else tuple(sources)
