"""Write training prompts, one JSONL file a set, from the templates and word lists of
data/prompts/recipes.yaml. The same recipes, counts and seed give the same files.

python scripts/write_prompts.py
python scripts/write_prompts.py out=FOLDER counts.math_tex=100 seed=1

In a template [[animal]] is a word of that list, the same at each mention; [[animal#2]] is another
one, [[a animal]] has its article and [[^animal]] a capital. [[2..9]] is a number, [[n:2..9]] one to
be mentioned again as [[n]], [[=n*2]] is computed, [[this|that]] is either, // a new paragraph.
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from launch import stage
from omegaconf import DictConfig

from graft.core.errors import InputError
from graft.core.runlog import write_atomically

log = logging.getLogger("write_prompts")

SLOT = re.compile(r"\[\[([^\[\]]+)\]\]")
RANGE = re.compile(r"(?:(\w+):)?(-?\d+)\.\.(-?\d+)")
TRIES = 30  # draws in a row that bring nothing new before a template counts as used up
PER_FUNCTION = 2  # stubs that may ask for the same function in other words


@stage("write_prompts")
def main(cfg: DictConfig) -> None:
    recipes = read_recipes(Path(cfg.recipes))
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, count in cfg.counts.items():
        if name != "code_stub" and name not in recipes["templates"]:
            raise InputError(f"counts.{name}: {cfg.recipes} has no such set")
        rng = random.Random(f"{cfg.seed}-{name}")
        prompts = draw(sources(name, recipes, rng), count, cfg.per_template)
        rng.shuffle(prompts)
        rows = ({"id": f"{name}-{i:05d}", "turns": [text]} for i, text in enumerate(prompts))
        write_atomically(
            out / f"{name}.jsonl",
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        )
        log.info("%s: %d of %d prompts", name, len(prompts), count)


def read_recipes(path: Path) -> dict[str, Any]:
    """The recipes, with each word list split at semicolons and line ends."""
    try:
        recipes = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"cannot read recipes from {path}: {error}") from error
    recipes["words"] = {
        name: [word.strip() for word in re.split(r"[;\n]", text) if word.strip()]
        for name, text in recipes["words"].items()
    }
    recipes["parts"] = {
        name: [
            dict(zip(("name", "say", "expr", "type"), cells(line), strict=False)) for line in part
        ]
        for name, part in ((name, lines(text)) for name, text in recipes["parts"].items())
    }
    return recipes


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(" | ")]


def sources(
    name: str, recipes: dict[str, Any], rng: random.Random
) -> list[Callable[[], str | None]]:
    """A set's templates, each as a function that draws a prompt, or None for no luck."""
    if name == "code_stub":
        drawn: Counter[str] = Counter()
        return [partial(stub, family, recipes, rng, drawn) for family in families(recipes)]

    def expand(line: str) -> str:
        return Expander(recipes["words"], rng).expand(line).replace(" // ", "\n\n")

    return [partial(expand, line) for line in lines(recipes["templates"][name])]


def draw(makers: list[Callable[[], str | None]], count: int, per_template: int) -> list[str]:
    """Up to `count` distinct prompts, a template at a time in turn so that all are used alike."""
    seen: set[str] = set()
    prompts: list[str] = []
    for _ in range(per_template):
        live = []
        for make in makers:
            if len(prompts) == count:
                return prompts
            for _ in range(TRIES):
                prompt = make()
                # Near-duplicates differ in case, spaces and stops alone.
                key = re.sub(r"[\s.,!?:]+", " ", prompt or "").strip().lower()
                if prompt is not None and key not in seen:
                    seen.add(key)
                    prompts.append(prompt)
                    live.append(make)
                    break
        makers = live
    return prompts


class Expander:
    """Fills the slots of one prompt; what it drew for a slot it keeps for later mentions."""

    def __init__(
        self,
        words: dict[str, list[str]],
        rng: random.Random,
        parts: dict[str, list[dict[str, str]]] | None = None,
    ) -> None:
        self.words, self.rng, self.parts = words, rng, parts or {}
        self.values: dict[str, Any] = {}

    def expand(self, text: str) -> str:
        while SLOT.search(text):
            text = SLOT.sub(lambda match: str(self.fill(match[1])), text)
        return text

    def fill(self, slot: str) -> Any:
        if slot.startswith("="):
            return eval(slot[1:], {"math": math, **self.values})
        if slot.startswith("a "):
            word = self.expand(f"[[{slot[2:]}]]")
            return (
                "an " if re.match(r"(?!uni|use|one|eu)[aeiou]|hour|honest", word) else "a "
            ) + word
        if slot.startswith("^"):
            word = self.expand(f"[[{slot[1:]}]]")
            return word[:1].upper() + word[1:]
        if span := RANGE.fullmatch(slot):
            number = self.rng.randint(int(span[2]), int(span[3]))
            return self.values.setdefault(span[1], number) if span[1] else number
        if "|" in slot:
            return self.rng.choice(slot.split("|"))
        if slot not in self.values:
            self.values[slot] = self.choose(slot)
        return self.values[slot]

    def choose(self, slot: str) -> str:
        if "." in slot:
            part, field = slot.split(".")
            if part not in self.values:
                self.values[part] = self.rng.choice(self.parts[part.partition("#")[0]])
            return self.values[part][field]
        name = slot.partition("#")[0]
        if name not in self.words:
            raise InputError(f"recipes: no word list {name!r} for [[{slot}]]")
        taken = {value for key, value in self.values.items() if key.partition("#")[0] == name}
        # Expanded once drawn, so that a list of lists gives the same word at each mention.
        for _ in range(TRIES):
            word = self.expand(self.rng.choice(self.words[name]))
            if word not in taken:
                break
        return word


