"""Symbolic links in the places of what we make, empty, move and replace: nothing is led elsewhere.

Somebody with write access beside a run may lay a link under a name that can be foreseen. What it
leads to is as it was afterwards, and the command has done its work or refused by name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_ckpt.cli._export import export
from dist_ckpt.cli._keep import pin, prune, unpin
from dist_ckpt.cli._life import fork, rewind, undelete
from dist_ckpt.cli._pivot import pivot
from dist_ckpt.cli._reshard import reshard
from dist_ckpt.cli._ship import ship
from dist_ckpt.errors import DistCkptError, ForeignFileError
from dist_ckpt.generations import GenerationStore
from helpers.lives import quiet, train

HOME = "rewind_to_000002"
SHIPPED = "backup/run-step_000006"


def _train(root: Path) -> None:
    train(root, 8, keep_last=None)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "fork": lambda root: fork(f"{root / 'run'}@4", str(root / "branch"), as_json=True),
    "rewind": lambda root: rewind(f"{root / 'run'}@2", as_json=True),
    "undelete": lambda root: undelete(str(root / "run"), HOME, as_json=True),
    "pin": lambda root: pin(f"{root / 'run'}@4", reason="x"),
    "unpin": lambda root: unpin(f"{root / 'run'}@4"),
    "prune": lambda root: prune(str(root / "run"), keep_last="1", keep_bins="1"),
    "ship": lambda root: ship(str(root / "run"), str(root / "backup"), as_json=True),
    "reshard": lambda root: reshard(
        str(root / "run"), world_size=2, output=str(root / "two"), as_json=True
    ),
    "export": lambda root: export(f"{root / 'run'}@4", output=str(root / "out.bin"), as_json=True),
    "pivot": lambda root: pivot(str(root / "run"), as_json=True),
    "training": _train,
}
#: What is done before the link is laid.
BEFORE = {"undelete": "rewind", "unpin": "pin"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained") / "work"
    root.mkdir()
    with quiet():
        train(root, 6, keep_last=None)
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "work"))


def _lay(link: Path, elsewhere: Path) -> None:
    """Lay a link; what lay there lies elsewhere now, else that is a directory of somebody's."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        shutil.move(link, elsewhere)
    else:
        (elsewhere / "inner").mkdir(parents=True)
        (elsewhere / "thesis.txt").write_text("years")
        (elsewhere / "inner" / "data").write_bytes(bytes(100))
    link.symlink_to(elsewhere)


def _contents(path: Path) -> dict[str, object]:
    """Return all that lies at a path: names, kinds, modes, times of change, bytes."""
    found: dict[str, object] = {}
    for one in (path, *sorted(path.rglob("*"))):
        status = one.lstat()
        data = one.read_bytes() if one.is_file() else None
        found[str(one.relative_to(path))] = (status.st_mode, status.st_mtime_ns, data)
    return found


def _run(command: str, root: Path) -> DistCkptError | None:
    """Return with what error a command refuses, None where it does its work."""
    try:
        with quiet():
            COMMANDS[command](root)
    except DistCkptError as error:
        return error
    return None


MET = [
    # beside the target
    (".tmp-fork-branch", "fork"),
    (".tmp-two-0123abcd", "reshard"),
    (".tmp-out.bin", "export"),
    (".tmp-out.bin.sha256", "export"),
    # the directories of a run
    *[("run/checkpoints", name) for name in ("fork", "rewind", "undelete", "prune", "pivot")],
    *[("run/archive", name) for name in ("rewind", "undelete", "pivot", "prune", "pin", "ship")],
    *[(f"run/archive/{HOME}", name) for name in ("rewind", "undelete")],
    ("run/archive/pivot_000006", "pivot"),
    # locks
    *[("run/run.lock", name) for name in ("fork", "rewind", "undelete", "prune", "training")],
    *[("run/pins.lock", name) for name in ("pin", "unpin", "prune", "ship")],
    # small files on their way
    *[("run/.pins.json.tmp", name) for name in ("pin", "unpin", "ship")],
    ("run/.request.json.tmp", "pivot"),
    ("run/.run.json.tmp", "training"),
    # what others read, move and remove
    *[("run/step_000004.bin", name) for name in ("fork", "rewind", "prune", "training")],
    *[("run/step_000004.bin.sha256", name) for name in ("fork", "rewind", "prune")],
    *[("run/step_000006.bin", name) for name in ("ship", "training")],
    *[("run/step_000008.bin", name) for name in ("rewind", "training")],
    *[("run/checkpoints/.tmp-step_000008-0123abcd", name) for name in ("prune", "training")],
    *[("run/checkpoints/.tmp-trash-step_000002-01234567", name) for name in ("prune", "training")],
    *[("run/checkpoints/step_000004", name) for name in ("fork", "rewind", "prune", "pin")],
    # the copy
    (SHIPPED, "ship"),
]


