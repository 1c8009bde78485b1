"""Find out what a round costs here and what it earns, and how many nodes it should have.

    python scripts/fit.py
    python scripts/fit.py collected=data/collected/mine out=data/constants/mine
    python scripts/fit.py method=ddtree use=rounds out=data/constants/ddtree   # recorded rounds

Measures costs on this machine (once: a cost.json in OUT that fits is used again), fits gains to the
collected rounds of one tree builder, calibrates its path probabilities, and says what it found:
the best fixed budget by context length, where that optimum is flat, what adapting every round is
worth. OUT holds cost.json, constants.json and their pictures; budget=best, fitted, ratio and paper
read it.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from launch import WIDTH, folders_of, open_log, progress_bar, stage, table
from methods import bind, method_of, models_of, scorer_of, setting_of
from omegaconf import DictConfig, ListConfig, OmegaConf
from regret import judge
from rich.console import Console
from rich.table import Table

from graft.budgets import paper
from graft.budgets.constants import Constants
from graft.budgets.cost import CostTable
from graft.core.errors import InputError
from graft.core.runlog import provenance
from graft.data.anchors import Anchors
from graft.data.rounds import Rounds
from graft.decode.profile import profile
from graft.decode.replay import Replay
from graft.eval.budget_plots import draw_costs, draw_gains
from graft.eval.fitting import FIRST, fit, split
from graft.eval.regret import flat
from graft.eval.watch import Watched, text_of, watch_anchors, watch_rounds

# With the root, passes of 2, 3, ... 16, 20, ... rows: kernels work in tiles of them.
SIZES = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 63, 95, 127)
LARGER = (159, 191, 255, 383, 511)  # worth looking at where nodes are cheap
PAPER_CONTEXT = 256
QUOTED = (3, 7, 15, 31, 63, 127)  # sizes whose costs are printed


WITHOUT_REGARD = ("Fixed", "Explore")  # to the state: budgets of rounds that a mean can be taken of


@stage("fit")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    check(cfg)
    decode = method_of(cfg.method)
    data = (Anchors if cfg.use == "anchors" else Rounds)(folders_of(cfg.collected))
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    bind(decode, target=target, drafter=drafter)  # refuses a scorer of other models
    setting = setting_of(decode, target, drafter)
    check_data(data, setting | {"candidates": drafter.candidates}, cfg)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    out = Path(cfg.out)
    log = open_log(cfg)
    out.mkdir(parents=True, exist_ok=True)
    asked = {
        "contexts": sorted(cfg.contexts),
        "sizes": sorted(cfg.sizes or (*SIZES, *(LARGER if target.device.type == "cuda" else ()))),
    }
    made_by = setting | asked | provenance(config)

    watched = watch(cfg, decode, unseen(decode, data, console), asked["sizes"][-1], console)
    learn, held_out = split(watched, cfg.held_out, cfg.seed)
    learn.observed.horizon(np.array(asked["sizes"]))  # refuses too few before the long part
    cost = measured(out / "cost.json", setting | asked)
    if cost is None:
        models = {"target": target, "drafter": drafter, "builder": decode.keywords["builder"]}
        cost = CostTable.measured(measure(cfg, asked, models, data, console), made_by)
        cost.save(out / "cost.json")
    console.print(costs_found(cost), end="\n\n")

    started = time.perf_counter()
    constants = fit(learn, held_out, cost, made_by, window=cfg.hist_window)
    seconds = time.perf_counter() - started
    constants.save(out)
    draw_costs(cost).savefig(out / "cost.png")
    draw_gains(constants, held_out.observed).savefig(out / "gain.png")
    console.print(f"{len(learn)} rounds fitted in {seconds:.1f} s, {len(held_out)} held out")
    for part in (gains_found(constants), reach_found(constants), paper_found(constants)):
        console.print(part, end="\n\n")
    if isinstance(data, Anchors):
        prompts = set(held_out.prompts)
        mine = [i for i, (prompt, _) in enumerate(data.keys) if prompt in prompts]
        with progress_bar(console, "held-out responses") as progress:
            rows = (data[i] for i in progress.track(mine))
            judged = judge(rows, decode.keywords["builder"], constants)
        console.print(judged.by_context(), end="\n\n")
        console.print(judged.in_words())
        log.log({"worth": judged.row()})
    console.print(best_found(constants))
    log.log(dict(constants.found))
    log.pictures([out / "cost.png", out / "gain.png"])
    log.artifact("constants", out)
    log.close()
    console.print(f"wrote {out}", style="dim", soft_wrap=True)


def check(cfg: DictConfig) -> None:
    """Refuse settings that make no sense (InputError)."""
    if cfg.use not in ("anchors", "rounds"):
        raise InputError(f"use must be anchors or rounds, not {cfg.use}")
    if not isinstance(cfg.held_out, float) or not 0 < cfg.held_out < 1:
        raise InputError(f"held_out must lie in 0..1, not {cfg.held_out}")
    for key, least in (("repeats", 3), ("hist_window", 1), ("seed", 0)):
        if not isinstance(cfg[key], int) or cfg[key] < least:
            raise InputError(f"{key} must be a number from {least} on, not {cfg[key]}")
    for key in ("contexts", "sizes"):
        numbers = list(cfg[key]) if isinstance(cfg[key], ListConfig) else []
        good = len(set(numbers)) == len(numbers) > 1
        good = good and all(isinstance(number, int) and number >= 1 for number in numbers)
        if not good and not (key == "sizes" and cfg.sizes is None):
            raise InputError(f"{key} must be several different numbers from 1 on, not {cfg[key]}")
    if min(cfg.contexts) > 1:
        raise InputError(f"contexts must begin at 1, where responses may, not {min(cfg.contexts)}")


def check_data(data: Anchors | Rounds, setting: dict[str, Any], cfg: DictConfig) -> None:
    """Refuse what other models said, another dtype or K, and rounds of another builder or window.

    And rounds whose budgets followed the state: their mean tells nothing. Raises InputError.
    """
    theirs = models_of(data.made_by) | {"candidates": data.candidates}
    if isinstance(data, Rounds):
        settings = data.made_by["settings"]
        theirs |= {"builder": data.made_by.get("builder"), "hist_window": settings["hist_window"]}
        setting = setting | {"hist_window": cfg.hist_window}
        budget = settings["method"]["budget"]["_target_"].removesuffix(".load").rpartition(".")[2]
        if budget not in WITHOUT_REGARD:
            raise InputError(
                f"collected={cfg.collected} has rounds with the budgets of {budget}, which follow "
                "the round; collect with budget@method.budget=explore"
            )
    for key, value in theirs.items():
        if value != setting[key]:
            raise InputError(
                f"collected={cfg.collected} was made with {key} {value}, not {setting[key]}; "
                "choose another collection, or the method that made it"
            )


def measured(file: Path, wanted: dict[str, Any]) -> CostTable | None:
    """The table in a file, if it was measured in this setting with these sizes and contexts."""
    if not file.exists():
        return None
    cost = CostTable.load(file)
    return cost if all(cost.made_by.get(key) == value for key, value in wanted.items()) else None


def measure(
    cfg: DictConfig,
    asked: dict[str, Any],
    models: dict[str, Any],
    data: Anchors | Rounds,
    console: Console,
) -> dict[str, np.ndarray]:
    """Seconds of rounds on this machine, on text of the collection."""
    with progress_bar(console, "measuring rounds") as progress:
        bar = progress.add_task("", total=cfg.repeats + 1)
        return profile(
            **models,
            **asked,
            text=text_of(data, asked["contexts"][-1]),
            repeats=cfg.repeats,
            seed=cfg.seed,
            on_repeat=partial(progress.advance, bar),
        )


def unseen(decode: Any, data: Anchors | Rounds, console: Console) -> list[Any]:
    """What was collected on prompts that the scorer did not learn from, or InputError."""
    scorer = scorer_of(decode)
    known = set(scorer.config.get("trained", {}).get("prompts", ())) if scorer else set()
    kept = [one for one in data if one.prompt_id not in known]
    if not kept:
        raise InputError("the scorer learned from every prompt that was collected; collect others")
    if left := len(data) - len(kept):
        what = "responses" if isinstance(data, Anchors) else "rounds"
        console.print(f"left out: {left} {what} that the scorer learned from", style="dim")
    return kept


def watch(cfg: DictConfig, decode: Any, data: list[Any], largest: int, console: Console) -> Watched:
    """The collected rounds, with the largest trees that they have or that can be built."""
    with progress_bar(console, cfg.use) as progress:
        if cfg.use == "rounds":
            return watch_rounds(progress.track(data))
        return watch_anchors(
            progress.track(data),
            decode.keywords["builder"],
            pace=Replay.of(decode),
            largest=largest,
            window=cfg.hist_window,
        )


def costs_found(cost: CostTable) -> Table:
    """A line a context."""
    wanted = [n for n in QUOTED if n in cost.nodes]
    lines = []
    for row, context in enumerate(cost.contexts):
        line = cost.line(context)
        cells = [1e3 * cost.ar[row], 1e3 * cost.draft[row]]
        cells += [1e3 * cost.rounds[row][cost.nodes == n][0] for n in wanted]
        lines.append(
            [
                f"{context}",
                *(f"{cell:.1f}" for cell in cells),
                f"{1e3 * np.median(cost.host[row]):.2f}",
                f"{1e3 * line.fixed:.1f} + {1e3 * line.per_node:.3f} n",
                f"{100 * line.residual:.0f} %",
                f"{100 * np.median(cost.spread[row]):.0f} %",
            ]
        )
    sizes = [f"n={n}" for n in wanted]
    headings = ["ms of a round at context", "AR", "draft", *sizes, "host", "line", "off by"]
    return table([*headings, "spread"], lines)


def gains_found(constants: Constants) -> str:
    """What the models of the gain say, and how well they predict."""
    lines = ["gains: held-out R2 over the mean curve; numbers with standard errors"]
    for name, gain in constants.gains.items():
        numbers = [
            f"{key} {value:.3g} ({gain.errors[key]:.2g})"
            if key in gain.errors
            else f"{key} {value}"
            for key, value in gain.numbers.items()
            if not key.startswith("alpha")
        ]
        lines.append(f"  {name:8} {constants.found['r2'][name]:6.3f}   {', '.join(numbers)}")
    return "\n".join(lines)


def reach_found(constants: Constants) -> str:
    """How calibration did."""
    ece, tokens = constants.found["calibration"]["ece"], constants.found["calibration"]["tokens"]
    return (
        f"path probabilities of held-out trees: calibration error of the first {FIRST} nodes "
        f"{ece['before']:.4f}, calibrated {ece['after']:.4f}; tokens a round of the largest tree "
        f"{tokens['before']:.2f}, calibrated {tokens['after']:.2f}, really {tokens['real']:.2f}"
    )


def paper_found(constants: Constants) -> Table:
    """The paper's constant under the three readings of its costs."""
    beta, lines = 0.5, []
    fitted = constants.gains["power"].numbers["beta"]
    for reading in paper.READINGS:
        context = min(PAPER_CONTEXT, int(constants.cost.contexts[-1]))
        fixed, per_node = paper.costs(constants.cost, reading, context)
        ratio = fixed / max(per_node, 1e-12)
        lines.append(
            [
                reading,
                f"{1e3 * fixed:.1f}",
                f"{1e3 * per_node:.3f}",
                f"{beta / (1 - beta) * ratio:.0f}",
                f"{fitted / (1 - fitted) * ratio:.0f}",
            ]
        )
    headings = ["paper's rule, reading", "c_f ms", "c_v ms", "B at beta 0.5"]
    return table([*headings, f"B at the fitted beta {fitted:.3f}"], lines)


def best_found(constants: Constants) -> str:
    """The constants, in words."""
    words = []
    for context in map(int, constants.cost.contexts):
        speeds = constants.mean / constants.cost.curve(context)[: len(constants.mean)]
        first, last = flat(dict(zip(constants.nodes.tolist(), speeds, strict=True)))
        words.append(
            f"at context {context}: {constants.best[str(context)]} nodes, "
            f"{first}..{last} lose less than 1 %"
        )
    text = "best constant budget " + "; ".join(words)
    if (last := constants.nodes[-1]) < constants.cost.nodes[-1]:
        text += f". Too few rounds reach beyond {last} nodes: larger budgets are not looked at"
    return text


if __name__ == "__main__":
    main()
