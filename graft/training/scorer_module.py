"""Train an edge scorer on what the target made of drafts (TDES, DESIGN 5.3).

Losses are means over fans, one true parent each. Validation is what counts: held-out responses are
replayed with the scorer's trees and with DDTree's at the same budgets, and the gain in tokens a
round decides which state is kept. Behind the last layer there is one more number, the shrink factor
of the learned term, tuned by the same replays.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.core.interfaces import TreeBuilder
from graft.data.anchors import AnchoredResponse
from graft.decode.replay import Replay
from graft.scorer.calibration import calibration_error, reliability
from graft.scorer.checkpoint import EdgeScorer
from graft.scorer.checkpoint import build as build_scorer
from graft.scorer.losses import scorer_losses, target_distribution
from graft.scorer.net import Scorer
from graft.targets.hf import HFTarget
from graft.training.run import RunFacts, adamw
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
        self._budgets = list(budgets)
        made_by = data.made_by
        self._config = {
            "model": dict(model),
            "target": made_by["target"]["fingerprint"],
            "drafter": made_by["drafter"]["fingerprint"],
            "depth": made_by["shape"]["D"],
            "candidates": made_by["shape"]["K"],
        }
        self._fans = data.validation_fans
        self._plain: dict[tuple[str, int, int], float] = {}  # DDTree's MAT
        self._middle = self._budgets[(len(self._budgets) - 1) // 2]
        self._stepped: float | None = None
        self._reliability: list[tuple[float, float, int]] = []  # raw scores are no probabilities
        self.monitors = ("gain",)

    def transfer_batch_to_device(self, batch: Any, _device: torch.device, _loader: int) -> Any:
        return batch  # fans of small types: they are unpacked where they are needed

    def training_step(self, fans: Fans, index: int) -> torch.Tensor:
        device = self._device_of_target
        edges = fans.edges(device)
        sides = self.scorer.sides(edges, self._embedding)
        logits = self.scorer(edges, sides)[:, 0]  # [n, K (+ 1)]
        K = edges.candidates.shape[1]
        f = logits[:, :K] - edges.log_probs
        wrong = None
        if self._losses.get("pairwise"):
            wrong = self._under_wrong_parents(fans, edges)
        taken = fans.taken.to(device).long()
        target = target_distribution(fans.target_logits.to(device), fans.target_log_norm.to(device))
        found = scorer_losses(
            logits,
            f,
            wrong,
            target=target,
            taken=taken,
            weights=self._losses,
            margin=self._margin,
        )
        loss = sum((self._losses[name] * value for name, value in found.items()), torch.zeros(()))
        if not torch.isfinite(loss):
            torch.save(fans, self.trainer.default_root_dir + "/nan_batch.pt")
            raise InputError(
                f"the loss of step {self.global_step} is {loss.item()}; the batch is in "
                f"{self.trainer.default_root_dir}/nan_batch.pt. Lower model.lr"
            )
        self.log("train/loss", loss.detach(), prog_bar=True)
        for name, value in found.items():
            self.log(f"train/{name}", value.detach())
        now = time.perf_counter()
        if self._stepped is not None:
            self.log("train/edges_per_second", f.numel() / (now - self._stepped), prog_bar=True)
        self._stepped = now
        return loss

    def _under_wrong_parents(self, fans: Fans, edges: Any) -> torch.Tensor:
        """f [n, K] of the same children under another candidate for parent; -inf at depth 1."""
        other = fans.wrong.to(edges.depths.device).long()[:, None]
        known = other[:, 0] >= 0
        moved = type(edges)(
            edges.depths,
            other.clamp_min(0),
            edges.grandparents,
            edges.parent_ranks,
            edges.grand_ranks,
            edges.candidates,
            edges.log_probs,
            edges.hidden,
        )
        sides = self.scorer.sides(moved, self._embedding)
        f = self.scorer(moved, sides)[:, 0, : edges.candidates.shape[1]] - edges.log_probs
        return f.masked_fill(~known[:, None], -1e4)

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
            self._tried[shrink].append(self._mat(self._middle, response))

    def on_validation_epoch_end(self) -> None:
        tried = {shrink: _mean(mats) for shrink, mats in sorted(self._tried.items())}
        self.best_shrink = max(tried, key=lambda shrink: tried[shrink])
        self._edge_scorer.shrink(self.best_shrink)
        self._mats = {}
        for budget in self._budgets:
            mine = _mean([self._mat(budget, response) for response in self._seen])
            theirs = _mean([self._plain_mat(budget, response) for response in self._seen])
            self._mats[budget] = [mine, theirs]
        gains = {budget: mine / theirs - 1 for budget, (mine, theirs) in self._mats.items()}
        self.log("gain", sum(gains.values()) / len(gains), prog_bar=True)
        self.log("shrink", self.best_shrink)
        for budget, gain in gains.items():
            self.log(f"gain/{budget}", gain)
        self._log_calibration()

    def _mat(self, budget: int, response: AnchoredResponse) -> float:
        return _replayed(TDES(self._edge_scorer), budget, response)

    def _plain_mat(self, budget: int, response: AnchoredResponse) -> float:
        """DDTree's, which does not change."""
        key = response.prompt_id, response.turn, budget
        if key not in self._plain:
            self._plain[key] = _replayed(DDTree(), budget, response)
        return self._plain[key]

    @torch.no_grad()
    def _log_calibration(self) -> None:
        """Expected calibration error by depth, and the mean NLL, of held-out fans."""
        if self.scorer.mode == "raw":
            return
        device, depths = self._device_of_target, self._fans.depths.long()
        probs, hits, nll = [], [], 0.0
        self.scorer.eval()
        for some in torch.arange(len(self._fans)).split(CHUNK):
            fans = self._fans[some]
            edges = fans.edges(device)
            logits = self.scorer(edges, self.scorer.sides(edges, self._embedding))[:, 0]
            taken = fans.taken.to(device).long()
            scores = logits.log_softmax(-1)
            nll -= float(scores.gather(1, taken[:, None]).sum())
            probs.append(scores[:, :-1].exp().cpu())
            hits.append(torch.arange(scores.shape[1] - 1)[None] == fans.taken.long()[:, None])
        self.scorer.train()
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
        }
        scorer.to(torch.device("cpu")).save(out, {"README.md": self._card(out, facts)})

    def check_replaceable(self, out: Path) -> None:
        """Raise InputError if `out` holds something other than a scorer."""
        if out.exists() and any(out.iterdir()) and not (out / "scorer.safetensors").exists():
            raise InputError(f"{out} holds something other than a scorer; choose another out=")

    def _card(self, out: Path, facts: RunFacts) -> str:
        validated = [row for row in facts.rows if "gain" in row]
        best = max(validated, key=lambda row: row["gain"], default={})
        gains = ", ".join(
            f"{100 * best[f'gain/{b}']:+.1f} % at {b}" for b in self._budgets if f"gain/{b}" in best
        )
        parameters = sum(p.numel() for p in self.scorer.parameters())
        recipe = {key: facts.config[key] for key in ("data", "model", "trainer", "seed")}
        root = facts.config["paths"]["root"] + "/"
        return (
            f"# {out.name}\n\nAn edge scorer (TDES) for {facts.target} and the drafter it was "
            f"collected with: {parameters:,} parameters,\nD = {self._config['depth']}, K = "
            f"{self._config['candidates']}. `python scripts/generate.py tree@method.builder=tdes "
            f"method.builder.scorer=<this folder>`\n\nTokens a round over DDTree's at equal budget,"
            f" on held-out prompts: {gains}.\n\n`{facts.command}` at `{facts.git}`: "
            f"{facts.steps} steps, {facts.seconds:.0f} s.\n\n```json\n"
            f"{json.dumps(recipe, indent=2)}\n```\n"
        ).replace(root, "")

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
            "this scorer looks at the drafter's states, which were not kept: collect anchors with "
            "hidden=int8, use them alone (data.use=[anchors]), or take scorer=r4"
        )
    return ScorerModule(net.to(target.device), target, data, model=model, **recipe)


def _replayed(builder: TreeBuilder, budget: int, response: AnchoredResponse) -> float:
    replay = Replay(builder, Fixed(budget))
    return replay(
        response.drafts, response.response, response.beyond, start=len(response.prompt)
    ).mat


def _mean(values: Sequence[float]) -> float:
    """Over all ranks."""
    if dist.is_available() and dist.is_initialized():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, list(values))
        values = [value for part in parts for value in part]
    return sum(values) / len(values)
