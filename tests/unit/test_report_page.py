"""The page as a file: what is in it, how large it is, what can't get out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.history import History, canonical
from dist_ckpt.report import Gathered, gather, render_page
from dist_ckpt.report._page import asset, json_text, render_index
from dist_ckpt.runs import open_run
from helpers.reporting import HOSTILE, hostile_run, write_run
from helpers.run_dirs import call, ended_run, killed_run, spawn


class Seen(HTMLParser):
    """The elements of a page, as a browser's parser finds them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))
        elif self._inside == "style":
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - the base's signature
        self._inside = ""


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def story_of(page: str) -> Any:
    (text,) = [text for given, text in Seen(page).scripts if given.get("id") == "story-data"]
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_a_page_needs_nothing_else_and_its_policy_names_its_own_scripts(tmp_path: Path) -> None:
    page = render_page(gather(open_run(ended_run(tmp_path))))
    seen = Seen(page)
    assert not {name for name, _ in seen.attributes} & {"src", "href", "style", "onclick"}
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(seen.tags)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    run = [text for given, text in seen.scripts if "type" not in given]
    assert rules["script-src"].split() == [digest(text) for text in run]
    assert rules["style-src"] == digest(seen.styles[0])
    assert (rules["default-src"], rules["connect-src"]) == ("'none'", "'none'")
    assert "unsafe" not in policy


def test_a_page_tells_the_status_and_the_story_of_its_run(tmp_path: Path) -> None:
    run = open_run(killed_run(tmp_path))
    page = render_page(gather(run))
    (facts,) = [json.loads(t) for given, t in Seen(page).scripts if given.get("id") == "facts-data"]
    assert (facts["now"]["state"], facts["now"]["last_step"]) == ("dead", 14)
    assert (facts["now"]["lost_steps"], facts["now"]["until"]) == (2, 30)
    assert facts["live"] is None
    story = story_of(page)
    assert [row[0] for row in story["generations"]] == [4, 8, 12]
    assert [attempt["how"] for attempt in story["attempts"]] == ["ended", None]
    assert [mark[:3] for mark in story["marks"]] == [["crash", 14, 2]]
    assert story["problems"] == []


def test_texts_of_a_run_are_never_markup(tmp_path: Path) -> None:
    plain = Seen(render_page(gather(open_run(write_run(tmp_path / "plain")))))
    run_dir = hostile_run(tmp_path / "<img src=x onerror=hurt>&{{scripts}}'\"")
    page = render_page(gather(open_run(run_dir)))
    seen = Seen(page)
    assert seen.tags == plain.tags
    assert len(seen.attributes) == len(plain.attributes)
    assert [text for given, text in seen.scripts if "type" not in given] == [
        text for given, text in plain.scripts if "type" not in given
    ]
    story = story_of(page)
    texts = [text.encode("utf-8", "replace").decode() for text in HOSTILE]
    assert [text for _, _, text in story["samples"]["rows"]] == texts


def test_the_list_of_runs_is_escaped() -> None:
    rows = [
        {"name": text, "href": text, "state": text, "step": text, "loss": text, "age": text}
        for text in HOSTILE
    ]
    seen = Seen(render_index(rows))
    assert seen.tags.count("a") == len(HOSTILE)
    assert not {"script", "img", "svg"} & set(seen.tags)
    assert len(seen.tags) == len(Seen(render_index(rows[:1])).tags) + 8 * (len(HOSTILE) - 1)


def test_assets_can_stand_inside_their_elements() -> None:
    for name in ("uPlot.iife.min.js", "decode.js", "words.js", "chart.js", "tables.js", "page.js"):
        assert not re.search(r"</script|<!--|\{\{\w+\}\}", asset(name), re.IGNORECASE), name
        assert "innerHTML" not in asset(name) or name.startswith("uPlot")
        assert not re.search(
            r"\beval\(|new Function|insertAdjacentHTML|document\.write", asset(name)
        )
    assert "v1.6.32" in asset("uPlot.iife.min.js")
    assert "Permission is hereby granted" in asset("uPlot.LICENSE")


def test_a_page_of_200_000_losses_and_2_000_generations_takes_a_megabyte_and_a_half(
    tmp_path: Path,
) -> None:
    chance = random.Random(5)
    empty = gather(open_run(write_run(tmp_path / "big")))
    story = empty.story | {
        "generations": [
            [100 * n, 1.7e9 + 1017.3 * n, ["cadence"], 8, 153_363_464 + n, 1.7e9 + 1018.9 * n,
             None, "37 of 37 replayed losses, attempt 3" if n % 7 == 0 else None, None]
            for n in range(2000)
        ]
    }  # fmt: skip
    losses = [(step, 2.0 + chance.gauss(0, 0.1)) for step in range(1, 200_001)]
    page = render_page(Gathered(empty.now, story, losses, 0))
    assert len(page.encode()) <= 1_500_000
    whole = render_page(Gathered(empty.now, story, losses, 0), every_bit=True)
    (curve,) = [
        json.loads(t) for given, t in Seen(whole).scripts if given.get("id") == "curve-data"
    ]
    assert (curve["count"], curve["exact"]) == (200_000, True)


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    (run_dir / "pins.json").write_text("[]")
    (run_dir / "small.samples.json").write_text("{}")
    (run_dir / "small.state.json").write_text("{")
    gathered = gather(open_run(run_dir))
    assert len(gathered.story["problems"]) == 3
    assert len(gathered.entries) == 12


