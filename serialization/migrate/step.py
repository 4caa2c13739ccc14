"""One step of the format: from manifests of one version to those of the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serialization.blobs import Bytes
from serialization.records import Values


@dataclass(frozen=True, slots=True)
class Step:
    """From version `since` to `since + 1`. Once a version was released, its step is never changed: somebody
    has files of it.

    `spelt` gives the map of what follows the prefix in a file of `since`, and raises what its rules refuse
    (Corrupt, LimitExceeded). `apply` gives the map that says the same by the rules of the next version; both
    are pure, and are handed a map that they may keep.
    """

    since: int
    name: str
    why: str
    spelt: Callable[[Bytes, str], Values]
    apply: Callable[[Values], Values]
