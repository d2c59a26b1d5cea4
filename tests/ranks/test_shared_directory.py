"""Ranks of several hosts need one directory: it is checked before anything is written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.ranks import RankContext, run_ranks


def open_run(ctx: RankContext, folder: str, names: list[str]) -> str:
    """Open the run directory as this rank sees it."""
    from dist_ckpt.comm import connect
    from dist_ckpt.errors import StorageError
    from dist_ckpt.service._attempt import open_attempt

    comm = connect(20.0)
    try:
        open_attempt(Path(folder) / names[ctx.rank] / "run", comm).close()
    except StorageError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the other ranks'
        return f"{type(error).__name__}: {error}"
    finally:
        comm.close()
    return "shared"


@pytest.mark.parametrize("other_has_a_run", [False, True])
def test_a_run_directory_that_not_all_ranks_share_is_refused_on_all_with_the_host(
    other_has_a_run: bool, tmp_path: Path
) -> None:
    """Two hosts, each with a local disk under the same path; told by a token that rank 0 wrote."""
    if other_has_a_run:  # an old run of its own, which isn't this one
        assert [r.value for r in run_ranks(1, open_run, str(tmp_path), ["b"])] == ["shared"]
    first, second = (r.value for r in run_ranks(2, open_run, str(tmp_path), ["a", "b"]))
    assert "isn't the directory that rank 0 sees on" in second
    assert "file system that all hosts share" in second
    assert first.startswith("RankFailedError: Rank 1 failed in looking for the run directory")
    assert (tmp_path / "b" / "run").exists() == other_has_a_run
    # Nothing is left locked or half-made: on a shared directory the same ranks begin.
    assert [r.value for r in run_ranks(2, open_run, str(tmp_path), ["a", "a"])] == ["shared"] * 2
