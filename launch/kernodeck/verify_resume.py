"""Prove that a resume is complete: one comparison that must agree, and one that must not.

    python -B verify_resume.py --output runs/proof-cpu

Four scenarios run in fresh processes: continuous, cut, resumed, and resumed without random state.
Exit status: 0 the resume agrees and the control without random state diverges; 1 one of them
doesn't; 2 the check could not be completed. The output directory must not exist; with status 2 it
doesn't exist afterwards either.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, STOP)
    try:
        check_absent(options.output)
        return verify(options.output)
    except ImportError as error:
        print(f"verify_resume.py: {error}; install torch, numpy and dist-ckpt", file=sys.stderr)
    except (OutputError, IncompleteError) as error:
        print(f"verify_resume.py: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("verify_resume.py: interrupted", file=sys.stderr)
    except Exception:  # noqa: BLE001 - not completed, whatever it is; 1 would mean that it was
        traceback.print_exc()
    return 2


def verify(output: Path) -> int:
    """Have the output directory with `verification.json` and return 0 or 1, as it says."""
    with new_directory(output) as folder:
        commands = run_scenarios(folder)
        # Imported here, so that a missing package ends with a status that says so.
        from checkpoint_file import RefusedError  # noqa: PLC0415
        from judgement import describe, judge  # noqa: PLC0415

        try:
            verification = {**judge(folder), "commands": commands}
        except RefusedError as error:
            raise IncompleteError(f"a scenario's checkpoint is {error}") from error
        write_json(folder / "verification.json", verification)
    print(describe(verification))
    return 0 if verification["all_checks_passed"] else 1


class _Stop:
    """A stop signal as KeyboardInterrupt, held back while processes are being started."""

    def __init__(self) -> None:
        self._is_held = False
        self._is_asked = False

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        self._is_asked = True
        if not self._is_held:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """No process is started without being known: a signal waits for the end of the block."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_asked:
            raise KeyboardInterrupt


STOP = _Stop()


def run_scenarios(folder: Path) -> dict[str, list[str]]:
    """Run each scenario in a process of its own; return their command lines.

    Raises:
        IncompleteError: One ended otherwise than by its end, or in too long a time.
    """
    commands: dict[str, list[str]] = {}
    for row in ROWS:
        row_commands = {
            name: [TRAIN.name, *arguments, "--output", name] for name, arguments in row.items()
        }
        _run_together(row_commands, folder)
        commands.update({name: ["python", "-B", *rest] for name, rest in row_commands.items()})
    return commands


def _run_together(commands: dict[str, list[str]], folder: Path) -> None:
    children: dict[str, subprocess.Popen[str]] = {}
    deadline = time.monotonic() + LIMIT_SECS
    try:
        with STOP.hold():
            for name, (_, *arguments) in commands.items():
                children[name] = subprocess.Popen(
                    [sys.executable, "-B", str(TRAIN), *arguments],
                    cwd=folder,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
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
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
