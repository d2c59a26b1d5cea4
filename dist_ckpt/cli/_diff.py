"""``diff``: two resume points or .bin files, value by value. Layer 8."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated

import typer

from dist_ckpt.cli._answer import Answer, JsonOption
from dist_ckpt.cli._progress import byte_bar
from dist_ckpt.cli._text import plain
from dist_ckpt.errors import CorruptFileError, IncompleteError

__all__ = ["COMMANDS"]

_STATE = "A resume point (RUN, RUN@N, a path) or a .bin."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_STATE)],
    b: Annotated[str, typer.Argument(metavar="B", help=_STATE)],
    *,
    atol: Annotated[float, typer.Option(metavar="X", help="Absolute tolerance; 0: bits.")] = 1e-12,
    rtol: Annotated[float, typer.Option(metavar="X", help="Relative tolerance.")] = 0.0,
    as_json: JsonOption = False,
) -> Answer:
    """Compare two resume points or .bin files and name every difference.

    Status 0: they agree within the tolerance. 1: they differ. 2: they can't be compared.
    """
    from dist_ckpt.comparison import compare_watched  # noqa: PLC0415 - imports torch

    try:
        with contextlib.ExitStack() as stack:

            def draw(num_bytes: int) -> Callable[[int], None]:
                return stack.enter_context(byte_bar("comparing", num_bytes, quiet=as_json))

            # Infinities of a mask, or of a best value so far, are as good as any equal values.
            found = compare_watched(a, b, atol=atol, rtol=rtol, expect_infinite=("*",), watch=draw)
    except CorruptFileError as error:
        # A file that isn't whole is a fault elsewhere; here it means that nothing was compared.
        raise IncompleteError(
            f"{a} and {b} can't be compared: {error.message}",
            next_step=error.next_step or "`dist-ckpt verify` tells what is whole.",
            **{key: value for key, value in error.values.items() if key == "path"},
        ) from error

    def text() -> str:
        return "".join(f"{plain(line)}\n" for line in str(found).splitlines())

    return Answer(found.to_json(), text, 0 if found.agrees else 1)


COMMANDS = (diff,)
