"""Which group gets a request: the same answer on every rank, worked out from loads that all groups agreed on.

Knows: what a load is, and which of several is the least. Pure. Does not know: how loads are agreed (step_sync.py),
what a group does with its requests.

A group's load is its unfinished answers, and of two groups with equally many the tokens of their prompts. Answers
come first because every group replays the bucket of the fullest one; tokens stand for prefill and memory. All answers
of a request are one group's, which computes its prompt once. A prompt goes to a group that has had one with the same
beginning as long as that one has at most SLACK answers more than the least loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from runtime.schedule.plan import Finished
from runtime.schedule.request import Request, packed

SHORTEST = 64  # tokens; shorter beginnings are not worth another group
MOST = 1 << 16  # beginnings that are remembered: some 15 MB


class PrefixHomes:
    """The groups that prompts were sent to, by digests of their first 64, 128, 256, ... tokens: a chat finds its own
    group again, not only one that has the same system prompt. The oldest are forgotten first.

    ``find`` before a prompt is assigned, ``remember`` after it, on every rank in the same order.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._homes: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def find(self, token_ids: Sequence[int], salt: str = "") -> list[tuple[int, ...]]:
        """The groups that had a prompt with the same beginning, for each length there is, the longest first."""
        found = [homes for key in _beginnings(token_ids, salt) if (homes := self._homes.get(key)) is not None]
        return found[::-1]

    def remember(self, token_ids: Sequence[int], group: int, salt: str = "") -> None:
        """The prompt goes to ``group``."""
        for key in _beginnings(token_ids, salt):
            homes = self._homes.pop(key, ())
            self._homes[key] = homes if group in homes else (*homes, group)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)


def _beginnings(token_ids: Sequence[int], salt: str) -> Iterator[bytes]:
    """Digests of the first 64, 128, 256, ... token ids, as far as there are so many, of requests with this salt."""
    contents, digest = memoryview(packed(token_ids)), blake2b(salt.encode(), digest_size=8)
    done, length = 0, SHORTEST
    while length <= len(contents):
        digest.update(contents[done:length])
        yield digest.digest()
        done, length = length, 2 * length


_ONE_REQUEST = 1 << 40  # of a load; below it are the tokens
_MOST = (1 << 63) - 1  # that can be agreed on
SLACK = 4  # answers: more, and the steps of all groups would be larger for the sake of one group's prefills


class LoadBalancer:
    """Kept by every rank of group ``index`` of ``groups``. Each step: ``assign`` what arrives, then agree on loads.

    ``requests``: how many each group was given so far. The loads of the other groups are those of the last agreement
    and what was assigned since; so is the own one, on all ranks alike.
    """

    def __init__(self, index: int, groups: int, *, prefix_caching: bool = True) -> None:
        self.index = index
        self._homes = PrefixHomes() if prefix_caching else None
        self.groups = groups
        self.requests = [0] * groups
        self._loads = [0] * groups
        self._held: dict[int, int] = {}  # this group's unfinished requests -> what each weighs
        self._load = 0

    def assign(self, request: Request) -> int:
        """The group that gets it: one that has had its beginning, else the least loaded, of several the first."""
        group = self._home_of(request)
        weights = dict.fromkeys(request.answer_ids, _ONE_REQUEST)
        weights[request.request_id] += len(request.prompt_token_ids)
        self._loads[group] += sum(weights.values())
        self.requests[group] += len(weights)
        if group == self.index:
            self._held |= weights
            self._load += sum(weights.values())
        return group

    def _home_of(self, request: Request) -> int:
        least = min(range(self.groups), key=self._loads.__getitem__)
        if self._homes is None:
            return least
        prompt, most = request.prompt_token_ids, self._loads[least] // _ONE_REQUEST + SLACK
        for homes in self._homes.find(prompt, request.sampling.cache_salt):
            free = [group for group in homes if self._loads[group] // _ONE_REQUEST <= most]
            if free:
                least = min(sorted(free), key=self._loads.__getitem__)
                break
        self._homes.remember(prompt, least, request.sampling.cache_salt)
        return least

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
