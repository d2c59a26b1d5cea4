"""Looking at runs: plots, one self-contained page, the same live over HTTP. Layer 7, reads only.

Needs no torch; matplotlib for the PNG alone. The page's script and styles lie in ``assets/``, with
uPlot 1.6.32 (MIT, its licence beside it) as it came.
"""

from __future__ import annotations

from dist_ckpt.report._curve import Curve, encode_curve
from dist_ckpt.report._gather import Gathered, gather
from dist_ckpt.report._page import PAGE_MARK, render_page
from dist_ckpt.report._plot import Panel, draw_panels
from dist_ckpt.report._png import draw_png
from dist_ckpt.report._server import DEFAULT_PORT, Server

__all__ = [
    "DEFAULT_PORT",
    "PAGE_MARK",
    "Curve",
    "Gathered",
    "Panel",
    "Server",
    "draw_panels",
    "draw_png",
    "encode_curve",
    "gather",
    "render_page",
]
