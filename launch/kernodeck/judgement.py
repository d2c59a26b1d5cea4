"""What four scenarios prove: part by part, with the tolerance stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dist_ckpt
from checkpoint_file import (
    CHECKPOINT,
    SUMMARY,
    RefusedError,
    check_progress,
    identity,
    read_checkpoint,
    versions,
)

SCHEMA = "kernodeck.verification/1"
#: Part of this protocol on the CPU; no rule for other models.
ATOL = 1e-12
RTOL = 0.0
SCENARIOS = ("continuous", "cut", "resumed", "negative")
#: Step and cursor at the end of each scenario, of 24 rows in batches of 4.
_ENDS = {"continuous": (10, 16), "cut": (5, 20), "resumed": (10, 16), "negative": (10, 16)}
_NEXT_LEARNING_RATE = 0.00375


class Scenario:
    """What one process left.

    Raises:
        RefusedError: Its checkpoint isn't whole or isn't of this code and data.
    """

    def __init__(self, folder: Path) -> None:
        self.state = read_checkpoint(folder / CHECKPOINT)
        self.summary: dict[str, Any] = json.loads((folder / SUMMARY).read_bytes())

    def parts(self) -> dict[str, Any]:
        """Return all that is compared (K9), by part."""
        history, state, summary = self.state["history"], self.state, self.summary
        return {
            "inputs": [{"rows": entry["rows"], "gain": entry["gain"]} for entry in history],
            "learning_rates": [*(entry["lr"] for entry in history), summary["next_learning_rate"]],
            "losses": [entry["loss"] for entry in history],
            "model": state["model"],
            "optimizer": state["optimizer"],
            "scheduler": state["scheduler"],
            "progress": {**state["progress"], **summary["progress"]},
            "data": state["data"],
            "mse": [summary["mse"]],
            "rng": state["rng"],
            "next_draws": summary["next_draws"],
        }


def judge(folder: Path) -> dict[str, Any]:
    """Return what goes into `verification.json`, the commands aside.

    Args:
        folder: Holds the output directory of each scenario.

    Raises:
        RefusedError: A scenario's files can't be used.
    """
    found = {name: Scenario(folder / name) for name in SCENARIOS}
    resumed = compare_parts(found["continuous"], found["resumed"])
    negative = compare_parts(found["continuous"], found["negative"])
    checks = _check_ends(found)
    checks["fresh_processes"] = len({one.summary["pid"] for one in found.values()}) == len(found)
    not_restored = _not_restored(found["resumed"])
    left_out = _not_restored(found["negative"])
    checks["everything_restored"] = not not_restored
    checks["only_rng_left_out"] = bool(left_out) and all(p.startswith("rng/") for p in left_out)
    positive = all(part["agrees"] for part in resumed.values())
    # The weights must show it: draws that differ but change nothing would prove nothing.
    detected = not negative["model"]["agrees"] and negative["model"]["max_abs"] > ATOL
    return {
        "schema": SCHEMA,
        "all_checks_passed": positive and detected and all(checks.values()),
        "positive": positive,
        "negative_divergence_detected": detected,
        "tolerance": {"atol": ATOL, "rtol": RTOL},
        "checks": checks,
        "not_restored": not_restored,
        "diverged": [name for name, part in resumed.items() if not part["agrees"]],
        "negative_diverged": [name for name, part in negative.items() if not part["agrees"]],
        "comparison": {"resumed": resumed, "negative": negative},
        "mse": {name: one.summary["mse"] for name, one in found.items()},
        "weights_sha256": {name: one.summary["weights_sha256"] for name, one in found.items()},
        "next_learning_rate": {
            name: one.summary["next_learning_rate"] for name, one in found.items()
        },
        "versions": versions(),
        "identity": identity(),
        "limits": "CPU, float64, one thread: nothing is said about CUDA, AMP or several ranks",
    }


def compare_parts(a: Scenario, b: Scenario) -> dict[str, dict[str, Any]]:
    """Return part → its comparison as JSON."""
    parts_a, parts_b = a.parts(), b.parts()
    return {
        name: dist_ckpt.compare(parts_a[name], parts_b[name], atol=ATOL, rtol=RTOL).to_json()
        for name in parts_a
    }


def _not_restored(scenario: Scenario) -> list[str]:
    """Return the paths that a resumed process held otherwise than saved, right after restoring."""
    restored = scenario.summary["resumed"]["restored"]
    return [finding["path"] for finding in restored["findings"]]


def _check_ends(found: dict[str, Scenario]) -> dict[str, bool]:
    checks = {}
    for name, scenario in found.items():
        progress = scenario.summary["progress"]
        ends = (progress["step"], progress["cursor"]) == _ENDS[name]
        try:
            check_progress(scenario.state)
        except RefusedError:
            ends = False
        checks[f"{name}_ends_where_it_must"] = ends
        checks[f"{name}_uses_each_row_once_an_epoch"] = _uses_each_row_once(scenario)
    end = found["continuous"].summary["next_learning_rate"]
    checks["next_learning_rate_is_0.00375"] = end == _NEXT_LEARNING_RATE
    return checks


def _uses_each_row_once(scenario: Scenario) -> bool:
    rows = [row for entry in scenario.state["history"] for row in entry["rows"]]
    num_rows = scenario.summary["progress"]["rows"]
    epochs = [rows[start : start + num_rows] for start in range(0, len(rows), num_rows)]
    return all(len(set(epoch)) == len(epoch) for epoch in epochs)


def describe(verification: dict[str, Any]) -> str:
    """Return the outcome as lines for a person."""
    verdicts = ("all_checks_passed", "positive", "negative_divergence_detected")
    lines = [f"{key}: {json.dumps(verification[key])}" for key in verdicts]
    tolerance = verification["tolerance"]
    lines.append(f"tolerance: absolute {tolerance['atol']:g}, relative {tolerance['rtol']:g}")
    lines.append(f"{'largest difference':<20}{'resumed':>26}{'without RNG':>26}")
    both = verification["comparison"]
    for name, part in both["resumed"].items():
        cells = (_cell(part), _cell(both["negative"][name]))
        lines.append(f"  {name:<18}{cells[0]:>26}{cells[1]:>26}")
    if verification["diverged"]:
        lines.append(f"diverged: {', '.join(verification['diverged'])}")
    if verification["not_restored"]:
        lines.append(f"not restored: {', '.join(verification['not_restored'])}")
    if not verification["negative_divergence_detected"]:
        lines.append("the control without random state ended with the same weights")
    failed = [name for name, passed in verification["checks"].items() if not passed]
    if failed:
        lines.append(f"checks that failed: {', '.join(failed)}")
    return "\n".join(lines)


def _cell(part: dict[str, Any]) -> str:
    if part["max_abs"]:
        return f"{part['max_abs']:.17g}"
    return "0" if part["agrees"] else "differs"
