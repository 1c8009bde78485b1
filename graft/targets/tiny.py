"""A random two-layer model of any family, with a byte tokenizer: no download, for tests and smoke
runs.

Its weights are drawn wide enough that its greedy text does not settle into one token, and its head
is scaled so that some next tokens are likely.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from graft.core.linear import cast_parameters
from graft.targets.hf import HFTarget, parse_device, parse_dtype

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
)  # the last is the spare row a drafter masks with
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens 0..255 (in the byte-level alphabet), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIAL[1], pad_token=SPECIAL[1]
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model(
    family: str = "qwen3", *, vocab_size: int = 0, layers: int = 2, seed: int = 0
) -> torch.nn.Module:
    """A random transformers causal LM: hidden 64, 4 heads over 2 key heads, in fp32."""
    text = tokenizer()
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size or len(text),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        bos_token_id=None,
        **(
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            if "moe" in family
            else {}
        ),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = AutoModelForCausalLM.from_config(config).eval()
    # As peaked as a real model: flat marginals would make broad, shallow trees.
    weights.lm_head.weight.data *= 4
    return weights


def load(
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    passes: str = "auto",
) -> HFTarget:
    """The random model as a target."""
    weights = model(family, seed=seed)
    cast_parameters(weights, parse_device(device), parse_dtype(dtype))
    return HFTarget(weights, tokenizer(), name=f"tiny-{family}", passes=passes)
