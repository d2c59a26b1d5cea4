"""``verify``: every byte against its digest. Layer 8."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt import storage
from dist_ckpt.cli._address import find
from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._progress import byte_bar
from dist_ckpt.cli._text import plain, size
from dist_ckpt.errors import NotFoundError, SettingError, SignatureError
from dist_ckpt.provenance import TrustedKeys, parse_public_key
from dist_ckpt.runs import (
    Depth,
    Finding,
    check_bin,
    check_run,
    find_origin,
    is_bin,
    planned_bytes,
    require_no_file,
)
from dist_ckpt.wording import counted

__all__ = ["COMMANDS"]

_KEY_LIMIT_BYTES = 1 << 16


def verify(
    address: Annotated[
        str,
        typer.Argument(metavar="RUN[@N]|FILE.bin", help="A run, one generation of it, or a .bin."),
    ],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes and manifests only.")] = False,
    sample: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Read a random share of each file, 5% say."),
    ] = None,
    key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A public key that must have signed it; may be repeated."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Read every byte and compare every digest; writes nothing.

    Status 1: a fault was found, and is named. Status 2: there was nothing to check, or it could not
    be checked.
    """
    depth = Depth(quick=quick, fraction=None if sample is None else _share(sample))
    findings = _check(address, depth, _trusted(key), as_json=as_json)
    if not any(finding.is_whole or finding.faults or finding.refused for finding in findings):
        raise NotFoundError(
            f"There is nothing to check in {address}: no generation and no .bin.",
            next_step="Give the directory of a run that has saved something.",
            path=address,
        )
    faults = [fault for finding in findings for fault in finding.faults]
    refused = [finding.refused for finding in findings if finding.refused is not None]
    document = {
        "address": address,
        "ok": not faults and not refused,
        "quick": quick,
        "sample": depth.fraction,
        "bytes_read": sum(finding.num_bytes for finding in findings),
        "digests_compared": sum(finding.num_digests for finding in findings),
        "faults": [fault.to_json() for fault in faults],
        "refused": [fault.to_json() for fault in refused],
        "findings": [finding.to_json() for finding in findings],
    }
    return Answer(document, lambda: _tell(findings, depth), 1 if faults else 2 if refused else 0)


def _share(text: str) -> float:
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if rest or math.isnan(share):
        raise SettingError(
            f"--sample {text!r} isn't a share.", next_step="Give --sample 5%.", found=text
        )
    return share


def _trusted(paths: Sequence[Path] | None) -> TrustedKeys | None:
    if not paths:
        return None
    keys = []
    for path in paths:
        pem = storage.read_file(Path(os.path.realpath(path)), limit_bytes=_KEY_LIMIT_BYTES)
        keys.append(parse_public_key(pem, path=path))
    return TrustedKeys(keys)


def _check(
    address: str, depth: Depth, trusted: TrustedKeys | None, *, as_json: bool
) -> list[Finding]:
    path = Path(address)
    if is_bin(path):
        with byte_bar("verifying", storage.lstat(path).st_size, quiet=as_json) as progress:
            origin = find_origin(path, trusted)
            if trusted is not None and origin is None:
                raise SignatureError(
                    f"{path} has no signature of its own, and no signed generation beside it "
                    "vouches for it.",
                    next_step="Give the run, or check the file's .sha256 by a signature of yours.",
                    path=address,
                )
            return [check_bin(path, depth, origin=origin, progress=progress)]
    if path.name.endswith(".bin") and not storage.exists(path):
        raise NotFoundError(f"There is no {path}.", next_step="Check the path.", path=address)
    require_no_file(path)
    found = find(address)
    store = found.run.store
    store.trusted = trusted
    steps = store.steps() if found.step is None else [found.step]
    with byte_bar("verifying", planned_bytes(store, steps, depth), quiet=as_json) as progress:
        return check_run(found.run, depth, progress=progress, only=found.step)


def _tell(findings: Sequence[Finding], depth: Depth) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{_verdict(finding):<8} {finding.path}{_about(finding)}")
        lines += [f"         {fault.message}" for fault in finding.faults]
        if finding.refused is not None:
            lines.append(f"         {finding.refused.message}")
    lines.append(_summary(findings, depth))
    return "".join(f"{plain(line)}\n" for line in lines)


def _verdict(finding: Finding) -> str:
    if finding.faults:
        return "FAULTY"
    if finding.refused is not None:
        return "REFUSED"
    return "retired" if finding.is_gone else "ok"


def _about(finding: Finding) -> str:
    return f" ({'; '.join(finding.notes)})" if finding.notes else ""


def _summary(findings: Sequence[Finding], depth: Depth) -> str:
    num_faults = sum(len(finding.faults) for finding in findings)
    num_bytes = sum(finding.num_bytes for finding in findings)
    num_digests = sum(finding.num_digests for finding in findings)
    kinds = [finding.kind for finding in findings if not finding.is_gone]
    checked = f"{counted(kinds.count('generation'), 'generation')}, {kinds.count('bin')} .bin"
    how = "sizes and manifests only, " if depth.quick else ""
    if depth.fraction is not None:
        how = f"a sample of {depth.fraction:.3g}, "
    found = "no fault" if not num_faults else counted(num_faults, "fault")
    if any(finding.refused is not None for finding in findings):
        found += ", not everything could be checked"
    digests = counted(num_digests, "digest")
    return f"{checked}: {how}{size(num_bytes)} read, {digests} compared, {found}"


COMMANDS = (verify,)
