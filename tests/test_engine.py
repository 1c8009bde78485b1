"""Plain Python use: `load`, streamed text, numbers, and what a user can get wrong."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import launch
import pytest
from conftest import composed, group

from graft import Engine, load
from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.core.types import Request
from graft.decode import autoregressive
from graft.decode.text import LONG, UNKNOWN, Detokenizer
from graft.drafters import dflash_checkpoint
from graft.drafters.dflash import new_network
from graft.drafters.noisy import Noisy
from graft.engine import PAIRS, SCORER
from graft.scorer import checkpoint
from graft.scorer.checkpoint import EdgeScorer
from graft.targets import tiny
from graft.trees.ddtree import DDTree
from graft.trees.tdes import TDES

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
]
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 3.0, "seed": 5},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 4},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A target and a drafter on disk, in published format."""
    folder = tmp_path_factory.mktemp("engine")
    tiny.model("qwen3").save_pretrained(folder / "target")
    tiny.tokenizer().save_pretrained(folder / "target")
    shape = {"layers": 2, "block_size": 8, "mask_token_id": 258, "taps": 1}
    network = new_network(tiny.load(device="cpu"), **shape, seed=0)
    dflash_checkpoint.save(network, folder / "drafter")
    return {"name": str(folder / "target"), "drafter": str(folder / "drafter")}


@pytest.fixture(scope="module")
def engine(folders) -> Engine:
    return load(**folders, device="cpu")


@pytest.fixture(scope="module")
def guessing() -> Engine:
    """Its rounds commit several tokens."""
    target = tiny.load(device="cpu")
    return Engine(target, Noisy(target), builder=DDTree(), budget=Fixed(16))


def plain(engine: Engine, **settings) -> list[int]:
    """What plain decoding answers to TALK."""
    target = engine.target
    request = Request(target.encode_chat(TALK), stop_tokens=target.stop_tokens, **settings)
    return autoregressive.generate(request, target=target).tokens


def trained_for(drafter: str, folder: str) -> EdgeScorer:
    """The scorer in a folder, as if trained for a drafter of this fingerprint."""
    scorer = checkpoint.load(folder)
    return EdgeScorer(scorer.net, scorer._tables, scorer.config | {"drafter": drafter})


@pytest.mark.parametrize("which", ["engine", "guessing"])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_stream_is_the_text_of_plain_decoding(which, sampling, request):
    engine = request.getfixturevalue(which)
    settings = {"max_new_tokens": 150, **SETTINGS[sampling]}
    pieces = list(engine.stream(TALK, **settings))
    tokens = plain(engine, **settings)
    assert "".join(pieces) == engine.target.decode(tokens)
    assert all(pieces)
    assert engine.last.tokens == tokens
    assert engine.generate(TALK, **settings).tokens == tokens
    assert engine.last.mat > (2 if (which, sampling) == ("guessing", "greedy") else 0.9)
    assert engine.last.tokens_per_second > 0
    if sampling == "sampled":  # flat enough to hit the bytes of a longer character now and then
        assert any(not c.isascii() and c != UNKNOWN for c in "".join(pieces))


def test_characters_come_whole_and_the_pieces_are_the_text():
    target = tiny.load(device="cpu")
    decode, text = target.decode, "naïve 漢字 🙂" * 20
    bytes_of = target.tokenizer(text).input_ids  # a token each
    assert len(bytes_of) == len(text.encode()) > LONG
    stream = Detokenizer(decode)
    pieces = [stream.add([token]) for token in bytes_of]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.rest() == ""
    draw = random.Random(0)
    for _ in range(30):  # stray bytes and control tokens, a few at a time, cut anywhere
        tokens = draw.choices([*range(259), *bytes_of[:40]], k=4 * LONG)
        stream, text, at = Detokenizer(decode), "", 0
        while at < len(tokens):
            text += stream.add(tokens[at : at + (n := draw.randint(1, 5))])
            at += n
        assert text + stream.rest() == decode(tokens)


def test_a_stream_may_be_left_and_not_be_gone_back_to(guessing):
    settings = {"max_new_tokens": 60}
    left = guessing.stream(TALK, **settings)
    first = next(left)
    assert guessing.last is None
    left.close()
    assert list(left) == []
    with_pauses = guessing.stream(TALK, **settings)
    assert next(with_pauses) == first
    assert guessing.generate(TALK, **settings).tokens == plain(guessing, **settings)
    with pytest.raises(InputError, match="another response was begun"):
        list(with_pauses)


