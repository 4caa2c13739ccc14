"""A reply that is one JSON object."""

from __future__ import annotations

from engine.chooser import Mask
from engine.grammar.json_bytes import BEGIN, BLANKS, Place, in_string, read
from engine.grammar.masks import JsonMasks

#: So many blanks in a row end where something solid may follow: models have been seen to go on for ever.
MAX_BLANKS = 40


class JsonObject:
    """A `Constraint`. When the object is whole the reply ends. One that is cut short (by its length) is the
    beginning of one."""

    def __init__(self, masks: JsonMasks) -> None:
        self._masks = masks
        self._place: Place = BEGIN
        self._blanks = 0

    def allowed(self) -> Mask:
        mask = self._masks.mask(self._place)
        if self._blanks < MAX_BLANKS:
            return mask
        solid: Mask = mask & self._masks.solid
        return solid if solid.any() else mask

    def push(self, token: int) -> None:
        if token in self._masks.tokenizer.end_ids:
            return
        data = self._masks.bytes_of(token)
        place = read(self._place, data)
        assert place is not None, f"token {token} was not allowed"
        self._place = place
        solid = data.rstrip(BLANKS)
        if in_string(place.state):
            self._blanks = 0
        else:
            self._blanks = len(data) - len(solid) + (0 if solid else self._blanks)
