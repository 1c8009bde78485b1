"""What became of a round's last token, its picture, the script that shows it, the gallery."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import collect
import launch
import numpy as np
import pytest
import show_round
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import FancyBboxPatch
from test_trees import drafts

from graft.core.tree import accept, ancestor_mask
from graft.core.types import Draft, DraftTree
from graft.data.rounds import RecordedRound, Rounds
from graft.eval.fate import KINDS, Fate, fate, fate_of, in_words, visible
from graft.eval.plots import draw_round, rows
from graft.targets import tiny
from graft.trees.best_first import expand


def run(module, *arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *arguments])
        try:
            module.main()
        except SystemExit as leave:
            return leave.code
    return 0


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("collected")
    places = (f"out={folder}", f"paths.outputs={folder / 'outputs'}")
    settings = ("what=[rounds]", "max_new_tokens=30", "per_set=4")
    assert run(collect, "+experiment=tiny", "drafter=noisy", *settings, *places) == 0
    return folder


@pytest.fixture
def show(collected, tmp_path, capsys):
    """Run the script on the small collection; gives (exit code, stdout, stderr)."""

    def go(*arguments: str):
        capsys.readouterr()
        given = (f"collected={collected}", f"paths.outputs={tmp_path}", *arguments)
        return run(show_round, *given), *capsys.readouterr()

    return go


def recorded(draft: Draft, tree: DraftTree, path: list[int], bonus: int) -> RecordedRound:
    n, K = len(tree), draft.tokens.shape[1]
    return RecordedRound(
        **dict.fromkeys(("prompt_id", "source"), "a"),
        **dict.fromkeys(("turn", "index", "context_length", "conf", "degen", "hist"), 0),
        draft=draft,
        budget=n - 1,
        tree=tree,
        target_logits=np.zeros((n, K), np.float32),
        target_log_norm=np.zeros(n, np.float32),
        target_argmax=np.zeros(n, np.int64),
        path=path,
        bonus=bonus,
        seconds={},
    )


@st.composite
def random_rounds(draw) -> RecordedRound:
    """Best-first trees, accepted as a target with a taste for candidates would."""
    draft = draw(drafts())
    tree = expand(draft, draw(st.integers(1, 60)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    at = np.minimum(tree.depths, len(draft.tokens) - 1)
    wanted = [rng.choice([*draft.tokens[depth, :3], 99]) for depth in at]
    path, bonus = accept(tree, lambda node: int(wanted[node]))
    return recorded(draft, tree, path, bonus)


@given(random_rounds())
@settings(max_examples=150, deadline=None)
def test_fate_by_its_definition(round):
    found, tree, depth = fate_of(round), round.tree, len(round.path)
    inside = depth <= len(round.draft.tokens)
    candidates = round.draft.tokens[depth - 1].tolist() if inside else []
    paths = {}  # each node by the tokens that lead to it
    for node in range(len(tree)):
        paths[node] = (*paths.get(tree.parents[node], ()), int(tree.tokens[node]))
    hung = [node for node, way in paths.items() if len(way) == depth + 1 and way[-1] == round.bonus]
    assert (*paths[round.path[-1]], round.bonus) not in paths.values(), "it was not accepted"
    holds = {
        "cap": not inside,
        "not_drafted": inside and round.bonus not in candidates,
        "budget": round.bonus in candidates and not hung,
        "mismatch": bool(hung),
    }
    assert [kind for kind in KINDS if holds[kind]] == [found.kind]
    assert list(found.nodes) == hung
    assert found.rank == (candidates.index(round.bonus) if round.bonus in candidates else None)
    assert f"({found.kind.replace('_', ' ')})" in in_words(round, str)


def by_hand(path: list[int], bonus: int) -> RecordedRound:
    """Of two candidates at two depths; tokens are letters' places in the alphabet.

     a
    b c     b and c are drafted at depth 1, d and e at depth 2
    d
    """
    parents = np.array([-1, 0, 0, 1])
    tree = DraftTree(
        tokens=np.arange(4),
        parents=parents,
        depths=np.array([0, 1, 1, 2]),
        log_scores=np.log(np.array([1, 0.5, 0.4, 0.35], np.float32)),
        visible=ancestor_mask(parents),
    )
    draft = Draft(
        root=0,
        tokens=np.array([[1, 2], [3, 4]]),
        log_probs=np.log(np.array([[0.5, 0.4], [0.7, 0.1]], np.float32)),
        cosines=np.zeros(1, np.float32),
        hidden=torch.empty(2, 0),
    )
    return recorded(draft, tree, path, bonus)


@pytest.mark.parametrize(
    ("path", "bonus", "expected", "words"),
    [
        ([0], 5, Fate("not_drafted"), 'wanted "f" after "a": it was not among the 2 candidates'),
        ([0, 1], 4, Fate("budget", (), 1), 'after "b": it was candidate 2 of 2 at depth 2'),
        ([0, 2], 3, Fate("mismatch", (3,), 0), '"d" after "c": it was drafted, but under "b"'),
        ([0, 1, 3], 7, Fate("cap"), "the path had reached depth 2, the last one drafted"),
    ],
)
def test_fates_by_hand(path, bonus, expected, words):
    round = by_hand(path, bonus)
    assert fate(round.tree, path, bonus, round.draft.tokens) == expected
    assert words in in_words(round, "abcdefgh".__getitem__)


def test_a_namesake_of_the_path_is_called_another():
    round = by_hand([0, 2], 3)
    assert 'but under another "x" (mismatch)' in in_words(round, "axxdefgh".__getitem__)


def test_what_does_not_print_is_escaped():
    assert visible(' a\n\t\x7f\u200b"é') == ' a\\n\\t\\x7f\\u200b"é'


AWKWARD = (
    " the",
    "\n\n",
    "$x^",
    "$",
    "[bold]",
    "\ufffd",
    "a very long token indeed",
    "\\frac{",
    "",
)


@given(random_rounds())
@settings(max_examples=8, deadline=None)
def test_a_picture_has_a_box_for_every_node_and_the_bonus(round):
    figure = draw_round(round, lambda token: AWKWARD[token % len(AWKWARD)])
    figure.savefig(io.BytesIO(), dpi=40)
    patches = figure.axes[0].patches
    boxes = [patch.get_extents() for patch in patches if isinstance(patch, FancyBboxPatch)]
    assert len(boxes) == len(round.tree) + 1
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    page = figure.bbox
    for box in (*boxes, *(text.get_window_extent() for text in figure.axes[0].texts)):
        assert page.x0 <= box.x0
        assert box.x1 <= page.x1
        assert page.y0 <= box.y0
        assert box.y1 <= page.y1


def test_leaves_lie_in_order_and_parents_amid_their_children():
    #   0
    #  1 2      2 scores better, so it is above
    #  3 4 5    3 under 1; 4 and 5 under 2, 5 better
    assert rows([-1, 0, 0, 1, 2, 2], [0, -2, -1, -3, -3, -2]) == [1.25, 2, 0.5, 2, 1, 0]


def test_the_script_shows_a_round_of_each_fate(show, collected, tmp_path):
    rounds = Rounds([collected])
    counts = Counter(fate_of(round).kind for round in rounds)
    assert len(counts) >= 2, "the collection is worth looking at"
    for kind in counts:
        code, out, err = show(f"fate={kind}", "count=1")
        assert (code, err) == (0, "")
        assert out.count("the target wanted") == 1
        assert f"({kind.replace('_', ' ')})" in out
        assert ("the target's token hung" in out) == (kind == "mismatch")
    pictures = list(tmp_path.rglob("*.png"))
    assert pictures
    for kind in set(KINDS) - set(counts):
        code, _, err = show(f"fate={kind}")
        assert code == 2
        assert "has this fate" in err


def test_the_script_prefers_mismatches_and_draws_alike(show):
    first, again = (show("count=4", "pictures=false")[1] for _ in range(2))
    assert first == again
    assert first.count("the target wanted") == 4
    assert "(mismatch)" in first
    assert "picture" not in first


def test_the_text_before_a_round_is_what_was_committed(show, collected):
    rounds = Rounds([collected])
    (prompt, turn), found = next(iter(rounds.responses().items()))
    tokens = []
    for row in found:
        round = rounds[row]
        assert round.draft.root == round.tree.tokens[0]
        text = show_round.before(rounds, row, tiny.tokenizer())
        assert text.endswith(visible(tiny.tokenizer().decode(tokens[-show_round.BEFORE :])))
        tokens += round.tree.tokens[round.path].tolist()
    code, out, _ = show(f"prompt={prompt}", f"turn={turn}", "round=0", "pictures=false")
    assert code == 0
    assert f"{prompt}, turn {turn}, round 0;" in out
    assert "the root is the response's first token" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collected=/nowhere"], "/nowhere/rounds holds no shards; scripts/collect.py makes them"),
        (["prompt=nonsense"], "no prompt nonsense in"),
        (["prompt=nonsense"], "it holds own-0000"),
        (["prompt={prompt}", "turn=7"], "turn=7: of prompt"),
        (["prompt={prompt}", "round=999"], "round=999: that response has"),
        (["prompt={prompt}", "round=-1"], "round=-1: that response has"),
        (["prompt={prompt}", "round=last"], "round=last: that response has"),
        (["round=3"], "Add prompt="),
        (["fate=bad"], "fate must be one of not_drafted, budget, mismatch, cap"),
        (["count=0"], "count must be"),
        (["nonsense=1"], "nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(show, collected, arguments, message):
    prompt, _ = next(iter(Rounds([collected]).responses()))
    code, _, err = show(*(argument.format(prompt=prompt) for argument in arguments))
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert message in err


def test_a_tokenizer_is_needed(show, collected, tmp_path):
    (tmp_path / "rounds").symlink_to(collected / "rounds")
    code, _, err = show(f"collected={tmp_path}")
    assert code == 2
    assert f"the stage that wrote {tmp_path} puts it there" in err
    (tmp_path / "tokenizer").mkdir()
    code, _, err = show(f"collected={tmp_path}")
    assert code == 2
    assert "cannot read the tokenizer in" in err
    assert err.count("\n") == 1, err


def test_the_gallery_runs(collected, monkeypatch):
    monkeypatch.chdir(launch.ROOT)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((launch.ROOT / "notebooks/tree_gallery.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "outputs are stripped before a commit"
    scope: dict = {}
    exec("".join(cells[0]["source"]), scope)
    assert scope["collected"] == launch.ROOT / "data/collected/default"
    scope["collected"] = collected
    for cell in cells[1:]:
        exec("".join(cell["source"]), scope)
    shown = [scope["picture"](kind) for kind in KINDS]
    assert any(picture._repr_png_()[1:4] == b"PNG" for picture in shown if hasattr(picture, "axes"))
