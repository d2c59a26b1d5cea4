"""What was gathered → one HTML page that needs nothing else. Pure but for its own assets: layer 7.

Nothing that a run holds is ever markup: facts travel as JSON in which ``<``, ``>`` and ``&`` are
spelled out, and the page's script shows them as text. The page's policy runs the scripts that are
named by their digest here and no other, and lets it fetch nothing (a live page: its own server).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib import resources
from typing import Any

from dist_ckpt.report._curve import Curve, encode_curve, pack
from dist_ckpt.report._gather import Gathered

__all__ = ["PAGE_MARK", "asset", "content_policy", "json_text", "render_index", "render_page"]

#: How a page of ours begins: only such a file is replaced unasked.
PAGE_MARK = "<!doctype html>\n<!-- dist_ckpt report -->"

_SCRIPTS = ("uPlot.iife.min.js", "decode.js", "words.js", "chart.js", "tables.js", "page.js")
_STYLES = ("uPlot.min.css", "page.css")
#: 200,000 losses and 2,000 generations fit into so much.
_PAGE_CHARS = 1_490_000
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SPELLED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def render_page(
    gathered: Gathered, *, live: dict[str, Any] | None = None, every_bit: bool = False
) -> str:
    """Return the page of a run.

    Args:
        gathered: What it tells.
        live: How the page gets news; None makes a page that stays as it is.
        every_bit: Keep all bits of every loss, however large the page becomes.
    """
    facts = {"now": gathered.now, "live": live, "void": gathered.void}
    parts = {
        "policy": content_policy(live=live is not None, in_page=True),
        "title": _escape(gathered.now["run"]),
        "styles": "\n".join(map(asset, _STYLES)),
        "scripts": "\n".join(f"<script>{asset(name)}</script>" for name in _SCRIPTS),
        "facts": json_text(facts),
        "story": pack(json_text(gathered.story).encode()),
        "summary": _escape(_summary(gathered.now)),
        "curve": "",
    }
    room = None if every_bit else max(0, _PAGE_CHARS - len(_fill(asset("page.html"), parts)))
    curve: Curve = encode_curve(gathered.entries, limit_chars=room)
    parts["curve"] = json_text(curve.to_json())
    return _fill(asset("page.html"), parts)


def render_index(runs: list[dict[str, Any]]) -> str:
    """Return the page that lists several runs, with links to theirs; it needs no script.

    Args:
        runs: Each with ``name``, ``href``, ``state``, ``step``, ``loss``, ``age``.
    """
    rows = "".join(map(_index_row, runs))
    parts = {
        "policy": content_policy(live=False, in_page=True),
        "styles": "\n".join(map(asset, _STYLES)),
        "rows": rows or '<tr><td colspan="5">no run yet</td></tr>',
    }
    return _fill(asset("index.html"), parts)


def _index_row(run: dict[str, Any]) -> str:
    said = {key: _escape(value) for key, value in run.items()}
    return (
        f'<tr><td><a href="{said["href"]}">{said["name"]}</a></td>'
        f'<td><span class="state {said["state"]}">{said["state"]}</span></td>'
        f"<td>{said['step']}</td><td>{said['loss']}</td><td>{said['age']}</td></tr>\n"
    )


def content_policy(*, live: bool, in_page: bool) -> str:
    """Return what the browser is to allow, for the page's own head or for the server's header."""
    rules = [
        "default-src 'none'",
        "script-src " + " ".join(_digest(asset(name)) for name in _SCRIPTS),
        "style-src " + _digest("\n".join(map(asset, _STYLES))),
        "connect-src " + ("'self'" if live else "'none'"),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    # A page can't say who may frame it, its server can.
    return "; ".join(rules if in_page else [*rules, "frame-ancestors 'none'"])


def json_text(value: Any) -> str:
    """Return JSON that can stand inside a script element; a number that isn't finite is null."""
    text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: _SPELLED[found[0]], _utf8(text))


def _escape(value: object) -> str:
    return html.escape(_utf8(str(value)))


def _utf8(text: str) -> str:
    """Return a text that can be sent: a file's name may hold a lone surrogate."""
    return text.encode("utf-8", "replace").decode()


@cache
def asset(name: str) -> str:
    """Return the text of one file of ``assets/``."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8").strip()


@cache
def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _fill(template: str, parts: dict[str, str]) -> str:
    # In one pass: what is put in is never looked at again.
    return _PLACE.sub(lambda found: parts[found[1]], template)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    # NaN and the infinities are what is not itself when taken from itself.
    return None if isinstance(value, float) and value - value != 0.0 else value


def _summary(now: dict[str, Any]) -> str:
    """Return what a reader without scripts gets."""
    return (
        f"{now['run']}: {now['state']}, last step {now['last_step']}, "
        f"committed step {now['committed_step']}, verified step {now['verified_step']}. "
        "The curve and the tables need JavaScript."
    )
