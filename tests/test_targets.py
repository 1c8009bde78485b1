"""The target against transformers and against itself: logits, taps, cache, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import FAMILIES, PROMPT
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from graft.core.errors import InputError
from graft.core.kv_cache import GROWTH
from graft.core.tree import ancestor_mask, chain_tree
from graft.core.types import DraftTree
from graft.targets import hf, tiny
from graft.targets.family import family_of

TIGHT = {"rtol": 1e-4, "atol": 2e-5}


def random_tree(nodes: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(rng.integers(0, i) for i in range(1, nodes + 1))])
    depths = np.zeros(nodes + 1, np.int64)
    for i in range(1, nodes + 1):
        depths[i] = depths[parents[i]] + 1
    tokens = rng.permutation(200)[: nodes + 1]
    return DraftTree(
        tokens, parents, depths, np.zeros(nodes + 1, np.float32), ancestor_mask(parents)
    )


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, int(tree.parents[path[0]]))
    return path


@pytest.mark.parametrize("seed", range(3))
def test_every_node_is_a_plain_causal_pass_over_its_path(target, family, seed):
    model = tiny.model(family)
    target.tap([0, 1])
    target.prefill(PROMPT)
    tree = random_tree(20, seed)
    step = target.verify(tree)
    for node in range(len(tree)):
        text = PROMPT + tree.tokens[path_to(tree, node)].tolist()
        plain = model(torch.tensor([text]), output_hidden_states=True)
        torch.testing.assert_close(step.logits[node], plain.logits[0, -1], **TIGHT)
        # taps are `hidden_states[id + 1]`; transformers norms its last entry, so check block 0
        torch.testing.assert_close(step.taps[node, :64], plain.hidden_states[1][0, -1], **TIGHT)


def test_chains_and_short_causal_passes_agree(target):
    """A chain without a mask (how CUDA runs it) and the same chain through its mask."""
    target.prefill(PROMPT)
    chain = chain_tree(7, np.arange(30, 40), np.zeros(10, np.float32))
    masked = target.verify(chain).logits
    target.mask = lambda tree: None
    torch.testing.assert_close(target.verify(chain).logits, masked, **TIGHT)


def test_cache_after_commit_is_that_of_a_fresh_prefill(family):
    target, fresh = tiny.load(family, device="cpu"), tiny.load(family, device="cpu")
    target.prefill(PROMPT)
    text = list(PROMPT)
    for seed in range(12):
        tree = random_tree(16, seed)
        path = path_to(tree, int(np.random.default_rng(seed).integers(0, 17)))
        target.verify(tree)
        target.commit(path)
        text += tree.tokens[path].tolist()
        fresh.prefill(text)
        assert target.cache.length == len(text)
        torch.testing.assert_close(target.cache.rows(), fresh.cache.rows(), **TIGHT)


def test_verify_leaves_the_context_alone(target):
    target.prefill(PROMPT)
    before = target.cache.rows().clone()
    tree = random_tree(30, 0)
    first = target.verify(tree).logits
    target.verify(random_tree(10, 1))
    assert torch.equal(target.cache.rows(), before)
    torch.testing.assert_close(target.verify(tree).logits, first, rtol=0, atol=0)
    assert np.array_equal(tree.visible, ancestor_mask(tree.parents)), "the tree is left alone too"


def test_cache_grows_in_blocks_and_keeps_its_rows(target, family):
    text = (PROMPT * 20)[: GROWTH - 2]
    target.prefill(text)
    assert target.cache.capacity == GROWTH
    step = target.verify(random_tree(20, 0))
    assert target.cache.capacity == 2 * GROWTH
    plain = tiny.model(family)(torch.tensor([[*text, int(random_tree(20, 0).tokens[0])]]))
    torch.testing.assert_close(step.logits[0], plain.logits[0, -1], **TIGHT)
    target.prefill(PROMPT)
    assert target.cache.capacity == 2 * GROWTH, "memory is kept between responses"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_loads_and_serves_the_same_logits(tmp_path, family):
    tiny.model(family).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    loaded = hf.load(str(tmp_path), device="cpu")
    assert torch.equal(
        loaded.prefill(PROMPT).logits, tiny.load(family, device="cpu").prefill(PROMPT).logits
    )
    assert loaded.stop_tokens == {tiny.tokenizer().eos_token_id}
    assert loaded.decode(loaded.tokenizer("héllo, wörld").input_ids) == "héllo, wörld"


def test_bf16_is_close_to_fp32(family):
    exact = tiny.load(family, device="cpu").prefill(PROMPT).logits
    rounded = tiny.load(family, dtype="bfloat16", device="cpu").prefill(PROMPT).logits
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.5 * exact.std()


def save_tiny(folder) -> None:
    tiny.model("qwen3").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


def test_pickles_are_refused(tmp_path):
    save_tiny(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle"):
        hf.load(str(tmp_path))


def test_damaged_weights_are_refused(tmp_path):
    save_tiny(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    state = {key: tensor.clone() for key, tensor in load_file(weights).items()}
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot load target"):
        hf.load(str(tmp_path))
    save_file(
        {k: v for k, v in state.items() if k != "model.norm.weight"}, weights, {"format": "pt"}
    )
    with pytest.raises(InputError, match=r"lacks 1 weights, model\.norm\.weight"):
        hf.load(str(tmp_path))
    state["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(state, weights, {"format": "pt"})
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN"):
        hf.load(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "overwrite cache rows"),
        ("qwen3_next", {}, "linear_attention layers fold the past"),
        ("gemma3_text", {}, "overwrite cache rows"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, "overwrite cache rows"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "changes angles"),
        ("gpt2", {}, "no family file"),
    ],
)
def test_targets_that_cannot_be_verified_are_refused_with_a_reason(kind, settings, reason):
    config = AutoConfig.for_model(kind, num_hidden_layers=2, **settings)
    if kind == "qwen3_next":
        config = AutoConfig.for_model(kind, num_hidden_layers=4)
    with pytest.raises(InputError, match=reason):
        family_of(config)


def test_missing_targets_and_bad_values_are_named(tmp_path, target):
    with pytest.raises(InputError, match="does not exist"):
        hf.load(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="holds no"):
        hf.load(str(tmp_path))
    with pytest.raises(InputError, match="dtype must be one of"):
        hf.parse_dtype("int8")
    with pytest.raises(InputError, match="not a device"):
        hf.parse_device("abacus")
    with pytest.raises(InputError, match="cannot tap"):
        target.tap([2])
    with pytest.raises(InputError, match="empty"):
        target.prefill([])


@pytest.mark.parametrize("taps", [[0], [0, 1], [1]])
def test_texts_read_side_by_side_are_read_as_alone(target, taps):
    target.tap(taps)
    texts = [torch.arange(3, 3 + n) for n in (5, 1, 40)]
    read, choices = target.read(texts), target.choices(texts)
    for text, own_taps, chosen in zip(texts, read, choices, strict=True):
        for end in range(1, len(text) + 1, 7):
            step = target.prefill(text[:end].tolist())
            torch.testing.assert_close(own_taps[:end], step.taps, rtol=1e-4, atol=2e-5)
            assert int(chosen[end - 1]) == int(step.logits.argmax())
