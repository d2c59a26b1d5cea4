"""Counts and commands that a person reads."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from dist_ckpt import open_run
from dist_ckpt.errors import NotFoundError
from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume import advise_import
from dist_ckpt.wording import counted, dist_ckpt_command
from helpers.run_dirs import call, ended_run


def test_one_is_told_in_the_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(1, "loss", "losses") == "1 loss"
    assert counted(20_000, "loss", "losses") == "20,000 losses"


@pytest.mark.parametrize("path", ["runs/first", "my runs/it's $HOME", "-o", "a;b&c", "ünï*"])
def test_a_shell_takes_a_command_with_any_path_as_it_is_meant(path: str) -> None:
    command = dist_ckpt_command("fork", Path(path) / "step_000004", "NEW")
    script = f"set -f; set -- {command}; printf '%s\\n' \"$@\""
    words = subprocess.run(["/bin/sh", "-c", script], text=True, check=True, capture_output=True)
    assert words.stdout.splitlines() == ["dist-ckpt", "fork", f"{path}/step_000004", "NEW"]
    assert dist_ckpt_command("ls", "runs/first") == "dist-ckpt ls runs/first"


def test_each_command_that_an_error_suggests_can_be_pasted_where_a_path_has_a_space(
    tmp_path: Path,
) -> None:
    run = ended_run(tmp_path, "my run")
    told = call("rewind", run).err
    assert f"Write {shlex.quote(f'{run}@N')}; `dist-ckpt ls {shlex.quote(str(run))}`" in told
    with pytest.raises(NotFoundError, match="`dist-ckpt show '") as caught:
        open_run(run).generation(4).tensor("zzz")
    assert str(run) in shlex.split(caught.value.next_step.split("`")[1])[2]
    advice = advise_import(GenerationStore(run))
    assert advice is not None
    assert f"`dist-ckpt import '{run / 'step_000012.bin'}' NEW_RUN -- COMMAND`" in advice
    assert call("rewind", f"{run}@4").status == 0
    (run / "checkpoints/step_000008").mkdir()
    told = call("undelete", run, "rewind_to_000004/step_000008").err
    assert f"`dist-ckpt fork '{run}/archive/rewind_to_000004/step_000008' NEW`" in told


def test_one_generation_is_told_in_the_singular(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    assert call("prune", run, "--keep-last", "1").status == 0
    assert "1 generation, 1 .bin" in call("verify", run).out
    assert "pinned: none" in call("unpin", run).out
    assert call("pin", run).status == 0
    assert "step 12 is no longer pinned; pinned: none" in call("unpin", run).out


def test_unpin_of_what_is_not_pinned_says_what_is(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    assert call("pin", f"{run}@4").status == 0
    assert "step 12 wasn't pinned; pinned: 4" in call("unpin", run).out
    assert call("unpin", run, "--json").json["pinned_steps"] == [4]