def test_a_slow_reader_costs_no_decoding_time(engine):
    for _ in engine.stream(TALK, max_new_tokens=5):
        time.sleep(0.2)
    assert sum(engine.last.seconds.values()) < 0.2


def test_a_string_is_one_user_turn(engine):
    turn = [{"role": "user", "content": "Hi"}]
    said = [engine.generate(asked, max_new_tokens=8).tokens for asked in ("Hi", turn)]
    assert said[0] == said[1]


def test_a_scorer_makes_tdes_trees(folders, engine, tiny_scorer, tmp_path):
    trained_for(engine.drafter.fingerprint, tiny_scorer).save(tmp_path / "scorer", {})
    scored = load(**folders, scorer=str(tmp_path / "scorer"), nodes=4, device="cpu")
    assert isinstance(scored.builder, TDES)
    assert isinstance(engine.builder, DDTree)
    result = scored.generate(TALK, max_new_tokens=20)
    assert result.tokens == plain(scored, max_new_tokens=20)
    assert max(result.nodes) == 4


@pytest.mark.parametrize(
    ("asked", "settings", "message"),
    [
        ([], {}, "messages must be a string or a list"),
        (" ", {}, "prompt is empty"),
        (None, {}, "messages must be a string or a list"),
        (["Hi"], {}, "a message must be .* not 'Hi'"),
        ([{"role": "user"}], {}, "a message must be"),
        ({"role": "user", "content": "Hi"}, {}, "messages must be a string or a list"),
        (TALK, {"max_new_tokens": 5000}, "more than the target's context"),
        (TALK, {"temperature": -1}, "temperature must be 0"),
    ],
)
def test_bad_messages_are_refused_at_once(engine, asked, settings, message):
    for ask in (engine.stream, engine.generate):
        with pytest.raises(InputError, match=message) as refused:
            ask(asked, **settings)
        assert "\n" not in str(refused.value)


def test_a_template_may_refuse_messages(folders):
    strict = load(**folders, device="cpu")
    strict.target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        strict.stream(TALK)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"drafter": None}, "is none of smollm2, .*needs drafter="),
        ({"name": "/nowhere"}, "target folder /nowhere does not exist"),
        ({"drafter": "/nowhere"}, "drafter folder /nowhere does not exist"),
        ({"scorer": "/nowhere"}, "cannot read a scorer from /nowhere"),
        ({"nodes": 0}, "must lie in 1..4096, not 0"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "abacus"}, "device abacus is not a device"),
        ({"drafter": PAIRS["smollm2"][1]}, "was made for a target with hidden size 576"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(folders, changed, message):
    with pytest.raises(InputError, match=message) as refused:
        load(**{**folders, **changed})
    assert "\n" not in str(refused.value)


def test_a_scorer_of_other_models_is_refused(folders, tiny_scorer, tmp_path):
    trained_for("another", tiny_scorer).save(tmp_path / "scorer", {})
    with pytest.raises(InputError, match="trained for another drafter"):
        load(**folders, scorer=str(tmp_path / "scorer"), device="cpu")


def test_the_default_says_how_to_prepare_it(monkeypatch):
    monkeypatch.setitem(PAIRS, "smollm2", ("/nowhere/smollm2", PAIRS["smollm2"][1]))
    with pytest.raises(InputError, match="make setup"):
        load()


def test_pairs_are_those_of_the_experiments():
    names = {name for name in group("experiment") if not name.startswith("train_")} - {"tiny"}
    assert names == PAIRS.keys()
    for name in names:
        cfg = composed("generate", f"+experiment={name}")
        assert PAIRS[name] == (cfg.target.model, cfg.drafter.checkpoint)
    assert composed("generate").paths.scorer == SCORER


def test_importing_the_package_is_cheap():
    code = "import sys, graft; assert graft.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=launch.ROOT).returncode == 0


@pytest.mark.slow
def test_the_default_engine_is_lossless(default_folder):
    engine = load("smollm2", device="cpu")
    text = "".join(engine.stream(TALK, max_new_tokens=24))
    tokens = plain(engine, max_new_tokens=24)
    assert engine.last.tokens == tokens
    assert text == engine.target.decode(tokens)
    assert engine.last.mat > 1.5