def test_a_value_of_another_kind_costs_only_itself(tmp_path: Path) -> None:
    losses = ["0.5", True, [1], 10**400, 0.25, None]
    run_dir = write_run(
        tmp_path / "run",
        losses=[(1, 2.0)],
        journal=[
            {"event": "attempt_started", "world_size": "2", "pid": 10**400},
            {"event": "loop_started", "until": 10**400},
            {"event": "saved", "step": 1, "blocked_secs": 10**400},
            {"event": "replayed", "resumed_step": 1, "of": 2, "first_difference": "three"},
            {"event": "replayed", "resumed_step": 1, "of": 2, "agreed": 2},
        ],
        samples=[{"step": n, "loss": loss, "text": n} for n, loss in enumerate(losses)],
    )
    (run_dir / "run.state.json").write_text('{"a":' * 600 + "1" + "}" * 600)
    with pytest.raises(RecursionError):
        json_text(json.loads((run_dir / "run.state.json").read_text()))
    called = call("report", run_dir, "-o", tmp_path / "a.html")
    assert (called.status, "nested deeper" in called.out) == (0, True)
    story = story_of((tmp_path / "a.html").read_text())
    assert [row[1] for row in story["samples"]["rows"]] == [None, None, None, 10**400, 0.25, None]
    (attempt,) = story["attempts"]
    assert (attempt["world_size"], attempt["pid"], attempt["blocked_secs"]) == (None, None, 0.0)
    assert [one["agreed"] for one in story["replays"]] == [2]


def test_what_needs_looking_after_is_said(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    assert gather(open_run(run_dir)).now["troubles"] == []
    (run_dir / "checkpoints" / "step_000012" / "rank_00000.shard").unlink()
    (run_dir / "archive" / "faulty_4").mkdir(parents=True)
    with History(run_dir, "small", 2) as history:
        history.journal.append("save_failed", step=14, error="disk on fire")
    troubles = gather(open_run(run_dir)).now["troubles"]
    assert [text.split(":")[0] for text in troubles] == [
        "Step 12 can't be used", "The last save failed", "Found unusable and set aside in archive/",
    ]  # fmt: skip
    assert troubles[1].endswith("disk on fire")
    for step in (4, 8):
        (run_dir / "checkpoints" / f"step_{step:06d}" / "rank_00000.state").unlink()
    for step in range(1, 4):
        (run_dir / "checkpoints" / f"step_{step:06d}").mkdir()
    troubles = gather(open_run(run_dir)).now["troubles"]
    assert troubles[3] == "3 older generations can't be used, either."


def test_a_rewind_to_before_the_first_loss_voids_all_of_them_in_the_page_too(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path / "run", losses=[(5, 1.0), (6, 0.5)])
    with History(run_dir, "run", 2) as history:
        history.cut(0)
        history.record(7, 0.25, {})
    gathered = gather(open_run(run_dir))
    assert (gathered.void, len(gathered.entries)) == (2, 3)
    assert canonical(gathered.entries[gathered.void :]) == open_run(run_dir).loss() == [(7, 0.25)]


def test_long_samples_are_cut_and_old_ones_left_out(tmp_path: Path) -> None:
    samples = [{"step": n, "text": "x" * 50_000} for n in range(1, 31)]
    shown = gather(open_run(write_run(tmp_path / "a", samples=samples))).story["samples"]
    assert shown["total"] == 30
    assert [step for step, _, _ in shown["rows"]] == list(range(22, 31))
    assert all("(50,000 characters)" in text for _, _, text in shown["rows"])


# The command


def test_report_writes_a_page_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = ended_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    called = call("report", run_dir)
    assert (called.status, called.err) == (0, "")
    assert called.out.startswith("small.html: ")
    document = call("report", run_dir, "-o", tmp_path / "other.html", "--exact", "--json").json
    assert document["path"] == str(tmp_path / "other.html")
    assert document["bytes"] == (tmp_path / "other.html").stat().st_size
    assert (document["losses"], document["problems"]) == (12, [])


def test_report_replaces_its_own_page_and_nothing_else(tmp_path: Path) -> None:
    run_dir, page, other = ended_run(tmp_path), tmp_path / "a.html", tmp_path / "b.html"
    other.write_text("<!doctype html>")
    for _ in range(2):
        assert call("report", run_dir, "-o", page).status == 0
    called = call("report", run_dir, "-o", other, "--json")
    assert (called.status, called.json["error"]["id"]) == (2, "usage")
    assert other.read_text() == "<!doctype html>"
    assert call("report", run_dir, "-o", other, "--force").status == 0
    assert call("report", run_dir, "-o", run_dir / "small.loss.json").status == 2
    assert call("report", run_dir, "-o", tmp_path / "none" / "a.html").status == 2


def test_a_loss_file_that_is_something_else_makes_no_page(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    (run_dir / "small.loss.json").write_text('{"a": 1}')
    called = call("report", run_dir, "-o", tmp_path / "a.html")
    assert called.status == 1
    assert not (tmp_path / "a.html").exists()


def test_looking_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[(1, 2.0)])
    code = (
        "import sys; from dist_ckpt.cli import main; import dist_ckpt.report._server;"
        "assert [main(['loss', 'run']), main(['report', 'run'])] == [0, 0];"
        "assert not {'torch', 'matplotlib', 'torchsnapshot'} & set(sys.modules)"
    )
    done = spawn(code=code, cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr
