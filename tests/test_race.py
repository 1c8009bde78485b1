"""The peers of `make race`: they say what plain decoding says, and their rows become one table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import eval as stage
import numpy as np
import pytest
import race as script
import torch
from conftest import composed
from test_eval import arguments, row_of
from test_scripts import run

from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.core.types import Request
from graft.decode import autoregressive, loop
from graft.drafters import dflash, dflash_checkpoint
from graft.eval import library, llama_cpp, published_ddtree
from graft.eval.race import race_of, sentences, table
from graft.targets import hf, tiny
from graft.trees.ddtree import DDTree

PROMPT = list(b"What is a tree of tokens?")
METHODS = ("methods=demo", *(f"~methods.{name}" for name in ("library", "tdes_7", "graft")))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_published_loop_says_what_plain_decoding_says(family):
    target = tiny.load(family, device="cpu")
    request = Request(PROMPT, 60, stop_tokens=target.stop_tokens)
    tokens = autoregressive.generate(request, target=target).tokens
    noise, seen = torch.Generator().manual_seed(0), [-len(PROMPT)]

    def draft(root, taps):
        """Often right, at some rank."""
        seen[0] += len(taps)
        assert root == tokens[seen[0]]
        logits = torch.randn(7, target.vocab_size, generator=noise)
        for depth, token in enumerate(tokens[seen[0] + 1 :][:7]):
            logits[depth, token] += 3
        return logits

    rounds = published_ddtree.stream(
        request, model=tiny.model(family), draft=draft, taps=(0, 1), budget=12
    )
    found = published_ddtree.drain(rounds, None)
    assert found.tokens == tokens
    assert 1.5 < found.mat < 8
    assert set(found.nodes) == {12}
    assert {"propose", "build", "verify", "accept", "commit", "prefill"} == found.seconds.keys()


@pytest.fixture
def saved(tmp_path):
    """The tiny llama and a random drafter for it as checkpoints: target, drafter's folder."""
    tiny.model("llama").save_pretrained(tmp_path / "target")
    tiny.tokenizer().save_pretrained(tmp_path / "target")
    target = hf.load(str(tmp_path / "target"), device="cpu")
    net = dflash.new_network(target, layers=2, block_size=6, mask_token_id=258, taps=1, seed=0)
    dflash_checkpoint.save(net, tmp_path / "drafter")
    return target, str(tmp_path / "drafter")


def test_the_published_loop_walks_as_ours_does(saved):
    target, checkpoint = saved
    request = Request(PROMPT, 40, stop_tokens=target.stop_tokens)
    drafter = dflash.load(checkpoint, target)
    settings = {"builder": DDTree(), "budget": Fixed(nodes=9)}
    ours = loop.generate(request, target=target, drafter=drafter, **settings)
    asked = {"target": target, "checkpoint": checkpoint, "nodes": 9}
    theirs = published_ddtree.generate(request, **asked)
    assert (theirs.tokens, theirs.committed) == (ours.tokens, ours.committed)
    assert theirs.nodes == ours.nodes
    with pytest.raises(InputError, match="temperature=0"):
        published_ddtree.generate(Request(PROMPT, 4, temperature=1.0), **asked)


def test_trees_are_those_of_the_reference():
    logits = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    draft = dflash.Draft.from_logits(7, logits, torch.empty(5, 0), candidates=16)
    ours, theirs = DDTree().build(draft, 16), published_ddtree.build(logits, 16)
    assert theirs.tokens == ours.tokens[1:].tolist()
    assert theirs.depths == ours.depths[1:].tolist()
    assert np.array_equal(theirs.visible, ours.visible)


def test_looking_up_changes_no_token(saved):
    target, _ = saved
    request = Request(PROMPT * 3, 60, stop_tokens=target.stop_tokens)
    plain = autoregressive.generate(request, target=target)
    pieces: list[int] = []
    found = library.generate(request, target=target, lookup=8, on_tokens=pieces.extend)
    assert found.tokens == plain.tokens == pieces
    assert len(found.committed) <= sum(found.committed) <= len(plain.tokens) - 1
    other = library.generate(request, target=target, precision="bfloat16")
    assert len(other.committed) == len(other.tokens) - 1


def made_by(**configs) -> dict:
    methods = {name: {"config": config} for name, config in configs.items()}
    return {"settings": {"baseline": "ar"}, "models": {"dtype": "bfloat16"}, "methods": methods}


LLAMA = {"_target_": "graft.eval.llama_cpp.generate", "gguf": "x", "precision": "bfloat16"}
LOOKUP = {"type": "ngram_simple", "size_n": 3, "size_m": 8}
RACED = made_by(
    ar={"_target_": "graft.decode.autoregressive.generate"},
    llama=LLAMA | {"lookup": None},
    ngram=LLAMA | {"lookup": LOOKUP},
    q4=LLAMA | {"precision": "Q4_1", "lookup": None},
    published={"_target_": "graft.eval.published_ddtree.generate", "nodes": 7, "checkpoint": "x"},
    graft={
        "_target_": "graft.decode.loop.generate",
        "builder": {"_target_": "graft.trees.tdes.load"},
        "budget": {"_target_": "graft.budgets.ratio.Ratio.load"},
    },
)
SECONDS = {"ar": 8.0, "llama": 4.0, "ngram": 5.0, "q4": 1.0, "published": 6.0, "graft": 2.0}


def raced():
    rows = [row_of(name, f"{s}{i}", t) for name, t in SECONDS.items() for s in "ab" for i in "012"]
    rows[6]["response"] = [9, 9, 9, 9, 9]
    return race_of(RACED, rows)


