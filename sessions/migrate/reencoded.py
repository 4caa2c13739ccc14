"""Re-encoding on the way: what `serialization.reencode` makes of a session, as a conversion."""

from __future__ import annotations

from dataclasses import dataclass

from serialization.blobs import Store
from serialization.manifest import Manifest
from serialization.reencode.forms import Forms
from serialization.reencode.planning import plan_reencoding
from serialization.reencode.reencode import reencode
from serialization.reencode.reencoding import Reencoding
from sessions.migrate.plan import Fate, Item

#: More than a blob has beside its rows.
_BLOB_NBYTES = 1024


@dataclass(frozen=True, slots=True)
class Reencoded:
    """Sessions as `wanted`; `forms` is of the model that made them, for other dtypes."""

    wanted: Reencoding
    forms: Forms | None = None

    def plan(self, manifest: Manifest) -> tuple[Item, ...]:
        found = plan_reencoding(manifest, self.wanted, self.forms)
        return tuple(
            Item(Fate(item.fate.value), item.what, item.count, item.why, item.becomes or item.nbytes or None)
            for item in found.items
        )

    def most_nbytes(self, manifest: Manifest) -> int:
        plan = plan_reencoding(manifest, self.wanted, self.forms)
        return plan.nbytes + _BLOB_NBYTES * sum(1 for _ in plan.outline(plan.source).pieces())

    def convert(self, manifest: Manifest, source: Store, target: Store) -> Manifest:
        return reencode(source, manifest, target, self.wanted, self.forms)
