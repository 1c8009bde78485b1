"""Many blocks in one pass: against a brute-force mask, against flex attention, against decoding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_dflash import TIGHT, VARIANTS, network

from graft.drafters import blocks, dflash
from graft.drafters.anchors import drafts_along
from graft.drafters.blocks import context_of, draft_blocks, visible
from graft.targets import tiny

TOKENS = torch.randint(0, 250, (60,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=sorted(VARIANTS))
def net(request):
    return network(VARIANTS[request.param])


@pytest.fixture(scope="module")
def target():
    return tiny.load("qwen3", device="cpu")


def brute_force(config, layer: int, anchors: list[int], length: int) -> torch.Tensor:
    """[A * size, length + A * size], one pair at a time, from the description."""
    size, window = config.block_size, config.window(layer)
    rows = []
    for block, anchor in enumerate(anchors):
        for slot in range(size):
            row = []
            for position in range(length):
                near = window is None or anchor + slot - position < window
                row.append(position < anchor and near)
            for other in range(len(anchors)):
                for key in range(size):
                    allowed = other == block and not (config.causal(layer) and key > slot)
                    row.append(allowed and (window is None or abs(slot - key) < window))
            rows.append(row)
    return torch.tensor(rows)


def test_visible_equals_brute_force(net):
    config, length, anchors = net.config, 20, [3, 4, 11, 19]
    m = len(anchors) * config.block_size
    query, key = torch.arange(m)[:, None], torch.arange(length + m)
    anchor = torch.tensor(anchors)[query // config.block_size]
    for layer in range(config.num_layers):
        got = visible(config, layer, anchor=anchor, query=query, key=key, length=length)
        assert torch.equal(got, brute_force(config, layer, anchors, length))


def masked(config, context, anchors):
    """The attention of `draft_blocks` as one SDPA under the brute-force mask."""
    length = context[0][0].shape[2]

    def attend(layer, queries, keys, values):
        mask = torch.stack([brute_force(config, layer, row, length) for row in anchors.tolist()])
        keys = torch.cat((context[layer][0], keys), 2)
        values = torch.cat((context[layer][1], values), 2)
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask[:, None], enable_gqa=True
        )

    return attend


def hidden_under(kernel, net, target, monkeypatch, *, flex: bool = False) -> torch.Tensor:
    if kernel is not None:
        monkeypatch.setattr(blocks, "_split", kernel)
    anchors = torch.tensor([[7, 8, 30], [5, 21, 40]])
    target.tap(net.config.target_layer_ids)
    taps = torch.stack(target.read([TOKENS[:45], TOKENS[10:55]]))
    roots = torch.stack([TOKENS[:45], TOKENS[10:55]]).gather(1, anchors)
    context = context_of(net, taps)
    return draft_blocks(net, target.embed, context=context, roots=roots, anchors=anchors, flex=flex)


def test_the_kernels_agree(net, target, monkeypatch):
    split = hidden_under(None, net, target, monkeypatch)
    with torch.no_grad():
        flex = hidden_under(None, net, target, monkeypatch, flex=True)
    torch.testing.assert_close(flex, split, **TIGHT)
    torch.testing.assert_close(split, hidden_under(masked, net, target, monkeypatch), **TIGHT)


def test_drafts_along_a_text_equal_decoding(net, target):
    """Training sees what decoding will: the same text gives the same draft (SpecForge #533)."""
    decoding = dflash.DFlash(net, target, candidates=16, name="under test")
    along = drafts_along(net, target, TOKENS, start=12)
    assert len(along) == len(TOKENS) - 12
    step = target.prefill(TOKENS[:12].tolist())
    decoding.reset()
    taps = step.taps
    for root in (12, 15, 16, 40):  # committed in steps of several tokens, as rounds do
        draft = decoding.propose(int(TOKENS[root]), taps)
        twin = along[root - 12]
        torch.testing.assert_close(twin.hidden, draft.hidden, **TIGHT)
        torch.testing.assert_close(
            torch.from_numpy(twin.log_probs), torch.from_numpy(draft.log_probs), **TIGHT
        )
        following = {12: 15, 15: 16, 16: 40, 40: 40}[root]
        target.tap(net.config.target_layer_ids)
        taps = target.read([TOKENS[:following]])[0][root:]


def test_a_draft_does_not_see_its_root_or_what_follows(net, target):
    changed = TOKENS.clone()
    changed[31:] = (changed[31:] + 1) % 250
    before, after = (drafts_along(net, target, text, start=30)[0] for text in (TOKENS, changed))
    assert torch.equal(before.hidden, after.hidden)


def test_a_drafter_may_propose_a_part_of_the_vocabulary(target):
    net = network()
    net.draft_tokens = torch.tensor([3, 40, 41, 97, 200])
    drafter = dflash.DFlash(net, target, candidates=64, name="under test")
    step = target.prefill(TOKENS[:12].tolist())
    draft = drafter.propose(int(TOKENS[12]), step.taps)
    assert draft.tokens.shape == (net.config.block_size - 1, 5)
    assert set(draft.tokens.flatten().tolist()) == set(net.draft_tokens.tolist())
    logits = target.head(draft.hidden)[:, net.draft_tokens].log_softmax(-1)
    expected = logits.sort(descending=True).values
    torch.testing.assert_close(torch.from_numpy(draft.log_probs), expected, **TIGHT)
