"""DFlash: against a plain rewrite, incremental against from-scratch, the checkpoint format."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from conftest import PROMPT
from safetensors.torch import load_file, save_file

from graft.core.errors import InputError
from graft.core.interfaces import Backbone
from graft.drafters import dflash, dflash_checkpoint
from graft.drafters.dflash_config import DFlashConfig, default_target_layer_ids, parse
from graft.drafters.dflash_net import DFlashNet
from graft.targets import tiny
from graft.targets.hf import HFTarget

TIGHT = {"rtol": 1e-4, "atol": 2e-5}
CONFIG = DFlashConfig(
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=259,
    block_size=6,
    mask_token_id=258,
    target_layer_ids=(0, 1),
    num_target_layers=2,
    rope_theta=5000.0,
    rms_norm_eps=1e-5,
)
SLIDING = dataclasses.replace(
    CONFIG,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    sliding_window=9,
)
VARIANTS = {
    "full": CONFIG,
    "sliding": SLIDING,
    "sliding, not causal": dataclasses.replace(SLIDING, is_causal=False),
    "causal": dataclasses.replace(CONFIG, is_causal=True),
    "yarn": dataclasses.replace(
        CONFIG,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}


def network(config: DFlashConfig = CONFIG, seed: int = 0) -> DFlashNet:
    torch.manual_seed(seed)
    net = DFlashNet(config).eval().requires_grad_(False)
    for name, parameter in net.named_parameters():  # norms start at one: draw them too
        parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.12))
        if "norm" in name:
            parameter.add_(1)
    return net


def drafter(target: Backbone, config: DFlashConfig = CONFIG, candidates: int = 20) -> dflash.DFlash:
    return dflash.DFlash(network(config), target, candidates=candidates, name="drafter under test")


def plain_hidden(net: DFlashNet, target: Backbone, taps: torch.Tensor, root: int) -> torch.Tensor:
    """The block's hidden states [b, H], slot by slot and head by head, from the description."""
    config, state = net.config, net.state_dict()
    T, b, d = len(taps), config.block_size, config.head_dim
    if config.rope_scaling is None:
        inverse = config.rope_theta ** -(torch.arange(0, d, 2) / d)
        angle = torch.arange(T + b)[:, None] * torch.cat([inverse, inverse])
        angles = angle.cos()[None], angle.sin()[None]
    else:  # scaled RoPE is transformers' own
        angles = net.rope(taps, torch.arange(T + b)[None])

    def visible(layer, ahead):  # as in z-lab's mask
        sliding = bool(config.layer_types) and config.layer_types[layer] == "sliding_attention"
        causal = sliding if config.is_causal is None else config.is_causal
        return not (causal and ahead > 0) and not (sliding and abs(ahead) >= config.sliding_window)

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rotated(x, position):
        cos, sin = angles[0][0, position], angles[1][0, position]
        return x * cos + torch.cat([-x[d // 2 :], x[: d // 2]]) * sin

    features = norm(taps @ state["fc.weight"].T, state["hidden_norm.weight"])
    x = target.embed(torch.tensor([root] + [config.mask_token_id] * (b - 1)))
    for i in range(config.num_layers):
        weight = {
            k.removeprefix(f"layers.{i}."): v for k, v in state.items() if f"layers.{i}." in k
        }
        attn = {k.split(".")[1]: v for k, v in weight.items() if k.startswith("self_attn")}
        rows = torch.cat([features, norm(x, weight["input_layernorm.weight"])])
        attended = torch.zeros(b, config.num_heads, d)
        for slot in range(b):
            for head in range(config.num_heads):
                kv = head // (config.num_heads // config.num_kv_heads)
                q = (rows[T + slot] @ attn["q_proj"].T).view(-1, d)[head]
                q = rotated(norm(q, attn["q_norm"]), T + slot)
                scores, values = [], []
                for row in range(T + b):
                    ahead = row - (T + slot)
                    if not visible(i, ahead):
                        continue
                    k = (rows[row] @ attn["k_proj"].T).view(-1, d)[kv]
                    scores.append(q @ rotated(norm(k, attn["k_norm"]), row) / d**0.5)
                    values.append((rows[row] @ attn["v_proj"].T).view(-1, d)[kv])
                attended[slot, head] = torch.stack(scores).softmax(0) @ torch.stack(values)
        x = x + attended.flatten(1) @ attn["o_proj"].T
        y = norm(x, weight["post_attention_layernorm.weight"])
        gate, up = y @ weight["mlp.gate_proj.weight"].T, y @ weight["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ weight["mlp.down_proj.weight"].T
    return norm(x, state["norm.weight"])


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_the_network_is_the_plain_rewrite(variant):
    target = tiny.load("qwen3", device="cpu")
    net = network(VARIANTS[variant])
    taps = torch.randn(14, 128)
    expected = plain_hidden(net, target, taps, root=65)
    drafted = drafter(target, VARIANTS[variant]).propose(65, taps)
    torch.testing.assert_close(drafted.hidden, expected[1:], **TIGHT)
    log_probs = target.head(expected[1:]).log_softmax(-1)
    best = log_probs.topk(20)
    assert drafted.tokens.tolist() == best.indices.tolist()
    torch.testing.assert_close(torch.from_numpy(drafted.log_probs), best.values, **TIGHT)


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafting_step_by_step_is_drafting_from_scratch(variant):
    target = tiny.load("qwen3", device="cpu")
    step_by_step, config = drafter(target, VARIANTS[variant]), VARIANTS[variant]
    taps = torch.randn(300, 128)
    start = 0
    for new in (7, 1, 3, 6, 1, 240, 2):
        draft = step_by_step.propose(start % 250, taps[start : start + new])
        start += new
        scratch = drafter(target, config).propose((start - new) % 250, taps[:start])
        torch.testing.assert_close(draft.hidden, scratch.hidden, **TIGHT)
        torch.testing.assert_close(
            torch.from_numpy(draft.log_probs), torch.from_numpy(scratch.log_probs), **TIGHT
        )
    step_by_step.reset()
    again = step_by_step.propose(3, taps[:9])
    torch.testing.assert_close(
        again.hidden, drafter(target, config).propose(3, taps[:9]).hidden, **TIGHT
    )


def test_bf16_keeps_its_angles_far_into_the_text():
    """Casting RoPE's frequencies to bf16 loses the position after a few hundred tokens."""
    taps = torch.randn(900, 128)
    exact = drafter(tiny.load("qwen3", device="cpu"))
    rounded = drafter(tiny.load("qwen3", dtype="bfloat16", device="cpu"))
    assert rounded.net.rope.inv_freq.dtype == torch.float32
    a = exact.propose(65, taps).hidden.flatten()
    b = rounded.propose(65, taps.bfloat16()).hidden.flatten().float()
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.999


def test_binding_a_network_leaves_it_trainable_and_savable(tmp_path):
    net = network()
    bound = dflash.DFlash(net, tiny.load("qwen3", device="cpu"), candidates=4, name="x")
    bound.propose(1, torch.randn(3, 128))
    dflash_checkpoint.save(net, tmp_path / "saved")
    assert torch.equal(
        dflash_checkpoint.load(str(tmp_path / "saved")).fc.weight, network().fc.weight
    )


def test_a_second_drafter_does_not_change_what_the_first_one_reads():
    target = HFTarget(tiny.model("qwen3", layers=4), tiny.tokenizer(), name="tiny")
    first = drafter(
        target, dataclasses.replace(CONFIG, num_target_layers=4, target_layer_ids=(0, 1))
    )
    drafter(target, dataclasses.replace(CONFIG, num_target_layers=4, target_layer_ids=(2, 3)))
    others = target.prefill(PROMPT).taps
    first.reset()
    assert not torch.equal(target.prefill(PROMPT).taps, others)


def test_the_drafter_reads_the_targets_block_outputs():
    """Taps off by one cost acceptance and nothing else: `hidden_states[id + 1]` is pinned here."""
    model = tiny.model("qwen3", layers=4)
    hidden = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    target = HFTarget(model, tiny.tokenizer(), name="tiny")
    config = dataclasses.replace(CONFIG, target_layer_ids=(2, 0), num_target_layers=4)
    drafter(target, config)
    taps = target.prefill(PROMPT).taps
    torch.testing.assert_close(taps, torch.cat([hidden[3][0], hidden[1][0]], -1), **TIGHT)


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (48, 5, (1, 12, 23, 34, 45)), (64, 5, (1, 16, 31, 46, 61)),
     (32, 5, (1, 8, 15, 22, 29)), (30, 5, (1, 8, 14, 20, 27)), (36, 1, (18,))],
)  # fmt: skip
def test_published_tap_spacing(layers, taps, ids):
    assert default_target_layer_ids(layers, taps) == ids


PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}


def test_both_config_layouts_say_the_same():
    old = parse(PUBLISHED, "old")
    assert (old.block_size, old.rope_theta, old.rope_scaling) == (16, 1e6, None)
    moved = {
        k: v for k, v in PUBLISHED.items() if k not in ("block_size", "rope_theta", "rope_scaling")
    }
    moved["dflash_config"] = PUBLISHED["dflash_config"] | {"block_size": 16}
    moved["rope_parameters"] = {"rope_theta": 1000000, "rope_type": "default"}
    assert dataclasses.replace(parse(moved, "new"), source={}) == dataclasses.replace(
        old, source={}
    )
    formula = PUBLISHED | {"dflash_config": {"mask_token_id": 151669}}
    assert parse(formula, "formula").target_layer_ids == (1, 9, 17, 25, 33)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    spelled = [
        PUBLISHED | {"rope_scaling": yarn},
        moved | {"rope_parameters": yarn | {"rope_theta": 1e6}},
    ]
    assert [parse(raw, "").rope_scaling for raw in spelled] == [yarn, yarn]
    assert [parse(raw, "").rope_theta for raw in spelled] == [1e6, 1e6]
    outside = PUBLISHED | {"dflash_config": {"mask_token_id": 1}, "target_layer_ids": [3, 4]}
    assert parse(outside, "").target_layer_ids == (3, 4)


def test_sliding_layers_are_read_as_transformers_reads_them():
    window = {"sliding_window": 2048, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]}
    on = parse(PUBLISHED | window | {"use_sliding_window": True}, "")
    assert [on.window(i) for i in range(5)] == [2048] * 4 + [None]
    assert [on.causal(i) for i in range(5)] == [True] * 4 + [False]
    off = parse(PUBLISHED | window, "")
    assert [off.window(i) for i in range(5)] == [None] * 5
    implied = {k: v for k, v in PUBLISHED.items() if k != "layer_types"}
    implied |= {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}
    assert [parse(implied, "").window(i) for i in range(5)] == [None] * 3 + [64] * 2
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(InputError, match="per layer type"):
        parse(PUBLISHED | {"rope_parameters": nested}, "x")


