"""The benchmark: what it counts, whom it believes, what it says; sizes here are toys."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt import bench
from dist_ckpt.bench import _attempts, _plan, _ranks
from dist_ckpt.bench._answer import BenchAnswer
from dist_ckpt.bench._plan import Case, Options, decode_order, encode_order
from dist_ckpt.bench._scale import measure_scale
from dist_ckpt.bench._time import choose_peers, too_slow
from dist_ckpt.cli import main
from dist_ckpt.cli._sizes import parse_size
from dist_ckpt.errors import IncompleteError, SettingError
from helpers.ranks import RankContext, run_ranks
from helpers.run_dirs import call

SMALL = 1 << 20


def fight(ctx: RankContext, folder: str) -> Any:
    """Measure on these ranks, beside a peer whose copies are torn and one that fails."""
    import torch

    from dist_ckpt.bench import _peers, _rounds

    class Torn(_peers._TorchSave):
        name = "torn"

        def save(self, number: int) -> Any:
            save = super().save
            return lambda: save(number)  # copies once training has gone on

    class Failing(_peers._TorchSave):
        name = "failing"

        def save(self, number: int) -> Any:
            if number == 1 and ctx.rank == 1:
                raise ValueError("no more")
            return super().save(number)

    torch.set_num_threads(1)
    peers = {made.name: made for made in (_peers._TorchSave, Torn, Failing)}
    _rounds.PEERS = peers  # type: ignore[attr-defined, assignment]
    case = Case("two", "two ranks", "mixed", world_size=2, num_bytes=SMALL, secs=60)
    told: list[str] = []

    def tell(on_turn: str, found: dict[str, Any], *, is_all: bool) -> None:
        told.append(on_turn)
        assert json.loads(json.dumps(found))["notes"] == []
        # enters, saves twice, loads if it could save, leaves
        assert is_all == (told.count(on_turn) > (3 if on_turn == "failing" else 4))

    return _rounds.measure_case(case, Options(repeats=1), Path(folder), tell)


def test_two_ranks_are_measured_in_turn_and_torn_copies_are_told(tmp_path: Path) -> None:
    results = run_ranks(2, fight, str(tmp_path), timeout=110)
    found = results[0].value
    ours, plain, torn, failing = found["contenders"].values()
    assert ours["correct"] == "yes"
    assert ours["error"] is None
    # load_state_dict gives the moments the parameters' dtype, which is what its user gets.
    assert "float32 became bfloat16" in plain["correct"]
    assert torn["correct"].startswith("no: ")
    assert "no more" in results[1].value["contenders"]["failing"]["error"]
    assert failing["error"] == "it failed on another rank"
    for figure in ("blocked", "durable", "verified", "exported", "warm", "cold", "verify"):
        assert len(ours["samples"][figure]) == 1
        assert ours["samples"][figure][0] > 0
    assert {"memcpy", "write", "read warm", "read cold"} <= set(found["limits"])
    assert found["bytes"] <= SMALL
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("limit")]


def test_one_command_measures_prints_and_leaves_nothing(tmp_path: Path) -> None:
    options = Options(["adamw"], SMALL, repeats=1, against=["torch.save"], directory=tmp_path)
    told: list[str] = []
    document = bench.run_bench(options, tell=told.append)
    assert told == ["adamw: AdamW, float32, 1 rank"]
    (case,) = document["cases"]
    assert {n: c["correct"] for n, c in case["contenders"].items()} == {
        "dist_ckpt": "yes",
        "torch.save": "yes",
    }
    text = bench.describe(json.loads(json.dumps(document)))
    assert "| torch.save " in text
    assert "adamw: blocked / memcpy" in text
    bench.draw(document, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]


WITH_BAD_PEERS = """
import os, signal, threading
from dist_ckpt.bench import _child, _peers, _rounds

class Endless(_peers._TorchSave):
    name = "endless"
    def save(self, number):
        if number == 1:
            threading.Event().wait()
        return super().save(number)

