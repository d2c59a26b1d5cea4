"""What a script may rely on: `Checkpointer` in one process, from the outside."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dist_ckpt
from dist_ckpt.errors import (
    ForeignFileError,
    IdentityError,
    LockedError,
    MismatchError,
    NotFoundError,
    SettingError,
    UnsupportedValueError,
    UsageError,
)
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import History, read_history, read_journal, read_loss, read_samples
from dist_ckpt.storage import use_ops
from helpers.faulty_ops import RecordingOps
from helpers.run_dirs import spawn
from helpers.trainers import Job
from helpers.training import Options


class Net:
    """A model, its optimizer, and an update that needs nothing else."""

    def __init__(self, width: int = 3, lr: float = 0.1) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def update(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.rand(4, 2)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss

    def checkpointer(self, run: Path, **settings: Any) -> dist_ckpt.Checkpointer:
        settings = {"every": 4, "model": self.model, "optimizer": self.optimizer, **settings}
        return dist_ckpt.Checkpointer(run, **settings)

    def train(self, run: Path, until: int, **settings: Any) -> dist_ckpt.Checkpointer:
        with self.checkpointer(run, **settings) as ckpt:
            for _ in ckpt.steps(until):
                ckpt.record(loss=self.update())
        return ckpt

    def weights(self) -> list[Any]:
        return [p.tolist() for p in self.model.parameters()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "andrea"


def _steps(run: Path) -> list[int]:
    return GenerationStore(run).steps()


def _events(run: Path, event: str) -> list[dict[str, Any]]:
    return [item for item in read_journal(run) if item["event"] == event]


# The loop --------------------------------------------------------------------------------------


def test_steps_are_numbered_by_the_update_being_made_and_end_with_a_checkpoint(run: Path) -> None:
    net, seen = Net(), []
    with net.checkpointer(run) as ckpt:
        assert ckpt.resumed is None
        for step in ckpt.steps(until=6):
            seen.append((step, ckpt.step, ckpt.due))
            ckpt.record(loss=net.update(), lr=0.1)
        assert ckpt.step == 6
        assert ckpt.stopped is None
    assert seen == [(n, n - 1, n == 4) for n in range(1, 7)]
    assert _steps(run) == [4, 6]
    assert [step for step, _ in read_loss(run)] == list(range(1, 7))
    assert read_history(run).metrics[-1] == {"step": 6, "lr": 0.1}


def test_a_second_call_of_steps_goes_on(run: Path) -> None:
    net = Net()
    with net.checkpointer(run) as ckpt:
        for until in (2, 3):
            for _ in ckpt.steps(until):
                net.update()
    assert _steps(run) == [2, 3]


def test_a_run_that_has_come_to_its_end_yields_nothing_and_writes_nothing(run: Path) -> None:
    Net().train(run, 5)
    net = Net()
    before = sorted(run.rglob("*.shard"))
    with net.checkpointer(run) as ckpt:
        assert ckpt.resumed is not None
        assert ckpt.resumed.step == ckpt.step == 5
        assert list(ckpt.steps(5)) == []
        assert list(ckpt.steps(3)) == []
    assert sorted(run.rglob("*.shard")) == before


def test_random_state_is_restored_when_steps_is_first_advanced_though_nothing_is_yielded(
    run: Path,
) -> None:
    """Case 11: last of all, after everything that draws."""
    generator = np.random.default_rng(5)
    Net().train(run, 5, generators={"own": generator})
    expected = (torch.rand(1).item(), random.random(), np.random.random())  # noqa: NPY002
    expected_own = generator.random()
    net, other = Net(), np.random.default_rng(6)
    with net.checkpointer(run, generators={"own": other}) as ckpt:
        torch.rand(7)
        random.random()
        assert list(ckpt.steps(5)) == []
        found = (torch.rand(1).item(), random.random(), np.random.random())  # noqa: NPY002
    assert found == expected
    assert other.random() == expected_own


def test_random_state_is_restored_once(run: Path) -> None:
    Net().train(run, 5)
    net = Net()
    with net.checkpointer(run) as ckpt:
        assert list(ckpt.steps(5)) == []
        first = torch.rand(1).item()
        assert list(ckpt.steps(5)) == []
        assert torch.rand(1).item() != first


@pytest.mark.parametrize("how", ["break", "raise"])
def test_a_body_that_is_left_takes_no_checkpoint(how: str, run: Path) -> None:
    net = Net()

    def leave() -> None:
        with net.checkpointer(run) as ckpt:
            for step in ckpt.steps(20):
                net.update()
                if step == 6:
                    if how == "break":
                        break
                    raise KeyError("six")

    if how == "break":
        leave()
    else:
        with pytest.raises(KeyError, match="six"):
            leave()
    assert _steps(run) == [4]
    assert Net().train(run, 5).resumed is not None


def test_after_a_break_nothing_is_saved_under_a_number_that_may_be_wrong(run: Path) -> None:
    net = Net()
    with net.checkpointer(run) as ckpt:
        for step in ckpt.steps(20):
            net.update()
            if step == 6:
                break
        with pytest.raises(UsageError, match="body of step 6 was left half-way"):
            ckpt.save()
        with pytest.raises(UsageError, match="stop"):
            list(ckpt.steps(20))
    assert _steps(run) == [4]


def test_stop_ends_after_the_body_with_a_checkpoint_and_no_exit_status(run: Path) -> None:
    net = Net()
    with net.checkpointer(run, stop_exit_code=75) as ckpt:
        for step in ckpt.steps(20):
            net.update()
            if step == 6:
                ckpt.stop()
    assert ckpt.stopped == "stop"
    assert ckpt.step == 6
    assert _steps(run) == [4, 6]


def test_save_in_a_body_asks_and_outside_it_commits(run: Path) -> None:
    net = Net()
    with net.checkpointer(run, every=100) as ckpt:
        ckpt.save()
        assert _steps(run) == [0]
        for step in ckpt.steps(5):
            net.update()
            if step == 2:
                ckpt.save()
                ckpt.save()
                assert _steps(run) == [0]
        ckpt.save()
        assert _steps(run) == [0, 2, 5]
    assert [event["step"] for event in _events(run, "saved")] == [0, 2, 5]


def test_poll_tells_what_is_asked_for_and_takes_nothing_away(run: Path) -> None:
    net = Net()
    with net.checkpointer(run, every=100) as ckpt:
        for step in ckpt.steps(4):
            assert not ckpt.poll()
            if step == 2:
                ckpt.save()
                assert ckpt.poll()
                assert ckpt.poll()
            net.update()
    assert _steps(run) == [2, 4]


def test_between_two_steps_training_never_waits_for_the_disk(run: Path) -> None:
    """A sync may take a minute; who asked for a save, by a signal too, doesn't hold up the loop."""
    net = Net()
    with use_ops(RecordingOps()) as ops, net.checkpointer(run, every=4) as ckpt:
        assert isinstance(ops, RecordingOps)
        for step in ckpt.steps(12):
            if step == 1:
                begin = len(ops.calls)
            if step in (2, 7):
                os.kill(os.getpid(), signal.SIGUSR1)
            if step == 3:
                ckpt.save()
            ckpt.record(loss=net.update(), lr=0.1)
            if step == 11:
                calls = ops.calls[begin:]
        begin = len(ops.calls)
        for step in ckpt.steps(14):  # epoch by epoch
            ckpt.record(loss=net.update())
            if step == 13:
                calls += ops.calls[begin:]
    assert [event["step"] for event in _events(run, "signal")] == [2, 7]
    assert [event["step"] for event in _events(run, "saved")] == [2, 3, 4, 7, 8, 12, 14]
    syncs = [call for call in calls if call.op in ("fsync", "fdatasync")]
    assert syncs
    assert [call for call in syncs if call.thread == threading.main_thread().name] == []


