"""Every step that the format ever took, and the reading of what any of its versions wrote.

The list is appended to, and never changed otherwise: docs/format.md, section 10, tells how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serialization.blobs import Bytes
from serialization.bodies import unpack_body
from serialization.migrate.packed import PACKED
from serialization.migrate.step import Step
from serialization.prefix import PREFIX_NBYTES, Letter, read_version
from serialization.records import Values

STEPS: tuple[Step, ...] = (PACKED,)


def manifest_version(data: Bytes) -> int:
    """Which version of the format an encoded manifest is of. `Manifest.decode` reads it whichever it is, and
    `encode` writes the newest. Raises Corrupt, UnknownVersion."""
    return read_version(Letter.MANIFEST, data, "manifest")


def read_newest(data: Bytes, check: Callable[[Values], object]) -> Values:
    """The map of an encoded manifest of any version, in the words of the newest. `check` is shown the map as
    it was written, before any step, and raises what it refuses. Raises besides Corrupt, UnknownVersion,
    LimitExceeded."""
    version = manifest_version(data)
    body = memoryview(data)[PREFIX_NBYTES:]
    steps = STEPS[version - 1 :]
    values = steps[0].spelt(body, "manifest") if steps else unpack_body(body, "manifest")
    check(values)
    return taken(values, steps)


def taken(values: Values, steps: Sequence[Step]) -> Values:
    """What `values` says, by the rules that hold after `steps`."""
    for step in steps:
        values = step.apply(values)
    return values