class Dying(_peers._TorchSave):
    name = "dying"
    def save(self, number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().save(number)

_rounds.PEERS = {made.name: made for made in (Endless, Dying)}
_child.main()
"""


def test_peers_without_an_end_or_that_die_cost_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ranks, "_CHILD", ("-c", WITH_BAD_PEERS))
    monkeypatch.setattr(_attempts, "TURN_SECS", 3.0)
    options = Options(["adamw"], SMALL, repeats=2, directory=tmp_path)
    document = bench.run_bench(options, tell=lambda _: None)
    (case,) = document["cases"]
    found = case["contenders"]
    assert found["endless"]["error"] == "no end within 3 s"
    assert "SIGKILL" in found["dying"]["error"]
    assert len(found["dist_ckpt"]["samples"]["warm"]) == 2
    assert len(case["limits"]["memcpy"]) == 2
    text = bench.describe(document)
    assert "endless: failed: no end within 3 s" in text
    assert not [*tmp_path.iterdir()]


def test_a_case_whose_time_is_up_keeps_what_there_is_and_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"contenders": {"peer": {"correct": "yes", "error": None, "samples": {}}}, "notes": []}

    def ends(*_: object, **__: object) -> tuple[str, BenchAnswer]:
        runs.append(1)
        return _ranks.TIME_IS_UP, BenchAnswer("peer", told, is_all=False)

    runs: list[int] = []
    monkeypatch.setattr(_attempts, "_attempt", ends)
    found = _attempts.measure(bench.CASES[0], Options(), tmp_path / "case")
    assert runs == [1]
    assert found["contenders"]["peer"]["error"] is None
    assert found["notes"] == ["The ranks' end: its time was up"]


def test_what_is_lost_with_a_peer_is_what_it_had_yet_to_measure() -> None:
    def entrant(correct: str) -> dict[str, Any]:
        return {"correct": correct, "error": None, "samples": {"blocked": [1.0]} if correct else {}}

    first = {"contenders": {"a b": entrant("yes"), "a c": entrant("")}, "limits": {"x": [1.0]}}
    blamed = _attempts._blame(BenchAnswer("a b", first, is_all=False), "no end")
    assert blamed == {"a b": "no end", "a c": "left out, as a b no end"}
    second = {"contenders": {"ours": entrant("yes")}, "limits": {}}
    joined = _attempts._join(first, second)
    assert list(joined["contenders"]) == ["a b", "a c", "ours"]
    assert joined["limits"] == {"x": [1.0]}


def test_a_peer_that_dies_before_it_is_measured_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its constructor, say: it stands in no table. What the second attempt notes comes too."""
    without: list[tuple[str, ...]] = []

    def attempt(_: Case, options: Options, __: Path) -> tuple[str, BenchAnswer]:
        without.append(tuple(options.without))
        notes = ["b can't be measured: no room"]
        found = {"contenders": {"dist_ckpt": {"samples": {"blocked": [1.0]}}}, "notes": notes}
        told = {**found, "limits": {"memcpy": [1.0]}}
        if len(without) == 3:
            notes.append("c didn't end well: no end")
            return "", BenchAnswer("", told, is_all=True)
        dies = ("dying", "worse")[len(without) - 1]
        return "ended with SIGSEGV", BenchAnswer(dies, told, is_all=False)

    monkeypatch.setattr(_attempts, "_attempt", attempt)
    found = _attempts.measure(bench.CASES[0], Options(), tmp_path / "case")
    assert without == [(), ("dying",), ("dying", "worse")]
    assert list(found["contenders"]) == ["dist_ckpt"]
    assert found["notes"] == [
        "b can't be measured: no room",
        "dying: ended with SIGSEGV",
        "worse: ended with SIGSEGV",
        "c didn't end well: no end",
    ]


def test_time_goes_to_the_limits_and_ours_first_and_then_to_the_quick() -> None:
    peers = {"slow": 30.0, "quick": 5.0}
    assert choose_peers(2, 4, 100.0, 10.0, peers) == {"quick", "slow"}
    assert choose_peers(2, 4, 60.0, 10.0, peers) == {"quick"}
    assert choose_peers(3, 3, -5.0, 10.0, peers) == set()
    assert choose_peers(5, 2, 9.0, 10.0, peers) == set()
    assert choose_peers(6, 2, 9.0, 10.0, peers) is None
    assert too_slow(25.0, 100.0) is None
    assert too_slow(26.0, 100.0) == "too slow: 26 s a round"


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in bench.CASES])
def test_every_case_runs_with_every_library(tmp_path: Path, name: str) -> None:
    document = bench.run_bench(Options([name], SMALL, 1, directory=tmp_path), tell=lambda _: None)
    (case,) = document["cases"]
    assert "error" not in case
    for contender in case.get("contenders", {}).values():
        assert contender["error"] is None
    assert bench.describe(document)


