"""Runs made of their files alone, for what shows them; and what attackers would write into them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dist_ckpt.report import Server

#: Each would run, break out of its place or be taken for a template where it isn't escaped.
HOSTILE = (
    "</script><script>window.hurt=1</script>",
    "<img src=x onerror=window.hurt=1>",
    '"><svg onload=window.hurt=1>',
    "<!--<script>",
    "{{scripts}}{{facts}}",
    "javascript:window.hurt=1",
    "a\u2028b\u2029c\x00\x1b[31m\ud800",
    "&lt;b&gt; &amp; ' \" `${window.hurt=1}`",
)


def write_run(
    run_dir: Path,
    *,
    losses: Iterable[tuple[int, float | None]] = (),
    journal: Sequence[dict[str, Any]] = (),
    samples: Sequence[dict[str, Any]] = (),
    state: Any = None,
) -> Path:
    """Have a run of these files, without generations; return its directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    name = run_dir.name
    (run_dir / f"{name}.loss.json").write_text(json.dumps(list(losses)))
    lines = [{"time": 1.0, "attempt": 1, "step": None, **event} for event in journal]
    (run_dir / f"{name}.journal.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    (run_dir / f"{name}.samples.json").write_text(json.dumps(list(samples)))
    if state is not None:
        (run_dir / f"{name}.state.json").write_text(json.dumps(state))
    return run_dir


def hostile_run(run_dir: Path) -> Path:
    """Have a run each of whose texts is hostile; return its directory."""
    journal: list[dict[str, Any]] = [
        {"event": "attempt_started", "pid": 1, "host": HOSTILE[0], "world_size": 1},
        {"event": "fresh_start", "step": 0},
        {"event": "signal", "step": 3, "signals": list(HOSTILE)},
    ]
    journal += [{"event": "save_failed", "step": 4, "error": text} for text in HOSTILE]
    journal += [{"event": "pivot", "step": 5, text: text} for text in HOSTILE]
    journal += [{"event": "attempt_failed", "step": 9, "error": " ".join(HOSTILE)}]
    return write_run(
        run_dir,
        losses=[(step, 1.0 / step) for step in range(1, 10)],
        journal=journal,
        samples=[{"step": 2 + n, "loss": 1.0, "text": text} for n, text in enumerate(HOSTILE)],
        state={"arms": {text: {"weight": 1.5, text: text} for text in HOSTILE}, "note": HOSTILE[0]},
    )


@contextmanager
def serving(*places: Path, **options: Any) -> Iterator[Server]:
    """Have a server of these runs answer meanwhile, on a port of its own."""
    server = Server(list(places), port=0, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