def test_a_race_is_one_table():
    found = table(raced(), "a race")
    lines = {row[0]: row[1:] for row in found.rows}
    assert [row[0] for row in found.rows] == ["graft", "llama", "ngram", "published", "ar", "q4"]
    assert lines["llama"][4] == "fastest plain"
    assert lines["q4"][4] == "fastest plain"
    assert found.best == {(1, 0), (5, 0)}
    assert lines["graft"] == [
        *("ours: TDES, budget ratio", "bfloat16", "2.0", "500.00"),
        *("2.00x [2.00, 2.00]", "6 of 6"),
    ]
    assert lines["ar"][4].startswith("0.50x"), "over llama.cpp, which is plain too, and faster"
    assert lines["ngram"][0] == "llama.cpp, ngram-simple 3 8"
    assert lines["llama"][5] == "5 of 6"


def test_a_race_is_told():
    said = sentences(raced(), "graft")
    peer = "(llama.cpp, plain; a peer's)"
    assert f"in bfloat16: llama {peer}, 1.0 tokens/s; graft is 2.00x that [2" in said[0]
    assert said[1] == f"Fastest plain decoding in Q4_1: q4 {peer}, 4.0 tokens/s."
    assert said[2] == "Ahead of graft (2.0 tokens/s): q4 (Q4_1, 4.0 tokens/s)."
    with pytest.raises(InputError, match="no method x was raced"):
        sentences(raced(), "x")


def test_results_become_a_table(monkeypatch, tmp_path, capsys):
    mine = [*arguments(tmp_path), *METHODS, "per_set=1", "max_new_tokens=8", "~methods.ddtree_7"]
    assert run(monkeypatch, stage, *mine) == 0
    places = (f"results={tmp_path / 'results'}", f"paths.outputs={tmp_path / 'outputs'}")
    capsys.readouterr()
    assert run(monkeypatch, script, "+experiment=tiny", *places) == 0
    out = capsys.readouterr().out
    written = (tmp_path / "outputs/race/race.md").read_text()
    for text in (out, written):
        assert "ours: DFlash, 64 nodes" in text
        assert "Fastest plain decoding in float32: ar (ours, plain; our own)" in text
        assert "No peer is ahead" in text
        assert f"torch {torch.__version__.partition('+')[0]}" in text


def test_without_llama_cpp_the_race_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    mine = [*arguments(tmp_path), *METHODS, "+method@methods.llama=llama_cpp"]
    assert run(monkeypatch, stage, *mine) == 2
    assert capsys.readouterr().err == "error: the race needs llama.cpp: pip install '.[race]'\n"
    assert not (tmp_path / "results").exists()


def test_the_race_composes():
    cfg = composed("eval", "methods=race")
    assert {"ar", "library", "llama_bf16", "llama_q4", "published_15", "graft"} <= set(cfg.methods)
    assert cfg.methods.published_15.checkpoint == cfg.drafter.checkpoint
    for ours in ("chain", "ddtree_15", "tdes_15", "graft"):
        assert cfg.methods[ours]._target_ == "graft.decode.loop.generate"


def test_a_gguf_is_written_in_other_precisions(tmp_path):
    gguf = pytest.importorskip("gguf")
    matrix = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(tmp_path / "x.Q4_1.gguf", "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_array("names", ["a", "b"])
    writer.add_tensor("m", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("v", matrix[0])
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    assert llama_cpp.weights(tmp_path / "x.Q4_1.gguf", "Q4_1").name == "x.Q4_1.gguf"
    written = llama_cpp.weights(tmp_path / "x.Q4_1.gguf", "float32")
    assert written == llama_cpp.weights(tmp_path / "x.Q4_1.gguf", "float32")
    reader = gguf.GGUFReader(written)
    assert reader.fields["names"].contents() == ["a", "b"]
    assert reader.fields["general.architecture"].contents() == "llama"
    expected = gguf.quants.dequantize(gguf.quants.quantize(matrix, kind), kind)
    assert np.array_equal(reader.tensors[0].data, expected)
    half = gguf.GGUFReader(llama_cpp.weights(tmp_path / "x.Q4_1.gguf", "bfloat16"))
    assert [t.tensor_type.name for t in half.tensors] == ["BF16", "F32"]
    with pytest.raises(InputError, match="precision must be"):
        llama_cpp.weights(tmp_path / "x.Q4_1.gguf", "Q8_0")
    with pytest.raises(InputError, match="does not exist"):
        llama_cpp.weights(tmp_path / "y.gguf", "Q8_0")


@pytest.mark.slow
def test_llama_cpp_says_the_same(default_folder):
    pytest.importorskip("xllamacpp")
    file = composed("eval").paths.gguf
    if not Path(file).exists():
        pytest.skip("make race fetches it")
    target = hf.load(str(default_folder), device="cpu")
    asked = [{"role": "user", "content": "What is 2+2? One number only."}]
    request = Request(target.encode_chat(asked), 30, stop_tokens=target.stop_tokens)
    plain = autoregressive.generate(request, target=target)
    for lookup in (None, LOOKUP):
        settings = {"gguf": file, "precision": "float32", "lookup": lookup}
        found = llama_cpp.generate(request, target=target, **settings)
        assert (found.tokens, found.stopped) == (plain.tokens, True)
        assert sum(found.committed) == len(found.tokens) - 1
        assert found.decode_seconds > 0


@pytest.mark.parametrize("wrong", [{"type": "nonsense"}, {"size_n": 3}, {"type": "simple", "n": 1}])
def test_a_lookup_that_llama_cpp_does_not_have_is_one_line(wrong):
    types = SimpleNamespace(COMMON_SPECULATIVE_TYPE_SIMPLE=1)
    with pytest.raises(InputError, match="knows no such lookup"):
        llama_cpp._draft_with(dict(wrong), SimpleNamespace(), types)