def families(recipes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The composed families, then each single function as a family of its own."""
    for family in recipes["stubs"]:
        # Families that multiply out get more turns than a single function.
        yield from [family] * family.get("weight", 4)
    for line in lines(recipes["singles"]):
        name, args, returns, expr, *docs = cells(line)
        yield {"name": name, "args": args, "returns": returns, "expr": expr, "docs": docs}


def stub(
    family: dict[str, Any], recipes: dict[str, Any], rng: random.Random, drawn: Counter[str]
) -> str | None:
    """A Python function to complete, with examples that were computed; None if it was had."""
    expander = Expander(recipes["words"], rng, recipes["parts"])
    kinds, names = family["args"].split(), list[str]()
    for kind in kinds:
        names.append(
            rng.choice([n for n in recipes["kinds"][kind]["names"].split() if n not in names])
        )
    expander.values |= dict(zip("abc", names, strict=False))
    name, expr = expander.expand(family["name"]), expander.expand(family["expr"])
    doc = expander.expand(rng.choice(family["docs"]))
    returns = expander.expand(family["returns"])
    if drawn[expr] == PER_FUNCTION:
        return None
    calls = examples(name, kinds, expr, recipes["words"], rng)
    if calls is None:
        return None
    drawn[expr] += 1
    signature = ", ".join(
        f"{arg}: {recipes['kinds'][kind]['type']}" for arg, kind in zip(names, kinds, strict=True)
    )
    head = f"def {name}({signature}) -> {returns}:"
    return layout(head, doc, calls, rng)


def layout(head: str, doc: str, calls: list[tuple[str, str]], rng: random.Random) -> str:
    """The stub's text, in one of several habits of writing such stubs."""
    style = rng.random()
    generics = sorted(set(re.findall(r"List|Dict|Tuple", head)))
    if generics and style < 0.6:
        opening = f"from typing import {', '.join(generics)}\n\n\n"
    elif style < 0.85:
        head = re.sub(r"List|Dict|Tuple", lambda match: match[0].lower(), head)
        opening = rng.choice(["", "\n", "\n\n"])
    else:
        names = re.findall(r"[(,] ?(\w+):", head)
        head = f"{head[: head.index('(')]}({', '.join(names)}):"
        opening = rng.choice(["", "\n"])
    quote = rng.choice(['"""', '"""', "'''"])
    body = textwrap.wrap(doc, rng.choice([68, 76, 84]))
    form = rng.choice([">>>", ">>>", ">>>", "==", "returns", "=>"])
    if form == ">>>":
        shown = [line for call, result in calls for line in (f">>> {call}", result)]
    else:
        word = rng.choice(["For example:", "Examples:", "Example:"])
        shown = [word] + [f"{call} {form} {result}" for call, result in calls]
    if rng.random() < 0.35 and len(body) > 0:
        shown = ["", *shown]
    if rng.random() < 0.3:
        text = f"{quote}\n    " + "\n    ".join(body + shown)
    else:
        text = quote + rng.choice([" ", ""]) + "\n    ".join(body + shown)
    text = re.sub(r" +\n", "\n", text)
    return f"{opening}{head}\n    {text}\n    {quote}\n"


def examples(
    name: str, kinds: list[str], expr: str, words: dict[str, list[str]], rng: random.Random
) -> list[tuple[str, str]] | None:
    """One to three calls with their results; None if `expr` takes none of what was drawn."""
    calls: dict[str, str] = {}
    wanted = rng.choice([1, 2, 2, 3])
    for _ in range(TRIES):
        values = [argument(kind, words, rng) for kind in kinds]
        scope = {
            "math": math,
            "re": re,
            "Counter": Counter,
            **dict(zip("abc", values, strict=False)),
        }
        try:
            result = repr(eval(expr, scope))
        except (ValueError, IndexError, ZeroDivisionError, KeyError):
            continue
        # A result seen already says little: a bool's other value is worth waiting for.
        if len(result) < 70 and (result not in calls.values() or rng.random() < 0.1):
            calls[f"{name}({', '.join(map(repr, values))})"] = result
        if len(calls) == wanted:
            break
    return list(calls.items()) or None


def argument(kind: str, words: dict[str, list[str]], rng: random.Random) -> Any:
    """A value to show a stub's argument with."""
    size = rng.randint(3, 6)
    low = rng.choice([-10, 0, 1])
    makers: dict[str, Callable[[], Any]] = {
        "ints": lambda: [rng.randint(low, rng.choice([9, 25])) for _ in range(size)],
        "floats": lambda: [rng.randint(2 * low, 40) / 2 for _ in range(size)],
        "strs": lambda: rng.sample(words["stub_word"], size),
        "word": lambda: rng.choice(words["stub_word"]),
        "text": lambda: rng.choice(words["stub_text"]),
        "int": lambda: rng.choice([rng.randint(1, 30), rng.randint(31, 9999)]),
        "small": lambda: rng.randint(1, 5),
        "pairs": lambda: [(word, rng.randint(1, 9)) for word in rng.sample(words["stub_word"], 3)],
        "dict": lambda: {word: rng.randint(1, 9) for word in rng.sample(words["stub_word"], 3)},
        "matrix": lambda: [
            [rng.randint(0, 9) for _ in range(3)] for _ in range(rng.choice([2, 3]))
        ],
        "tuple": lambda: tuple(rng.randint(0, 12) for _ in range(size)),
        "letter": lambda: rng.choice("aeorst"),
        "float": lambda: rng.randint(1, 400) / 4,
    }
    return makers[kind]()


if __name__ == "__main__":
    main()
