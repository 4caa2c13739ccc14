"""What a newer build stored: this one cannot read it, which is no damage. It is told, and left as it is."""

from __future__ import annotations

from engine.errors import UnknownFeature, UnknownVersion

#: How it is refused. The digest was right, so that nothing else can be the reason.
NEWER = (UnknownVersion, UnknownFeature)
