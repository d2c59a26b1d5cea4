"""The table of what was tried is made from what the tests wrote, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.reliability import KINDS, RECORD, encode_page, main, read_lines, record_fault

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def test_nothing_is_recorded_where_no_table_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RECORD, raising=False)
    monkeypatch.chdir(tmp_path)
    record_fault("Kill", "anywhere", 3, "nothing")
    assert list(tmp_path.iterdir()) == []


def test_lines_become_one_table_a_kind_in_a_fixed_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "faults.jsonl"
    monkeypatch.setenv(RECORD, str(path))
    record_fault("Clock", "set | back", 7, "nothing")
    record_fault("Power cut", "any state", 1500, "recovered")
    record_fault("Power cut", "any state", 1600, "recovered")  # the same test again
    lines = read_lines(path)
    assert [(line.kind, line.times) for line in lines] == [("Clock", 7), ("Power cut", 1600)]
    assert all(line.test.startswith("tests/unit/test_reliability.py::") for line in lines)
    assert main(["reliability.py", str(path)]) == 0
    page = capsys.readouterr().out
    assert page == encode_page(lines)
    assert page.index("## Power cut") < page.index("## Clock")
    assert "| any state | 1,600 | recovered | `tests/unit/test_reliability.py` |" in page
    assert "| set \\| back | 7 |" in page
    assert "| [Power cut](#power-cut) | 1,600 | 1 |\n| [Clock](#clock) | 7 | 1 |\n" in page
    assert main(["reliability.py"]) == 2


def test_the_page_in_the_docs_is_of_that_making() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, _, foot = encode_page([]).partition("## How this page is made")
    assert text.startswith(head.rstrip())
    assert text.endswith(foot)
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert titles[:-1] == [kind for kind in KINDS if kind in titles]
