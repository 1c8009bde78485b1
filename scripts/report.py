"""Tables, figures and a page out of results alone; no model is loaded.

    python scripts/report.py
    python scripts/report.py results=[data/results/a,data/results/b] out=outputs/report/both
    python scripts/report.py +experiment=qwen3_8b compare=paper

OUT gets table.md, table.tex (models and temperatures down, sets across), every figure as PNG and
PDF, and index.html, one file with all of it and a viewer that steps through real rounds.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from launch import WIDTH, folders_of, open_log, stage, table, tokenizer_of
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.console import Console

from graft.core.errors import InputError
from graft.core.runlog import write_atomically
from graft.data import published
from graft.data.collected import difference
from graft.data.results import read
from graft.eval import tables
from graft.eval.figures import FIGURES
from graft.eval.limits import Passes
from graft.eval.metrics import ratio, summarise
from graft.eval.page import FigureData, Page, Section, render
from graft.eval.tables import Block, label
from graft.eval.viewer import response_of

SHOWN = 3  # methods in the viewer: the focus, then the fastest DDTree, TDES and chain
SPOKEN = ("Results", "against the others", "Published")  # sections that the terminal shows too
SAME = ("settings", "models")  # for one model at one temperature there is one of each

TEXTS = {
    "results": "Speedup is plain decoding's time per output token over the method's, on the same "
    "prompts of the same run, methods taking turns; the prompt's prefill is left out, the first "
    "draft pass is not. MAT is tokens committed a round, the target's own included: the mean over "
    "rounds, then over responses; a response's last round counts in full. Means are over sets.",
    "head": "Ratios are paired over prompts. A difference whose interval holds 1 is a tie.",
    "time": "One clock runs through a round and is in exactly one part at a time, so the parts sum "
    "to the round. A pass is all that the network does, drawn candidates included; sampling is "
    "nothing where the pass itself gives the likeliest token. Blank: there is no such part, or "
    "what was measured did not tell it apart.",
    "passes": "No pass is faster than reading its weights once, nor than their products; both "
    "rates were measured together with the passes. What the ratio holds beyond 1: attention over "
    "the context, norms, the way into a pass, and what could still be won.",
    "loss": "A round ends at the token that the target wanted and the path did not have. It was "
    "not among the drafter's candidates (not drafted); it was one, but no node carried it "
    "(budget); a node did, under another parent (mismatch); or the path had reached the full depth "
    "(cap). The mismatch rate is over the rounds that stop short of it. It falls by itself as "
    "budgets shrink: compare it at equal budget.",
    "lossless": "In fp32 every response of ours must be plain decoding's, and in bf16 too where "
    "passes are compiled for a CPU. Elsewhere a pass over many rows rounds otherwise than a pass "
    "over one, and near-ties flip: the gap says how near. Above T = 0 the library's generate "
    "draws from a stream of its own.",
    "published": "Other machines, other baselines, other lengths: compare MAT first.",
    "pictures": "The same results, drawn.",
}
UNMEASURED = (
    "Nobody has measured these models' passes on the machine of these results: "
    "python scripts/bench.py what=passes does."
)


@stage("report")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    if cfg.compare not in (None, "paper"):
        raise InputError(f"compare must be paper or null, not {cfg.compare}")
    folders = folders_of(cfg.results)
    blocks = [block_of(folder, cfg.seed) for folder in folders]
    check_apart(blocks, folders)
    papers = published.read(Path(cfg.published)) if cfg.compare else []
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    sections: list[Section] = []
    made: list[Path] = []
    for block in blocks:
        about_it = f"{tables.short(block.target)}-{block.dtype}-t{block.temperature:g}-"
        name = about_it if len(blocks) > 1 else ""
        found = sections_of(block, focus_of(block, cfg.focus), papers, passes_of(cfg, block))
        figures = draw(block, out, name)
        made += [out / f"{name}{key}.png" for key in figures]
        found[-1].figures.extend(figures.values())
        sections += found
    every = [one for section in sections for one in section.tables]
    write_atomically(out / "table.md", "\n".join(map(tables.markdown, every)))
    write_atomically(out / "table.tex", tables.latex(blocks))
    page = Page(
        title="Draft trees, measured: " + ", ".join(dict.fromkeys(b.target for b in blocks)),
        summary=summary(blocks[0], focus_of(blocks[0], cfg.focus)),
        sections=sections,
        config=yaml.safe_dump([about(block) for block in blocks], sort_keys=False),
        responses=[
            response
            for block, folder in zip(blocks, folders, strict=True)
            for response in shown(block, folder, focus_of(block, cfg.focus))
        ],
    )
    write_atomically(out / "index.html", render(page))
    log = open_log(cfg)
    for one in every:
        log.table(one.caption, [h or "method" for h in one.headings], one.rows)
    log.pictures(made)
    log.artifact("report", out)
    log.close()
    for section in sections:
        if section.title.startswith(SPOKEN) or section.title.endswith(SPOKEN):
            for one in section.tables:
                console.print(one.caption, style="bold", soft_wrap=True)
                console.print(table(one.headings, one.rows), end="\n\n")
    console.print(f"tables, figures and the page: {out / 'index.html'}", soft_wrap=True)


def block_of(folder: Path, seed: int) -> Block:
    """The results of one folder. Raises InputError."""
    made_by, rows = read(folder)
    settings = made_by["settings"]
    return Block(
        target=name_of(made_by["names"]["target"]),
        drafter=name_of(made_by["names"]["drafter"]),
        dtype=made_by["models"]["dtype"],
        temperature=settings["temperature"],
        methods=summarise(rows, baseline=settings["baseline"], seed=seed),
        baseline=settings["baseline"],
        made_by=made_by,
        rows=rows,
    )


def check_apart(blocks: Sequence[Block], folders: Sequence[Path]) -> None:
    """Refuse two folders that would be one line of the table (InputError)."""
    seen: dict[str, tuple[Block, Path]] = {}
    for block, folder in zip(blocks, folders, strict=True):
        if block.title in seen:
            other, place = seen[block.title]
            apart = difference(other.made_by, block.made_by, SAME) or "run"
            raise InputError(
                f"{place} and {folder} are both {block.title}, with another {apart}; report one of "
                "them, or each into its own out="
            )
        seen[block.title] = block, folder


def focus_of(block: Block, wanted: str) -> str:
    """The method that is set against the others."""
    if wanted in block.methods:
        return wanted
    return max(block.methods, key=lambda name: block.methods[name].mean.speedup)


def passes_of(cfg: DictConfig, block: Block) -> Passes | None:
    """What scripts/bench.py measured, if it measured these models on the machine of the results.

    Raises InputError for a damaged file.
    """
    file = Path(cfg.passes)
    found = Passes.load(file) if file.exists() else None
    return found if found and found.fits(block.made_by["models"]) else None


def sections_of(
    block: Block, focus: str, papers: Sequence[published.Published], passes: Passes | None
) -> list[Section]:
    """Everything about one model at one temperature; pictures go with the last."""
    parts = [
        (f"Results: {block.title}", "results", [tables.by_set(block), tables.speeds(block)]),
        (f"{label(focus)} against the others", "head", [tables.head_to_head(block, focus)]),
        ("Where the time goes", "time", [tables.times(block)]),
        ("What a pass costs", "passes", [tables.passes(passes)] if passes else []),
        ("Why rounds end", "loss", [tables.losses(block)]),
        ("Is it lossless?", "lossless", [tables.divergences(block)]),
    ]
    if papers:
        beside = tables.beside(block, papers)
        parts.append(("Published numbers", "published", beside))
    parts.append((f"Pictures: {block.title}", "pictures", []))
    texts = TEXTS | ({} if passes else {"passes": UNMEASURED})
    texts |= {"results": f"{where(block)}\n\n{TEXTS['results']}"}
    return [Section(head, texts[key], found) for head, key, found in parts]


def where(block: Block) -> str:
    """What was measured, and on which machine, in a sentence."""
    models, settings = block.made_by["models"], block.made_by["settings"]
    responses = block.methods[block.baseline].responses
    return (
        f"{responses} responses of at most {settings['max_new_tokens']} tokens by {block.target} "
        f"with {block.drafter}, in {block.dtype}, on {models['device']} "
        f"({models['threads']} threads), at revision {block.made_by['git'][:7]}."
    )


def draw(block: Block, out: Path, name: str) -> dict[str, FigureData]:
    """Every figure that the results allow, written as PNG and PDF; for the page as SVG."""
    found = {}
    for key, (figure_of, title, caption) in FIGURES.items():
        figure: Figure | None = figure_of(block)
        if figure is not None:
            for kind in ("png", "pdf"):
                figure.savefig(out / f"{name}{key}.{kind}")
            file = io.StringIO()
            figure.savefig(file, format="svg")
            found[key] = FigureData(title, caption, file.getvalue())
    return found


def summary(block: Block, focus: str) -> list[tuple[str, str]]:
    """The numbers to remember."""
    mine = block.methods[focus]
    found = [
        (f"{mine.mean.speedup:.2f}x", f"{label(focus)} over plain decoding, mean over sets"),
        (f"{mine.mean.mat:.2f}", "tokens a round"),
    ]
    if "library" in block.methods:
        value, _ = ratio(mine, block.methods["library"])
        found.append((f"{value:.2f}x", "over the library's own generate"))
    kind = f"in {block.dtype}" + (": near-ties flip" if mine.parted else "")
    return [*found, (f"{mine.parted} of {mine.responses}", f"responses unlike AR's {kind}")]


def shown(block: Block, folder: Path, focus: str) -> Iterable[dict[str, Any]]:
    """What the viewer has: responses that kept their trees, by a few methods."""
    others = [block.best(family) for family in ("ddtree", "tdes", "chain")]
    names = list(dict.fromkeys([focus, *(m.name for m in others if m is not None)]))[:SHOWN]
    rows = [row for row in block.rows if row.get("trees") and row["method"] in names]
    if not rows:
        return
    tokenizer = tokenizer_of(folder)
    order = {name: place for place, name in enumerate(names)}
    for row in sorted(
        rows, key=lambda r: (r["source"], r["prompt"], r["turn"], order[r["method"]])
    ):
        yield response_of(row, label(row["method"]), lambda token: tokenizer.decode([token]))


def about(block: Block) -> dict[str, Any]:
    """What made a block, for the page."""
    keys = ("names", "settings", "models", "machine", "versions", "git", "command", "methods")
    responses = block.methods[block.baseline].responses
    return {key: block.made_by[key] for key in keys} | {"responses": responses}


def name_of(model: str) -> str:
    """A hub id as it is, a local folder by its own name."""
    return Path(model).name if Path(model).is_absolute() else model


if __name__ == "__main__":
    main()
