"""Load and save DFlash drafters in the published format: config.json and safetensors, no remote
code.

A drafter that was trained to propose a part of the vocabulary only has `draft_tokens.npy` beside
them. Engines that do not know it read the whole head, whose other rows no training pushed down.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from graft.core.errors import InputError
from graft.drafters.dflash_config import dump, parse
from graft.drafters.dflash_net import DFlashNet, rotary_embedding

DRAFT_TOKENS = "draft_tokens.npy"


def load(checkpoint: str) -> DFlashNet:
    """The network of a local folder or a hub id, in its saved dtype. Raises InputError."""
    folder = _folder(checkpoint)
    try:
        raw = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise InputError(f"drafter {checkpoint}: {folder} has no config.json") from error
    except ValueError as error:
        raise InputError(
            f"drafter {checkpoint}: config.json is not valid JSON ({error})"
        ) from error
    if not isinstance(raw, dict):
        raise InputError(f"drafter {checkpoint}: config.json is not a JSON object")
    config = parse(raw, f"drafter {checkpoint}")
    try:
        with torch.device("meta"):  # the weights come from the file: draw none
            net = DFlashNet(config)
        net.rope = rotary_embedding(config)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"drafter {checkpoint}: config.json makes no network ({error})") from error
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            state |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"drafter {checkpoint}: {file.name} is truncated or damaged ({error}): "
                "fetch it again"
            ) from error
    if not state:
        raise InputError(
            f"drafter {checkpoint}: {folder} holds no .safetensors weights (pickles are not read)"
        )
    _check(net, state, f"drafter {checkpoint}")
    net.load_state_dict(state, assign=True)
    net.draft_tokens = _draft_tokens(folder, config.vocab_size, f"drafter {checkpoint}")
    return net.eval().requires_grad_(False)


def save(net: DFlashNet, folder: Path, texts: Mapping[str, str] | None = None) -> None:
    """Write config.json, model.safetensors and `texts` (file name -> content, a model card).

    The folder appears whole or not at all: if the disk is full, what was there before survives.
    """
    partial = folder.with_name(folder.name + ".partial")
    dtype = str(net.fc.weight.dtype).removeprefix("torch.")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "config.json").write_text(
            json.dumps(dump(net.config, dtype), indent=2, sort_keys=True) + "\n"
        )
        save_file(
            {k: v.contiguous() for k, v in net.state_dict().items()},
            partial / "model.safetensors",
            {"format": "pt"},
        )
        (partial / "model.safetensors").chmod(0o644)  # safetensors makes it the owner's alone
        if net.draft_tokens is not None:
            np.save(partial / DRAFT_TOKENS, net.draft_tokens.cpu().numpy().astype(np.int32))
        for name, text in (texts or {}).items():
            (partial / name).write_text(text)
        replaced = folder.with_name(folder.name + ".old")
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(
            f"cannot save the drafter in {folder} ({error}); what was there before is intact: make "
            "room and run the same command again"
        ) from error


def check_replaceable(folder: Path) -> None:
    """Refuse to save over anything but a drafter or an empty folder (InputError)."""
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        raise InputError(f"{folder} holds something other than a drafter; choose another out=")


def _draft_tokens(folder: Path, vocab_size: int, name: str) -> torch.Tensor | None:
    if not (file := folder / DRAFT_TOKENS).exists():
        return None
    try:
        tokens = np.load(file, allow_pickle=False).astype(np.int64)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{name}: {DRAFT_TOKENS} is damaged ({error})") from error
    if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InputError(f"{name}: {DRAFT_TOKENS} must list tokens below {vocab_size}")
    return torch.from_numpy(tokens)


def _folder(checkpoint: str) -> Path:
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or checkpoint.startswith("."):
        raise InputError(f"drafter folder {path} does not exist")
    try:
        return Path(
            snapshot_download(checkpoint, allow_patterns=["*.json", "*.safetensors", DRAFT_TOKENS])
        )
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise InputError(
            f"cannot fetch drafter {checkpoint}: {str(error).strip().splitlines()[0]}"
        ) from error


def _check(net: DFlashNet, state: dict[str, torch.Tensor], name: str) -> None:
    expected = net.state_dict()
    if missing := sorted(expected.keys() - state.keys()):
        raise InputError(
            f"{name} lacks {len(missing)} of {len(expected)} tensors, {missing[0]} among them"
        )
    if extra := sorted(state.keys() - expected.keys()):
        raise InputError(
            f"{name} holds {len(extra)} tensors that a DFlash network has no place for, "
            f"{extra[0]} among them"
        )
    for key, tensor in state.items():
        if tensor.shape != expected[key].shape:
            raise InputError(
                f"{name}: {key} is {list(tensor.shape)}, but config.json makes it "
                f"{list(expected[key].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise InputError(
                f"{name}: weight {key} holds NaN or infinity; the checkpoint is damaged"
            )
