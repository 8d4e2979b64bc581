"""Places on the device for tables of grammars.

Knows: which table is in which place, and when a place may get another one. Does not know: what a table is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PLACES: Final = 16


@dataclass(slots=True, eq=False)
class Place:
    """``users``: slots that read its table. ``last_step``: the last step in which a former one may."""

    number: int
    key: bytes
    users: int = 0
    last_step: int = -1


class TablePlaces:
    """``places``: by Request.table_key, the one that was taken longest ago first. ``landed_after``: whether a step has
    landed."""

    def __init__(self, landed_after: Callable[[int], bool]) -> None:
        self.places: dict[bytes, Place] = {}
        self._landed_after = landed_after

    def add(self, key: bytes) -> None:
        """A table that all ranks hold; none, if all places are in use: then its requests do without."""
        if key in self.places:
            return
        number = len(self.places)
        if number == PLACES:
            idle = [one for one in self.places.values() if not one.users and self._landed_after(one.last_step)]
            if not idle:
                return
            number = self.places.pop(idle[0].key).number
        self.places[key] = Place(number, key)

    def take(self, key: bytes) -> Place | None:
        """For a slot; None: there is no such table."""
        if (place := self.places.pop(key, None)) is not None:
            place.users += 1
            self.places[key] = place
        return place

    def give_back(self, place: Place, last_step: int) -> None:
        place.users -= 1
        place.last_step = max(place.last_step, last_step)