def test_state_dict_has_the_published_names():
    names = set(DFlashNet(dataclasses.replace(CONFIG, num_layers=5)).state_dict())
    per_layer = [
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"self_attn.{p}_norm.weight" for p in "qk"),
        *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    layers = {f"layers.{i}.{name}" for i in range(5) for name in per_layer}
    assert names == layers | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 58


@pytest.mark.parametrize("config", [CONFIG, SLIDING, VARIANTS["yarn"]])
def test_saved_checkpoints_load_again(tmp_path, config):
    folder = tmp_path / "drafter"
    dflash_checkpoint.save(network(config), folder)
    dflash_checkpoint.save(network(config), folder)  # again: replaced whole
    loaded = dflash_checkpoint.load(str(folder))
    kinds = ("full_attention",) * 3 if not config.layer_types else config.layer_types
    expected = dataclasses.replace(config, layer_types=kinds)
    assert dataclasses.replace(loaded.config, source={}) == expected
    for key, tensor in network(config).state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[key])
    written = json.loads((folder / "config.json").read_text())
    assert "auto_map" not in written
    assert written["dflash_config"] == {"mask_token_id": 258, "target_layer_ids": [0, 1]}


def test_a_hub_id_loads_from_the_hubs_own_cache(tmp_path, monkeypatch):
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--drafter"
    dflash_checkpoint.save(network(), repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = dflash_checkpoint.load("org/drafter")
    assert torch.equal(loaded.fc.weight, network().fc.weight)
    with pytest.raises(InputError, match="cannot fetch drafter org/other"):
        dflash_checkpoint.load("org/other")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": 128}, "hidden size 128; tiny-qwen3 has 64"),
        ({"vocab_size": 300}, "vocabulary 300; tiny-qwen3 has 259"),
        ({"num_target_layers": 36}, "layer count 36; tiny-qwen3 has 2"),
        ({"mask_token_id": 259}, "masks with token 259, but tiny-qwen3 embeds only 259"),
        ({"target_layer_ids": (0, 2)}, r"cannot tap \[2\]"),
        ({"block_size": 1}, "block_size 1"),
    ],
)
def test_a_drafter_for_another_target_is_refused_with_the_numbers(changed, message):
    target = tiny.load("qwen3", device="cpu")
    net = DFlashNet(dataclasses.replace(CONFIG, **changed))
    with pytest.raises(InputError, match=message):
        dflash.DFlash(net, target, candidates=8, name="drafter x")


