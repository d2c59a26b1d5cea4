"""Words for a supervisor: whole, short, and never a reason to wait or to fail."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dist_ckpt import notify


def test_what_was_encoded_is_parsed_and_a_line_break_makes_no_field_of_its_own() -> None:
    fields: dict[str, str | int] = {"READY": 1, "STATUS": "step 5\nMAINPID=1"}
    assert notify.parse_message(notify.encode_message(fields)) == {
        "READY": "1",
        "STATUS": "step 5 MAINPID=1",
    }
    assert notify.parse_message(b"\xff\n=x\nnothing\nA=b=c") == {"A": "b=c"}


@pytest.mark.parametrize("length", [107, 108, 250])
def test_a_path_of_any_length_works_though_the_kernel_takes_107_bytes(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("d" * max(1, length - len(str(tmp_path)) - len("//notify")))
    directory.mkdir()
    path = directory / "notify"
    receiver = notify.NotifyReceiver(path)
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert notify.is_heard()
        assert notify.send({"WATCHDOG": 1})
        assert notify.send({"STATUS": "Schritt 5 ✓"})
        assert receiver.take() == [{"WATCHDOG": "1"}, {"STATUS": "Schritt 5 ✓"}]
        assert receiver.take() == []
    finally:
        receiver.close()
    assert not path.exists()


def test_an_abstract_socket_is_reached_by_its_at_sign() -> None:
    name = f"dist-ckpt-test-{id(object())}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        assert notify.send({"READY": 1}, to=f"@{name}")
        assert receiver.recv(100) == b"READY=1"


@pytest.mark.parametrize("name", ["", "relative", "vsock:2:1234", "/no/such/socket", "@no-such"])
def test_nobody_there_is_no_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    assert notify.send({"READY": 1}, wait_secs=0.01) is False


def test_a_supervisor_that_does_not_listen_makes_nobody_wait(tmp_path: Path) -> None:
    path = tmp_path / "s"
    receiver = notify.NotifyReceiver(path)
    try:
        sent = [notify.send({"WATCHDOG": 1}, to=str(path)) for _ in range(600)]
        assert sent[0]
        assert not sent[-1]  # its queue is full
        num_sent = sent.count(True)
        taken = 0
        while messages := receiver.take():
            taken += len(messages)
        assert taken == num_sent
    finally:
        receiver.close()
