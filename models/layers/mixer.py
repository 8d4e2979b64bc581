"""Mixer: the half of a decoder layer that carries information from token to token of a sequence.

Knows: what every mixer is given and returns. Does not know: how one mixes (attention.py), or what it keeps of a
sequence (models/cache_layout.py).
Shape letters as in models/inputs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor, nn

from models.cache_layout import CacheView, LayerCache
from models.inputs import StateRows, StepInputs, Undecided
from parallel.comm.collectives import PendingAllReduce

# Of (x, residual), the latter None where there is none: both again, with what it makes of the former as the new x.
Part = Callable[[Any, Any], tuple[Any, Any]]
View = TypeVar("View", bound=CacheView)


class Mixer(nn.Module, Generic[View]):
    """x' = mix(norm(x + residual)), over the tokens of each row and what ``cache`` keeps of those before them.

    ``View`` is the kind of view that its declaration stands for: a Tensor for planes, StateBanks for SlotState.
    ``replays``: of a mixer with slot state, that it heeds StateRows.undecided, of chains and of trees.
    ``batch_invariant``: a token's result has the same bits whatever shares the step, if its kernels' have.
    """

    batch_invariant: bool = False
    replays: ClassVar[bool] = False

    @property
    def made_size(self) -> int:
        """X: numbers that a mixer which ``replays`` makes of a token before its state takes it in."""
        raise NotImplementedError

    def advance(self, made_TX: Tensor, rows: StateRows, positions_T: Tensor, cache: View) -> Tensor:
        """Of a mixer which ``replays``: what lies between its two projections. ``rows`` says what updates the state."""
        raise NotImplementedError

    def advance_or_wait(self, made_TX: Tensor, rows: StateRows, positions_T: Tensor, cache: View) -> Tensor:
        """``advance``; for rows that are undecided without an update, which is left to the decider."""
        if rows.undecided is None:
            return self.advance(made_TX, rows, positions_T, cache)
        rows.undecided(Undecided(self, made_TX, partial(self.advance, cache=cache)))
        return self.advance(made_TX, rows.verifying, positions_T, cache)

    @property
    def cache(self) -> LayerCache:
        """What this rank keeps of a sequence for this layer."""
        raise NotImplementedError

    def forward(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, inputs: StepInputs, cache: View,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:  # fmt: skip
        """``x`` is not yet added to ``residual`` (None: there is none); nor is the first result to the second.

        Both results are [R, N] where only some tokens are ``wanted``; all of them update ``cache``. A mixer defines
        this or ``parts``.
        """
        for part in self.parts(inputs, cache, wanted_R):
            x_TN, residual_TN = part(x_TN, residual_TN)
        return x_TN, cast(Tensor, residual_TN)

    def parts(self, inputs: StepInputs, cache: View, wanted_R: Tensor | None = None) -> Iterator[Part]:
        """What ``forward`` calls one after the other. A caller that does so itself holds no ``x`` which is no longer
        needed: it takes memory in large steps."""
        yield lambda x, residual: self(x, residual, inputs, cache, wanted_R)