def test_samples_and_losses_of_a_body_are_logged_before_its_generation_commits(run: Path) -> None:
    net = Net()
    with net.checkpointer(run, every=2) as ckpt:
        for step in ckpt.steps(4):
            ckpt.record(loss=net.update())
            if ckpt.due:
                ckpt.sample(f"text of {step}")
    losses = dict(read_loss(run))
    assert [(s["step"], s["text"], s["loss"]) for s in read_samples(run)] == [
        (step, f"text of {step}", losses[step]) for step in (2, 4)
    ]


def test_what_could_not_be_written_is_refused_where_it_is_given(run: Path) -> None:
    """Not at the boundary: the checkpoint that is due there would go with it."""
    net = Net()
    bad: list[tuple[Callable[[dist_ckpt.Checkpointer], None], str]] = [
        (lambda ckpt: ckpt.sample(b"bytes"), "bytes, not str"),  # type: ignore[arg-type]
        (lambda ckpt: ckpt.sample("text", loss="much"), "not a number"),
        (lambda ckpt: ckpt.sample("text", loss=torch.tensor(1j)), "not of a real number"),
        (lambda ckpt: ckpt.record(loss=torch.tensor(1j)), "not of a real number"),
        (lambda ckpt: ckpt.record(loss=torch.ones((), device="meta")), "holds no number"),
        (lambda ckpt: ckpt.record(loss=torch.ones(1).to_sparse()), "not a dense one"),
        (lambda ckpt: ckpt.record(loss=10**400), "larger than any float"),
        (lambda ckpt: ckpt.record(lr=np.ones(2)), "not a number"),
    ]
    with net.checkpointer(run, every=2) as ckpt:
        for step in ckpt.steps(2):
            ckpt.record(loss=net.update(), lr=np.float32(0.5))
            for call, told in bad:
                with pytest.raises(UsageError, match=told) as caught:
                    call(ckpt)
                assert caught.value.next_step
            if step == 2:
                ckpt.sample("text", loss=0.25)
    assert _steps(run) == [2]
    assert [step for step, _ in read_loss(run)] == [1, 2]
    assert [(s["step"], s["text"], s["loss"]) for s in read_samples(run)] == [(2, "text", 0.25)]
    assert [line["lr"] for line in read_history(run).metrics] == [0.5, 0.5]


