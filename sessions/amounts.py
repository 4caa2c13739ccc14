"""Amounts as people write them: 90s, 15m, 30d; 500M, 10G."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def seconds(text: str) -> float:
    """30, 90s, 15m, 12h, 30d, 2w: seconds, unless a unit is given. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no duration; say 90s, 15m, 12h, 30d or 2w")
    return float(match[1]) * _UNITS[match[2] or "s"]


def nbytes(text: str) -> int:
    """500M, 10G: bytes, unless a unit is given; powers of 1,000. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; say 500M or 10G")
    return int(float(match[1]) * _SIZES[match[2]])
