"""One HTML page that reports results and steps through the rounds of real responses.

Everything is in the one file: it needs no network and can be sent around. The viewer takes all it
shows from `Page.responses`, a list of

    prompt_id, turn, source, method
    prompt        the user's turn
    first         text of the response's first token, which comes from the prefill
    rounds        a list of
        nodes           [text, parent, depth, probability after the parent], admission order, root
                        first: its parent is -1, its probability null
        path            accepted nodes, root first
        bonus           text of the target's own token behind the path
        hung            nodes that carry that token at its depth under another parent
        fate            not_drafted, budget, mismatch or cap (graft/eval/fate.py)
        words           the fate in one sentence
        budget, conf, context_length
        milliseconds    by part of the round
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


@dataclass(frozen=True, slots=True)
class TableData:
    """Columns after the first are numbers, and stand to the right."""

    caption: str
    headings: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]] = field(default_factory=set)  # (row, column) in bold


@dataclass(frozen=True, slots=True)
class FigureData:
    """A figure as matplotlib writes it."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class Section:
    """Paragraphs of the text are separated by blank lines."""

    title: str
    text: str
    tables: list[TableData] = field(default_factory=list)
    figures: list[FigureData] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Page:
    """All that a page shows. Without rounds in `responses` there is no viewer."""

    title: str
    summary: list[tuple[str, str]]  # the big figures: value, what it is
    sections: list[Section]
    config: str
    responses: list[dict[str, Any]]


def render(page: Page) -> str:
    """The page as HTML. Text is escaped; SVGs are taken for well-formed XML."""
    # from_string, not a loader: the template includes no other.
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"paragraphs": paragraphs, "inline": inline, "data": data}
    template = files("graft.eval").joinpath("page.html").read_text(encoding="utf-8")
    viewer = any(response["rounds"] for response in page.responses)
    return environment.from_string(template).render(page=page, viewer=viewer)


def paragraphs(text: str) -> list[str]:
    """What blank lines separate."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def data(value: Any) -> Markup:
    """JSON that is safe in a script element: ASCII only, and no tag or comment can begin."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for c in "<>&":  # in JSON, these occur in strings only
        text = text.replace(c, f"\\u{ord(c):04x}")
    return Markup(text)


def inline(svg: str, name: str, title: str) -> Markup:
    """An SVG document as an element of the page, which `name` tells from the page's others.

    Its size becomes a bound, so that style sheets can shrink it; its ids get the name in front, as
    matplotlib numbers markers alike in all figures; and its style rules, which would hold for the
    whole page, hold for itself.
    """
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(svg)  # drops comments and the doctype
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key in ("href", f"{{{XLINK}}}href") and value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            else:
                element.set(key, re.sub(r"url\((['\"]?)#", rf"url(\1#{name}-", value))
        if element.tag == f"{{{SVG}}}style":
            element.text = _scoped(element.text or "", f"#{name}")
    root.attrib.pop("height", None)
    width = root.attrib.pop("width", None)
    root.attrib |= {"id": name, "role": "img", "aria-label": title}
    if width:
        root.set("style", f"--width: {width if not width.isdecimal() else width + 'px'}")
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _scoped(rules: str, scope: str) -> str:
    """Style rules with every selector confined to what lies below `scope`."""

    def confined(match: re.Match[str]) -> str:
        return ", ".join(f"{scope} {selector.strip()}" for selector in match[1].split(",")) + " {"

    return re.sub(r"([^{}]+)\{", confined, rules)
