"""Constants from collections, through the scripts: fitted, read by every policy, judged; and what
cannot be fitted, in one line.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import collect
import fit
import generate
import numpy as np
import pytest
import regret
import torch
from conftest import costs_of
from test_replay import trained
from test_show_round import run

from graft.budgets.constants import Constants
from graft.budgets.cost import CostTable
from graft.budgets.fixed import Fixed
from graft.budgets.observed import Observed
from graft.core.types import Draft
from graft.data.anchors import Anchors
from graft.data.rounds import Rounds
from graft.decode.replay import NEVER, Replay
from graft.drafters import dflash_checkpoint
from graft.eval.watch import Watched, watch_anchors
from graft.trees.best_first import expand
from graft.trees.ddtree import DDTree

SIZES = [1, 2, 4, 8]
EXPLORE = (
    *("budget@method.budget=explore", "method.budget.nodes=8"),
    *("method.budget.share=0.9", "method.budget.largest=24"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """A drafter that is right now and then, collections of it, and constants from the anchors."""
    folder = tmp_path_factory.mktemp("fit")
    dflash_checkpoint.save(trained("qwen3"), folder / "drafter")
    prompts = folder / "own.jsonl"
    rows = [{"id": f"own-{i}", "turns": ["What is a tree of tokens?"[i:]]} for i in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        *("+experiment=tiny", "drafter=dflash", f"drafter.checkpoint={folder / 'drafter'}"),
        *("drafter.candidates=8", "target.dtype=float32", f"paths.outputs={folder / 'outputs'}"),
    )
    asked = (*common, f"prompts={prompts}", "max_new_tokens=40")
    assert run(collect, *asked, f"out={folder / 'all'}", *EXPLORE) == 0
    fixed = ("what=[rounds]", "per_set=8", "budget@method.budget=fixed", "method.budget.nodes=4")
    assert run(collect, *asked, f"out={folder / 'fixed'}", *fixed) == 0
    assert run(collect, *asked, f"out={folder / 'few'}", "per_set=2") == 0
    small = (
        *("method=ddtree", f"collected={folder / 'all'}", "contexts=[1,300]"),
        *("sizes=[4,1,2,8]", "repeats=3"),
    )
    assert run(fit, *common, *small, f"out={folder / 'constants'}") == 0
    return SimpleNamespace(folder=folder, common=common, small=small)


@pytest.fixture
def go(made, capsys):
    """Run a script on what was made; gives (exit code, stdout, stderr)."""

    def start(module, *arguments: str):
        capsys.readouterr()
        given = (argument.format(folder=made.folder) for argument in arguments)
        return run(module, *made.common, *given), *capsys.readouterr()

    return start


@pytest.fixture
def fitted(made, go, tmp_path):
    """Run scripts/fit.py with small settings, into a folder of the test's own."""

    def start(*arguments: str):
        return go(fit, *made.small, f"out={tmp_path / 'out'}", *arguments)

    return start


def last_row(made: SimpleNamespace, stage: str) -> dict:
    """What the last run of a stage logged last."""
    files = sorted((made.folder / "outputs" / stage).glob("*/metrics.jsonl"))
    return json.loads(files[-1].read_text().splitlines()[-1])