@pytest.mark.parametrize("what", ["record", "sample", "due"])
def test_what_belongs_into_a_body_is_refused_outside(what: str, run: Path) -> None:
    calls: dict[str, Callable[[dist_ckpt.Checkpointer], Any]] = {
        "record": lambda ckpt: ckpt.record(loss=1.0),
        "sample": lambda ckpt: ckpt.sample("text"),
        "due": lambda ckpt: ckpt.due,
    }
    with Net().checkpointer(run) as ckpt, pytest.raises(UsageError, match="body of a step"):
        calls[what](ckpt)


def test_a_checkpointer_is_entered_once_and_used_inside_its_with(run: Path) -> None:
    ckpt = Net().checkpointer(run)
    with pytest.raises(UsageError, match="needs an entered Checkpointer"):
        ckpt.save()
    with ckpt, pytest.raises(UsageError):
        ckpt.__enter__()
    with pytest.raises(UsageError):
        ckpt.save()
    with pytest.raises(UsageError), ckpt:
        pass


# Resume ----------------------------------------------------------------------------------------


def test_going_back_sets_later_points_aside_and_goes_on_from_there(run: Path) -> None:
    Net().train(run, 12, keep_last=None)
    assert _steps(run) == [4, 8, 12]
    net = Net()
    torch.manual_seed(99)
    ckpt = net.train(run, 9, resume=4)
    assert ckpt.resumed is not None
    assert ckpt.resumed.step == 4
    assert _steps(run) == [4, 8, 9]
    aside = sorted(path.name for path in (run / "archive").rglob("step_*"))
    assert {"step_000008", "step_000012", "step_000012.bin"} <= set(aside)
    (rewound,) = _events(run, "rewound")
    assert rewound["set_aside"] == [8, 12]
    assert [step for step, _ in read_loss(run)] == list(range(1, 10))


def test_going_back_that_was_cut_off_is_ended_by_the_next_start(run: Path) -> None:
    Net().train(run, 12, keep_last=None)
    with History(run, run.name, 2) as history:  # all that a kill right after the mark leaves
        history.journal.append("rewind_started", step=4)
    ckpt = Net().train(run, 6, keep_last=None)
    assert ckpt.resumed is not None
    assert ckpt.resumed.step == 4
    assert _steps(run) == [4, 6]
    (rewound,) = _events(run, "rewound")
    assert rewound["set_aside"] == [8, 12]
    assert [step for step, _ in read_loss(run)] == list(range(1, 7))


def test_a_restart_by_torchrun_of_the_same_launch_does_not_go_back_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Net().train(run, 8)
    Net().train(run, 10, resume=4)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ckpt = Net().train(run, 12, resume=4)
    assert ckpt.resumed is not None
    assert ckpt.resumed.step == 10


