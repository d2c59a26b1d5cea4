"""Nothing is passed over in silence: words, losses, late signals, long names, other batch sizes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt.errors import DistCkptError, IdentityError, SettingError, tidy
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal, read_loss
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps


def _train(run: Path, until: int, **settings: Any) -> dist_ckpt.Checkpointer:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"every": 2, "model": model, "optimizer": optimizer, **settings}
    body = settings.pop("body", lambda _ckpt, _step: None)
    after = settings.pop("after", lambda: None)
    with dist_ckpt.Checkpointer(run, **settings) as ckpt:
        for step in ckpt.steps(until):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 2)).square().mean()
            loss.backward()
            optimizer.step()
            ckpt.record(loss=loss)
            body(ckpt, step)
        after()
    return ckpt


def _events(run: Path, event: str) -> list[dict[str, Any]]:
    return [item for item in read_journal(run) if item["event"] == event]


# --------------------------------------------------------------------------------- words of accept


def test_a_slip_in_accept_is_told_with_the_nearest_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    _train(run, 2, config={"lr": 0.1})
    with pytest.raises(IdentityError, match=r"config\.lr"):
        _train(run, 4, config={"lr": 0.2}, accept=("confg.lr",))
    assert "accept='confg.lr' names nothing that could differ here. Was 'config.lr' meant?" in (
        caplog.text
    )
    caplog.clear()
    monkeypatch.setenv("DIST_CKPT_ACCEPT", "config.lr,structrue")
    _train(run, 4, config={"lr": 0.2})
    assert "Was 'structure' meant?" in caplog.text
    assert "accept='config.lr' names nothing" not in caplog.text


def test_a_negative_control_that_would_leave_nothing_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(tmp_path / "run", 2)
    monkeypatch.setenv("DIST_CKPT_OMIT_RESTORE", "optimiser")
    with pytest.raises(SettingError, match="'optimiser' isn't one of rng, data, optimizer"):
        _train(tmp_path / "run", 4)


def test_another_global_batch_size_is_refused_until_it_is_accepted(tmp_path: Path) -> None:
    def loader(size: int) -> dist_ckpt.ResumableLoader:
        return dist_ckpt.ResumableLoader(torch.arange(24.0), batch_size=size, seed=1)

    run = tmp_path / "run"
    _train(run, 2, data=loader(4))
    with pytest.raises(IdentityError, match=r"data\.batch_size: 4 saved, 6 now"):
        _train(run, 4, data=loader(6))
    _train(run, 4, data=loader(6), accept=("data.batch_size",))
    assert _train(run, 6, data=loader(6)).step == 6


# ------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("how", ["cut", "removed", "emptied"])
def test_losses_that_are_gone_are_said_at_the_resume_and_journalled(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    _train(run, 6)
    path = run / "run.loss.json"
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:60] if how == "cut" else b"")
    _train(run, 8)
    (event,) = _events(run, "losses_missing")
    left = event["found"]
    assert (event["step"], event["logged"]) == (6, 6)
    assert left == (0 if how != "cut" else len(read_loss(run)) - 2)
    assert f"{6 - left} of the 6 losses up to step 6 are missing" in caplog.text
    assert [step for step, _ in read_loss(run)][-2:] == [7, 8]
    caplog.clear()
    _train(run, 10)  # what was saved since knows what there is
    assert "missing" not in caplog.text


def test_a_bad_bit_in_the_loss_file_costs_one_loss_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    _train(run, 8)
    path = run / "run.loss.json"
    data = path.read_bytes()
    bad = data.replace(b"\n[3, 0", b"\n[3, p")
    assert bad != data
    path.write_bytes(bad)
    _train(run, 10)
    assert [step for step, _ in read_loss(run)] == [1, 2, *range(4, 11)]
    assert "run.loss.json was damaged: " in caplog.text
    assert "put back a copy of the file while the run is stopped" in caplog.text
    assert "1 of the 8 losses up to step 8 are missing" in caplog.text


def test_losses_of_a_whole_file_are_never_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    for until in (4, 7, 7, 9):
        _train(run, until, keep_last=None)
    _train(run, 10, keep_last=None, resume=4)
    _train(run, 12, keep_last=None)
    (run / "run.journal.jsonl").unlink()  # a copy of the generations alone knows no losses
    (run / "run.loss.json").unlink()
    _train(run, 13, keep_last=None)
    assert _events(run, "losses_missing") == []
    assert "missing" not in caplog.text


# ------------------------------------------------------------------------------------------ signals


def test_a_stop_that_comes_while_leaving_is_told_by_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ckpt = _train(run, 2, after=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert ckpt.stopped == "SIGTERM"
    assert GenerationStore(run).steps() == [2]
    assert [event["reason"] for event in _events(run, "attempt_stopped")] == ["SIGTERM"]
    with pytest.raises(SystemExit) as left:
        _train(run, 3, after=lambda: os.kill(os.getpid(), signal.SIGTERM), stop_exit_code=75)
    assert left.value.code == 75


def test_a_stop_during_the_last_read_back_is_told_too(tmp_path: Path) -> None:
    run = tmp_path / "run"

    class Stopping(FaultyOps):
        """Sends SIGTERM when the last generation is read back: its boundary is past."""

        def preadv(self, *args: Any) -> int:
            if not self.sent and (run / "checkpoints/step_000002").exists():
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)
            return super().preadv(*args)

        sent = False

    with use_ops(Stopping(Fault("none"))):
        assert _train(run, 2).stopped == "SIGTERM"
    assert GenerationStore(run).verified_at(2) is not None


SCRIPT = """
import os, signal, sys
import torch, dist_ckpt
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
with dist_ckpt.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, every=2) as ckpt:
    for step in ckpt.steps(2):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_stop_after_the_with_is_the_scripts_own(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    assert subprocess.run(command, env=env, check=False, timeout=60).returncode == -signal.SIGTERM


# ------------------------------------------------------------------------------------------- export


def test_a_signal_at_a_step_that_is_saved_already_makes_its_bin(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def body(ckpt: dist_ckpt.Checkpointer, step: int) -> None:
        if step == 1:
            ckpt.save()

    _train(run, 1, export="signal", body=body)
    store = GenerationStore(run)
    assert not store.bin_path(1).exists()
    settings: dict[str, Any] = {"export": "signal", "signals": (signal.SIGTERM,)}
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with dist_ckpt.Checkpointer(run, model=model, optimizer=optimizer, **settings) as ckpt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert list(ckpt.steps(9)) == []
    assert ckpt.stopped == "SIGTERM"
    assert store.bin_path(1).exists()
    assert store.bin_path(1).with_name("step_000001.bin.sha256").exists()
    # Were it not for lack of time, or a fault: the next start knows that a signal was answered.
    store.drop_bin(1)
    _train(run, 1, export="signal")
    assert store.bin_path(1).exists()


# ------------------------------------------------------------------------ names, modes, the device


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_everything_in_a_run_directory_is_private_whatever_the_umask(
    open_umask: None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    _train(run, 6, keep_last=2, export_copy=True, body=lambda c, step: c.sample(f"at {step}"))
    GenerationStore(run).set_aside(4, "faulty_000004")
    _train(run, 7, keep_last=2)
    found = [run, *run.rglob("*")]
    assert len(found) > 15
    for path in found:
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize("length", [255, 240])
def test_a_name_too_long_for_the_runs_files_is_refused_before_anything_is_made(
    length: int, tmp_path: Path
) -> None:
    run = tmp_path / ("n" * length)
    with pytest.raises(SettingError, match="takes 220 bytes"):
        _train(run, 2)
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_that_is_taken_works_to_the_end(tmp_path: Path) -> None:
    run = tmp_path / ("n" * 220)
    _train(run, 3)
    assert GenerationStore(run).steps() == [2, 3]


def test_a_path_too_long_for_what_lies_below_is_refused(tmp_path: Path) -> None:
    run = tmp_path
    while len(str(run)) < 3990:
        run /= "d" * min(200, 3990 - len(str(run)))
    with pytest.raises(SettingError, match="too long"):
        _train(run, 2)
    assert list(tmp_path.iterdir()) == []


def test_reading_back_takes_manifest_and_index_from_the_device(tmp_path: Path) -> None:
    with use_ops(RecordingOps()) as ops:
        _train(tmp_path / "run", 2)
    assert isinstance(ops, RecordingOps)
    for name in ("resume_point.json", ".snapshot_metadata"):
        path = f"*/step_000002/{name}"
        assert ops.of("fadvise_dontneed", path), name
        assert [call.args for call in ops.of("set_direct", path)][:1] == [(True,)], name


# --------------------------------------------------------------------------------------- sentences


def test_texts_put_into_one_another_keep_one_full_stop_and_one_next_step() -> None:
    inner = DistCkptError("The disk is full.", next_step="Make room.")
    outer = DistCkptError(f"Step 8 failed: {inner}.", next_step="Make room.")
    assert str(outer) == "Step 8 failed: The disk is full. Make room."
    assert str(DistCkptError("No stop here", next_step="Go on.")) == "No stop here. Go on."
    assert tidy("see ../up, a range 1..3 and so on...") == "see ../up, a range 1..3 and so on..."
    assert tidy("one.. two.; three..") == "one. two.; three."


def test_a_failed_save_says_each_thing_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with use_ops(FaultyOps(Fault("pwrite", "*.shard", error="ENOSPC"))):
        _train(tmp_path / "run", 4)
    (said,) = [r.getMessage() for r in caplog.records if "was not saved" in r.getMessage()]
    assert ".." not in said.replace(str(tmp_path), "")
    for sentence in ("Free some space", "Earlier generations are untouched", "[ENOSPC]"):
        assert said.count(sentence) == 1
