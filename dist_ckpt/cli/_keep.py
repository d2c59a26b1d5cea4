"""``pin``, ``unpin``, ``prune``: what retention keeps. Layer 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from dist_ckpt import lifecycle, storage
from dist_ckpt.cli._address import AddressArgument, RunArgument, find_generation, find_run
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._life import run_dir_of
from dist_ckpt.cli._settings_file import DryRunOption
from dist_ckpt.cli._text import plain, size, table
from dist_ckpt.errors import CorruptFileError, SettingError
from dist_ckpt.generations import GenerationStore, Retention
from dist_ckpt.lifecycle import Verdict
from dist_ckpt.runs import Run, settings_of

__all__ = ["COMMANDS"]

_ALL = "all"


def pin(
    address: AddressArgument,
    *,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why it is kept [as an earlier pin says].")
    ] = None,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Keep a generation whatever retention says, until it is unpinned; also of a live run."""
    run, generation = find_generation(address)
    lifecycle.settle(run_dir_of(run))  # a pin of what a power cut takes away keeps nothing
    store = GenerationStore(run_dir_of(run))
    if reason is None:
        from dist_ckpt import shipping  # noqa: PLC0415 - no other command here needs it

        reason = store.pins().get(generation.step, "")
        if shipping.is_shipments_pin(reason):  # kept as it is, the pin would go with the shipment
            reason = ""
    store.pin(generation.step, reason)
    document = {"run": run.name, "step": generation.step, "pinned": True, "reason": reason}
    why = f": {plain(reason)}" if reason else ""
    return Answer(document, lambda: f"{plain(run.name)}: step {generation.step} is pinned{why}\n")


def unpin(
    address: AddressArgument,
    *,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Leave a generation to retention again."""
    run, generation = find_generation(address)
    store = GenerationStore(run_dir_of(run))
    was = store.unpin(generation.step)
    lifecycle.settle(run_dir_of(run))  # also where a call that was killed has done it
    rest = sorted(store.pins())
    document = {
        "run": run.name,
        "step": generation.step,
        "pinned": False,
        "was_pinned": was,
        "pinned_steps": rest,
    }
    word = "is no longer pinned" if was else "wasn't pinned"
    others = ", ".join(map(str, rest)) or "none"
    text = f"{plain(run.name)}: step {generation.step} {word}; pinned: {others}\n"
    return Answer(document, lambda: text)


def prune(
    run: RunArgument,
    *,
    keep_last: Annotated[
        str | None, typer.Option(metavar="N", help="Newest verified ones that stay, or all.")
    ] = None,
    keep_every: Annotated[
        str | None, typer.Option(metavar="N", help="Multiples of N stay too, or none.")
    ] = None,
    keep_bins: Annotated[
        str | None, typer.Option(metavar="N", help=".bin files that stay, or all.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,  # noqa: ARG001 - see JsonOption
) -> Answer:
    """Remove what retention doesn't keep, and say of each generation why it stays or goes.

    Settings that aren't given are those of the run's last start.
    """
    found = find_run(run)
    run_dir = run_dir_of(found)
    given = {"keep_last": keep_last, "keep_every": keep_every, "keep_bins": keep_bins}
    retention = _retention(found, given)
    gone: list[int] = []
    bins: list[int] = []
    if dry_run:
        _require_told(found, given)
        verdicts = lifecycle.judge(found.store, retention)
    else:
        with lifecycle.hold_open(run_dir, "prune") as (store, history):
            _require_told(found, given)  # now that it is known to be a run's, and held
            retention = _retention(found, given)
            store.clean()
            verdicts = lifecycle.judge(store, retention)
            gone, bins = lifecycle.retire(store, verdicts, history.journal.append)
            verdicts = [_as_it_went(verdict, gone) for verdict in verdicts]
    document = {
        "run": found.name,
        "path": str(found.path),
        "settings": retention.to_json(),
        "generations": [verdict.to_json() for verdict in verdicts],
        "removed": gone,
        "bins_removed": bins,
        "dry_run": dry_run,
    }
    return Answer(document, lambda: _tell(found, retention, verdicts, dry_run=dry_run))


def _as_it_went(verdict: Verdict, gone: Sequence[int]) -> Verdict:
    """Return what became of a generation: one that should go stays if it was pinned meanwhile."""
    if verdict.keep or verdict.step in gone:
        return verdict
    told = replace(verdict, keep=True, reason="pinned", why="pinned meanwhile")
    return told if told.bin is None else replace(told, bin="keep")


def _retention(run: Run, given: Mapping[str, str | None]) -> Retention:
    """Return the settings: what was given, else those of the run's last start, else defaults.

    Raises:
        SettingError: One would keep nothing, or isn't a count.
    """
    settings: dict[str, Any] = Retention().to_json()
    told = _told(run)
    settings |= {name: told[name] for name in settings if name in told}
    for name, text in given.items():
        if text is not None:
            settings[name] = _number(name, text)
    return Retention(**settings)


def _told(run: Run) -> dict[str, Any]:
    told = settings_of(run).get("retention")
    return told if isinstance(told, dict) else {}


def _require_told(run: Run, given: Mapping[str, str | None]) -> None:
    """Return if no setting is a default that a damaged file is the reason for.

    Raises:
        CorruptFileError: ``run.json`` is there and lacks one: who knows what the run wants kept?
    """
    path, told = run.store.run_dir / "run.json", _told(run)
    lacking = [name for name, text in given.items() if text is None and name not in told]
    if lacking and storage.exists(path):
        options = ", ".join("--" + name.replace("_", "-") for name in lacking)
        raise CorruptFileError(
            f"{path} can't be read, or doesn't tell by which settings the run removes generations.",
            next_step=f"Give {options}; or start the run, which writes that file anew.",
            path=str(path),
        )


def _number(name: str, text: str) -> int | None:
    if text in (_ALL, "none"):
        return None
    try:
        return int(text)
    except ValueError:
        option = "--" + name.replace("_", "-")
        raise SettingError(
            f"{option} {text!r} isn't a number.",
            next_step=f"Give {option} 3, say, or {_ALL}.",
            setting=name,
            found=text,
        ) from None


def _tell(run: Run, retention: Retention, verdicts: Sequence[Verdict], *, dry_run: bool) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in retention.to_json().items())
    head = f"{plain(run.name)}: {settings}\n"
    if not verdicts:
        return head + "no generation yet\n"
    goes = "would go" if dry_run else "went"
    rows = [
        (
            verdict.step,
            "stays" if verdict.keep else goes,
            verdict.why,
            {"keep": "stays", "drop": goes}.get(verdict.bin or ""),
            size(verdict.num_bytes),
        )
        for verdict in verdicts
    ]
    heads = ("step", "generation", "why", ".bin", "bytes")
    freed = sum(verdict.num_bytes or 0 for verdict in verdicts if not verdict.keep)
    count = sum(not verdict.keep for verdict in verdicts)
    last = f"{count} of {len(verdicts)} {goes}, {size(freed)}\n"
    return head + table(heads, rows, right=("step", "bytes")) + last


COMMANDS = (pin, unpin, prune)
