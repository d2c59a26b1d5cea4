"""The user's policy as a run keeps it: fresh after a pivot, without zombie arms. Layer 6.

At a resume the resume point's copy of the policy's state wins; ``NAME.state.json`` beside the loss
shows the same to people. The policy starts fresh where a pivot is recorded that the resume point
doesn't know, or where ``NAME.state.json``, which this run had written, was taken away; not where
the resume point knows one that the journal has lost.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.capture import Stateful, load_stateful
from dist_ckpt.comm import Comm
from dist_ckpt.errors import NotFoundError
from dist_ckpt.history import (
    ABSENT,
    History,
    encode_state,
    history_path,
    read_journal,
    read_policy,
    read_state,
    write_state,
)
from dist_ckpt.lifecycle import last_pivot, saved_since
from dist_ckpt.policy import (
    Configurable,
    Sorted,
    check_policy,
    check_settings,
    sort_arms,
    tell_zombies,
)
from dist_ckpt.resume_point import ResumePoint
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._policy_state import differing_paths, plain_state
from dist_ckpt.service._voice import Voice

__all__ = ["KeptPolicy", "Past", "begin_policy", "settle_policy"]

_MAX_PATHS = 10


@dataclass(frozen=True)
class Past:
    """What the run directory says of its policy; the same on every rank.

    Attributes:
        pivot: Id of the newest pivot, None without one.
        settings: What stands in ``NAME.policy.json``.
        recorded: The settings since that pivot, as the journal has them.
        taken: Ids of generations that this run saved, where its ``NAME.state.json`` is missing.
        since: Ids of generations that this run saved since that pivot.
    """

    pivot: str | None
    settings: dict[str, Any] | None
    recorded: Any
    taken: tuple[str, ...]
    since: tuple[str, ...] = ()


class KeptPolicy:
    """Stands between the run and the user's policy; on every rank.

    Args:
        policy: The user's object; None where there is none.

    Attributes:
        pivot: Id of the newest pivot, which the run's resume points carry. Counts on rank 0.
        fresh: Why what was saved isn't restored: ``"pivot"``, ``"taken"``, or None.
        restored: What was restored, sorted.
        lost: The journal lacks the pivot that the resume point notes.
        saved: The resume point's copy of it, as JSON.
        past: What the run directory said at the start.
        settings_before: The settings that the resume point was made under.
    """

    def __init__(self, policy: Any) -> None:
        if policy is not None:
            check_policy(policy)
        self.policy = policy
        self.pivot: str | None = None
        self.fresh: str | None = None
        self.lost = False
        self.restored: Sorted | None = None
        self.saved: Any = None
        self._clean: Any = None
        self.settings_before: Any = None
        self.past = Past(None, None, None, ())

    @property
    def holder(self) -> Stateful | None:
        """What the capture keeps; None where there is no policy."""
        return None if self.policy is None else self

    def begin(self, past: Past, path: str) -> None:
        """The policy has the settings of the run directory.

        Raises:
            UsageError: There are some, and the policy takes none.
        """
        self.past = past
        self.pivot = past.pivot
        check_settings(self.policy, past.settings, path)
        if past.settings is not None and isinstance(self.policy, Configurable):
            self.policy.configure(past.settings)
        if self.policy is not None:
            self._clean = copy.deepcopy(self.policy.state_dict())

    def choose(self, point: ResumePoint) -> None:
        """Decide whether the copy in this resume point counts; the same on every rank."""
        self.restored = None
        self.fresh = None
        self.settings_before = point.notes.get("policy")
        noted = point.notes.get("pivot")
        self.lost = noted not in (None, self.past.pivot) and point.id in self.past.since
        self.pivot = noted if self.lost else self.past.pivot
        if self.past.pivot is not None and noted != self.pivot:
            self.fresh = "pivot"
        elif point.id in self.past.taken:
            self.fresh = "taken"

    def notes(self) -> dict[str, Any]:
        """Return what a resume point says of the policy: its pivot, its settings, if it takes any.

        The last is for commands that are to give it some, and don't have the program.
        """
        takes = isinstance(self.policy, Configurable)
        return {"pivot": self.pivot, "policy": self.past.settings, "takes_settings": takes}

    def state_dict(self) -> Any:
        """Return the policy's own state."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Any, /) -> None:
        """The policy goes on from ``state``, without arms that have no source; or stays fresh."""
        if self.fresh is not None:
            if self.saved is not None:  # of a newer generation, which turned out faulty after this
                load_stateful("policy", self.policy, copy.deepcopy(self._clean))
            return
        self.saved = plain_state(state)
        self.restored = sort_arms(self.policy, state)
        load_stateful("policy", self.policy, self.restored.state)

    def sidecar(self) -> bytes | None:
        """Return the bytes of ``NAME.state.json`` for this instant; None without a policy."""
        return None if self.policy is None else encode_state(plain_state(self.state_dict()))


def begin_policy(attempt: Attempt, comm: Comm, kept: KeptPolicy) -> None:
    """The policy is configured, and knows what a resume may restore of it. Collective."""
    run_dir = attempt.store.run_dir

    def look() -> bytes | None:
        if comm.rank != 0:
            return None
        past = _look(run_dir, attempt.name, attempt.store.steps(), has_policy=bool(kept.policy))
        return json.dumps(dataclasses.asdict(past)).encode()

    told = json.loads(comm.broadcast(comm.together("looking at the policy", look)))
    past = Past(**{**told, "taken": tuple(told["taken"]), "since": tuple(told["since"])})
    attempt.settings = past.settings
    path = history_path(run_dir, attempt.name, "policy")
    comm.together("configuring the policy", lambda: kept.begin(past, path))


