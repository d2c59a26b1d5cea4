"""Train the mini-project for some steps, from the start or from a checkpoint.

    python -B train.py --steps 10 --output runs/continuous
    python -B train.py --steps 5 --output runs/cut
    python -B train.py --steps 5 --resume runs/cut/checkpoint.pt --output runs/resumed

``--steps`` counts additional updates. The output directory must not exist; it holds
``checkpoint.pt``, ``checkpoint.pt.sha256`` and ``summary.json``, all of them or it isn't there.
Exit status: 0 done; 2 not done (usage, a refused checkpoint, a missing package).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outputs import OutputError, check_absent, new_directory, write_json

if TYPE_CHECKING:
    from experiment import Experiment

SUMMARY_SCHEMA = "kernodeck.summary/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one scenario and return the exit status."""
    options = _parse(argv)
    try:
        check_absent(options.output)
        summary = train(options)
    except ImportError as error:
        print(f"train.py: {error}; install torch, numpy and dist-ckpt", file=sys.stderr)
        return 2
    except OutputError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    if summary is None:
        return 2
    progress = summary["progress"]
    print(f"step {progress['step']}, cursor {progress['cursor']} of {progress['rows']}")
    print(f"next learning rate {summary['next_learning_rate']}, MSE {summary['mse']}")
    return 0


def train(options: argparse.Namespace) -> dict[str, Any] | None:
    """Have the scenario's output directory; return its summary, None where it was refused."""
    # Imported here, so that a missing package ends with a status that says so.
    import checkpoint_file as files  # noqa: PLC0415
    from experiment import Experiment  # noqa: PLC0415

    experiment = Experiment()
    resumed = None
    try:
        if options.resume is not None:
            state = files.load_checkpoint(options.resume)
            experiment.restore(state, omit_rng=options.omit_rng_restore)
            resumed = {
                "sha256": hashlib.sha256(options.resume.read_bytes()).hexdigest(),
                "step": state["progress"]["step"],
                "rng_restore_omitted": options.omit_rng_restore,
                "restored": observe_restored(experiment, state),
            }
        for _ in range(options.steps):
            experiment.update()
        with new_directory(options.output) as folder:
            checkpoint = files.write_checkpoint(folder, experiment.state())
            summary = summarise(experiment, checkpoint, resumed)
            write_json(folder / files.SUMMARY, summary)
    except files.RefusedError as error:
        print(f"train.py: {options.resume or options.output}: {error}", file=sys.stderr)
        return None
    return summary


def observe_restored(experiment: Experiment, state: dict[str, Any]) -> dict[str, Any]:
    """Return how what is live right after restoring compares with what was saved, bit by bit."""
    import dist_ckpt  # noqa: PLC0415

    live = experiment.state()
    saved = {key: state[key] for key in live}
    live["next_learning_rate"] = experiment.learning_rate()
    saved["next_learning_rate"] = float(state["optimizer"]["param_groups"][0]["lr"])
    return dist_ckpt.compare(saved, live, atol=0.0, rtol=0.0).to_json()


def summarise(
    experiment: Experiment, checkpoint: dict[str, Any], resumed: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what a reader wants to know of one scenario, and what the verifier compares."""
    from checkpoint_file import identity, versions  # noqa: PLC0415
    from experiment import CONFIG  # noqa: PLC0415

    weights = hashlib.sha256()
    for tensor in experiment.model.state_dict().values():
        weights.update(tensor.numpy().tobytes())
    num_rows = sum(len(entry["rows"]) for entry in experiment.history)
    return {
        "schema": SUMMARY_SCHEMA,
        "pid": os.getpid(),
        "progress": {
            "step": experiment.step,
            "epoch": experiment.epoch,
            "cursor": experiment.cursor,
            "rows": CONFIG["rows"],
            "observations": num_rows,
        },
        "next_learning_rate": experiment.learning_rate(),
        "mse": experiment.evaluate(),
        "next_draws": experiment.next_draws(),
        "parameters": sum(item.numel() for item in experiment.model.parameters()),
        "weights_sha256": weights.hexdigest(),
        "checkpoint": checkpoint,
        "resumed": resumed,
        "config": CONFIG,
        "versions": versions(),
        "identity": identity(),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the mini-project for some steps.")
    parser.add_argument("--steps", type=int, required=True, help="additional updates, 1 or more")
    parser.add_argument("--output", type=Path, required=True, help="a directory that isn't there")
    parser.add_argument("--resume", type=Path, help="a checkpoint.pt to go on from")
    parser.add_argument(
        "--omit-rng-restore", action="store_true", help="leave the random state out, on purpose"
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give 1 or more")
    if options.omit_rng_restore and options.resume is None:
        parser.error("--omit-rng-restore goes with --resume")
    return options


if __name__ == "__main__":
    sys.exit(main())
