"""A trained scorer on disk and in decoding: config.json, the parameters, and the per-token tables,
so that neither replay nor a tree builder needs the target's embedding.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from graft.core.clock import Part
from graft.core.errors import InputError
from graft.core.fingerprint import fingerprint
from graft.core.types import Draft
from graft.native.scoring import BilinearScorer
from graft.scorer import terms
from graft.scorer.compiled import compiled
from graft.scorer.edges import edges_of
from graft.scorer.net import Scorer

TERMS: dict[str, type[terms.Nothing]] = {
    "nothing": terms.Nothing,
    "ranks": terms.Ranks,
    "mlp": terms.MLP,
    "bilinear": terms.Bilinear,
}
VERSION = 1


def build(config: Mapping[str, Any]) -> Scorer:
    """An untrained scorer of a configuration: `term`, `mode`, `depth` and the term's own sizes."""
    kind, mode = config["term"], config["mode"]
    if kind not in TERMS:
        raise InputError(f"scorer.net.term must be one of {', '.join(TERMS)}, not {kind}")
    if mode not in ("raw", "normalised"):
        raise InputError(f"scorer.net.mode must be raw or normalised, not {mode}")
    sizes = {key: value for key, value in config.items() if key not in ("term", "mode")}
    try:
        return Scorer(TERMS[kind](**sizes), depth=config["depth"], mode=mode)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"scorer.net cannot be built: {reason}") from error


class EdgeScorer:
    """A scorer with its tables, as a tree builder asks it."""

    def __init__(
        self, scorer: Scorer, tables: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ):
        self.net, self._tables = scorer.eval().requires_grad_(False), dict(tables)
        self.config = dict(config)
        self._compiled: BilinearScorer | None = None

    def compile(self) -> EdgeScorer:
        """Score in one call from now on, where that can be; parameters must not change any more."""
        self._compiled = compiled(self.net, self._tables, self.config["candidates"])
        return self

    @Part("score")
    @torch.inference_mode()
    def edge_logits(self, draft: Draft) -> tuple[np.ndarray, np.ndarray]:
        """The K candidates [D, K] that are scored, and their logits in rows [D, 1 + K + G, K + 1]
        that add up (`Scorer`): the drafter's, a parent's and a grandparent's by rank. G is 0 or K.

        Raises InputError for a draft of another depth, or with fewer candidates than it was trained
        with.
        """
        K, D = self.config["candidates"], self.config["depth"]
        if draft.tokens.shape[0] != D or draft.tokens.shape[1] < K:
            raise InputError(
                f"the scorer was trained for D = {D} and K = {K}, the drafter gives "
                f"{draft.tokens.shape[0]} and {draft.tokens.shape[1]}; set drafter.candidates={K}"
            )
        draft = Draft(
            draft.root, draft.tokens[:, :K], draft.log_probs[:, :K], draft.cosines, draft.hidden
        )
        if self.net.term.uses_hidden and draft.hidden.shape[1] == 0:
            raise InputError(
                "the scorer looks at the drafter's states, which were not kept; collect anchors "
                "with hidden=int8"
            )
        if self._compiled is not None and self._device.type == "cpu":
            parts = draft.tokens, draft.log_probs, draft.hidden
            return np.ascontiguousarray(draft.tokens), self._compiled(draft.root, *parts)
        edges = edges_of(draft, self._device)
        tokens = {
            "parent": edges.parents,
            "child": edges.candidates,
            "grandparent": edges.grandparents,
        }
        sides = {name: F.embedding(tokens[name], t).float() for name, t in self._tables.items()}
        return np.ascontiguousarray(draft.tokens), self.net(edges, sides).cpu().numpy()

    @property
    def fingerprint(self) -> str:
        """Tells scorers apart that build different trees."""
        return fingerprint(self.net, f"{self.config} {float(self.net.shrink)}")

    @property
    def _device(self) -> torch.device:
        return self.net.shrink.device

    def to(self, device: torch.device) -> EdgeScorer:
        """Move network and tables, in place."""
        self.net.to(device)
        self._tables = {name: table.to(device) for name, table in self._tables.items()}
        return self

    def check_fits(self, target: str, drafter: str) -> None:
        """Refuse other models than it was trained for, by fingerprint (InputError)."""
        for what, found in (("target", target), ("drafter", drafter)):
            if self.config[what] != found:
                raise InputError(
                    f"the scorer was trained for another {what} ({self.config[what]}, not "
                    f"{found}); train one: python train.py"
                )

    def shrink(self, factor: float) -> None:
        """Weigh the learned term by this much."""
        self._compiled = None
        self.net.shrink.fill_(factor)

    def save(self, folder: Path, texts: Mapping[str, str]) -> None:
        """Write parameters, tables and config, and texts by file name; the folder appears whole."""
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        partial.mkdir(parents=True)
        bad = [name for name, table in self._tables.items() if not table.isfinite().all()]
        if bad:
            raise InputError(
                f"the {', '.join(bad)} table does not fit half precision; lower model.lr"
            )
        try:
            save_file(self.net.state_dict(), partial / "scorer.safetensors")
            save_file(self._tables, partial / "tables.safetensors")
            config = json.dumps({"version": VERSION, **self.config}, indent=2)
            for name, text in {"config.json": config + "\n", **texts}.items():
                (partial / name).write_text(text)
            for file in partial.iterdir():
                file.chmod(0o644)  # safetensors writes for its owner alone
            old = folder.with_name(f"{folder.name}.{os.getpid()}.old")
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        except SafetensorError as error:  # how it words a full disk
            raise InputError(f"cannot write {folder}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def load(folder: str) -> EdgeScorer:
    """Read a trained scorer. Raises InputError."""
    path = Path(folder).expanduser()
    try:
        config = json.loads((path / "config.json").read_text())
        if config.pop("version") != VERSION:
            raise InputError(f"{path} was written by another version; train the scorer again")
        scorer = build(config["model"])
        scorer.load_state_dict(load_file(path / "scorer.safetensors"))
        return EdgeScorer(scorer, load_file(path / "tables.safetensors"), config).compile()
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"cannot read a scorer from {path} ({reason}); python train.py makes one"
        ) from error
