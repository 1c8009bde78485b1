"""Train an edge scorer on what the target made of drafts (TDES, DESIGN 5.3).

Losses are means over fans, one true parent each. Validation is what counts: held-out responses are
replayed with the scorer's trees and with DDTree's at the same budgets, and the gain in tokens a
round decides which state is kept. Behind the last layer there is one more number, the shrink factor
of the learned term, tuned by the same replays.
"""

from __future__ import annotations

import json
import math
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
from graft.scorer.checkpoint import EdgeScorer
from graft.scorer.checkpoint import build as build_scorer
from graft.scorer.losses import scorer_losses, target_distribution
from graft.scorer.net import Scorer
from graft.targets.hf import HFTarget
from graft.training.run import RunFacts
from graft.training.scorer_data import EdgeData, Fans
from graft.trees.ddtree import DDTree
from graft.trees.tdes import TDES

SHRINKS = (1.0, 0.8, 0.6, 0.4)  # tried at every validation
BINS = 10  # of a calibration error
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
        self._plain: dict[str, dict[int, float]] = {}  # DDTree's MAT by response and budget
        self._rows: list[tuple[float, int, float, float]] = []
        self._stepped: float | None = None
        self._ece: float | None = None  # raw scores are no probabilities
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

    def edge_scorer(self) -> EdgeScorer:
        """The scorer as decoding would use it now."""
        twin = build_scorer(self._config["model"]).to(self._device_of_target)
        twin.load_state_dict(self.scorer.state_dict())
        return EdgeScorer(twin.eval(), twin.tables(self._embedding), self._config)

    def validation_step(self, response: AnchoredResponse, _index: int) -> None:
        if response.prompt_id not in self._plain:
            plain = {b: _mat(DDTree(), b, response) for b in self._budgets}
            self._plain[response.prompt_id] = plain
        plain = self._plain[response.prompt_id]
        builder = TDES(self._edge_scorer)
        trained = bool(sum(p.numel() for p in self.scorer.term.parameters()))
        for shrink in SHRINKS if trained else SHRINKS[:1]:
            self._edge_scorer.shrink(shrink)
            for budget in self._budgets:
                mat = _mat(builder, budget, response)
                self._rows.append((shrink, budget, mat, plain[budget]))

    def on_validation_epoch_end(self) -> None:
        rows, self._rows = self._rows, []
        if dist.is_available() and dist.is_initialized():
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, rows)
            rows = [row for part in parts for row in part]
        sums: dict[tuple[float, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for shrink, budget, mat, plain in rows:
            if not math.isnan(mat):
                sums[shrink, budget][0] += mat
                sums[shrink, budget][1] += plain
        gains = {key: mine / theirs - 1 for key, (mine, theirs) in sums.items()}
        mean = {
            shrink: sum(gains[shrink, b] for b in self._budgets) / len(self._budgets)
            for shrink in {key[0] for key in gains}
        }
        best = max(mean, key=lambda shrink: mean[shrink])
        self.scorer.shrink.fill_(1.0)  # training goes on with the whole of it
        self.best_shrink = best
        self.log("gain", mean[best], prog_bar=True)
        self.log("shrink", best)
        for budget in self._budgets:
            self.log(f"gain/{budget}", gains[best, budget])
        self._log_calibration()

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
        self._ece = calibration_error(p.flatten(), hit.flatten())
        self.log("ece", self._ece)
        for depth in depths.unique().tolist():
            at = depths == depth
            self.log(f"ece/depth_{depth}", calibration_error(p[at].flatten(), hit[at].flatten()))

    def write(self, out: Path, facts: RunFacts) -> None:
        """The best state so far, with its shrink factor, as conf/tree/tdes.yaml takes it."""
        scorer = self.edge_scorer()
        scorer.shrink(self.best_shrink)
        scorer.config["trained"] = {
            "parameters": sum(p.numel() for p in self.scorer.parameters()),
            "seconds": facts.seconds,
            "steps": facts.steps,
            "gain": self.trainer.callback_metrics["gain"].item(),
            "ece": self._ece,
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
        matrices = [p for p in self.scorer.parameters() if p.dim() > 1]
        others = [p for p in self.scorer.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self._weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self._lr)
        steps = int(self.trainer.estimated_stepping_batches)
        rising = max(1, round(self._warmup * steps))

        def scale(step: int) -> float:
            if step < rising:
                return (step + 1) / rising
            return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


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


def calibration_error(probs: torch.Tensor, hits: torch.Tensor) -> float:
    """Mean |predicted - observed| over bins of equal width, weighted by what is in them."""
    bins = (probs * BINS).long().clamp_max(BINS - 1)
    counts = torch.bincount(bins, minlength=BINS).clamp_min(1)
    predicted = torch.bincount(bins, probs.double(), minlength=BINS) / counts
    observed = torch.bincount(bins, hits.double(), minlength=BINS) / counts
    return float(((predicted - observed).abs() * counts).sum() / len(probs))


def _mat(builder: TreeBuilder, budget: int, response: AnchoredResponse) -> float:
    replay = Replay(builder, Fixed(budget))
    return replay(
        response.drafts, response.response, response.beyond, start=len(response.prompt)
    ).mat
