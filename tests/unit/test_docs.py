"""What the documentation says holds: examples run, commands and names exist, links resolve."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dist_ckpt
from dist_ckpt import errors

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
#: Their blocks need runs that exist, or are pieces of a specification.
NO_PROGRAMS = [DOCS / name for name in ("kernodeck.md", "format.md", "protocol.md")]
PAGES = [README, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [body for _, kind, body in found if kind == language]


def without_code(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    titles = re.findall(
        r"^#+ (.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


# ----------------------------------------------------------------------------------------- examples


@pytest.fixture(autouse=True)
def own_torch_settings() -> Iterator[None]:
    """Examples set torch up as a program of their own would."""
    was = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in NO_PROGRAMS and blocks(page, "python")],
    ids=name_of,
)
def test_the_python_of_a_page_is_one_program_that_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    source = "\n".join(blocks(page, "python"))
    program.write_text(source.replace("until=10_000", "until=1_000"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(program), run_name="__main__")


def test_the_readmes_example_goes_on_where_it_was_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    source = blocks(README, "python")[0]
    monkeypatch.chdir(tmp_path)
    for until in (150, 1000):  # 10 000 are a minute: time for a reader to kill it
        program.write_text(source.replace("until=10_000", f"until={until}"), encoding="utf-8")
        runpy.run_path(str(program), run_name="__main__")
    run = dist_ckpt.open_run(tmp_path / "runs" / "line")
    assert [step for step, _ in run.loss()] == list(range(1, 1001))
    assert [e["step"] for e in run.journal() if e["event"] == "resumed"] == [150]


def test_the_readmes_example_fits_on_the_first_screen() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line]
    assert len(lines) <= 18
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=name_of)
def test_shell_examples_are_what_a_shell_understands(page: Path) -> None:
    for body in blocks(page, "sh"):
        done = subprocess.run(
            ["/bin/bash", "-n"], input=body, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{body}\n{done.stderr}"


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").rglob("*.md")), ids=name_of)
def test_directories_that_shell_examples_write_into_are_there(page: Path) -> None:
    """Made on the page before; the runs' own is there, absolute ones are the reader's."""
    text = "\n".join(blocks(page, "sh"))
    for found in re.finditer(r" -o ([^\s/]+)/", text):
        made = text[: found.start()].split("\n")
        assert found[1] == "runs" or f"mkdir -p {found[1]}" in made, found[0]


# --------------------------------------------------------------------------------- commands, names


def existing_commands() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "dist_ckpt", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"^  ([a-z]+) ", done.stdout.split("Commands:")[1], re.MULTILINE))


def test_every_command_in_the_docs_exists_and_the_readme_and_the_reference_name_all() -> None:
    there = existing_commands()
    call = re.compile(r"dist-ckpt ((?:--\w+ )*)([a-z]+)\b")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"`([^`\n]+)`", text) + blocks(page, "sh"))
        named = {command for _, command in call.findall(code)}
        assert named <= there, f"{name_of(page)}: {sorted(named - there)}"
    readme = README.read_text(encoding="utf-8")
    reference = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    for command in there:
        assert f"| `dist-ckpt {command}" in readme
        assert f"| `{command} " in reference


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"^make ([a-z]+)|`make ([a-z]+)", pages, re.MULTILINE))
    assert {name for pair in named for name in pair if name} <= targets


def test_the_reference_names_every_argument_and_method_of_the_checkpointer() -> None:
    page = (DOCS / "reference" / "checkpointer.md").read_text(encoding="utf-8")
    cls = dist_ckpt.Checkpointer
    arguments = list(inspect.signature(cls.__init__).parameters)[1:]
    methods = [name for name in vars(cls) if not name.startswith("_")]
    for name in [*arguments, *methods]:
        assert re.search(rf"`{name}[`(]", page), name
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if isinstance(parameter.default, int | float | None):
            row = next(
                line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line
            )
            assert str(parameter.default) in row, row


def test_the_reference_names_every_argument_of_the_loader() -> None:
    page = (DOCS / "reference" / "loader.md").read_text(encoding="utf-8")
    for name in list(inspect.signature(dist_ckpt.ResumableLoader.__init__).parameters)[1:]:
        assert f"`{name}`" in page, name


def test_the_reference_names_every_error_with_its_id() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    for name in errors.__all__:
        assert f"| `{name}` | `{getattr(errors, name).id}` |" in page, name


def test_the_reference_names_every_variable_that_is_read() -> None:
    named = set(
        re.findall(r"`(DIST_CKPT_\w+)`", (DOCS / "reference" / "environment.md").read_text("utf-8"))
    )
    read: set[str] = set()
    for path in (ROOT / "dist_ckpt").rglob("*.py"):
        read |= set(re.findall(r'"(DIST_CKPT_\w+)"', path.read_text(encoding="utf-8")))
    assert read == named


def journalled_events() -> set[str]:
    """Return the first argument of each call that journals, as the code has it."""
    found: set[str] = set()
    for path in (ROOT / "dist_ckpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            ways = ("journal.append", "encode_event")
            if called.split(".")[-1] != "journal" and not called.endswith(ways):
                continue
            event = node.args[0]
            if isinstance(event, ast.Constant):
                found.add(str(event.value))
            elif isinstance(event, ast.JoinedStr):
                found |= {"attempt_ended", "attempt_stopped", "attempt_failed"}
            elif isinstance(event, ast.Name) and event.id.isupper():
                found |= _constants(event.id)
    return found


def _constants(name: str) -> set[str]:
    pattern = re.compile(rf'^{name}: Final = "(\w+)"', re.MULTILINE)
    return {
        value
        for path in (ROOT / "dist_ckpt").rglob("*.py")
        for value in pattern.findall(path.read_text(encoding="utf-8"))
    }


def test_the_reference_names_every_event_of_the_journal_and_no_other() -> None:
    page = (DOCS / "reference" / "journal.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == journalled_events()


# ------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_internal_links_resolve(page: Path) -> None:
    for link in _LINK.findall(without_code(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert target.is_relative_to(ROOT), f"{name_of(page)} links out of the checkout: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)} links to {link}"


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in sorted(DOCS.rglob("*.md")):
        assert f" {page.relative_to(DOCS)}\n" in nav, page


def test_the_start_page_names_every_page_of_the_navigation() -> None:
    nav = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    start = DOCS / "index.md"
    named = {link.partition("#")[0] for link in _LINK.findall(without_code(start))}
    # Each decision is listed on a page of its own, see the next test.
    wanted = {page for page in nav if not re.match(r"decisions/\d", page)} - {"index.md"}
    assert len(wanted) > 40
    assert not wanted - named


def test_decisions_are_numbered_in_order_and_listed() -> None:
    folder = DOCS / "decisions"
    pages = sorted(path.name for path in folder.glob("0*.md"))
    numbers = [int(name[:4]) for name in pages]
    assert numbers == sorted(set(numbers))
    listed = re.findall(r"\]\((0\d+-[\w-]+\.md)\)", (folder / "index.md").read_text("utf-8"))
    assert listed == pages
    for name in pages:
        first = (folder / name).read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(f"# {int(name[:4])}. ")