def _look(run_dir: Path, name: str, steps: Collection[int], *, has_policy: bool) -> Past:
    try:
        words = ("pivot", "forked", "saved") if has_policy else ("pivot", "forked")
        journal = read_journal(history_path(run_dir, name, "journal"), naming=words)
    except NotFoundError:
        journal = []
    pivot = last_pivot(journal)
    there = {*steps}
    here = [event for event in journal if event["event"] != "saved" or event["step"] in there]
    since = tuple(str(event.get("id")) for event in saved_since(here))
    taken: tuple[str, ...] = ()
    if has_policy and read_state(run_dir, name) is ABSENT:
        # Only those that this very directory saved: a copy of a generation brings no sidecar.
        taken = tuple(str(event.get("id")) for event in here if event["event"] == "saved")
    settings = read_policy(run_dir, name)
    if pivot is None:
        return Past(_branch_of(journal), settings, None, taken, since)
    return Past(pivot.id, settings, pivot.policy, taken, since)


def _branch_of(journal: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the fork that this run began by, where it was given a policy of its own: a pivot."""
    return next(
        (
            f"fork {event.get('id')}"
            for event in journal
            if event.get("event") == "forked" and event.get("policy") is True
        ),
        None,
    )


def settle_policy(attempt: Attempt, kept: KeptPolicy, step: int, voice: Voice) -> None:
    """Rank 0, after a resume: journal and say how the policy begins; mend its sidecar."""
    if kept.policy is None:
        return
    if kept.fresh == "taken":
        _record_by_hand(attempt, kept, step)
    if kept.fresh is not None:
        attempt.journal("policy_fresh", step=step, pivot=kept.pivot, why=kept.fresh)
        reason = "after a pivot" if kept.fresh == "pivot" else "its state was taken away"
        voice.say(f"the policy starts fresh: {reason}")
        return
    if kept.lost:
        voice.warn(
            f"the journal lacks the pivot that step {step} was saved after, so a line of it is "
            "damaged: the resume point's copy of the policy counts"
        )
    if kept.restored is None:
        return
    zombies = kept.restored.zombies
    if zombies:
        attempt.journal(
            "zombie_arms",
            step=step,
            arms={name: plain_state(arm) for name, arm in zombies.items()},
        )
        voice.warn(tell_zombies(zombies))
    if kept.restored.new:
        voice.say(f"new sources start clean: {', '.join(kept.restored.new)}")
    if kept.settings_before != kept.past.settings:
        attempt.journal(
            "policy_changed",
            step=step,
            policy=kept.past.settings,
            previous=kept.settings_before,
        )
        voice.warn(
            f"{attempt.name}.policy.json holds other settings than at step {step}, without a "
            "pivot: what was learned under the old ones stays"
        )
    _mend_sidecar(attempt, kept, step, voice)


def _record_by_hand(attempt: Attempt, kept: KeptPolicy, step: int) -> None:
    """A sidecar that was taken away is a pivot; recorded, or the next start would undo it."""
    history = attempt.history
    if isinstance(history, History) and (history.loss.last_step or 0) > step:
        history.cut(step)
    kept.pivot = secrets.token_hex(16)
    # Not by `attempt.journal`, which lets a full disk pass: without this it would be restored.
    history.journal.append(
        "pivot",
        step=step,
        id=kept.pivot,
        by="hand",
        archive=None,
        archived=[],
        policy=kept.past.settings,
        previous=kept.past.recorded,
    )


def _has_moved(journal: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the run was taken to another step since a save wrote the sidecar."""
    words = [event.get("event") for event in journal]
    moves = [word for word in words if word in {"saved", "rewound", "undeleted"}]
    return bool(moves) and moves[-1] != "saved"


def _mend_sidecar(attempt: Attempt, kept: KeptPolicy, step: int, voice: Voice) -> None:
    """``NAME.state.json`` shows what was restored; what differed is kept in archive/, and told."""
    run_dir, name = attempt.store.run_dir, attempt.name
    found = read_state(run_dir, name)
    if found is not ABSENT and found != kept.saved:
        copy = f"{name}.state.json.differs-{attempt.number}"
        archive = attempt.store.archive
        storage.make_dir(archive, exist_ok=True, follow=False)
        storage.sync_dir(run_dir)
        storage.replace_durable(archive / copy, encode_state(found))
        paths = list(islice(differing_paths(found, kept.saved), _MAX_PATHS))
        kept_as = f"archive/{copy}"
        if _has_moved(read_journal(run_dir)):  # nobody's fault: it is of the step before that
            attempt.journal("policy_followed", step=step, paths=paths, kept_as=kept_as)
        else:
            attempt.journal("policy_differs", step=step, paths=paths, kept_as=kept_as)
            voice.warn(
                f"{name}.state.json isn't the policy of step {step} ({', '.join(paths)}): the "
                f"resume point's copy counts, the file's is {kept_as}"
            )
    state = kept.sidecar()
    if state is not None and found != json.loads(state):
        write_state(run_dir, name, state)
