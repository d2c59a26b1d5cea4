"""A run begun from a .bin alone, as `Checkpointer` does it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dist_ckpt
from dist_ckpt.errors import (
    CorruptFileError,
    MismatchError,
    NotFoundError,
    NoUsableGenerationError,
    SaveFailedError,
    UsageError,
)
from dist_ckpt.generations import GenerationStore
from helpers.boxes import in_memory
from helpers.generating import change_byte
from helpers.import_script import Small, train
from helpers.ranks import RankContext, run_ranks

BEGAN, ENDED = 6, 9


@functools.cache
def _source() -> Path:
    """A run of nine steps with a .bin of the sixth."""
    run = Path(tempfile.mkdtemp(prefix="import-")) / "source"
    train(str(run), 1, BEGAN)
    train(str(run), 1, ENDED)
    return run


@pytest.fixture(scope="module")
def source() -> Path:
    return _source()


@pytest.fixture
def given(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The .bin of step 6, which is to be imported."""
    path = source / f"step_{BEGAN:06d}.bin"
    monkeypatch.setenv("DIST_CKPT_IMPORT", str(path))
    return path


def named(state: dist_ckpt.CanonicalState) -> dict[str, Any]:
    return {"weights": state.weights, "m": state.m, "v": state.v}


def test_the_continuation_is_bit_equal_to_the_run_that_never_stopped(
    tmp_path: Path, source: Path, given: Path
) -> None:
    """Requirement A5: weights, m and v alone; the data are given by the step here."""
    found = train(str(tmp_path / "new"), 99, ENDED)
    assert found["began"] == BEGAN
    for name in ("step_000006.bin", "step_000009.bin"):
        assert (tmp_path / "new" / name).read_bytes() == (source / name).read_bytes()
    # What was never used has no state, here as there.
    assert found["states"].count([]) == 2


def test_beyond_the_steps_that_a_bin_can_hold_there_is_none_and_saves_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    last, zeros = 2**31 - 1, np.zeros(6, np.float32)
    dist_ckpt.write_bin(tmp_path / "late.bin", last - 1, zeros, zeros, zeros)
    monkeypatch.setenv("DIST_CKPT_IMPORT", str(tmp_path / "late.bin"))
    run = tmp_path / "run"

    def go_on(until: int) -> list[str]:
        caplog.clear()
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        with dist_ckpt.Checkpointer(
            run, model=model, optimizer=optimizer, every=1, keep_last=9
        ) as ckpt:
            for _ in ckpt.steps(until=until):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
        return caplog.messages

    for until, told in ((last + 2, last + 1), (last + 4, last + 3)):
        said = go_on(until)
        why = "run: makes no step_N.bin: steps above 2147483647 don't fit its int32"
        assert said.count(why) == 1
        assert f"run: step {told} saved (cadence)" in said
        assert not [text for text in said if "fail" in text]
        monkeypatch.delenv("DIST_CKPT_IMPORT", raising=False)
    steps = [last + more for more in (-1, 0, 1, 2, 3, 4)]
    assert GenerationStore(run).steps() == steps
    assert sorted(path.name for path in run.glob("*.bin")) == [f"step_{s}.bin" for s in steps[:2]]