@pytest.mark.parametrize(("name", "command"), MET, ids=str)
def test_what_a_planted_link_leads_to_stays_as_it_is(name: str, command: str, root: Path) -> None:
    if command in BEFORE:
        assert _run(BEFORE[command], root) is None
    elsewhere = root.parent / "elsewhere"
    _lay(root / name, elsewhere)
    before = _contents(elsewhere)
    error = _run(command, root)
    assert _contents(elsewhere) == before
    if error is not None:
        assert isinstance(error, ForeignFileError) or "symbolic link" in str(error), error
        assert error.next_step


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (".tmp-fork-branch", "fork"),
        ("run/archive", "rewind"),
        ("run/archive", "undelete"),
        (f"run/archive/{HOME}", "undelete"),
        ("run/archive", "pivot"),
        (SHIPPED, "ship"),
    ],
)
def test_who_would_have_to_follow_a_link_refuses_it_by_name(
    name: str, command: str, root: Path
) -> None:
    if command in BEFORE:
        assert _run(BEFORE[command], root) is None
    _lay(root / name, root.parent / "elsewhere")
    before = _contents(root)
    error = _run(command, root)
    assert isinstance(error, ForeignFileError)
    assert f"{root / name} is a symbolic link, which dist_ckpt never" in str(error)
    assert GenerationStore(root / "run").steps() == ([2] if command == "undelete" else [2, 4, 6])
    added = {path for path in _contents(root) if path not in before}
    assert added <= {"run/run.lock", "run/pins.lock", "run/pins.json", "run/request.json"}


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step_000006", "shipped"])
def test_a_copy_is_gone_on_with_in_its_own_folder_only(name: str, root: Path) -> None:
    assert _run("ship", root) is None
    elsewhere = root.parent / "elsewhere"
    _lay(root / SHIPPED / name, elsewhere)
    (root / SHIPPED / "confirmation.json").unlink()
    before = _contents(elsewhere)
    error = _run("ship", root)
    assert isinstance(error, ForeignFileError)
    assert "is a symbolic link" in str(error)
    assert _contents(elsewhere) == before
    assert not (root / SHIPPED / "confirmation.json").exists()


@pytest.mark.parametrize("name", [".tmp-ship-RESTORE.md", "RESTORE.md"])
def test_a_file_of_a_copy_that_is_a_link_is_written_in_its_place(name: str, root: Path) -> None:
    assert _run("ship", root) is None
    (root / SHIPPED / "RESTORE.md").unlink()
    (root / SHIPPED / "confirmation.json").unlink()
    elsewhere = root.parent / "elsewhere.md"
    elsewhere.write_text("mine")
    (root / SHIPPED / name).symlink_to(elsewhere)
    error = _run("ship", root)
    assert elsewhere.read_text() == "mine"
    if error is None:
        assert not (root / SHIPPED / "RESTORE.md").is_symlink()
    else:
        assert "RESTORE.md is not a regular file" in str(error)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"undelete", "unpin"}))
def test_a_run_directory_that_is_a_link_itself_is_used(command: str, root: Path) -> None:
    shutil.move(root / "run", root / "on_another_disk")
    (root / "run").symlink_to(root / "on_another_disk")
    if command == "ship":
        (root / "away").mkdir()
        (root / "backup").symlink_to(root / "away")
    assert _run(command, root) is None
    assert (root / "run").is_symlink()
