"""Which group gets a request: the same answer on every rank, worked out from loads that all groups agreed on.

Knows: what a load is, and which of several is the least. Pure. Does not know: how loads are agreed (step_sync.py),
what a group does with its requests.

A group's load is its unfinished requests, and of two groups with equally many the tokens of their prompts. Requests
come first because every group replays the bucket of the fullest one; tokens stand for prefill and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.schedule.plan import Finished
from runtime.schedule.request import Request

_ONE_REQUEST = 1 << 40  # of a load; below it are the tokens
_MOST = (1 << 63) - 1  # that can be agreed on


class LoadBalancer:
    """Kept by every rank of group ``index`` of ``groups``. Each step: ``assign`` what arrives, then agree on loads.

    ``requests``: how many each group was given so far. The loads of the other groups are those of the last agreement
    and what was assigned since; so is the own one, on all ranks alike.
    """

    def __init__(self, index: int, groups: int) -> None:
        self.index = index
        self.groups = groups
        self.requests = [0] * groups
        self._loads = [0] * groups
        self._held: dict[int, int] = {}  # this group's unfinished requests -> what each weighs
        self._load = 0

    def assign(self, request: Request) -> int:
        """The group that gets it: the one with the least load, of several the first."""
        group = min(range(self.groups), key=self._loads.__getitem__)
        weight = _ONE_REQUEST + len(request.prompt_token_ids)
        self._loads[group] += weight
        self.requests[group] += 1
        if group == self.index:
            self._held[request.request_id] = weight
            self._load += weight
        return group

    def ended(self, finished: Iterable[Finished]) -> None:
        """Requests of this group have ended."""
        for one in finished:
            self._load -= self._held.pop(one.request_id, 0)

    @property
    def proposal(self) -> tuple[int, ...]:
        """This group's numbers, of which the maximum over all groups is every group's load."""
        mine = min(self._load, _MOST)
        return tuple(mine if group == self.index else 0 for group in range(self.groups))

    def agreed(self, loads: Sequence[int]) -> None:
        """``loads``: that maximum."""
        self._loads = list(loads)