def test_what_was_imported_and_what_wasnt_is_said_journalled_and_in_resumed(
    tmp_path: Path, given: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 16: loading of weights only isn't taken for more; A5: data order aside."""
    torch.manual_seed(5)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches = dist_ckpt.ResumableLoader(torch.arange(9), batch_size=3)
    run = tmp_path / "new"
    with dist_ckpt.Checkpointer(
        run, model=model, optimizer=optimizer, scheduler=scheduler, data=batches
    ) as ckpt:
        assert ckpt.resumed is not None
        assert (ckpt.resumed.step, ckpt.resumed.imported) == (BEGAN, str(given))
        assert ckpt.resumed.point.reasons == ("import",)
        assert ckpt.resumed.point.step == BEGAN
        notes = ckpt.resumed.notes
    assert any("place in the data" in note for note in notes)
    assert any("scheduler" in note and "data" in note for note in notes)
    assert any("unused.weight" in note for note in notes)
    event = next(e for e in dist_ckpt.open_run(run).journal() if e["event"] == "imported")
    assert event["step"] == BEGAN
    assert event["file"] == str(given)
    assert event["notes"] == list(notes)
    assert event["num_params"] == sum(p.numel() for p in model.parameters())
    assert all(note in caplog.text for note in notes)  # loud enough without any set-up
    assert scheduler.last_epoch == 0
    generation = dist_ckpt.open_run(run).latest()
    assert generation is not None
    assert generation.manifest.parent is None


def test_the_second_start_is_a_plain_resume(
    tmp_path: Path, given: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(str(tmp_path / "new"), 99, BEGAN)
    monkeypatch.delenv("DIST_CKPT_IMPORT")
    found = train(str(tmp_path / "new"), 98, ENDED)
    assert found["resumed"].imported is None
    assert (tmp_path / "new" / "step_000009.bin").read_bytes() == (
        source / "step_000009.bin"
    ).read_bytes()


def test_a_run_that_has_generations_is_refused_but_a_restart_of_the_launch_goes_on(
    tmp_path: Path, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "new"
    train(str(run), 99, BEGAN + 1)
    with pytest.raises(UsageError, match="has generations up to step 7"):
        train(str(run), 99, ENDED)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(str(run), 99, ENDED)["began"] == BEGAN + 1


def test_another_number_of_parameters_is_refused_with_both_and_where_to_look(
    tmp_path: Path, given: Path
) -> None:
    with pytest.raises(MismatchError, match="holds 71 parameters, the model has 90") as caught:
        train(str(tmp_path / "new"), 99, ENDED, width=6)
    assert "vocabulary" in caught.value.next_step
    assert (caught.value.expected, caught.value.found) == (71, 90)
    assert GenerationStore(tmp_path / "new").steps() == []


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_an_optimizer_that_isnt_adams_is_refused_and_nothing_has_changed(
    tmp_path: Path, given: Path, optimizer: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(MismatchError, match="Adam's first and second moment"):
        train(str(tmp_path / "new"), 99, ENDED, optimizer=optimizer, options=options)


def test_moments_of_a_parameter_that_nobody_updates_are_refused(
    tmp_path: Path, given: Path
) -> None:
    model = Small()
    model.middle.weight.requires_grad_(False)
    some = [p for p in model.parameters() if p.requires_grad]
    ckpt = dist_ckpt.Checkpointer(tmp_path / "new", model=model, optimizer=torch.optim.Adam(some))
    with pytest.raises(MismatchError, match=r"moments of 'middle\.weight'"):
        ckpt.__enter__()


def test_second_moments_that_adam_cant_have_are_refused(
    tmp_path: Path, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = dist_ckpt.read_bin(given)
    path = tmp_path / "swapped.bin"
    dist_ckpt.write_bin(path, state.step, state.weights, state.v, state.m)
    monkeypatch.setenv("DIST_CKPT_IMPORT", str(path))
    with pytest.raises(CorruptFileError, match="which Adam's never are"):
        train(str(tmp_path / "new"), 99, ENDED)


def test_a_file_that_is_missing_or_short_is_refused(
    tmp_path: Path, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.bin"
    monkeypatch.setenv("DIST_CKPT_IMPORT", str(path))
    with pytest.raises(NotFoundError):
        train(str(tmp_path / "new"), 99, ENDED)
    path.write_bytes(given.read_bytes()[:-4])
    with pytest.raises(CorruptFileError, match="calls for"):
        train(str(tmp_path / "new"), 99, ENDED)


def test_a_model_of_another_dtype_takes_what_it_can_hold_and_says_if_that_was_rounded(
    tmp_path: Path, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train(str(tmp_path / "half"), 99, BEGAN, dtype=torch.bfloat16)
    assert any("rounded to this model's dtype" in note for note in found["resumed"].notes)
    exact = tmp_path / "half" / "step_000006.bin"
    monkeypatch.setenv("DIST_CKPT_IMPORT", str(exact))
    found = train(str(tmp_path / "again"), 99, BEGAN, dtype=torch.bfloat16)
    assert not any("rounded" in note for note in found["resumed"].notes)
    one, other = dist_ckpt.read_bin(exact), dist_ckpt.read_bin(tmp_path / "again" / exact.name)
    for name, array in named(one).items():
        assert np.array_equal(array, named(other)[name])
    # Wider than the file: float64 holds all of it, and has no .bin of its own.
    found = train(str(tmp_path / "wide"), 99, BEGAN, dtype=torch.float64)
    assert not any("rounded" in note for note in found["resumed"].notes)
    weights = torch.cat([p.detach().flatten() for p in found["model"].parameters()])
    assert torch.equal(weights.float(), torch.from_numpy(one.weights.copy()))


def test_an_import_of_step_0_begins_without_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.cat([p.detach().flatten() for p in Small().parameters()]).numpy()
    path = tmp_path / "zero.bin"
    dist_ckpt.write_bin(path, 0, weights, 0 * weights, 0 * weights)
    monkeypatch.setenv("DIST_CKPT_IMPORT", str(path))
    found = train(str(tmp_path / "new"), 99, 0)
    assert found["states"] == [[]] * 5
    assert GenerationStore(tmp_path / "new").steps() == [0]


def test_a_first_generation_that_cant_be_saved_ends_it(
    tmp_path: Path, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SaveFailedError, match="bytes left"):
        train(str(tmp_path / "new"), 99, ENDED, reserve_bytes=10**18)
    assert GenerationStore(tmp_path / "new").steps() == []
    assert train(str(tmp_path / "new"), 99, BEGAN)["began"] == BEGAN


def test_where_no_generation_is_usable_the_error_names_a_whole_bin_and_the_command(
    tmp_path: Path,
) -> None:
    with in_memory() as home:
        run = home / "lost"
        train(str(run), 1, 2)
        train(str(run), 1, 3)
        for step in (2, 3):
            change_byte(run / f"checkpoints/step_{step:06d}/rank_00000.state", -20)
        with pytest.raises(NoUsableGenerationError) as caught:
            train(str(run), 1, 4)
        assert f"dist-ckpt import {run}/step_000003.bin NEW_RUN -- COMMAND" in str(caught.value)
        # The newest that is whole: a link to a damaged shard isn't.
        change_byte(run / "step_000003.bin", 50)
        with pytest.raises(NoUsableGenerationError, match=r"import .*/step_000002\.bin NEW_RUN"):
            train(str(run), 1, 4)
        change_byte(run / "step_000002.bin", 50)
        with pytest.raises(NoUsableGenerationError, match="Restore a copy"):
            train(str(run), 1, 4)


def body_import(_ctx: RankContext, run: str, until: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = train(run, 99, until)
    return {"began": found["began"], "imported": found["resumed"].imported}


def body_train(_ctx: RankContext, run: str) -> int:
    torch.set_num_threads(1)
    train(run, 1, BEGAN)
    return int(train(run, 1, ENDED)["began"])


def test_two_ranks_take_over_a_bin_and_go_on_bit_equal(tmp_path: Path) -> None:
    began = run_ranks(2, body_train, str(tmp_path / "source"))
    assert [result.returncode for result in began] == [0, 0], began
    path = tmp_path / "source" / "step_000006.bin"
    results = run_ranks(
        2, body_import, str(tmp_path / "new"), ENDED, env={"DIST_CKPT_IMPORT": str(path)}
    )
    assert [result.returncode for result in results] == [0, 0], results
    for result in results:
        assert result.value == {"began": BEGAN, "imported": str(path)}
    for name in ("step_000006.bin", "step_000009.bin"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_a_bin_that_doesnt_fit_ends_both_ranks_with_the_numbers(tmp_path: Path) -> None:
    """Case 39."""
    path = tmp_path / "other.bin"
    flat = np.zeros(5, np.float32)
    dist_ckpt.write_bin(path, 3, flat, flat, flat)
    results = run_ranks(
        2, body_import, str(tmp_path / "new"), ENDED, env={"DIST_CKPT_IMPORT": str(path)}
    )
    for result in results:
        assert result.returncode != 0
        assert "holds 5 parameters, the model has 71" in result.stderr
