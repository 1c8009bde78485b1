"""THE loop. DFlash chain, DDTree and GRAFT are configs over it: they differ in the builder and the
budget policy.

A round is seven verbs: propose, allocate, build, trim, verify, accept, commit. At the head of the
loop the target's cache holds every committed token but the last, the root; the drafter has seen the
taps of all but the last `taps`. The clock runs in a verb or between verbs, so that their times sum
to the round's.
"""

from __future__ import annotations

from collections.abc import Callable

from graft.core.clock import PYTHON, Clock
from graft.core.interfaces import BudgetPolicy, Drafter, Target, TreeBuilder
from graft.core.tree import accept
from graft.core.types import Generation, Request, Round, RoundState
from graft.decode.response import Response, Rounds, check_fits, drain
from graft.decode.sampling import Sampler


def stream(
    request: Request,
    *,
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    budget: BudgetPolicy,
    on_round: Callable[[Round], None] | None = None,
) -> Rounds:
    """Decode one response, round by round: yields new tokens, the prefill's one first.

    Returns the `Generation`, whose tokens are those of `autoregressive.generate` for the same
    request. Time between rounds is the caller's and counts nowhere, but target and drafter must be
    left alone in it. `on_round` sees every round with its draft, tree and logits. Raises InputError
    at the first token.
    """
    check_fits(request, target, budget)
    clock = Clock(target.device)
    sampler = Sampler(request, target.device)
    response = Response(request)
    with clock("prefill"):
        drafter.reset()
        step = target.prefill(request.prompt)
        root = sampler.draws(step)(0)
    taps, context_length = step.taps, len(request.prompt)
    accepted: list[int] = []
    nodes: list[int] = []
    clock.lap()  # the prefill belongs to no round
    yield response.extend([root])
    with clock(PYTHON):
        while not response.finished:
            with clock("propose"):
                draft = drafter.propose(root, taps)
            state = RoundState(draft, context_length, tuple(accepted))
            with clock("allocate"):
                allocated = budget.allocate(state)
            with clock("build"):
                tree = builder.build(draft, allocated)
            with clock("trim"):
                tree = tree.prefix(budget.trim(tree, context_length))
            with clock("verify"):
                step = target.verify(tree)
            with clock("accept"):
                path, bonus = accept(tree, sampler.draws(step))
            with clock("commit"):
                target.commit(path)
                taps = step.taps[path]
            root, context_length = bonus, context_length + len(path)
            accepted.append(len(path) - 1)
            nodes.append(len(tree) - 1)
            tokens = response.extend([*tree.tokens[path[1:]].tolist(), bonus])
            with clock.paused():
                if on_round is not None:
                    on_round(
                        Round(
                            index=len(nodes) - 1,
                            state=state,
                            budget=allocated,
                            tree=tree,
                            step=step,
                            path=path,
                            bonus=bonus,
                            seconds=clock.lap(),
                        )
                    )
                yield tokens
    return Generation(
        tokens=response.tokens,
        stopped=response.stopped,
        committed=[drafted + 1 for drafted in accepted],
        nodes=nodes,
        seconds=clock.totals,
    )


def generate(
    request: Request,
    *,
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    budget: BudgetPolicy,
    on_round: Callable[[Round], None] | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Decode one response to its end; `on_tokens` gets new tokens as they are committed."""
    rounds = stream(
        request, target=target, drafter=drafter, builder=builder, budget=budget, on_round=on_round
    )
    return drain(rounds, on_tokens)
