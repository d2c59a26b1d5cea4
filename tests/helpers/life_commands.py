"""The commands of a run's life as tests of power cuts use them, each with what must hold.

What a user does next works: the same command again, or training on. Nothing of the run is lost,
and what a command makes elsewhere (a fork, a copy, a resharded run) is there whole or refused.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from dist_ckpt.cli._keep import pin, prune
from dist_ckpt.cli._life import fork, rewind, undelete
from dist_ckpt.cli._pivot import pivot
from dist_ckpt.cli._reshard import reshard
from dist_ckpt.cli._ship import ship
from dist_ckpt.errors import UsageError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from helpers.cut_commands import (
    LAST,
    STEPS,
    Command,
    check_run,
    confirmation,
    is_refused,
    resume,
)
from helpers.lives import NAME, Branch, train

ALL = frozenset(STEPS)
BACK = 2
MIDDLE = 4
BRANCH = "branches/branch"  # not beside the run, whose own names are synced


def _run(root: Path) -> str:
    return str(root / NAME)


# fork: there whole or not at all; then trained in -----------------------------------------------


def _make_place(root: Path) -> None:
    (root / BRANCH).parent.mkdir()


def _fork(root: Path) -> None:
    fork(f"{_run(root)}@{MIDDLE}", str(root / BRANCH), as_json=True)


def _is_forked(root: Path) -> None:
    check_run(root / BRANCH, {MIDDLE}, MIDDLE)
    check_run(root / NAME, ALL, LAST)
    first = read_journal(root / BRANCH)[0]
    assert (first["event"], first["step"]) == ("forked", MIDDLE)


def _train_both(root: Path, branch: Branch) -> None:
    resume(root, branch, {LAST})
    if (root / BRANCH).exists():
        resume(root, branch, {MIDDLE}, BRANCH)


def _fork_and_train(root: Path) -> None:
    if not (root / BRANCH).exists():
        _fork(root)
    train(root, LAST, name=BRANCH)


def _is_trained(root: Path) -> None:
    check_run(root / BRANCH, {LAST}, LAST)


def _train_branch(root: Path, branch: Branch) -> None:
    if (root / BRANCH).exists():
        resume(root, branch, {MIDDLE, LAST}, BRANCH, keep_last=1)


# rewind, undelete, pin and prune ------------------------------------------------------------------


def _rewind(root: Path) -> None:
    rewind(f"{_run(root)}@{BACK}", as_json=True)


def _is_rewound(root: Path) -> None:
    check_run(root / NAME, {BACK}, BACK)


def _train_back(root: Path, branch: Branch) -> None:
    step = resume(root, branch, {BACK, LAST})
    assert GenerationStore(root / NAME).steps() == ([BACK] if step == BACK else list(STEPS))


def _undelete(root: Path) -> None:
    undelete(_run(root), f"rewind_to_{BACK:06d}", as_json=True)


def _is_whole(root: Path) -> None:
    check_run(root / NAME, ALL, LAST)


def _train_anywhere(root: Path, branch: Branch) -> None:
    resume(root, branch, ALL)


def _pin_and_prune(root: Path) -> None:
    pin(f"{_run(root)}@{BACK}", reason="the start")
    prune(_run(root), keep_last="1", keep_bins="1")


def _is_pruned(root: Path) -> None:
    check_run(root / NAME, {BACK, LAST}, LAST)
    assert dict(GenerationStore(root / NAME).pins()) == {BACK: "the start"}


def _train_newest(root: Path, branch: Branch) -> None:
    resume(root, branch, {LAST})


# pivot --------------------------------------------------------------------------------------------


def _pivot(root: Path) -> None:
    pivot(_run(root))


def _is_pivoted(root: Path) -> None:
    check_run(root / NAME, ALL, LAST)
    run_dir = root / NAME
    assert [event["step"] for event in read_journal(run_dir) if event["event"] == "pivot"] == [LAST]
    assert (run_dir / f"archive/pivot_{LAST:06d}/{NAME}.samples.json").exists()
    assert not (run_dir / "request.json").exists()


# ship, reshard: another place ---------------------------------------------------------------------

AWAY = "backup/of/runs"
SHIPPED = f"{AWAY}/{NAME}-step_{LAST:06d}"


def _ship(root: Path) -> None:
    ship(_run(root), str(root / AWAY), as_json=True)


def _is_shipped(root: Path) -> None:
    confirmed = confirmation(root / SHIPPED)
    assert confirmed is not None, "it isn't confirmed"
    for name, facts in confirmed["files"].items():
        assert (root / SHIPPED / name).stat().st_size == facts["size_bytes"], name
    check_run(root / SHIPPED, {LAST}, LAST)
    check_run(root / NAME, ALL, LAST)


def _train_shipped(root: Path, branch: Branch) -> None:
    resume(root, branch, {LAST})
    copy = root / SHIPPED
    if not copy.exists():
        return
    if (copy / f"checkpoints/step_{LAST:06d}/resume_point.json").exists():  # the last that is sent
        resume(root, branch, {LAST}, SHIPPED)
        return
    assert confirmation(copy) is None
    if (copy / "unfinished.json").exists():
        assert is_refused(root, SHIPPED)
    _ship(root)
    _is_shipped(root)


def _taken(target: Path) -> contextlib.AbstractContextManager[object]:
    """Expect to be refused where a call before has made what is wanted."""
    if target.exists():
        return pytest.raises(UsageError, match="is there already")
    return contextlib.nullcontext()


def _reshard(root: Path) -> None:
    with _taken(root / "two"):
        reshard(_run(root), world_size=2, output=str(root / "two"), as_json=True)


def _is_resharded(root: Path) -> None:
    check_run(root / "two", {LAST}, LAST)
    check_run(root / NAME, ALL, LAST)


def _train_resharded(root: Path, branch: Branch) -> None:
    resume(root, branch, {LAST})
    if (root / "two").exists():
        resume(root, branch, {LAST}, "two")


COMMANDS = {
    "fork": Command(_fork, ALL, _is_forked, _train_both, _make_place),
    "fork, and training in it": Command(
        _fork_and_train, ALL, _is_trained, _train_branch, _make_place
    ),
    "rewind": Command(_rewind, ALL, _is_rewound, _train_back),
    "undelete": Command(_undelete, ALL, _is_whole, _train_anywhere, _rewind),
    "pin and prune": Command(_pin_and_prune, frozenset({BACK, LAST}), _is_pruned, _train_newest),
    "ship": Command(_ship, ALL, _is_shipped, _train_shipped),
    "reshard": Command(_reshard, ALL, _is_resharded, _train_resharded),
}


def _remove_samples(root: Path) -> None:
    # With samples to be set aside, their new directory is synced again by whoever ends the rewind.
    (root / NAME / f"{NAME}.samples.json").unlink()


#: Only as ended after a kill: by the command itself, or by the next start of the training.
REWIND = Command(_rewind, ALL, _is_rewound, _train_back, _remove_samples)
PIVOT = Command(_pivot, ALL, _is_pivoted, _train_newest)


def start(root: Path) -> None:
    """Start the run's training, which ends what a command left undone."""
    train(root, 0, keep_last=None)