def test_patience_gives_each_case_more_time_and_has_bounds() -> None:
    plain, patient = Options().cases(1 << 40), Options(patience=2).cases(1 << 40)
    assert [case.secs for case in patient] == [2 * case.secs for case in plain]
    for senseless in (0.0, -1.0, 1000.0):
        with pytest.raises(SettingError, match="patience"):
            Options(patience=senseless)


def test_a_case_whose_ranks_die_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    options = Options(["scale"], SMALL, directory=tmp_path)
    document = bench.run_bench(options, tell=lambda _: None)
    assert "its ranks ended with 1" in document["cases"][0]["error"]
    assert "Not measured" in bench.describe(document)


def case_of(ours: float, peer: float, *, correct: str = "yes") -> dict[str, Any]:
    def entrant(secs: float, verdict: str) -> dict[str, Any]:
        return {
            "correct": verdict,
            "error": None,
            "left_out": None,
            "stored_bytes": 8,
            "samples": {"blocked": [secs], "durable": [secs]},
        }

    return {
        "name": "adamw",
        "title": "t",
        "world_size": 1,
        "bytes": 8,
        "num_tensors": 1,
        "write_threads": 1,
        "notes": [],
        "limits": {"memcpy": [1.0], "write": [1.0]},
        "contenders": {"dist_ckpt": entrant(ours, "yes"), "peer": entrant(peer, correct)},
    }


def test_an_aim_is_met_or_missed_by_the_medians() -> None:
    met = {bar.figure: bar.met for bar in bench.judge({"cases": [case_of(1.21, 1.3)]})}
    assert met == {
        "adamw: blocked / memcpy": True,
        "adamw: blocked / peer": True,
        "adamw: durable / O_DIRECT write": False,
        "adamw: durable / peer": True,
    }


def test_a_peer_that_hands_back_something_else_is_no_measure() -> None:
    bars = bench.judge({"cases": [case_of(1.2, 0.1, correct="no: 3 of 4 tensors differ")]})
    assert not [bar for bar in bars if "peer" in bar.figure]


def test_plans_grow_with_what_ranks_hold_apart_and_not_with_replicas() -> None:
    case = Case("scale", "", "scale", num_bytes=SMALL, secs=20)
    rows = {(row["kind"], row["world_size"]): row for row in measure_scale(case)["rows"]}
    one, many = rows["replicated", 1], rows["replicated", 64]
    assert many["num_places"] < one["num_places"] + 4 * 64
    assert rows["sharded", 64]["num_places"] == 30 * 64 + 10
    assert many["gather_bytes"] == 64 * one["gather_bytes"]


def test_orders_survive_their_way_to_a_process(tmp_path: Path) -> None:
    case, options = bench.CASES[0], Options(repeats=3, against=["torch.save"])
    found = decode_order(encode_order(case, options, tmp_path))
    assert found == (case, options, tmp_path)


def test_what_cannot_be_measured_is_refused_by_name(tmp_path: Path) -> None:
    for arguments, word in (
        ({"only": ["adam"]}, "adamw"),
        ({"repeats": 0}, "--repeats"),
        ({"num_bytes": 12}, "--size"),
        ({"against": ["torchsave"]}, r"no library 'torchsave'.* torch\.save, .*or none"),
    ):
        with pytest.raises(SettingError, match=word):
            Options(**arguments)
    with pytest.raises(IncompleteError, match="no directory"):
        bench.run_bench(Options(directory=tmp_path / "none"), tell=lambda _: None)


def test_a_state_fits_the_memory_of_all_ranks_together() -> None:
    sizes = {case.name: case.num_bytes for case in Options().cases(20_000_000_000)}
    assert sizes["adamw"] == 1_500_000_000
    assert sizes["ranks-4"] * 4 <= 20_000_000_000 * 0.2
    assert copy.copy(Options(num_bytes=SMALL)).cases(1 << 40)[0].num_bytes == SMALL


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8MiB", 8 << 20), ("1.5GB", 1_500_000_000), ("64", 64), ("1 B", 1)],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_size(text, "--size") == expected


def test_a_size_that_is_none_names_its_option() -> None:
    with pytest.raises(SettingError, match="--size '8 apples'"):
        parse_size("8 apples", "--size")


