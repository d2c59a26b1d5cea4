"""The page in a real browser: loaded, clicked, zoomed, followed; nothing in its console."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.history import History, canonical
from dist_ckpt.report import Gathered, _routes, gather, render_page
from dist_ckpt.runs import open_run
from helpers.browsing import Browser, Page, find_browser
from helpers.reporting import HOSTILE, hostile_run, serving, write_run
from helpers.run_dirs import call, killed_run, options_of
from helpers.trainers import train

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_browser() is None, reason="no chromium on this machine"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


def page_of(run_dir: Path) -> str:
    path = run_dir.with_name("page.html")
    called = call("report", run_dir, "-o", path, "--exact")
    assert called.status == 0, called.err
    return path.as_uri()


def shown(page: Page) -> tuple[float, float]:
    low, high = page.eval(
        "['min', 'max'].map((end) => Number(document.getElementById('chart').dataset[end]))"
    )
    return float(low), float(high)


def go_to(page: Page, step: int) -> str:
    page.eval("document.getElementById('goto').value = ''; document.getElementById('goto').focus()")
    page.type(str(step))
    page.key("Enter")
    page.eval("document.getElementById('goto').blur()")
    return page.text("#readout")


def test_a_run_that_was_killed_and_resumed_is_told_and_can_be_looked_through(
    browser: Browser, tmp_path: Path
) -> None:
    run_dir = killed_run(tmp_path, "again")
    train(options_of(run_dir, until=16))
    losses = dict(json.loads((run_dir / "again.loss.json").read_text()))
    with browser.page() as page:
        url = page_of(run_dir)
        page.open(url)
        assert page.text("#state") == "ended"
        assert page.text("#risk").startswith("Nothing is lost. Step 16 is the newest generation")
        assert "journal attempt 3 ended at step 16" in page.text("#evidence")
        assert page.text("#replays").strip() == ("attempt 3 from step 12: 2 replayed, 2 bit-equal")
        assert page.eval("document.querySelectorAll('#attempts tbody tr').length") == 3
        assert page.eval("document.querySelectorAll('#generations tbody tr').length") == 3
        assert "✓ read back" in page.text("#generations")
        assert "2 of 2 replayed losses" in page.text("#generations")
        assert "gone without a word" in page.text("#events")

        # Every point can be read, to its last digit.
        for step, loss in losses.items():
            assert f"step {step} loss {loss!r} " in go_to(page, step)

        # Buttons, mouse and keys zoom, and find back to the whole.
        whole = (1.0, 16.0)
        page.click("#whole")
        assert shown(page) == whole
        page.click("#zoom-in")
        zoomed = shown(page)
        assert 6 < zoomed[1] - zoomed[0] < 8
        page.click("#zoom-out")
        page.click("#zoom-out")
        assert shown(page) == whole
        page.drag("#chart .u-over", 0.25, 0.75)
        low, high = shown(page)
        assert 4 < low < 6
        assert 11 < high < 13
        page.eval("document.getElementById('chart').focus()")
        page.key("0")
        assert shown(page) == whole
        page.key("Home")
        page.key("ArrowRight")
        assert page.text("#readout").startswith("step 2 ")
        page.key("+")
        assert shown(page) != whole
        page.key("Escape")
        assert shown(page) == whole

        # A mark brings its place into view; curves can be drawn otherwise.
        page.click("#events .link")
        assert page.text("#readout").startswith("step 14 ")
        for box in ("#log", "#smooth"):
            page.click(box)
        assert page.eval("document.querySelectorAll('#chart canvas').length") == 1
        assert page.complaints() == []
        assert page.requests() == [url]


def test_200_000_losses_and_2_000_generations_are_all_reachable(
    browser: Browser, tmp_path: Path
) -> None:
    chance = random.Random(7)
    losses = [(3 * n, 2 + math.exp(-n / 3e4) + chance.gauss(0, 0.1)) for n in range(1, 200_001)]
    empty = gather(open_run(write_run(tmp_path / "big")))
    rows = [[100 * n, 1.0, ["cadence"], 2, 5, 2.0, None, None, None] for n in range(1, 2001)]
    story = empty.story | {"generations": rows}
    path = tmp_path / "big.html"
    path.write_text(render_page(Gathered(empty.now, story, losses, 0)), encoding="utf-8")
    with browser.page() as page:
        page.open(path.as_uri())
        digits = json.loads(page.eval("document.getElementById('curve-data').textContent"))[
            "digits"
        ]
        assert shown(page) == (3.0, 600_000.0)
        for n in [0, 1, 2, 99_999, 123_456, 199_998, 199_999]:
            step, loss = losses[n]
            said = go_to(page, step)
            assert said.replace("\u2009", "").startswith(f"step {step} loss ")
            kept = float(said.split("loss ")[1].split()[0])
            assert abs(kept - loss) < 10.0 ** (1 - digits)
            low, high = shown(page)
            assert high - low < 1000
        page.eval("document.getElementById('chart').focus()")
        page.key("ArrowLeft")
        assert page.text("#readout").replace("\u2009", "").startswith("step 599997 ")
        assert page.eval("document.querySelectorAll('#generations tbody tr').length") == 25
        page.click("#generations .more")
        assert page.eval("document.querySelectorAll('#generations tbody tr').length") == 2000
        assert page.complaints() == []


def test_the_page_reads_a_loss_file_as_the_library_does(browser: Browser, tmp_path: Path) -> None:
    chance = random.Random(17)
    cases, expected = [], []
    for _ in range(200):
        step, entries = 0, []
        for _ in range(chance.randrange(40)):
            step = max(0, step + chance.choice((1, 1, 1, 1, 3, -2, -7, 0)))
            entries.append((step, chance.choice((None, chance.random()))))
        void = chance.choice((0, 0, chance.randrange(len(entries) + 1)))
        # In one piece, and as a live page gets it.
        cut = chance.randrange(void, len(entries) + 1)
        cases.append([void, cut, entries])
        expected.append([list(entry) for entry in canonical(entries[void:])])
    run_dir = write_run(tmp_path / "run", losses=[(1, 1.0)])
    with browser.page() as page:
        page.open(page_of(run_dir))
        for pieces in ("[entries]", "[entries.slice(0, cut), entries.slice(cut)]"):
            found = page.eval(
                f"{json.dumps(cases)}.map(([voided, cut, entries]) => {{"
                "const history = new decode.History();"
                f"for (const piece of {pieces})"
                " history.add(piece.map(([step]) => step), piece.map(([, loss]) => loss ?? NaN),"
                " voided);"
                "return history.steps.map((step, place) => [step, history.losses[place]]); })"
            )
            assert found == expected


def test_hostile_texts_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    run_dir = hostile_run(tmp_path / "<img src=x onerror=window.hurt=1>")
    with browser.page() as page:
        url = page_of(run_dir)
        page.open(url)
        assert page.text("h1") == run_dir.name
        for selector in ("#events", "#policy", "#attempts"):
            assert "</script><script>window.hurt=1</script>" in page.text(selector)
        for _ in HOSTILE:
            page.click("#sample-back")
        assert page.text("#sample-text") == HOSTILE[0]
        go_to(page, 3)
        assert "onerror" in page.text("#readout")
        assert page.eval("window.hurt") is None
        assert page.eval("document.querySelectorAll('img, svg, iframe, [onload]').length") == 0
        assert page.requests() == [url]
        assert page.complaints() == []
        # Were one to slip through, the page's policy would still stop it.
        page.eval("document.body.insertAdjacentHTML('beforeend', '<b onclick=window.hurt=1>b</b>')")
        page.click("body > b")
        assert page.eval("window.hurt") is None
        assert any("Content Security Policy" in text for text in page.complaints())


def test_a_part_that_cannot_be_shown_costs_no_other(browser: Browser, tmp_path: Path) -> None:
    journal = [{"event": "save_failed", "step": 1, "time": 1e14, "error": "far ahead"}]
    run_dir = write_run(tmp_path / "run", losses=[(1, 2.0)], journal=journal)
    found = gather(open_run(run_dir))
    story = found.story | {
        "samples": {"total": 1, "rows": [[1, "0.5", "some text"]]},
        "policy": {"state": {"arms": [{"name": {"toString": 1}}]}, "policy": None},
    }
    path = tmp_path / "page.html"
    path.write_text(render_page(Gathered(found.now, story, found.entries, 0)), encoding="utf-8")
    with browser.page() as page:
        page.open(path.as_uri())
        assert page.text("#problems").startswith("Not shown: policy (")
        assert "far ahead" in page.text("#events")
        assert page.text("#sample-head").startswith("step 1, loss 0.5 ")
        assert page.complaints() == []


def test_a_live_page_opened_before_the_first_loss_can_draw_it_by_its_logarithm(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_routes, "_EVERY_SECS", 0.1)
    run_dir = write_run(tmp_path / "run")
    with serving(run_dir) as server, browser.page() as page:
        page.open(server.url)
        assert page.eval("document.getElementById('log').disabled") is True
        with History(run_dir, "run", 1) as history:
            history.record(1, 0.25, {})
        page.wait("document.getElementById('log').disabled === false")
        assert page.complaints() == []


def test_a_live_page_follows_its_run_and_says_when_nobody_answers(
    browser: Browser, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", losses=[(step, 1.0 / step) for step in range(1, 9)])
    with serving(run_dir) as server, browser.page() as page:
        page.open(server.url)
        assert page.text("#fresh") == "live"
        with History(run_dir, "run", 1) as history:
            history.record(9, 0.25, {})
            history.sample(9, "a new sample", 0.25)
            history.journal.append("signal", step=9, signals=["SIGUSR1"])
            page.wait("document.querySelector('#tiles dd').innerText === '9'")
            page.wait("document.getElementById('sample-text').textContent === 'a new sample'")
            assert "SIGUSR1" in page.text("#events")
            assert "step 9 loss 0.25" in go_to(page, 9)
            history.cut(4)
            history.record(5, 0.5, {})
            page.wait("document.getElementById('key').textContent.includes('voided')")
        assert "step 5 loss 0.5 " in go_to(page, 9)
        # Another file in its place: nothing of the old one stays.
        write_run(run_dir.with_name("other"), losses=[(1, 7.5), (2, 7.25)])
        run_dir.with_name("other").joinpath("other.loss.json").rename(run_dir / "run.loss.json")
        page.wait("!document.getElementById('key').textContent.includes('voided')")
        assert "step 2 loss 7.25" in go_to(page, 9)
        assert page.complaints() == []
        server.shutdown()
        server.server_close()
        page.wait("document.getElementById('fresh').textContent.startsWith('no answer')")


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_without_scrolling_sideways_and_fingers_move_it(
    browser: Browser, tmp_path: Path, dark: bool
) -> None:
    run_dir = hostile_run(tmp_path / ("a-long-name-of-a-run-" * 4))
    losses = [(step, 1.0 / step) for step in range(1, 1001)]
    (run_dir / f"{run_dir.name}.loss.json").write_text(json.dumps(losses))
    with browser.page(width=360, height=740, phone=True, dark=dark) as page:
        page.open(page_of(run_dir))
        assert page.eval("document.documentElement.scrollWidth <= innerWidth") is True
        background = page.eval("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) is dark
        left, top, width, height = page.box("#chart .u-over")
        y = top + height / 2

        def touch(kind: str, *places: float) -> None:
            points: list[Any] = [
                {"x": left + width * place, "y": y, "id": n} for n, place in enumerate(places)
            ]
            page.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

        touch("touchStart", 0.45, 0.55)
        touch("touchMove", 0.3, 0.7)
        touch("touchMove", 0.1, 0.9)
        touch("touchEnd")
        page.wait("Number(document.getElementById('chart').dataset.max) < 999")
        before = shown(page)
        assert before[1] - before[0] < 500
        touch("touchStart", 0.7)
        touch("touchMove", 0.5)
        touch("touchMove", 0.2)
        touch("touchEnd")
        page.wait(f"Number(document.getElementById('chart').dataset.min) > {before[0]}")
        after = shown(page)
        assert after[1] - after[0] == pytest.approx(before[1] - before[0])
        assert page.complaints() == []
