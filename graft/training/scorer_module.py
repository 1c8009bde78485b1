"""Train an edge scorer on what the target made of drafts (TDES, DESIGN 5.3).

Losses are means over fans, one true parent each. Validation is what counts: held-out responses are
replayed with the scorer's trees and with DDTree's at the same budgets, and the gain in tokens a
round decides which state is kept. Behind the last layer there is one more number, the shrink factor
of the learned term, tuned by the same replays.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist

from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.core.interfaces import TreeBuilder
from graft.core.runlog import write_atomically
from graft.data.anchors import AnchoredResponse
from graft.decode.replay import Replay, Walk
from graft.scorer.calibration import calibration_error, reliability
from graft.scorer.checkpoint import EdgeScorer
from graft.scorer.checkpoint import build as build_scorer
from graft.scorer.edges import Edges
from graft.scorer.losses import scorer_losses, target_distribution
from graft.scorer.net import Scorer
from graft.targets.hf import HFTarget
from graft.training.run import RunFacts, adamw
from graft.training.scorer_card import scorer_card
from graft.training.scorer_data import EdgeData, Fans
from graft.trees.ddtree import DDTree
from graft.trees.tdes import TDES

SHRINKS = (1.0, 0.8, 0.6, 0.4)  # tried at every validation
CHUNK = 4096  # fans scored together in validation


class ScorerModule(L.LightningModule):
    """The scorer as Lightning trains it; the target's embedding is no part of its state."""

    def __init__(
        self,
        scorer: Scorer,
        target: HFTarget,
        data: EdgeData,
        *,
        model: Mapping[str, Any],
        losses: Mapping[str, float],
        margin: float,
        budgets: Sequence[int],
        lr: float,
        weight_decay: float,
        warmup: float,
        seed: int,
    ) -> None:
        super().__init__()
        if not budgets:
            raise InputError("model.budgets is empty: nothing could be validated")
        if not any(losses.values()):
            raise InputError("model.losses are all 0: nothing would be learned")
        self.scorer, self._losses, self._margin = scorer, dict(losses), margin
        every = torch.arange(target.vocab_size, device=target.device)
        self._embedding = target.embed(every).detach()  # frozen: no parameter, no buffer
        self._device_of_target = target.device
        self._lr, self._weight_decay, self._warmup = lr, weight_decay, warmup
        self._budgets, self._seed = list(budgets), seed
        made_by = data.made_by
        self._config = {
            "model": dict(model),
            "target": made_by["target"]["fingerprint"],
            "drafter": made_by["drafter"]["fingerprint"],
            "depth": made_by["shape"]["D"],
            "candidates": made_by["shape"]["K"],
        }
        self._fans, self._prompts = data.validation_fans, data.prompts
        self._plain: dict[tuple[str, int, int], float] = {}  # DDTree's MAT
        self._middle = self._budgets[(len(self._budgets) - 1) // 2]
        self._stepped: float | None = None
        self._reliability: list[tuple[float, float, int]] = []  # raw scores are no probabilities
        self.monitors = ("gain",)

    def transfer_batch_to_device(self, batch: Any, _device: torch.device, _loader: int) -> Any:
        return batch  # fans of small types: they are unpacked where they are needed

    def training_step(self, fans: Fans, index: int) -> torch.Tensor:
        # Dropout draws from the step alone: a resumed run must draw what an uninterrupted one did.
        drawn = np.random.SeedSequence([self._seed, self.global_step, self.global_rank])
        torch.manual_seed(int(drawn.generate_state(1)[0]))
        device = self._device_of_target
        edges = fans.edges(device)
        f = self.scorer.term(edges, self.scorer.sides(edges, self._embedding))  # [n, 1 + G, K + 1]
        wrong = known = None
        if self._losses.get("pairwise"):
            wrong, known = self._under_wrong_parents(fans, edges)
        found = scorer_losses(
            self.scorer.rows(edges, f).sum(1),  # [n, K (+ 1)]
            f.sum(1)[:, :-1],
            wrong,
            known,
            target=target_distribution(
                fans.target_logits.to(device), fans.target_log_norm.to(device)
            ),
            taken=fans.taken.to(device).long(),
            weights=self._losses,
            margin=self._margin,
        )
        loss = sum((self._losses[name] * value for name, value in found.items()), torch.zeros(()))
        if not torch.isfinite(loss):
            batch = Path(self.trainer.default_root_dir) / f"nan_batch_{self.global_rank}.pt"
            torch.save(fans, batch)
            raise InputError(
                f"the loss of step {self.global_step} is {loss.item()}; the batch is in {batch}. "
                "Lower model.lr"
            )
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        for name, value in found.items():
            self.log(f"train/{name}", value.detach())
        now = time.perf_counter()
        if self._stepped is not None:
            edges_done = fans.candidates.numel()
            self.log("train/edges_per_second", edges_done / (now - self._stepped), prog_bar=True)
        self._stepped = now
        return loss

    def _under_wrong_parents(self, fans: Fans, edges: Edges) -> tuple[torch.Tensor, torch.Tensor]:
        """f [n, K] of the same children under another candidate for parent, and where there is one:
        at depth 1 the root is the only parent.
        """
        other = fans.wrong.to(edges.depths.device).long()[:, None]
        moved = dataclasses.replace(edges, parents=other.clamp_min(0))
        f = self.scorer.term(moved, self.scorer.sides(moved, self._embedding))
        return f.sum(1)[:, :-1], other[:, 0] >= 0

    def on_validation_start(self) -> None:
        self._stepped = None  # a validation is no part of a step
        self._edge_scorer = self.edge_scorer()
        self._seen: list[AnchoredResponse] = []
        self._tried: dict[float, list[float]] = defaultdict(list)  # MAT by shrink factor

    def edge_scorer(self) -> EdgeScorer:
        """The scorer as decoding would use it now."""
        twin = build_scorer(self._config["model"]).to(self._device_of_target)
        twin.load_state_dict(self.scorer.state_dict())
        return EdgeScorer(twin.eval(), twin.tables(self._embedding), self._config)

    def validation_step(self, response: AnchoredResponse, _index: int) -> None:
        """How much of the learned term to trust, at one budget; the others come at the end."""
        self._seen.append(response)
        learned = any(True for _ in self.scorer.term.parameters())
        for shrink in SHRINKS if learned else SHRINKS[:1]:
            self._edge_scorer.shrink(shrink)
            self._tried[shrink].append(_walk(TDES(self._edge_scorer), self._middle, response).mat)

    def on_validation_epoch_end(self) -> None:
        tried = {shrink: _mean(mats) for shrink, mats in sorted(self._tried.items())}
        self.best_shrink = max(tried, key=lambda shrink: tried[shrink])
        self._edge_scorer.shrink(self.best_shrink)
        self._mats = {}
        for budget in self._budgets:
            walks = [_walk(TDES(self._edge_scorer), budget, one) for one in self._seen]
            mine = _mean([walk.mat for walk in walks])
            theirs = _mean([self._plain_mat(budget, response) for response in self._seen])
            self._mats[budget] = [mine, theirs]
            self.log(f"mat/tdes_{budget}", mine)
            self.log(f"mat/ddtree_{budget}", theirs)
            self.log(f"mismatch/tdes_{budget}", _mean([_mismatch(walk) for walk in walks]))
        gains = {budget: mine / theirs - 1 for budget, (mine, theirs) in self._mats.items()}
        self.log("gain", sum(gains.values()) / len(gains), prog_bar=True)
        self.log("shrink", self.best_shrink)
        for budget, gain in gains.items():
            self.log(f"gain/{budget}", gain)
        self._log_calibration()

    def _plain_mat(self, budget: int, response: AnchoredResponse) -> float:
        """DDTree's, which does not change."""
        key = response.prompt_id, response.turn, budget
        if key not in self._plain:
            self._plain[key] = _walk(DDTree(), budget, response).mat
        return self._plain[key]

    @torch.no_grad()
    def _log_calibration(self) -> None:
        """Calibration by depth and mean NLL of held-out fans, as the scorer would be saved."""
        if self.scorer.mode == "raw":
            return
        device, depths = self._device_of_target, self._fans.depths.long()
        probs, hits, nll = [], [], 0.0
        scorer = self._edge_scorer.net
        for some in torch.arange(len(self._fans)).split(CHUNK):
            fans = self._fans[some]
            edges = fans.edges(device)
            logits = scorer(edges, scorer.sides(edges, self._embedding)).sum(1)
            taken = fans.taken.to(device).long()
            scores = logits.log_softmax(-1)
            nll -= float(scores.gather(1, taken[:, None]).sum())
            probs.append(scores[:, :-1].exp().cpu())
            hits.append(torch.arange(scores.shape[1] - 1)[None] == fans.taken.long()[:, None])
        self.log("nll", nll / len(self._fans))
        p, hit = torch.cat(probs), torch.cat(hits).float()
        self._reliability = reliability(p.flatten(), hit.flatten())
        self.log("ece", calibration_error(self._reliability))
        for depth in depths.unique().tolist():
            at = depths == depth
            bins = reliability(p[at].flatten(), hit[at].flatten())
            self.log(f"ece/depth_{depth}", calibration_error(bins))

    def write(self, out: Path, facts: RunFacts) -> None:
        """The best state so far, with its shrink factor, as conf/tree/tdes.yaml takes it."""
        scorer = self.edge_scorer()
        scorer.shrink(self.best_shrink)
        scorer.config["trained"] = {
            "parameters": sum(p.numel() for p in self.scorer.parameters()),
            "seconds": facts.seconds,
            "steps": facts.steps,
            "gain": self.trainer.callback_metrics["gain"].item(),
            "ece": calibration_error(self._reliability) if self._reliability else None,
            "reliability": self._reliability,
            "mats": self._mats,  # by budget: with the scorer, with DDTree
            "prompts": self._prompts,  # learned from: fits want others
        }
        scorer.to(torch.device("cpu")).save(
            out, {"README.md": scorer_card(out.name, self._config, facts)}
        )

    def finish(self, out: Path, facts: RunFacts) -> None:
        """The card again, with the whole run's time."""
        write_atomically(out / "README.md", scorer_card(out.name, self._config, facts))

    def trained(self, out: Path) -> dict[str, Any]:
        """What the best state was like, for a picture."""
        return json.loads((out / "config.json").read_text())["trained"]

    def check_replaceable(self, out: Path) -> None:
        """Raise InputError if `out` holds something else than a scorer of these models."""
        if not out.exists() or not any(out.iterdir()):
            return
        if not (out / "config.json").exists() or not (out / "scorer.safetensors").exists():
            raise InputError(f"{out} holds something other than a scorer; choose another out=")
        there = json.loads((out / "config.json").read_text())
        if any(there[key] != self._config[key] for key in ("target", "drafter")):
            raise InputError(f"{out} holds a scorer of other models; choose another name= or out=")

    def configure_optimizers(self) -> Any:
        return adamw(
            self.scorer,
            steps=int(self.trainer.estimated_stepping_batches),
            lr=self._lr,
            weight_decay=self._weight_decay,
            warmup=self._warmup,
        )


def build(
    target: HFTarget, data: EdgeData, *, scorer: Mapping[str, Any], **recipe: Any
) -> ScorerModule:
    """A new scorer for what `data` was collected with. Raises InputError."""
    shape, states = data.made_by["shape"], data.training.hidden.shape[1]
    model = {
        **scorer,
        "depth": shape["D"],
        "hidden_size": target.hidden_size,
        "state_size": states,
    }
    net = build_scorer(model)
    if net.term.uses_hidden and states == 0:
        raise InputError(
            "this scorer looks at the drafter's states, which were not kept: take scorer=r4, or "
            "collect anchors with hidden=int8 (scripts/collect.py what=[anchors] hidden=int8 "
            "out=...) and use them alone (data.use=[anchors])"
        )
    return ScorerModule(net.to(target.device), target, data, model=model, **recipe)


def _walk(builder: TreeBuilder, budget: int, response: AnchoredResponse) -> Walk:
    replay = Replay(builder, Fixed(budget))
    return replay(response.drafts, response.response, response.beyond, start=len(response.prompt))


def _mismatch(walk: Walk) -> float:
    """Of the rounds, those whose failing token is a node under another parent."""
    return float(walk.elsewhere.mean())


def _mean(values: Sequence[float]) -> float:
    """Over all ranks."""
    if dist.is_available() and dist.is_initialized():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, list(values))
        values = [value for part in parts for value in part]
    return sum(values) / len(values)