def test_constants_from_anchors(fitted, made, tmp_path):
    code, out, err = fitted()
    assert (code, err) == (0, "")
    for words in (
        *("measuring rounds", "rounds fitted in", "held out", "best constant budget at context 1:"),
        *("paper", "power", "lomax", "arrival", "gamma_conf", "chain", "calibration error"),
        *("whole", "draft", "per_node", "expected optimum", "luck"),
    ):
        assert words in out
    folder = tmp_path / "out"
    for picture in ("cost.png", "gain.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    constants = Constants.load(folder)
    assert constants.nodes.tolist() == SIZES
    assert constants.cost.contexts.tolist() == [1, 300]
    assert constants.made_by["builder"] == constants.cost.made_by["builder"] == "DDTree()"
    assert constants.made_by["config"]["held_out"] == 0.4, "they say how they were made"
    for context, best in constants.best.items():
        speeds = constants.mean / constants.cost.curve(int(context))
        assert speeds[SIZES.index(best)] == speeds.max()
    assert constants.fitted in ("lomax", "arrival")
    # The rounds of 60 % of the prompts, as a walk at the method's own budget takes them.
    anchors, pace = Anchors([made.folder / "all"]), Replay(DDTree(), Fixed(7))
    watched = watch_anchors(anchors, DDTree(), pace=pace, largest=8, window=8)
    learn, held = fit.split(watched, 0.4, 0)
    assert constants.found["rounds"] == len(learn)
    assert f"{len(held)} held out" in out
    tokens = learn.observed.tokens(np.array(SIZES))
    assert constants.mean == pytest.approx(tokens.mean(0)), "nothing is censored"
    assert constants.found["calibration"]["tokens"]["real"] == pytest.approx(
        held.observed.tokens(np.array([8])).mean()
    )
    row = last_row(made, "fit")
    assert row["r2"] == constants.found["r2"]


def test_prompts_are_held_out_as_a_whole(made):
    anchors, pace = Anchors([made.folder / "all"]), Replay(DDTree(), Fixed(4))
    watched = watch_anchors(anchors, DDTree(), pace=pace, largest=4, window=8)
    parts = {}
    for seed in (0, 1):
        learn, held = fit.split(watched, 0.25, seed)
        assert not set(learn.prompts) & set(held.prompts)
        assert len(set(held.prompts)) == 4
        assert len(learn) + len(held) == len(watched)
        parts[seed] = set(held.prompts)
    assert parts[0] != parts[1]


def test_costs_are_measured_once(fitted, made, tmp_path):
    file = tmp_path / "out/cost.json"
    file.parent.mkdir()
    whole = (made.folder / "constants/cost.json").read_text()
    file.write_text(whole)
    code, out, _ = fitted("sizes=[8,4,2,1]", "contexts=[300,1]", "held_out=0.5")
    assert code == 0
    assert "measuring rounds" not in out, "in whatever order they are asked for"
    assert file.read_text() == whole
    code, out, _ = fitted("sizes=[1,4,8]")
    assert code == 0
    assert "measuring rounds" in out
    assert CostTable.load(file).nodes.tolist() == [1, 4, 8]
    other = json.loads(whole)
    other["made_by"]["threads"] = 99
    file.write_text(json.dumps(other))
    assert "measuring rounds" in fitted()[1]
    assert CostTable.load(file).made_by["threads"] == torch.get_num_threads()
    file.write_text("{")
    code, _, err = fitted()
    assert code == 2
    assert "cost.json is no cost table" in err


def test_constants_from_recorded_rounds(fitted, made, go, tmp_path):
    """Each round is seen up to its own budget; sizes that few reach are not told of."""
    explored = (*EXPLORE, "use=rounds")
    code, out, err = fitted(*explored, "sizes=[1,2,4,8,12,24]")
    assert (code, err) == (0, "")
    assert "expected optimum" not in out, "nothing to replay"
    constants = Constants.load(tmp_path / "out")
    assert constants.cost.nodes.tolist() == [1, 2, 4, 8, 12, 24]
    assert 8 <= constants.nodes[-1] < 24
    rounds = Rounds([made.folder / "all"])
    assert {one.budget for one in rounds} > {8, 24}
    assert f"{len(rounds) - constants.found['rounds']} held out" in out
    same = Constants.load(made.folder / "constants")
    assert constants.mean[:4] == pytest.approx(same.mean, abs=0.12), "as anchors have it"
    chosen = ("method=ddtree", "budget@method.budget=ratio", f"paths.constants={tmp_path / 'out'}")
    code, out, _ = go(generate, *chosen, "max_new_tokens=8")
    assert code == 0


@pytest.mark.parametrize("policy", ["best", "fitted", "ratio", "paper"])
def test_policies_read_the_constants(go, policy):
    chosen = ("method=ddtree", f"budget@method.budget={policy}", "compare=true")
    code, out, err = go(
        generate, *chosen, "paths.constants={folder}/constants", "max_new_tokens=20"
    )
    assert (code, err) == (0, "")
    assert "tokens identical to AR: yes" in out


def test_regret_says_what_policies_are_worth(go, made):
    given = ("method=ddtree", "collected={folder}/all", "constants={folder}/constants")
    code, out, err = go(regret, *given)
    assert (code, err) == (0, "")
    for words in ("budget", "best", "fitted", "ratio", "paper", "over AR", "% over best", "luck"):
        assert words in out
    found = last_row(made, "regret")
    assert set(found) == {"own", "1", "300"}
    for one in found.values():
        assert set(one["policies"]) == {"best", "fitted", "ratio", "paper"}
        assert set(one["fixed"]) == {"1", "2", "4", "8"}
        fastest = min(one["fixed"].values())
        assert one["fixed"][str(one["best_fixed"])] == fastest
        for policy in one["policies"].values():
            assert policy["gain"] == pytest.approx(fastest / policy["seconds_a_token"] - 1)
            assert policy["seconds_a_token"] >= one["bounds"]["hindsight"] * (1 - 1e-9)
        assert one["bounds"]["optimum"] <= one["bounds"]["fixed"] * (1 + 1e-9)
    # Where nodes cost nothing all take many, where they are dear none does.
    nodes = {}
    for line in ("[5,0.0001]", "[5,50]"):
        assert go(regret, *given, f"line={line}")[0] == 0
        nodes[line] = last_row(made, "regret")["own"]["policies"]["best"]["nodes"]
    assert nodes == {"[5,0.0001]": 8, "[5,50]": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["collected={folder}/nowhere"], "nowhere/anchors holds no shards; scripts/collect.py"),
        (["collected={folder}/fixed"], "fixed/anchors holds no shards"),
        (["collected={folder}/few"], "rounds are too few to fit a gain; collect 200 at least"),
        (
            ["collected={folder}/fixed", "use=rounds", "held_out=0.1"],
            "tree of 4 nodes, so what more would buy is not in the data; collect rounds with "
            "budget@method.budget=explore",
        ),
        (["use=rounds", "method=dflash"], "was made with builder DDTree(), not Chain()"),
        (["use=both"], "use must be anchors or rounds, not both"),
        (["held_out=0"], "held_out must lie in 0..1, not 0"),
        (["held_out=1"], "held_out must lie in 0..1, not 1"),
        (["held_out=0.99"], "held_out=0.99 of 16 prompts leaves none on one side"),
        (["repeats=1"], "repeats must be a number from 3 on, not 1"),
        (["sizes=[0,4]"], "sizes must be several different numbers from 1 on, not [0, 4]"),
        (["sizes=[4,4]"], "sizes must be several different numbers from 1 on"),
        (
            ["contexts=[0,300]"],
            "contexts must be several different numbers from 1 on, not [0, 300]",
        ),
        (["contexts=[300,300]"], "contexts must be several different numbers"),
        (["contexts=[]"], "contexts must be several different numbers"),
        (["contexts=[2,300]"], "contexts must begin at 1, where responses may, not 2"),
        (["contexts=[1,1100]"], "target's context of 1024 leaves"),
        (["target.dtype=bfloat16"], "was made with dtype float32, not bfloat16"),
        (["target.seed=3"], "was made with target"),
        (["budget@method.budget=ratio", "paths.constants={folder}/none"], "none/constants.json"),
        (["out=/proc/no"], "/proc/no"),
        (["nonsense=1"], "nonsense"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_fitted_is_one_line(fitted, made, arguments, words):
    code, _, err = fitted(*arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert words in err


@pytest.mark.parametrize(
    "arguments",
    [
        *(["contexts=many"], ["contexts=5"], ["contexts=[1.5,300]"]),
        *(["sizes=[a]"], ["sizes=5"], ["sizes=[1.5,3]"]),
        *(["held_out=many"], ["repeats=many"], ["repeats=3.5"]),
        *(["hist_window=x"], ["hist_window=0"], ["hist_window=-3"]),
        *(["collected=[]"], ["collected=null"]),
        ["held_out=0.01"],  # no prompt is held out of 16
        ["drafter.candidates=4"],  # the drafts have 8, and trees follow from them
        [*EXPLORE, "use=rounds", "hist_window=3"],  # the rounds were recorded with 8
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_one_line(fitted, arguments):
    code, _, err = fitted(*arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err


@pytest.mark.parametrize(
    "arguments",
    [
        ["sizes=[8]"],  # one size makes no line
        ["out=/proc/no"],
        ["collected={folder}/few"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_fitted_is_said_before_anything_is_measured(fitted, arguments):
    code, out, _ = fitted(*arguments)
    assert code == 2
    assert "measuring rounds" not in out


def test_rounds_whose_budgets_followed_the_state_are_no_sample(fitted, go):
    """Small trees where rounds are hard: a mean over what was seen would be too high."""
    ratio = ("method=ddtree", "budget@method.budget=ratio")
    places = ("paths.constants={folder}/constants", "prompts={folder}/own.jsonl", "per_set=1")
    asked = (*places, "max_new_tokens=20", "what=[rounds]", "out={folder}/ratio")
    assert go(collect, *ratio, *asked)[0] == 0
    code, _, err = fitted("use=rounds", "collected={folder}/ratio")
    assert code == 2
    assert "budgets of Ratio, which follow the round" in err
    assert err.count("\n") == 1


def test_costs_of_a_chain_are_measured_once(fitted):
    """Of the sizes 1, 4 and 64 a chain of depth 5 can fill two, and has 5 nodes at the third."""
    chain = ("method=dflash", "sizes=[1,4,64]")
    assert "measuring rounds" in fitted(*chain)[1]
    assert "measuring rounds" not in fitted(*chain)[1]


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (generate, ["paths.constants={folder}/none"], "none/constants.json: No such file"),
        (generate, ["target.dtype=bfloat16"], "measured with dtype float32, not bfloat16"),
        (generate, ["target.seed=3"], "measured with target"),
        (generate, ["tree@method.builder=chain"], "with builder DDTree(), not Chain()"),
        (generate, ["prompt=" + "long " * 70], "cost up to a context of 300, and prompt and max"),
        (generate, ["max_new_tokens=290"], "python scripts/fit.py contexts=[...]"),
        (generate, ["method.budget.least=9"], "none of the measured sizes lies in budget.least=9"),
        (generate, ["method.budget.trust=2"], "budget.trust must lie in 0..1, not 2"),
        (generate, ["method.budget.trust=x"], "method.budget"),
        (regret, ["constants={folder}/none"], "none/constants.json: No such file"),
        (regret, ["method=dflash"], "with builder DDTree(), not Chain()"),
        (regret, ["collected={folder}/nowhere"], "holds no shards"),
        (regret, ["line=3"], "line must be two times in ms, [c_f, c_v], not 3"),
        (regret, ["line=[0,1]"], "line must be two times in ms"),
        (regret, ["line=[a,b]"], "line must be two times in ms"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_constants_that_do_not_fit_are_one_line(go, script, arguments, words):
    given = ["method=ddtree", "collected={folder}/all", "constants={folder}/constants"]
    if script is generate:
        given = ["method=ddtree", "budget@method.budget=ratio"]
        given += ["paths.constants={folder}/constants", "max_new_tokens=20"]
    code, _, err = go(script, *given, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert words in err


@pytest.mark.slow
def test_a_hundred_thousand_rounds_are_fitted_in_a_minute():
    """Trees of 127 nodes, and texts drawn from the drafter's own law: their scores come true."""
    rng = np.random.default_rng(0)
    trees, depth, copies = 500, 7, 200
    parts: dict[str, list] = {name: [] for name in ("parents", "depths", "log_scores", "arrivals")}
    states = []
    for _ in range(trees):
        logits = torch.from_numpy(rng.normal(0, rng.uniform(1, 5), (depth, 40))).float()
        draft = Draft.from_logits(0, logits, torch.randn(depth, 8), candidates=16)
        tree = expand(draft, 127)
        places = {
            (int(p), int(t)): n
            for n, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))
        }
        laws = np.exp(draft.log_probs.astype(float))
        laws /= laws.sum(1, keepdims=True)
        said = [rng.choice(draft.tokens[d], copies, p=laws[d]) for d in range(depth)]
        arrivals = np.full((copies, depth), NEVER, np.int64)
        for row in range(copies):
            node = 0
            for d in range(depth):
                if (node := places.get((node, int(said[d][row])), -1)) < 0:
                    break
                arrivals[row, d] = node
        for name, kind in (("parents", "i2"), ("depths", "i1"), ("log_scores", "f4")):
            parts[name].append(np.tile(getattr(tree, name)[1:].astype(kind), (copies, 1)))
        parts["arrivals"].append(arrivals)
        states.append(np.tile([laws[:, 0].mean(), rng.normal(), rng.exponential()], (copies, 1)))
    rounds = trees * copies
    order = np.repeat(np.arange(trees), copies)
    arrays = {name: np.concatenate(rows) for name, rows in parts.items()}
    observed = Observed(arrays.pop("arrivals"), np.full(rounds, 127), np.concatenate(states), order)
    watched = Watched(observed, order.astype(str), **arrays)
    nodes = np.array(fit.SIZES)
    cost = costs_of(1e-3 * (10 + 0.2 * nodes), nodes, contexts=[1, 2048])
    fit.fit(watched[order < 20], watched[order >= 480], cost, {}, window=8)  # compiles
    started = time.perf_counter()
    constants = fit.fit(watched, watched[order >= 450], cost, {}, window=8)
    seconds = time.perf_counter() - started
    print(f"{rounds} rounds fitted in {seconds:.1f} s")
    assert seconds < 60
    assert constants.mean == pytest.approx(observed.tokens(nodes).mean(0))
    calibration = constants.found["calibration"]
    assert calibration["ece"]["after"] < 0.01
    assert calibration["tokens"]["after"] == pytest.approx(calibration["tokens"]["real"], rel=0.05)
    assert isinstance(constants, Constants)
