"""Ctrl-C for what tests start."""

from __future__ import annotations

import signal


def hear_ctrl_c() -> None:
    """Before a program begins: tests that were started in the background ignore it, and what they start would
    inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