def test_the_command_answers_with_one_document_and_refuses_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--only", "scale", "--size", "1MiB", "--dir", str(tmp_path)]
    assert main([*words, "--json", "-o", str(tmp_path / "all.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert document["cases"][0]["rows"]
    assert main(["bench", "--only", "everything"]) == 2
    assert "There is no case 'everything'." in capsys.readouterr().err


def test_each_library_has_a_name_that_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from dist_ckpt.bench import _peers

    assert list(_peers._BY_NAME) == list(_plan.LIBRARIES)
    assert Options(against=["none"]).against == ["none"]
    monkeypatch.setitem(_plan.LIBRARIES, "safetensors", "a_module_that_is_not_there")
    assert "torch.save" in _plan.installed_libraries()
    with pytest.raises(SettingError, match=r"safetensors isn't installed\."):
        Options(against=["torch.save", "safetensors"])


def count_runs(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], object] = lambda: None
) -> list[Options]:
    """Return what is asked for in place of measuring, which does ``end`` and finds `case_of`."""
    runs: list[Options] = []

    def run(options: Options, *, tell: Callable[[str], None]) -> dict[str, Any]:
        runs.append(options)
        tell("measured")
        end()
        libraries: dict[str, str] = {}
        machine = {"system": "s", "cpus": 2, "file_system": "f", "load": 0.0, "python": "3"}
        about = {"secs": 1.0, "machine": {**machine, "libraries": libraries}}
        return {**about, "cases": [case_of(1.0, 1.0)]}

    monkeypatch.setattr(bench, "run_bench", run)
    return runs


@pytest.mark.parametrize(
    ("words", "change", "why"),
    [
        (["-o"], ("nodir/x.json", "x.json"), "nodir isn't a directory."),
        (["-o"], (".", "x.json"), ". is a directory."),
        (["--plot"], ("nodir/x.png", "x.png"), "nodir isn't a directory."),
        (["--plot"], ("x.xyz", "x.svg"), "x.xyz has no ending of a picture"),
        (["--plot"], ("x", "x.PNG"), "x has no ending of a picture"),
        (["--plot", "x.png", "--only"], ("flat,scale", "flat,small"), "There is nothing to draw"),
        (["--against"], ("torchsave", "torch.save, DCP save"), "There is no library 'torchsave'"),
    ],
)
def test_what_could_not_be_kept_is_refused_before_anything_is_measured(
    words: list[str],
    change: tuple[str, str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    bad, good = change
    runs = count_runs(monkeypatch)
    monkeypatch.setattr(bench, "draw", lambda _, path: path.touch())
    monkeypatch.chdir(tmp_path)
    called = call("bench", *words, bad)
    assert (called.status, called.out, runs) == (2, "", [])
    assert called.err.startswith(f"dist-ckpt: {why}")
    assert call("bench", *words, good).status == 0
    assert len(runs) == 1


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    runs = count_runs(monkeypatch)
    called = call("bench", "--plot", tmp_path / "x.png")
    assert (called.status, called.out, runs) == (2, "", [])
    assert "A plot needs matplotlib." in called.err


def test_a_file_that_nobody_may_write_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    runs = count_runs(monkeypatch)
    called = call("bench", "-o", tmp_path / "x.json")
    assert (called.status, called.out, runs) == (2, "", [])
    assert "x.json can't be written." in called.err


def test_figures_whose_files_cannot_be_written_in_the_end_are_printed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    home = tmp_path / "home"
    home.mkdir()
    kept, aside = tmp_path / "kept.json", tmp_path / "aside"
    runs = count_runs(monkeypatch, end=lambda: home.rename(aside) if home.exists() else None)
    called = call("bench", "-o", home / "x.json", "--plot", home / "x.png")
    assert (called.status, len(runs), home.exists()) == (2, 1, False)
    assert "| dist_ckpt " in called.out
    for name in ("x.json", "x.png"):
        assert f"{name} couldn't be written: No such file or directory" in called.err
    aside.rename(home)
    called = call("bench", "-o", kept, "--plot", home / "x.png", "--json")
    assert (called.status, len(runs), home.exists()) == (2, 2, False)
    assert called.json["cases"][0]["contenders"]
    assert len(called.json["unwritten"]) == 1
    assert json.loads(kept.read_text(encoding="utf-8"))["cases"] == called.json["cases"]
