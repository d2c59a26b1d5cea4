"""A proof as files: ``verification.json``, ``summary.txt``, ``CONFIRMATION.md``. I/O."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from dist_ckpt import __version__, storage
from dist_ckpt.generations import StoredGenerations
from dist_ckpt.proof._negative import Verdict
from dist_ckpt.proof._prove import Proof
from dist_ckpt.proof._scenario import Scenario

__all__ = ["CONFIRMATION", "SUMMARY", "VERIFICATION", "describe", "verification", "write_report"]

VERIFICATION = "verification.json"
SUMMARY = "summary.txt"
CONFIRMATION = "CONFIRMATION.md"
SCHEMA = "dist_ckpt.verification/1"
_MAX_FINDINGS = 100
_LIMITS = (
    "Inputs, learning rates, losses and the generators' draws of every step and rank, and all of "
    "the state that is saved, were compared bit for bit, as the library saw them inside the "
    "processes. Details: `verification.json`. Nothing is said about steps after the last, other "
    "devices, versions or numbers of ranks."
)


def verification(proof: Proof) -> dict[str, Any]:
    """Return the outcome as one document."""
    identity = _identity(proof.continuous)
    final = None if proof.final is None else proof.final.to_json()
    findings = [] if final is None else final["findings"][:_MAX_FINDINGS]
    return {
        "schema": SCHEMA,
        "all_checks_passed": proof.passed,
        "positive": proof.positive,
        "negative_divergence_detected": proof.negative,
        "parts": {control.part: str(control.verdict) for control in proof.controls},
        "tolerance": {"atol": 0.0, "rtol": 0.0},
        "cause": proof.cause,
        "diverged": None if proof.diverged is None else proof.diverged.name,
        "first_difference": None if proof.first is None else proof.first.to_json(),
        "findings": findings,
        "values_compared": None if final is None else final["num_values"],
        "max_abs": None if final is None else final["max_abs"],
        "controls": [control.to_json() for control in proof.controls],
        "command": list(proof.command),
        "world_size": proof.continuous.tracks[0].world_size,
        "steps": proof.continuous.stop_at,
        "cuts": [{"step": step, "kinds": kinds} for step, kinds in proof.cuts.items()],
        "scenarios": [scenario.to_json() for scenario in proof.scenarios],
        "dist_ckpt": __version__,
        "identity": identity,
        "time": time.time(),
    }


def _identity(scenario: Scenario) -> dict[str, Any]:
    point = StoredGenerations(scenario.run_dir).manifest(scenario.stop_at)
    return {key: point.identity.get(key) for key in ("config", "data", "code", "versions")}


def write_report(proof: Proof) -> dict[str, Any]:
    """The three files are in the proof's directory; returns what ``verification.json`` holds.

    ``verification.json`` is written last: without it a proof wasn't completed.
    """
    document = verification(proof)
    files = {
        SUMMARY: describe(document),
        CONFIRMATION: confirm(document),
        VERIFICATION: json.dumps(document, indent=1, allow_nan=False) + "\n",
    }
    for name, text in files.items():
        storage.write_durable(proof.output / name, text.encode("utf-8"), mode=0o600)
    storage.sync_dir(proof.output)
    return document


def describe(document: dict[str, Any]) -> str:
    """Return the outcome in lines for a person."""
    verdicts = ("all_checks_passed", "positive", "negative_divergence_detected")
    lines = [f"{key}: {json.dumps(document[key])}" for key in verdicts]
    lines.append(f"command: {shlex.join(document['command'])}")
    lines.append(f"ranks: {document['world_size']}, steps: {document['steps']}")
    lines.append("tolerance: absolute 0, relative 0 (bit for bit)")
    for cut in document["cuts"]:
        kinds = f" ({'; '.join(cut['kinds'])})" if cut["kinds"] else ""
        lines.append(f"cut at step {cut['step']}{kinds}")
    lines.append(f"resumed = uninterrupted: {_positive(document)}")
    if document["cause"] is not None:
        lines += ["", document["cause"]]
        lines += [f"  {finding['path']}: {finding['detail']}" for finding in document["findings"]]
        lines += _shown(document["first_difference"])
    lines += ["", "left out at the resume, to see that it would be noticed:"]
    for control in document["controls"]:
        at = "" if control["cut"] is None else f" at step {control['cut']}"
        verdict = f"{control['verdict']}{at}"
        lines.append(f"  {control['part']:<10} {verdict:<20} {control['reason']}")
    if not document["controls"]:
        lines.append("  not tried, since the resume itself differs")
    return "\n".join(lines) + "\n"


def _positive(document: dict[str, Any]) -> str:
    if document["positive"]:
        values = document["values_compared"]
        return f"yes, every step and {values} values at the end"
    return f"no, in the scenario {document['diverged']}"


def _shown(first: dict[str, Any] | None) -> list[str]:
    if first is None:
        return []
    return [
        f"  {kind}: {_brief(pair[0])} without the cut, {_brief(pair[1])} here"
        for kind, pair in first["shown"].items()
    ]


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def confirm(document: dict[str, Any]) -> str:
    """Return one page for those who weren't there: command, step, check, result."""
    result = "PASSED" if document["all_checks_passed"] else "FAILED"
    cuts = ", ".join(str(cut["step"]) for cut in document["cuts"])
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(document["time"]))
    versions = document["identity"].get("versions") or {}
    others = {name: version for name, version in versions.items() if name != "dist_ckpt"}
    about = ", ".join(f"{name} {version}" for name, version in others.items())
    lines = [
        f"# Proof of resume: {result}",
        "",
        f"- **Command run**: `{shlex.join(document['command'])}`",
        f"- **When**: {when}, {len(document['scenarios'])} scenarios in fresh processes",
        f"- **Ranks**: {document['world_size']}",
        f"- **Step found**: resumed at {cuts}; compared up to step {document['steps']}",
        f"- **Check**: {_check(document)}",
        f"- **Negative control**: {_controls(document)}",
        f"- **Result**: {document['cause'] or _result(document)}",
        f"- **Versions**: dist_ckpt {document['dist_ckpt']}{f'; {about}' if about else ''}",
        "",
        "| scenario | from | to | left out | seconds |",
        "|---|---|---|---|---|",
        *(
            f"| {one['name']} | {one['from']} | {one['to']} | {one['left_out'] or '-'} | "
            f"{one['secs']:.1f} |"
            for one in document["scenarios"]
        ),
        "",
        _LIMITS,
    ]
    return "\n".join(lines) + "\n"


def _check(document: dict[str, Any]) -> str:
    if document["positive"]:
        return f"resumed = uninterrupted, bit for bit ({document['values_compared']} values)"
    return f"resumed ≠ uninterrupted, in the scenario {document['diverged']}"


def _controls(document: dict[str, Any]) -> str:
    told = [f"{part} {verdict}" for part, verdict in document["parts"].items()]
    return ", ".join(told) or "not tried"


def _result(document: dict[str, Any]) -> str:
    if document["all_checks_passed"]:
        return "a stopped run goes on as if it had not been stopped"
    faults = [
        f"{control['part']}: {control['reason']}"
        for control in document["controls"]
        if control["verdict"] == Verdict.NOT_PROVEN
    ]
    return f"leaving out a part was not noticed ({'; '.join(faults) or 'no part was left out'})"
