"""An address → what the server answers. Layer 7, reads only.

    /                           the page of the only run, or the list of runs
    /run/NAME                   the page of a run
    /run/NAME/data?since=N&…    what is new on it
    /loss                       {"live": {NAME: {…}}, "saved": {NAME: {…}}}
    /loss/NAME                  {"points": [[step, loss], …]}
    /checkpoints                {"checkpoints": [{model, step, type, path, size_bytes}, …]}
    /samples/NAME               {"samples": [{step, text, loss}, …]}

The last four are what the dashboard of ANDREA reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from dist_ckpt import storage
from dist_ckpt.errors import DistCkptError, NotFoundError
from dist_ckpt.history import canonical, read_samples
from dist_ckpt.report._catalog import Catalog, View, Watched
from dist_ckpt.report._curve import encode_curve, pack
from dist_ckpt.report._gather import Gathered, sample_loss
from dist_ckpt.report._page import content_policy, json_text, render_index, render_page

__all__ = ["Reply", "answer"]

_HTML = "text/html; charset=utf-8"
_JSON = "application/json"
_EVERY_SECS = 3
_NONE = "-"
_MAX_TARGET_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        status: Of HTTP.
        kind: The content's type.
        body: The content.
        policy: The content security policy of a page; None for what isn't one.
    """

    status: int
    kind: str
    body: bytes
    policy: str | None = None


def answer(catalog: Catalog, target: str) -> Reply:
    """Return the answer to a request's target; errors are answers too."""
    try:
        if len(target) > _MAX_TARGET_CHARS:
            return _refusal(414, "usage", "The address is too long.")
        path, _, query = target.partition("?")
        parts = [unquote(part, errors="surrogateescape") for part in path.split("/")[1:]]
        reply = _route(catalog, parts, query)
    except NotFoundError as error:
        return _refusal(404, error.id, error.message)
    except DistCkptError as error:
        return _refusal(500, error.id, error.message)
    except (UnicodeError, ValueError):
        return _refusal(400, "usage", "The address can't be read.")
    return reply or _refusal(404, "not-found", "There is nothing at this address.")


def _route(catalog: Catalog, parts: list[str], query: str) -> Reply | None:
    plain: Mapping[tuple[str, ...], Callable[[Catalog], Reply]] = {
        ("",): _home,
        ("loss",): _losses,
        ("checkpoints",): _checkpoints,
    }
    if tuple(parts) in plain:
        return plain[tuple(parts)](catalog)
    match parts:
        case ["run", name]:
            return _page(catalog.get(name))
        case ["run", name, "data"]:
            return _news(catalog.get(name).view(), parse_qs(query))
        case ["loss", name]:
            view = catalog.get(name).view()
            return _json({"points": canonical(view.losses.entries(view.losses.void))})
        case ["samples", name]:
            return _samples(catalog.get(name))
        case _:
            return None


def _home(catalog: Catalog) -> Reply:
    runs = catalog.runs()
    if len(runs) == 1:
        return _page(next(iter(runs.values())))
    rows = [_row(name, watched) for name, watched in runs.items()]
    return Reply(200, _HTML, render_index(rows).encode(), content_policy(live=False, in_page=False))


def _row(name: str, watched: Watched) -> dict[str, Any]:
    row = {"name": name, "href": f"/run/{_path_of(name)}"}
    try:
        view = watched.view()
    except DistCkptError as error:
        return {**row, "state": "unreadable", "step": error.id, "loss": _NONE, "age": _NONE}
    now, (_, loss, _) = view.now, view.losses.newest
    age = now["last_step_age_secs"]
    return {
        **row,
        "state": now["state"],
        "step": _NONE if now["last_step"] is None else now["last_step"],
        "loss": _NONE if loss is None else f"{loss:.5g}",
        "age": _NONE if age is None else f"{age:,.0f} s ago",
    }


def _page(watched: Watched) -> Reply:
    view = watched.view()
    live = {
        "url": f"/run/{_path_of(watched.name)}/data",
        "every_secs": _EVERY_SECS,
        "file": view.file,
        "story": view.token,
    }
    gathered = Gathered(view.now, view.story, view.losses.entries(), view.losses.void)
    page = render_page(gathered, live=live).encode()
    return Reply(200, _HTML, page, content_policy(live=True, in_page=False))


def _news(view: View, query: Mapping[str, list[str]]) -> Reply:
    """Answer with how the run is, its new losses, and its story where that is another."""
    since = _whole(query, "since")
    is_same_file = query.get("file", [""])[0] == view.file
    losses = view.losses
    if not is_same_file or since > len(losses) or _whole(query, "void") != losses.void:
        since = 0
    has_story = query.get("story", [""])[0] == view.token
    return _json(
        {
            "now": view.now,
            "token": view.token,
            "story": None if has_story else pack(json_text(view.story).encode()),
            "file": view.file,
            "void": losses.void,
            "from": since,
            "curve": encode_curve(losses.entries(since)).to_json(),
        }
    )


def _losses(catalog: Catalog) -> Reply:
    found: dict[str, dict[str, Any]] = {"live": {}, "saved": {}}
    for name, watched in catalog.runs().items():
        try:
            view = watched.view()
        except DistCkptError:
            continue  # one broken run mustn't hide the others
        step, loss, count = view.losses.newest
        found["live" if view.now["alive"] else "saved"][name] = {
            "step": step,
            "loss": loss,
            "count": count,
            "state": view.now["state"],
        }
    return _json(found)


def _checkpoints(catalog: Catalog) -> Reply:
    found = []
    for name, watched in catalog.runs().items():
        store = watched.run.store
        try:
            rows = watched.view().story["generations"]
        except DistCkptError:
            continue
        for step, _, _, _, size_bytes, *_ in rows:
            path = store.path(step).relative_to(store.run_dir)
            found.append(_checkpoint(name, step, "generation", str(path), size_bytes))
            exported = store.bin_path(step)
            try:
                bin_bytes = storage.file_size(exported)
            except DistCkptError:
                continue
            found.append(_checkpoint(name, step, "bin", exported.name, bin_bytes))
    return _json({"checkpoints": found})


def _checkpoint(model: str, step: int, kind: str, path: str, size: int | None) -> dict[str, Any]:
    return {"model": model, "step": step, "type": kind, "path": path, "size_bytes": size}


def _samples(watched: Watched) -> Reply:
    try:
        samples = read_samples(watched.run.store.run_dir)
    except NotFoundError:
        samples = []
    return _json(
        {
            "samples": [
                {
                    "step": sample["step"],
                    "text": str(sample.get("text", "")),
                    "loss": sample_loss(sample),
                }
                for sample in samples
            ]
        }
    )


def _whole(query: Mapping[str, list[str]], key: str) -> int:
    text = query.get(key, ["0"])[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _path_of(name: str) -> str:
    """Return a run's name as a part of an address: its very bytes, be they UTF-8 or not."""
    return quote(name, safe="", errors="surrogateescape")


def _json(document: Any) -> Reply:
    return Reply(200, _JSON, json_text(document).encode())


def _refusal(status: int, id_: str, message: str) -> Reply:
    body = json.dumps({"error": {"id": id_, "message": message}})
    return Reply(status, _JSON, f"{body}\n".encode())
