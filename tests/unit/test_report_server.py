"""The live page's server: what it answers, to whom, and what it never does."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from dist_ckpt.errors import DistCkptError, UsageError
from dist_ckpt.history import FollowedHistory, FollowedLosses, History
from dist_ckpt.report import Server, _catalog, _gather, _server
from dist_ckpt.report._catalog import Catalog
from dist_ckpt.report._page import json_text
from dist_ckpt.storage import RunLock
from helpers.reporting import hostile_run, serving, write_run
from helpers.run_dirs import call, ended_run, killed_run, snapshot_of
from helpers.trainers import ROOT


def ask(
    server: Server, path: str, *, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def ask_json(server: Server, path: str) -> Any:
    status, headers, body = ask(server, path)
    assert (status, headers["Content-Type"]) == (200, "application/json"), body
    return json.loads(body)


def raw(server: Server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as sock:
        sock.sendall(data)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_the_dashboards_four_addresses_answer_as_it_reads_them(tmp_path: Path) -> None:
    ended = ended_run(tmp_path, "one")
    with History(ended, "one", 2) as history:
        history.sample(12, "text of a sample", 0.5)
    killed_run(tmp_path, "two")
    losses = json.loads((ended / "one.loss.json").read_text())
    with serving(tmp_path) as server:
        found = ask_json(server, "/loss")
        assert (found["live"], sorted(found["saved"])) == ({}, ["one", "two"])
        assert found["saved"]["one"] == {
            "step": 12, "loss": losses[-1][1], "count": 12, "state": "ended",
        }  # fmt: skip
        assert ask_json(server, "/loss/one") == {"points": losses}
        checkpoints = ask_json(server, "/checkpoints")["checkpoints"]
        assert {tuple(one) for one in checkpoints} == {
            ("model", "step", "type", "path", "size_bytes")
        }
        of_one = [one for one in checkpoints if one["model"] == "one"]
        assert [(one["step"], one["type"]) for one in of_one] == [
            (step, kind) for step in (4, 8, 12) for kind in ("generation", "bin")
        ]
        for one in of_one:
            assert (ended / one["path"]).exists()
        assert of_one[1]["size_bytes"] == (ended / "step_000004.bin").stat().st_size
        assert ask_json(server, "/samples/one") == {
            "samples": [{"step": 12, "text": "text of a sample", "loss": 0.5}]
        }
        assert ask_json(server, "/samples/two") == {"samples": []}


def test_samples_of_another_kind_are_told_as_text_without_a_loss(tmp_path: Path) -> None:
    deep = json.loads("[" * 600 + "]" * 600)
    run_dir = write_run(tmp_path / "run", samples=[{"step": 1, "text": deep, "loss": "0.5"}])
    with pytest.raises(RecursionError):
        json_text(deep)
    with serving(run_dir) as server:
        (sample,) = ask_json(server, "/samples/run")["samples"]
    assert sample == {"step": 1, "text": "[" * 600 + "]" * 600, "loss": None}


def test_a_run_whose_lock_is_held_is_live(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[(1, 2.0)])
    holder = "import sys; from dist_ckpt.storage import RunLock; lock = RunLock('run/run.lock');"
    holder += "lock.acquire({'pid': 1}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with serving(tmp_path / "run") as server:
            assert ask_json(server, "/loss")["live"]["run"]["loss"] == 2.0
        process.kill()


def test_news_are_the_entries_since_and_what_else_happened(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", losses=[(1, 3.0), (2, 2.0)])
    with serving(run_dir) as server:
        watched = server.catalog.get("run")
        news = ask_json(server, "/run/run/data")
        assert (news["from"], news["curve"]["count"], news["void"]) == (0, 2, 0)
        known = f"file={news['file']}&story={news['token']}&void=0"
        news = ask_json(server, f"/run/run/data?since=2&{known}")
        assert (news["from"], news["curve"]["count"], news["story"]) == (2, 0, None)
        with History(run_dir, "run", 2) as history:
            history.record(3, 1.25, {})
            history.journal.append("signal", step=3, signals=["SIGUSR1"])
        watched._read_at = -1e9
        news = ask_json(server, f"/run/run/data?since=2&{known}")
        data = zlib.decompress(base64.b64decode(news["curve"]["data"]))
        assert (news["from"], struct.unpack("<d", data[:8])) == (2, (3.0,))
        story = json.loads(zlib.decompress(base64.b64decode(news["story"])))
        assert [mark[:2] for mark in story["marks"]] == [["signal", 3]]
        # Another file, fewer entries, other void ones: all of it again.
        for query in ("since=2&file=other&void=0", f"since=9&{known}", "since=2&file=&void=7"):
            assert ask_json(server, f"/run/run/data?{query}")["from"] == 0


def test_an_event_that_comes_while_the_journal_is_read_is_told_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path / "run", losses=[(1, 1.0)])
    watched = Catalog([run_dir]).get("run")
    late = [json.dumps({"time": 2.0, "attempt": 1, "event": "save_failed", "step": 1})]

    def story_of(*args: Any) -> dict[str, Any]:
        if late:
            with (run_dir / "run.journal.jsonl").open("a") as file:
                file.write(f"{late.pop()}\n")
        return _gather.story_of(*args)

    monkeypatch.setattr(_catalog, "story_of", story_of)
    monkeypatch.setattr(_catalog, "_FRESH_SECS", 0.0)
    assert watched.view().story["marks"] == []
    assert not late, "it came after the journal was read"
    assert [mark[:2] for mark in watched.view().story["marks"]] == [["fault", 1]]


def test_a_look_that_failed_is_made_again_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path / "run", losses=[(1, 1.0)])
    watched = Catalog([run_dir]).get("run")
    monkeypatch.setattr(_catalog, "_FRESH_SECS", 0.0)
    watched.view()
    with History(run_dir, "run", 2) as history:
        history.journal.append("save_failed", step=1)
    faults = [PermissionError("for a moment")]

    def story_with_faults(*args: Any) -> dict[str, Any]:
        if faults:
            raise faults.pop()
        return _gather.story_of(*args)

    monkeypatch.setattr(_catalog, "story_of", story_with_faults)
    with pytest.raises(PermissionError):
        watched.view()
    assert [mark[:2] for mark in watched.view().story["marks"]] == [["fault", 1]]


def test_a_run_that_nobody_trains_is_read_again_only_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = ended_run(tmp_path)
    watched = Catalog([run_dir]).get("small")
    monkeypatch.setattr(_catalog, "_FRESH_SECS", 0.0)
    reads: list[FollowedHistory] = []
    read = FollowedHistory.losses

    def losses(history: FollowedHistory) -> FollowedLosses:
        reads.append(history)
        return read(history)

    monkeypatch.setattr(FollowedHistory, "losses", losses)
    first, second = watched.view(), watched.view()
    assert (first.now["state"], len(reads)) == ("ended", 1)
    for age in ("last_step_age_secs", "committed_age_secs", "attempt_age_secs"):
        passed = second.now["time"] - first.now["time"]
        assert second.now[age] - first.now[age] == pytest.approx(passed, abs=1e-6)
    for name in ("run.json", "run.lock", "small.loss.json", "small.journal.jsonl"):
        os.utime(run_dir / name, (1, 1))
        before = len(reads)
        watched.view()
        watched.view()
        assert len(reads) == before + 1, name
    lock = RunLock(run_dir / "run.lock")
    lock.acquire({"pid": 1})
    before = len(reads)
    assert [watched.view().now["state"] for _ in range(2)] == ["running", "running"]
    assert len(reads) == before + 2
    lock.release()
    assert watched.view().now["state"] == "ended"
    # What no stamp tells is told, too, only later.
    before = len(reads)
    watched.view()
    monkeypatch.setattr(_catalog, "_STILL_SECS", 0.0)
    watched.view()
    assert len(reads) == before + 1


def test_what_was_read_of_a_run_goes_with_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, losses=[(3, 1.0), (4, None), (2, 0.5), (3, 0.25)])
    catalog = Catalog([tmp_path])
    losses = catalog.get("one").view().losses
    assert (losses.newest, losses.entries(1)) == ((3, 0.25, 2), [(4, None), (2, 0.5), (3, 0.25)])
    shutil.rmtree(tmp_path / "one")
    assert list(catalog.runs()) == ["two"]
    assert list(catalog._watched) == [tmp_path / "two"]


def test_no_address_leads_out_of_the_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "run", losses=[(1, 2.0)])
    secret = write_run(tmp_path / "secret", losses=[(1, 918273645.5)])
    (tmp_path / "runs" / "link").symlink_to(secret)
    paths = (
        "/loss/../../../etc/passwd", "/loss/..%2f..%2fetc%2fpasswd", "/loss/%2e%2e", "/loss/.",
        "/loss/%00", "/loss/run%2frun.loss.json", "/samples//etc/passwd", "/run//etc", "/run/",
        "/loss/", "/run/run/run.loss.json", "/secret.loss.json", "/loss/%ff", "*",
        "/loss/run/x", "/run/run/data/..", "/checkpoints/../loss/..", "/" + "x" * 5000,
        "http://127.0.0.1/etc/passwd", "/loss/secret", "/loss/link", "//127.0.0.1/etc/passwd",
    )  # fmt: skip
    with serving(tmp_path / "runs") as server:
        for path in paths:
            answer = raw(server, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            assert answer.split()[1] in (b"400", b"404", b"414"), path
            assert b"918273645" not in answer
            assert b"root:" not in answer
        assert ask(server, "/loss/run")[0] == 200


def test_links_inside_a_run_are_not_followed(tmp_path: Path) -> None:
    secret = write_run(
        tmp_path / "secret", losses=[(1, 918273645.5)], samples=[{"step": 1, "text": "unheard-of"}]
    )
    run_dir = write_run(tmp_path / "runs" / "run", losses=[(1, 2.0)])
    for kind in ("loss.json", "samples.json"):
        (run_dir / f"run.{kind}").unlink()
        (run_dir / f"run.{kind}").symlink_to(secret / f"secret.{kind}")
    with serving(tmp_path / "runs") as server:
        for path in ("/loss/run", "/samples/run", "/run/run", "/run/run/data", "/loss"):
            status, _, body = ask(server, path)
            assert status == (200 if path == "/loss" else 500), path
            assert b"918273645" not in body
            assert b"unheard-of" not in body


def test_only_names_that_nobody_else_can_own_are_answered(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[(1, 2.0)])
    with serving(tmp_path / "run", allow_hosts=["Watch.Example"]) as server:
        port = server.server_port
        for host in ("localhost", "LOCALHOST:9", f"127.0.0.1:{port}", "[::1]:80", "10.1.2.3",
                     "watch.example:8088"):  # fmt: skip
            assert ask(server, "/loss", Host=host)[0] == 200, host
        for host in ("attacker.example", f"attacker.example:{port}", "", "[::1", "0x7f000001",
                     "localhost.attacker.example", "127.0.0.1.attacker.example",
                     "localhost@attacker.example:1"):  # fmt: skip
            status, _, body = ask(server, "/loss", Host=host)
            assert (status, b"loss" in body) == (403, False), host
        for head in (b"", b"Host: localhost\r\nHost: attacker.example\r\n"):
            assert raw(server, b"GET /loss HTTP/1.0\r\n" + head + b"\r\n").split()[1] == b"403"


def test_other_pages_may_read_only_when_they_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    own = "https://dashboard.example"
    with serving(tmp_path / "run", allow_origins=[own]) as server:
        assert ask(server, "/loss", Origin=own)[1]["Access-Control-Allow-Origin"] == own
        for other in ("https://attacker.example", "null", f"{own}.attacker.example"):
            assert "Access-Control-Allow-Origin" not in ask(server, "/loss", Origin=other)[1]


def test_nothing_can_be_done_but_looking(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    before = snapshot_of(run_dir)
    with serving(run_dir) as server:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            status, headers, _ = ask(server, "/loss", method=method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD"), method
        assert ask(server, "/loss", method="BREW")[0] == 501
        whole = ask(server, "/loss")
        head = ask(server, "/loss", method="HEAD")
        assert (head[0], head[1]["Content-Length"], head[2]) == (200, str(len(whole[2])), b"")
        for path in ("/", "/run/small", "/run/small/data", "/checkpoints", "/samples/small"):
            assert ask(server, path)[0] == 200
    assert snapshot_of(run_dir) == before


def test_a_live_page_may_ask_its_own_server_and_nobody_may_frame_it(tmp_path: Path) -> None:
    run_dir = hostile_run(tmp_path / "runs" / "a b&c'<i>")
    with serving(tmp_path / "runs") as server:
        for path in ("/", f"/run/{quote(run_dir.name)}"):
            status, headers, body = ask(server, path)
            assert status == 200
            policy = headers["Content-Security-Policy"]
            assert "connect-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert b"<i>" not in body
        write_run(tmp_path / "runs" / "second")
        status, headers, body = ask(server, "/")
        assert (status, b"<script" in body, b"second" in body) == (200, False, True)
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_a_broken_run_hides_no_other(tmp_path: Path) -> None:
    write_run(tmp_path / "good", losses=[(1, 2.0)])
    broken = write_run(tmp_path / "bad")
    (broken / "bad.loss.json").write_text('{"no": "losses"}')
    with serving(tmp_path) as server:
        assert list(ask_json(server, "/loss")["saved"]) == ["good"]
        assert ask_json(server, "/checkpoints") == {"checkpoints": []}
        assert b"unreadable" in ask(server, "/")[2]
        status, _, body = ask(server, "/loss/bad")
        assert (status, json.loads(body)["error"]["id"]) == (500, "corrupt-file")


def test_runs_of_one_name_are_told_apart_and_new_ones_show_up(tmp_path: Path) -> None:
    for place in ("a", "b"):
        write_run(tmp_path / place / "run", losses=[(1, 1.0 if place == "a" else 2.0)])
    with serving(tmp_path / "a", tmp_path / "b" / "run") as server:
        assert ask_json(server, "/loss/run") == {"points": [[1, 1.0]]}
        assert ask_json(server, "/loss/run~2") == {"points": [[1, 2.0]]}
        assert ask(server, "/loss/new")[0] == 404
        write_run(tmp_path / "a" / "new", losses=[(5, 5.0)])
        assert ask_json(server, "/loss/new") == {"points": [[5, 5.0]]}


def test_a_run_whose_name_isnt_utf_8_has_its_page(tmp_path: Path) -> None:
    ended_run(tmp_path, "b\udcffd")
    ended_run(tmp_path, "other")
    assert call("report", tmp_path / "b\udcffd", "-o", tmp_path / "page.html").status == 0
    assert "b?d" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with serving(tmp_path) as server:
        assert b'href="/run/b%FFd"' in ask(server, "/")[2]
        assert b"b?d" in ask(server, "/run/b%FFd")[2]
        assert ask_json(server, "/run/b%FFd/data")["now"]["last_step"] == 12


def test_copies_are_listed_by_their_directories_names(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[(1, 1.0)])
    for number in (1, 2):
        shutil.copytree(tmp_path / "run", tmp_path / f"copy{number}")
    write_run(tmp_path / "other", losses=[(1, 1.0)])
    assert list(Catalog([tmp_path]).runs()) == ["copy1", "copy2", "other", "run"]
    (tmp_path / "copy1").rename(tmp_path / "run2")
    assert {name: w.run.path.name for name, w in Catalog([tmp_path]).runs().items()} == {
        name: name for name in ("copy2", "other", "run", "run2")
    }


def test_slow_clients_keep_nobody_waiting_and_lose_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", losses=[(1, 2.0)])
    monkeypatch.setattr(_server, "_MAX_CONNECTIONS", 6)
    with serving(tmp_path / "run") as server:
        slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(5)]
        for sock in slow:
            sock.sendall(b"GET /loss HTTP/1.0\r\nX-Slow: ")  # and then never its end
        assert ask(server, "/loss")[0] == 200
        while len(server._open) > 5:  # the one that was answered may still be on its way out
            threading.Event().wait(0.01)
        slow.append(socket.create_connection(("127.0.0.1", server.server_port)))
        while len(server._open) < 6:
            threading.Event().wait(0.01)
        assert ask(server, "/loss")[0] == 503
        monkeypatch.setattr(_server, "_LIMIT_SECS", -1.0)
        for sock in slow:
            sock.settimeout(20)
            while sock.recv(4096):  # the server ends it, though each kept its end open
                pass
            sock.close()
        monkeypatch.setattr(_server, "_LIMIT_SECS", 60.0)
        while server._open:
            threading.Event().wait(0.01)
        assert ask(server, "/loss")[0] == 200


def test_many_clients_at_once_read_a_run_that_is_being_written(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", losses=[(1, 1.0)])
    with serving(run_dir) as server, History(run_dir, "run", 2) as history:
        paths = ("/loss/run", "/run/run", "/run/run/data", "/loss", "/checkpoints", "/samples/run")

        def client(number: int) -> list[int]:
            return [ask(server, path)[0] for path in paths[number % 3 :]]

        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(client, range(24))
            for step in range(2, 200):
                history.record(step, 1.0 / step, {})
            assert {status for found in answers for status in found} == {200}
        server.catalog.get("run")._read_at = -1e9
        assert len(ask_json(server, "/loss/run")["points"]) == 199


# The command


def serve(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dist_ckpt", "serve", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_serve_takes_a_free_port_and_ends_with_0_at_sigterm_and_130_at_ctrl_c(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "run", losses=[(1, 2.0)])
    with serve(tmp_path / "run", "--port", "0", "--json") as first:
        assert first.stdout is not None
        told = json.loads(first.stdout.readline())
        assert (told["runs"], told["url"]) == (["run"], f"http://127.0.0.1:{told['port']}/")
        # A client that is connected and silent keeps it from nothing.
        with socket.create_connection(("127.0.0.1", told["port"])):
            taken = call("serve", tmp_path / "run", "--port", str(told["port"]), "--json")
            assert (taken.status, taken.json["error"]["id"]) == (2, "usage")
            first.send_signal(signal.SIGTERM)
            out, err = first.communicate(timeout=30)
        assert (first.returncode, out, err) == (0, "", "")
    with serve(tmp_path, "--port", "0") as second:
        assert second.stdout is not None
        assert "(run); Ctrl-C ends it" in second.stdout.readline()
        second.send_signal(signal.SIGINT)
        out, err = second.communicate(timeout=30)
        assert (second.returncode, out, err) == (130, "", "")


def test_a_sigterm_at_the_moment_it_is_told_of_ends_it_in_order(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=[(1, 2.0)])
    server = Server([tmp_path / "run"], port=0)
    struck = []

    def ready() -> None:
        struck.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        if struck[0]:
            signal.raise_signal(signal.SIGTERM)

    server.serve(ready=ready)
    assert struck == [True]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.server_port))


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    for place in (
        tmp_path / "none",
        run_dir / "small.loss.json",
        run_dir / "checkpoints/step_000004",
    ):
        with pytest.raises(DistCkptError):
            Server([place], port=0)
    for options in ({"port": 70_000}, {"host": "192.0.2.1"}):
        with pytest.raises(UsageError):
            Server([run_dir], **{"port": 0, **options})  # type: ignore[arg-type]
    assert call("serve", run_dir, "--port", "x", "--json").status == 2
