"""The best constant: what a sweep over fixed budgets would find, to the accuracy of the fit. It
depends on the machine, the models, the dtype and the context length, not on the round.
"""

from __future__ import annotations

from graft.budgets.constants import Constants
from graft.budgets.priced import Priced
from graft.core.types import RoundState


class Best(Priced):
    """The mean round's gain over the measured cost, by context length."""

    def __init__(self, constants: Constants, **limits: int) -> None:
        super().__init__(constants, **limits)
        self._mean = constants.mean[self.inside]
        self.choose(self._mean, int(self.cost.contexts[0]))  # compile now, not in the first round

    def allocate(self, state: RoundState) -> int:
        return self.choose(self._mean, state.context_length)