def test_going_back_to_a_step_that_is_not_there_lists_those_that_are(run: Path) -> None:
    Net().train(run, 8)
    with pytest.raises(NotFoundError, match=r"step 5 to go back to\. There are: 4, 8"):
        Net().train(run, 12, resume=5)
    assert _steps(run) == [4, 8]


def test_resume_never_is_refused_on_a_run_that_has_generations(run: Path) -> None:
    Net().train(run, 4, resume="never")
    with pytest.raises(UsageError, match="has generations up to step 4"):
        Net().train(run, 8, resume="never")
    assert _steps(run) == [4]


def test_two_jobs_in_one_directory_the_second_names_the_first(tmp_path: Path) -> None:
    options = Options(
        run_dir=str(tmp_path / "run"), out=str(tmp_path / "out"), until=10_000, step_secs=0.01
    )
    with Job(options) as job:
        job.wait_for_step(2)
        with pytest.raises(LockedError) as caught, Net().checkpointer(tmp_path / "run"):
            pass
        assert str(job.pid()) in str(caught.value)
        job.wait_for_step(job.step() + 2)


def test_a_model_that_does_not_match_is_refused_by_name_and_nothing_changes(run: Path) -> None:
    Net(width=3).train(run, 4)
    net = Net(width=5)
    before = net.weights()
    with pytest.raises((MismatchError, IdentityError)) as caught, net.checkpointer(run):
        pass
    assert "0.weight" in str(caught.value)
    assert net.weights() == before
    assert _steps(run) == [4]
    assert _events(run, "skipped") == []


def test_another_learning_rate_is_refused_or_accepted_by_name_and_recorded(run: Path) -> None:
    """Case 19: never ignored."""
    Net(lr=0.1).train(run, 4, config={"lr": 0.1, "seed": 1})
    changed = {"lr": 0.02, "seed": 1}
    with pytest.raises(IdentityError, match=r"config\.lr"):
        Net(lr=0.02).train(run, 8, config=changed)
    Net(lr=0.02).train(run, 8, config=changed, accept=("config.lr",))
    assert "config.lr" in json.dumps(_events(run, "resumed")[-1]["accepted"])
    # It is the run's new identity.
    Net(lr=0.02).train(run, 9, config=changed)
    with pytest.raises(IdentityError, match=r"config\.lr"):
        Net().train(run, 10, config={"lr": 0.1, "seed": 1})


