"""A pivot of a live run, by the command, as a person does it: plain script, and the launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dist_ckpt
from dist_ckpt.history import read_journal, read_samples
from dist_ckpt.lifecycle import new_request, read_request, write_request
from helpers.pivoting import ROOT, Options, Training, command, wait_for

SETTINGS = {"floors": {"docs": 2.0}, "ceilings": {"code": 0.25}, "c": 1.0}

pytestmark = pytest.mark.timeout(300)  # starts of real processes, on busy cores

_PIVOT = [sys.executable, "-m", "dist_ckpt", "pivot"]


class Live:
    """The script, waiting in the body of step 19.

    Args:
        tmp_path: Where the run and the gate's files lie.
        launched: On two ranks, by the launcher.
    """

    def __init__(self, tmp_path: Path, *, launched: bool = False) -> None:
        self.run = tmp_path / "andrea"
        self.gate = tmp_path / "gate"
        self.gate.mkdir()
        self.policy = tmp_path / "polish.json"
        self.policy.write_text(json.dumps(SETTINGS), encoding="utf-8")
        options = Options(run_dir=str(self.run), gate=19, gate_dir=str(self.gate))
        launcher = ["-m", "dist_ckpt", "run", "--nproc-per-node", "2"] if launched else []
        self.log = (tmp_path / "log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, *launcher, *command(options)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        wait_for(self.gate / "reached")

    def ask(self) -> subprocess.Popen[bytes]:
        """Start the command, and let the body go on once the signal has arrived in it."""
        asking = subprocess.Popen(
            [*_PIVOT, str(self.run), "--policy", str(self.policy), "--timeout", "90", "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        wait_for(self.gate / "usr1")
        assert read_request(self.run) is not None  # written before the signal
        (self.gate / "go").touch()
        return asking

    def end(self) -> str:
        """Wait for the good end of the script; return what it said."""
        status = self.process.wait(90)
        self.log.seek(0)
        said = self.log.read().decode()
        assert status == 0, said
        return said

    def close(self) -> None:
        """Whatever a failed test left is ended."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self.log.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    started = Live(tmp_path)
    yield started
    started.close()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Live]:
    started = Live(tmp_path, launched=True)
    yield started
    started.close()


def _events(run: Path, *words: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run) if event["event"] in words]


def _check_story(run: Path, until: int) -> None:
    """The journal tells it in its order, and the history of losses has no gap."""
    words = ("pivot_asked", "signal", "attempt_stopped", "pivot", "resumed", "policy_fresh")
    story = [(event["event"], event["step"]) for event in _events(run, *words)]
    assert story == [
        ("pivot_asked", 19),
        ("signal", 20),
        ("attempt_stopped", 20),
        ("pivot", 20),
        ("resumed", 20),
        ("policy_fresh", 20),
    ]
    (saved,) = (event for event in _events(run, "saved") if event["step"] == 20)
    assert saved["reasons"] == ["cadence", "SIGUSR1", "pivot"]
    (pivot,) = _events(run, "pivot")
    assert (pivot["policy"], pivot["previous"]) == (SETTINGS, None)
    assert pivot["archive"] == "archive/pivot_000020"
    assert [step for step, _ in dist_ckpt.open_run(run).loss()] == list(range(1, until + 1))
    assert len(dist_ckpt.open_run(run).loss_raw()) == until  # no step was made twice
    archive = run / pivot["archive"]
    assert [sample["step"] for sample in json.loads((archive / "andrea.samples.json").read_text())]
    state = json.loads((archive / "andrea.state.json").read_text())
    assert sum(arm["pulls"] for arm in state["arms"].values()) == 20
    assert read_request(run) is None


