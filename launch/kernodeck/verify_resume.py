"""Prove that a resume is complete: four fresh processes, one comparison that must agree, one that must not.

    python -B verify_resume.py --output runs/proof-cpu

Exit status: 0 the resume agrees and the control without random state diverges; 1 one of them
doesn't; 2 the check could not be completed. The output directory must not exist; with status 2 it
doesn't exist afterwards either.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outputs import OutputError, check_absent, new_directory, write_json

TRAIN = Path(__file__).resolve().with_name("train.py")
LIMIT_SECS = 300.0
#: Scenario → its arguments; those of one row don't depend on each other.
ROWS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"continuous": ("--steps", "10"), "cut": ("--steps", "5")},
    {
        "resumed": ("--steps", "5", "--resume", "cut/checkpoint.pt"),
        "negative": ("--steps", "5", "--resume", "cut/checkpoint.pt", "--omit-rng-restore"),
    },
)


class IncompleteError(Exception):
    """The check can't be completed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the protocol and return the exit status."""
    parser = argparse.ArgumentParser(description="Prove that a resume is complete.")
    parser.add_argument("--output", type=Path, required=True, help="a directory that isn't there")
    options = parser.parse_args(argv)
    try:
        check_absent(options.output)
        # Imported here, so that a missing package ends with a status that says so.
        from judgement import describe, judge  # noqa: PLC0415

        with new_directory(options.output) as folder:
            commands = run_scenarios(folder)
            verification = {**judge(folder), "commands": commands}
            write_json(folder / "verification.json", verification)
    except ImportError as error:
        print(f"verify_resume.py: {error}; install torch, numpy and dist-ckpt", file=sys.stderr)
        return 2
    except (OutputError, IncompleteError) as error:
        print(f"verify_resume.py: {error}", file=sys.stderr)
        return 2
    print(describe(verification))
    return 0 if verification["all_checks_passed"] else 1


def run_scenarios(folder: Path) -> dict[str, list[str]]:
    """Run each scenario in a process of its own; return their command lines.

    Raises:
        IncompleteError: One ended otherwise than by its end, or in too long a time.
    """
    commands: dict[str, list[str]] = {}
    for row in ROWS:
        children = {}
        for name, arguments in row.items():
            command = [*arguments, "--output", name]
            commands[name] = ["python", "-B", TRAIN.name, *command]
            children[name] = subprocess.Popen(
                [sys.executable, "-B", str(TRAIN), *command],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        _wait(children)
    return commands


def _wait(children: dict[str, subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + LIMIT_SECS
    try:
        for name, child in children.items():
            said, _ = child.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if child.returncode != 0:
                how = f"status {child.returncode}"
                if child.returncode < 0:
                    how = f"signal {-child.returncode}"
                raise IncompleteError(f"the {name} scenario ended with {how}: {said.strip()}")
    except subprocess.TimeoutExpired as error:
        raise IncompleteError(f"a scenario took more than {LIMIT_SECS:g} s") from error
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
