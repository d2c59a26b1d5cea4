"""One command line from its words to its exit status. Layer 8."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer

from dist_ckpt import __version__
from dist_ckpt.cli import INTERRUPTED_STATUS
from dist_ckpt.cli._answer import Answer, dump
from dist_ckpt.cli._text import plain
from dist_ckpt.errors import CorruptFileError, DistCkptError, FormatVersionError

__all__ = ["carry_out"]

#: Module → its commands, in the order of the list: only the module of the one wanted is imported.
_HOMES = {
    "_look": ("ls", "status", "show"),
    "_verify": ("verify",),
    "_export": ("export",),
    "_import": ("import",),
    "_diff": ("diff",),
    "_ask": ("save", "stop"),
    "_loss": ("loss",),
    "_pivot": ("pivot",),
    "_report": ("report",),
    "_serve": ("serve",),
    "_prove": ("prove",),
    "_life": ("fork", "rewind", "undelete"),
    "_keep": ("pin", "unpin", "prune"),
    "_reshard": ("reshard",),
    "_bench": ("bench",),
    "_ship": ("ship",),
}

_FAULT_STATUS = 1
_UNDONE_STATUS = 2
_BROKEN_PIPE_STATUS = 141  # what the shell shows of a program that SIGPIPE ended

_HELP = """Look at, check and steer training runs that dist_ckpt keeps.

A generation is addressed as RUN (the newest), RUN@N or RUN@latest, or by its own path.

Exit status: 0 done and in order; 1 the check ran and found a fault; 2 it could not be done.
"""


def carry_out(arguments: Sequence[str]) -> int:
    """The command has been carried out and its answer printed; returns the exit status."""
    debug, as_json, rest = _split(arguments)
    _have_streams()
    _make_printable(sys.stdout)
    _make_printable(sys.stderr)
    status = 0
    try:
        status, text = _call(rest, debug=debug, as_json=as_json)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush again at exit, and complain. What was found out still counts.
        _let_go(sys.stdout)
        return status or _BROKEN_PIPE_STATUS
    except OSError as error:
        _tell(f"dist-ckpt: the answer can't be written: {error.strerror}\n")
        _let_go(sys.stdout)
        return status or _UNDONE_STATUS
    return status


def _have_streams() -> None:
    """Have both streams: one that was closed before the start takes all and shows nothing.

    The exit status is an answer by itself, as with ``>/dev/null``.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _let_go(stream: TextIO) -> None:
    """Have what is left unwritten go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _tell(text: str) -> None:
    """Write on stderr; that nobody reads it changes no answer."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        _let_go(sys.stderr)


def _split(arguments: Sequence[str]) -> tuple[bool, bool, list[str]]:
    """Return ``--debug``, ``--json`` and the rest: both may stand anywhere before a ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = arguments[:end]
    rest = [word for word in words if word != "--debug"]
    return "--debug" in words, "--json" in words, [*rest, *arguments[end:]]


def _call(arguments: list[str], *, debug: bool, as_json: bool) -> tuple[int, str]:
    """Return the exit status and what belongs on stdout; errors in words go to stderr here."""
    try:
        result = typer.main.get_command(_app(_wanted(arguments))).main(
            args=arguments, prog_name="dist-ckpt", standalone_mode=False
        )
        if isinstance(result, Answer):
            return result.status, dump(result.document) if as_json else result.text()
        return (result if isinstance(result, int) else 0), ""
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS, ""
    except SystemExit as error:
        # The parser's own way out where nobody reads what it prints; --help, say.
        raise BrokenPipeError if error.code == 1 else error from None
    except Exception as error:
        if isinstance(error, typer.Abort):
            return INTERRUPTED_STATUS, ""
        if isinstance(error, BrokenPipeError):
            raise
        if debug:
            _tell(traceback.format_exc())
        status, document = _describe(error)
        if as_json:
            return status, dump({"error": document})
        lines = [f"dist-ckpt: {document['message']}", document["next_step"]]
        _tell("".join(f"{plain(line)}\n" for line in lines if line))
        return status, ""


def _describe(error: Exception) -> tuple[int, dict[str, Any]]:
    if isinstance(error, DistCkptError):
        is_fault = isinstance(error, CorruptFileError) and not isinstance(error, FormatVersionError)
        return _FAULT_STATUS if is_fault else _UNDONE_STATUS, error.to_json()
    if _is_parsers(error):
        message = str(error.format_message())  # type: ignore[attr-defined]
        return _UNDONE_STATUS, {
            "id": "usage",
            "message": message,
            "next_step": f"See: {_command_of(error)} --help",
        }
    if isinstance(error, OSError):
        return _UNDONE_STATUS, {
            "id": "storage",
            "message": f"{error.filename or 'The system'}: {error.strerror}.",
            "next_step": "",
        }
    return _UNDONE_STATUS, {
        "id": "internal",
        "message": f"This should not happen: {type(error).__name__}: {error}",
        "next_step": "Please report it, with what --debug prints.",
    }


def _is_parsers(error: Exception) -> bool:
    # Typer's parser has its own exceptions, whose home differs from version to version.
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _command_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return str(getattr(context, "command_path", "dist-ckpt"))


def _make_printable(stream: TextIO) -> None:
    # A terminal that knows no "→", and a file name that isn't UTF-8, mustn't end a command.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")


def _wanted(arguments: Sequence[str]) -> set[str]:
    """Return the commands that the command line needs: all where it names none of ours."""
    word = next((word for word in arguments if not word.startswith("-")), None)
    if word is None and "--version" in arguments:
        return set()
    names = {name for words in _HOMES.values() for name in words}
    return {word} if word in names else names


def _app(wanted: set[str]) -> typer.Typer:
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=_HELP
    )
    app.callback()(_root)
    for home, names in _HOMES.items():
        if wanted.isdisjoint(names):
            continue
        for command in importlib.import_module(f"dist_ckpt.cli.{home}").COMMANDS:
            # `import` is a word of Python's: its function has a name with a dash behind it.
            name = command.__name__.rstrip("_")
            if name in wanted:
                app.command(name)(command)
    # For the list of commands; the words behind it never get here.
    app.command("run", add_help_option=False)(_run)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"dist-ckpt {__version__}\n")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="And exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="With an error, print the traceback too.")
    ] = False,
) -> None:
    pass


def _run() -> None:
    """The launcher: torchrun with signals that work. See: dist-ckpt run --help."""
    raise typer.BadParameter("`run` comes first: dist-ckpt run [OPTIONS] SCRIPT ...")