def test_damaged_checkpoints_are_refused(tmp_path):
    folder = tmp_path / "drafter"
    with pytest.raises(InputError, match="does not exist"):
        dflash_checkpoint.load(str(folder))
    folder.mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        dflash_checkpoint.load(str(folder))
    dflash_checkpoint.save(network(), folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, settings = weights.read_bytes(), config.read_text()
    state = {key: tensor.clone() for key, tensor in load_file(weights).items()}

    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message):
            dflash_checkpoint.load(str(folder))
        weights.write_bytes(whole)
        config.write_text(settings)

    weights.write_bytes(whole[:-100])
    refused(r"model\.safetensors is truncated")
    weights.unlink()
    refused("holds no .safetensors weights")
    save_file({k: v for k, v in state.items() if k != "fc.weight"}, weights)
    refused(r"lacks 1 of 36 tensors, fc\.weight")
    save_file(state | {"candidate_selector.w": torch.ones(1)}, weights)
    refused("no place for, candidate_selector")
    save_file(state | {"norm.weight": torch.ones(32)}, weights)
    refused(r"norm\.weight is \[32\], but config\.json makes it \[64\]")
    save_file(state | {"norm.weight": torch.full((64,), torch.nan)}, weights)
    refused(r"norm\.weight holds NaN")
    config.write_text(settings[:50])
    refused("not valid JSON")
    config.write_text("[1, 2]")
    refused("not a JSON object")
    config.write_text(
        json.dumps({k: v for k, v in json.loads(settings).items() if k != "block_size"})
    )
    refused("no block_size")
    config.write_text(json.dumps(json.loads(settings) | {"architectures": ["DFlash2DraftModel"]}))
    refused("is a DFlash2DraftModel")
    config.write_text(json.dumps(json.loads(settings) | {"output_multiplier": 0.2}))
    refused("sets output_multiplier")
    assert dflash_checkpoint.load(str(folder)) is not None
