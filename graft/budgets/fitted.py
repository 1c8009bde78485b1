"""SABA with fitted gains: what a round of this state earns, by budget (DESIGN 5.4)."""

from __future__ import annotations

import numpy as np

from graft.budgets.constants import Constants
from graft.budgets.gain import STATEFUL
from graft.budgets.priced import Priced
from graft.core.errors import InputError
from graft.core.types import RoundState


class Fitted(Priced):
    """Decides before building, by conf, degen and hist. `gain` is lomax or arrival; None takes
    the one that predicts held-out rounds better.
    """

    def __init__(self, constants: Constants, *, gain: str | None = None, **limits: int) -> None:
        super().__init__(constants, **limits)
        gain = gain or constants.fitted
        if gain not in STATEFUL:
            raise InputError(f"budget.gain must be one of {', '.join(STATEFUL)}, not {gain}")
        self._gain = constants.gains[gain]
        tokens = self._gain.tokens(self.nodes, np.zeros(3))
        self.choose(tokens, int(self.cost.contexts[0]))  # compile now, not in the first round

    def allocate(self, state: RoundState) -> int:
        seen = np.array([state.conf, state.degen, state.hist(self.constants.window)])
        return self.choose(self._gain.tokens(self.nodes, seen), state.context_length)
