"""Which code runs: digest of the main script, commit of the repository it lies in.

Part of layer 3. Reads that file, asks git. Nothing here fails: what can't be told is None.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

__all__ = ["describe_code"]

_GIT_SECS = 2.0


def describe_code(main: str | None = None) -> dict[str, Any]:
    """Return ``{"main": sha256, "path": name, "git": commit, "dirty": bool}``; None if unknown.

    Args:
        main: Path of the main script; that of ``__main__`` if None.
    """
    path = main or getattr(sys.modules.get("__main__"), "__file__", None)
    if not path:  # an interactive session, a notebook
        return {"main": None, "path": None, "git": None, "dirty": None}
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    # Only what git knows: a run's own output beside the script says nothing about the code.
    status = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "main": _sha256(path),
        "path": os.path.basename(path),
        "git": commit.strip() if commit else None,
        "dirty": None if status is None else bool(status.strip()),
    }


def _sha256(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _git(folder: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],  # noqa: S607 - the user's git, wherever it is
            capture_output=True,
            check=False,
            timeout=_GIT_SECS,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            # Looking must not write to the repository, nor wait for a password or a lock.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.SubprocessError, ValueError):  # no git, too slow
        return None
    return done.stdout if done.returncode == 0 else None