def test_a_live_run_pivots_at_its_boundary_and_goes_on_when_it_is_started_again(live: Live) -> None:
    asking = live.ask()
    out, err = asking.communicate(timeout=90)
    assert asking.returncode == 0, err
    assert live.end().splitlines()[-1] == "pivot 20"
    answer = json.loads(out)
    assert (answer["step"], answer["restarted"]) == (20, False)
    assert "pivoting.py" in answer["command"]
    assert json.loads((live.run / "andrea.policy.json").read_text()) == SETTINGS
    assert not (live.run / "andrea.state.json").exists()
    before = dist_ckpt.read_bin(live.run / "step_000020.bin")
    weights, m, v = (np.array(part) for part in (before.weights, before.m, before.v))

    training = Training()
    with training.checkpointer(live.run) as ckpt:
        # Weights and moments are those of the boundary, the bandit knows nothing but its settings.
        found = [value for part in training.state()[:4] for value in part]
        assert found == weights.tolist()
        moments = training.state()[4:]
        assert [x for part in moments[::2] for x in part] == m.tolist()
        assert [x for part in moments[1::2] for x in part] == v.tolist()
        assert all(arm.pulls == 0 for arm in training.bandit.arms.values())
        assert training.bandit.settings.floors == {"docs": 2.0}
        for _ in ckpt.steps(until=45):
            _, loss = training.update()
            ckpt.record(loss=loss)
    _check_story(live.run, 45)
    arms = json.loads((live.run / "andrea.state.json").read_text())["arms"]
    assert sum(arm["pulls"] for arm in arms.values()) == 25
    assert arms["code"]["weight"] <= 0.25
    assert arms["docs"]["weight"] >= 2.0
    assert read_samples(live.run) == []  # none was recorded since


def test_the_launcher_starts_the_run_again_and_the_pivot_is_done_before_it_resumes(
    launched: Live,
) -> None:
    write_request(launched.run, new_request(SETTINGS))  # of a command that was killed behind it
    asking = launched.ask()
    out, err = asking.communicate(timeout=90)
    assert asking.returncode == 0, err
    answer = json.loads(out)
    assert (answer["step"], answer["restarted"]) == (20, True)
    assert answer["policy"] == SETTINGS
    said = launched.end()
    assert "the policy starts fresh: after a pivot" in said
    _check_story(launched.run, 40)
    (_, started) = _events(launched.run, "attempt_started")
    assert started["world_size"] == 2
    # It was the workers of the same launch that carried it out, under the second attempt.
    assert [event["attempt"] for event in _events(launched.run, "pivot", "resumed")] == [2, 2]
    assert [sample["step"] for sample in read_samples(launched.run)] == [40]


def test_a_pivot_whose_command_was_killed_after_the_signal_is_done_by_the_next_start(
    live: Live, tmp_path: Path
) -> None:
    write_request(live.run, new_request(SETTINGS))
    live.process.send_signal(signal.SIGUSR1)
    wait_for(live.gate / "usr1")
    (live.gate / "go").touch()
    assert live.end().splitlines()[-1] == "pivot 20"
    assert _events(live.run, "pivot") == []
    copy = tmp_path / "copy" / "andrea"
    shutil.copytree(live.run, copy)

    Training().train(live.run, 40)
    _check_story(live.run, 40)

    # Or by the command, run again; the next start then has nothing left to do.
    done = subprocess.run(
        [*_PIVOT, str(copy), "--policy", str(live.policy)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "policy now:    " + json.dumps(SETTINGS) in done.stdout
    Training().train(copy, 40)
    _check_story(copy, 40)


def test_a_run_that_is_killed_before_its_boundary_is_told_and_nothing_is_changed(
    live: Live,
) -> None:
    asking = subprocess.Popen(
        [*_PIVOT, str(live.run), "--timeout", "60"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    wait_for(live.gate / "usr1")
    live.process.kill()
    _, err = asking.communicate(timeout=60)
    assert asking.returncode == 2
    assert b"killed, without a word" in err
    assert read_request(live.run) is None
    assert _events(live.run, "pivot") == []
