"""What all tests share: one thread a process. Markers, timeouts and warnings: pyproject.toml.

One thread, for the processes that tests start too: two cores are shared by many ranks, and a sum
over several threads may differ in its last bit from a sum over one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch: OpenMP reads it once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

# A `torch.compile` or a matplotlib of some test must not write into the user's home.
os.environ.setdefault("MPLBACKEND", "Agg")

# Settings of the caller's shell that would change what is tested.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("DIST_CKPT_")]:
    if not name.startswith("DIST_CKPT_TEST_"):  # seeds and records, meant for the tests
        del os.environ[name]


_soak = os.environ.get("DIST_CKPT_TEST_MINUTES")
_order = os.environ.get("DIST_CKPT_TEST_ORDER")
_ends = time.monotonic() + 60 * float(_soak) if _soak else None
if _soak and float(_soak) < 1:
    raise pytest.UsageError(f"MINUTES={_soak}: give the soak a minute or more.")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory: thousands of small trees are made there, and inodes aren't reused."""
    from helpers.memory import in_memory

    with in_memory(tmp_path) as folder:
        yield folder


def pytest_report_header() -> list[str]:
    return [] if _ends is None else [f"soak: {_soak} minutes, order {_order}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A soak of so many minutes doesn't come to all tests: each one in another order."""
    if _ends is not None and _order:
        random.Random(_order).shuffle(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _ends is not None and time.monotonic() > _ends:
        pytest.skip(f"the soak's {_soak} minutes are over before {item.name}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many states of power cuts were tried: what passes is else not heard of."""
    told = [
        value
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, [])
        for name, value in getattr(report, "user_properties", ())
        if name == "power_cuts"
    ]
    if not told:
        return
    states, faults = (sum(one[k] for one in told) for k in (0, 1))
    outcome = f"{faults:,} or more NOT recovered" if faults else "all recovered"
    seeds = ", ".join(sorted({str(seed) for _, _, seed, _ in told}))
    terminalreporter.write_sep(
        "-", f"power cuts: {states:,} states tried, {outcome} (seed {seeds})"
    )
    for number, _, _, text in sorted(told, key=lambda one: one[3]):
        terminalreporter.write_line(f"{number:>7,}  {text}")
