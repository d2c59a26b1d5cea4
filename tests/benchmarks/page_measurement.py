"""How large the page of a long run is, how fast it is made, loads and zooms in a real Chromium.

    .venv/bin/python tests/benchmarks/page_measurement.py [DIR]

The run has 200,000 losses with noise in every bit and 2,000 generations, made once in DIR. Wall
clock beside the time that the page's own thread was on a processor: on a machine that is busy with
other things the second tells more.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[up]) for up in (1, 2)]

from dist_ckpt.generations import StoredGenerations
from helpers.browsing import Browser, Page
from helpers.run_dirs import call, ended_run, write_manifest

LOSSES, GENERATIONS, TIMES = 200_000, 2_000, 9


def make_run(folder: Path) -> Path:
    """Return the run, made if it isn't there."""
    run_dir = folder / "long"
    if run_dir.exists():
        return run_dir
    chance = random.Random(11)
    ended_run(folder, "long")
    point = StoredGenerations(run_dir).manifest(12)
    for number in range(1, GENERATIONS + 1):
        step = number * LOSSES // GENERATIONS
        directory = run_dir / "checkpoints" / f"step_{step:06d}"
        write_manifest(directory, point, step=step)
        for name in point.files:
            os.link(run_dir / "checkpoints" / "step_000012" / name, directory / name)
    losses = [
        [step, 2 + 3 * math.exp(-step / 3e4) + chance.gauss(0, 0.12)]
        for step in range(1, LOSSES + 1)
    ]
    (run_dir / "long.loss.json").write_text(json.dumps(losses), encoding="utf-8")
    return run_dir


def busy(page: Page) -> float:
    """Return for how many seconds the page's main thread has worked."""
    metrics = page.call("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def zoom(page: Page) -> tuple[float, float]:
    """Return the milliseconds from a click to the next frame, by the clock and of work."""
    before = busy(page)
    wall = page.eval(
        "(async () => { const began = performance.now();"
        "document.getElementById('zoom-in').click();"
        "await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));"
        "const took = performance.now() - began;"
        "document.getElementById('whole').click(); return took; })()"
    )
    page.eval("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
    return float(wall), 1000 * (busy(page) - before) / 2  # there and back


def main(folder: Path) -> None:
    """Print the measurements."""
    run_dir, path = make_run(folder), folder / "long.html"
    began = time.process_time()
    assert call("report", run_dir, "-o", path).status == 0
    made = time.process_time() - began
    figures: dict[str, list[float]] = {"load": [], "load work": [], "zoom": [], "zoom work": []}
    with Browser() as browser:
        for _ in range(TIMES):
            with browser.page() as page:
                page.call("Performance.enable", timeDomain="threadTicks")
                page.open(path.as_uri())
                figures["load"].append(
                    float(page.eval("Number(document.documentElement.dataset.ready)"))
                )
                figures["load work"].append(1000 * busy(page))
                wall, work = zoom(page)
                figures["zoom"].append(wall)
                figures["zoom work"].append(work)
                assert page.complaints() == []
    print(f"page: {path.stat().st_size:,} bytes, made in {made:.2f} s of processor time")
    for name, values in figures.items():
        print(f"{name}: median {statistics.median(values):.0f} ms, best {min(values):.0f} ms")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))