def test_another_optimizer_that_is_accepted_is_told_of_and_begins_anew(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dist_ckpt")
    Net(lr=0.1).train(run, 4)
    net = Net()
    net.optimizer = torch.optim.SGD(net.model.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(MismatchError, match=r"saved AdamW, here SGD.*accept=\('optimizer',\)"):
        net.train(run, 8)
    net.train(run, 8, accept=("optimizer",))
    said = caplog.text
    assert "accepted: optimizer: AdamW saved, SGD here" in said
    assert "optimizer begins anew, with the settings it was built with" in said
    assert net.optimizer.param_groups[0]["lr"] == 0.5
    assert all(set(state) == {"momentum_buffer"} for state in net.optimizer.state.values())
    (resumed,) = _events(run, "resumed")
    assert resumed["accepted"] == ["optimizer: AdamW saved, SGD here"]
    # It is the run's optimizer from now on.
    again = Net()
    again.optimizer = torch.optim.SGD(again.model.parameters(), lr=0.5, momentum=0.9)
    resumed_at = again.train(run, 9).resumed
    assert resumed_at is not None
    assert resumed_at.step == 8


def test_a_run_that_is_done_already_says_so_once(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dist_ckpt")
    Net().train(run, 4)
    net = Net()
    with net.checkpointer(run) as ckpt:
        for until in (2, 4, 5):
            for _ in ckpt.steps(until):
                net.update()
    assert caplog.text.count("nothing to train: 4 steps are done, until=2") == 1
    assert _steps(run)[-1] == 5


def test_a_change_is_accepted_by_the_environment_too(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Net().train(run, 4, config={"lr": 0.1})
    monkeypatch.setenv("DIST_CKPT_ACCEPT", "config.lr")
    Net().train(run, 8, config={"lr": 0.2})
    assert _steps(run)[-1] == 8


def test_a_scaler_left_out_or_added_is_refused_unless_accepted(run: Path) -> None:
    """Case 17: the scale must not jump back."""

    def scaler(scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale)

    Net().train(run, 4, scaler=scaler(256.0))
    fresh = scaler(65536.0)
    Net().train(run, 5, scaler=fresh)
    assert fresh.get_scale() == 256.0
    with pytest.raises(MismatchError, match="scaler"):
        Net().train(run, 8)
    Net().train(run, 8, accept=("scaler",))
    with pytest.raises(MismatchError, match="scaler"):
        Net().train(run, 9, scaler=scaler(1.0))


@pytest.mark.parametrize("name", ["step_000004.bin", "weights.safetensors"])
def test_a_file_of_weights_is_no_run_and_the_error_says_so(name: str, tmp_path: Path) -> None:
    """Case 20: only the weights were saved."""
    Net().train(tmp_path / "run", 4)
    path = tmp_path / name
    path.write_bytes((tmp_path / "run/step_000004.bin").read_bytes())
    net = Net()
    with pytest.raises(ForeignFileError, match="is a file, not a run directory") as caught:
        net.train(path, 5)
    assert name in str(caught.value)
    assert "no training can be resumed from it" in str(caught.value)
    assert path.is_file()


# What is kept ----------------------------------------------------------------------------------


class Counter:
    """A user's object with a state."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {"n": 0}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def test_further_objects_come_back_with_tensors_and_odd_keys(run: Path) -> None:
    kept = Counter()
    kept.state = {"ema": torch.arange(3.0), 7: (1, float("inf")), "deep": {"t": torch.eye(2)}}
    policy = Counter()
    policy.state = {"arms": [1.5, 2.5]}
    Net().train(run, 2, extra={"ema": kept}, policy=policy)
    found, found_policy = Counter(), Counter()
    Net().train(run, 3, extra={"ema": found}, policy=found_policy)
    assert torch.equal(found.state["ema"], torch.arange(3.0))
    assert found.state[7] == (1, float("inf"))
    assert torch.equal(found.state["deep"]["t"], torch.eye(2))
    assert found_policy.state == policy.state


def test_what_cannot_be_kept_is_refused_at_construction_with_its_path(run: Path) -> None:
    odd = Counter()
    odd.state = {"deep": [1, {"fn": len}]}
    with pytest.raises(UnsupportedValueError, match=r"deep.*fn"):
        Net().checkpointer(run, extra={"odd": odd})
    assert not run.exists()


def test_dicts_of_models_and_optimizers_come_back_and_lie_in_their_order(run: Path) -> None:
    def build() -> tuple[dict[str, torch.nn.Module], dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(2)
        models: dict[str, torch.nn.Module] = {
            "zed": torch.nn.Linear(2, 2),
            "abc": torch.nn.Linear(3, 1),
        }
        return models, {n: torch.optim.Adam(m.parameters()) for n, m in models.items()}

    def train(until: int) -> dict[str, torch.nn.Module]:
        models, optimizers = build()
        with dist_ckpt.Checkpointer(run, model=models, optimizer=optimizers) as ckpt:
            for _ in ckpt.steps(until):
                for name, model in models.items():
                    optimizers[name].zero_grad()
                    model(torch.ones(1, 2 if name == "zed" else 3)).sum().backward()
                    optimizers[name].step()
        return models

    first = train(3)
    again = train(3)
    for name in ("zed", "abc"):
        for ours, theirs in zip(first[name].parameters(), again[name].parameters(), strict=True):
            assert torch.equal(ours, theirs)
    flat = torch.cat([p.detach().reshape(-1) for m in first.values() for p in m.parameters()])
    assert dist_ckpt.read_bin(run / "step_000003.bin").weights.tobytes() == flat.numpy().tobytes()


def test_every_group_comes_back_whole_an_empty_one_too(run: Path) -> None:
    """Cases 40 and 18: groups keep their own rates and betas, under a scheduler built before."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(3)
        model = torch.nn.Linear(2, 2)
        groups = [
            {"params": [model.weight], "lr": 0.1, "betas": (0.8, 0.9)},
            {"params": [model.bias], "lr": 0.2, "weight_decay": 0.5},
            {"params": [], "lr": 0.3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(until: int) -> list[dict[str, Any]]:
        model, optimizer, scheduler = build()
        with dist_ckpt.Checkpointer(
            run, model=model, optimizer=optimizer, scheduler=scheduler
        ) as ckpt:
            for _ in ckpt.steps(until):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                scheduler.step()
        return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    assert train(5) == train(5)


def test_parameters_without_state_are_zeros_in_the_bin_and_stay_without(run: Path) -> None:
    net = Net()
    net.model[0].requires_grad_(False)
    net.train(run, 3)
    point = GenerationStore(run).manifest(3)
    assert sorted(point.canonical.stateless) == ["0.bias", "0.weight"]
    state = dist_ckpt.read_bin(run / "step_000003.bin")
    assert not state.m[:9].any()
    assert state.m[9:].any()
    again = Net()
    again.model[0].requires_grad_(False)
    again.train(run, 4)
    frozen = list(again.model[0].parameters())
    assert all(parameter not in again.optimizer.state for parameter in frozen)


# Settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": True},
        {"keep_every": 0},
        {"keep_bins": -1},
        {"every": 0},
        {"every": 2.0},
        {"stop_exit_code": 256},
        {"timeout_secs": 0},
        {"timeout_secs": 1e10},  # twice of it is more than a thread can be waited for
        {"timeout_secs": math.inf},
        {"timeout_secs": math.nan},
        {"deadline_secs": -1.0},
        {"deadline_secs": math.inf},
        {"signals": ("SIGTERM",)},
        {"signals": (signal.SIGHUP,)},
        {"signals": signal.SIGTERM},
        {"signals": ([],)},
        {"export": "sometimes"},
        {"sigusr1": "later"},
        {"reduce": "sum"},
        {"resume": "yes"},
        {"resume": -1},
        {"resume": True},
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_meant_is_refused_by_name(
    settings: dict[str, Any], run: Path
) -> None:
    """Case 54: a typo in retention must not remove everything."""
    (name,) = settings
    with pytest.raises(SettingError, match=name):
        Net().checkpointer(run, **settings)
    assert not run.exists()


def test_several_ranks_without_a_process_group_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"), Net().checkpointer(run):
        pass


def test_retention_keeps_the_last_the_multiples_and_as_many_bins_as_asked(run: Path) -> None:
    Net().train(run, 12, every=2, keep_last=2, keep_every=6, keep_bins=2)
    assert _steps(run) == [6, 10, 12]
    assert sorted(path.name for path in run.glob("*.bin")) == [
        "step_000010.bin",
        "step_000012.bin",
    ]


def test_more_bins_than_generations_keep_them_all(run: Path) -> None:
    Net().train(run, 4, every=2, keep_last=3, keep_bins=3)
    assert sorted(path.name for path in run.glob("*.bin")) == [
        "step_000002.bin",
        "step_000004.bin",
    ]


@pytest.fixture
def handlers() -> Iterator[None]:
    import signal

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in watched]
    yield
    assert [signal.getsignal(number) for number in watched] == before


def test_leaving_gives_handlers_threads_and_descriptors_back(run: Path, handlers: None) -> None:
    import threading

    Net().train(run, 1)
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for until in range(2, 6):
        Net().train(run, until)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds


def test_the_run_directory_of_the_environment_counts(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST_CKPT_RUN_DIR", str(tmp_path / "scenario"))
    ckpt = Net().train(run, 1)
    assert ckpt.run_dir == tmp_path / "scenario"
    assert _steps(tmp_path / "scenario") == [1]
    assert not run.exists()


def test_a_run_under_way_imports_nothing_of_ours(run: Path) -> None:
    """What is installed may be another version by then."""
    code = f"""
import sys
import torch
import dist_ckpt

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
ours = lambda: {{name for name in sys.modules if name.split(".")[0] == "dist_ckpt"}}
settings = dict(every=1, keep_last=1, export_copy=True)
with dist_ckpt.Checkpointer({str(run)!r}, model=model, optimizer=optimizer, **settings) as ckpt:
    for step in ckpt.steps(3):
        before = ours() if step == 1 else before
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
print(sorted(ours() - before), ckpt.step)
"""
    done = spawn(code=code)
    assert (done.stdout, done.returncode) == ("[] 3\n", 0), done.stderr
