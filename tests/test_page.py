"""The HTML page: nothing in a text is read as markup, and its viewer works in a browser."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from graft.eval.page import FigureData, Page, Section, TableData, data, inline, paragraphs, render

AWKWARD = "</script><b>&\"'\u2028\n<!--"
VIEWS = [(1280, 900), (390, 844)]
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def round_of(nodes: list[Any], path: list[int], bonus: str, **more: Any) -> dict[str, Any]:
    default = {
        "hung": [],
        "fate": "budget",
        "words": f'the target wanted "{bonus}"',
        "budget": 12,
        "conf": 0.61,
        "context_length": 143,
        "milliseconds": {"propose": 4.1, "verify": 40.2, "other": 0.9},
    }
    return {"nodes": nodes, "path": path, "bonus": bonus} | default | more


def response(number: int) -> dict[str, Any]:
    """Four rounds; the third is a mismatch behind two accepted nodes, the last has a wide tree."""
    small = [["A", -1, 0, None], [" cat", 0, 1, 0.6], [AWKWARD, 0, 1, 0.3], [" sat", 1, 2, 0.5]]
    hung = [*small, [" on", 3, 3, 0.4], [" under", 2, 2, 0.7], [" the", 5, 3, 0.2]]
    wide = [["A", -1, 0, None], *([f" {i}", 0, 1, 1 / (i + 50)] for i in range(200))]
    return {
        "prompt_id": f"own-0000{number}",
        "turn": 0,
        "source": "own",
        "method": "graft",
        "prompt": AWKWARD,
        "first": "A",
        "rounds": [
            round_of(small, [0], AWKWARD, fate="not_drafted"),
            round_of(small, [0, 2], " and"),
            round_of(hung, [0, 1, 3], " the", hung=[6], fate="mismatch"),
            round_of(wide, [0, 150], " end", fate="cap"),
        ],
    }


def svg() -> str:
    figure = Figure(figsize=(8, 3))
    figure.subplots().plot([1, 2, 3], marker="o")
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()


def page_of(responses: list[dict[str, Any]]) -> Page:
    headings = ["method", *(f"set number {i}" for i in range(20))]
    table = TableData(AWKWARD, headings, [[AWKWARD, *["1.25"] * 20]], {(0, 2)})
    figures = [FigureData(AWKWARD, "caption", svg())] * 2
    sections = [Section("Speed", "one\n\n" + AWKWARD, [table], figures), Section("Loss", "")]
    summary = [("2.63", "tokens a round"), (AWKWARD, AWKWARD)]
    return Page("x" * 80 + AWKWARD, summary, sections, "key: " + AWKWARD * 20, responses)


class Elements(HTMLParser):
    """Start tags with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def test_the_page_holds_the_responses_as_they_are() -> None:
    responses = [response(1), response(2)]
    held, code = Elements(render(page_of(responses))).scripts
    assert json.loads(held) == responses
    assert not re.search(r"[<>&\u2028]", held)
    assert held.isascii()
    assert "use strict" in code


def test_no_text_becomes_markup_and_nothing_is_fetched() -> None:
    found = Elements(render(page_of([response(1)])))
    assert sum(tag == "b" for tag, _ in found.tags) == 3  # the best cell, two figures' titles
    assert sum(tag == "script" for tag, _ in found.tags) == 2
    for _, attributes in found.tags:
        for key in ("src", "href", "xlink:href"):
            assert (attributes.get(key) or "#").startswith(("#", "data:"))
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_page_without_rounds_has_no_viewer() -> None:
    for responses in ([], [response(1) | {"rounds": []}]):
        found = Elements(render(page_of(responses)))
        assert not found.scripts
        assert "viewer" not in [attributes.get("id") for _, attributes in found.tags]


def test_figures_keep_to_themselves() -> None:
    text = inline(svg(), "figure-1", 'a "title"')
    assert text.startswith("<svg")
    assert "DOCTYPE" not in text
    assert "metadata" not in text
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    assert used
    assert used <= ids
    assert all(name.startswith("figure-1") for name in ids)
    assert "#figure-1 * {" in text
    assert "--width: 576pt" in text
    assert re.search(r'<svg[^>]* height="', text) is None


def test_paragraphs_and_data() -> None:
    assert paragraphs("a\nb\n \n\nc\n") == ["a\nb", "c"]
    assert paragraphs("") == []
    with pytest.raises(ValueError, match="JSON"):
        data([float("nan")])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=list(ARGS))
        yield browser
        browser.close()


class Tab:
    """A page opened from a file, which must leave no complaint."""

    def __init__(self, browser: Any, file: Path, view: tuple[int, int] = VIEWS[0]) -> None:
        self.address = file.as_uri()
        self.complaints: list[str] = []
        self.page = browser.new_page(viewport={"width": view[0], "height": view[1]})
        self.page.set_default_timeout(5000)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self.requested)

    def requested(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:")):
            self.complaints.append(request.url)

    def open(self, hash: str = "") -> None:
        self.page.goto("about:blank")  # or only the hash would change
        self.page.goto(self.address + hash)

    def round(self) -> tuple[int, int]:
        """The response and the round shown."""
        words = self.page.inner_text("#words")
        found = re.match(r"Round (\d+): ", words)
        assert found, words
        assert self.page.input_value("#slider") == found[1]
        return int(self.page.input_value("#response")), int(found[1])

    def close(self) -> None:
        self.page.close()
        assert self.complaints == []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "page.html"
    text = render(page_of([response(0) | {"rounds": []}, response(1), response(2)]))
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("view", VIEWS)
def test_one_steps_through_the_rounds(browser: Any, file: Path, view: tuple[int, int]) -> None:
    tab = Tab(browser, file, view)
    tab.open()
    page = tab.page
    assert tab.round() == (1, 2)  # the first response that has rounds, its mismatch
    page.evaluate("document.getElementById('viewer').scrollIntoView()")
    page.click("#next")
    assert tab.round() == (1, 3)
    page.click("#next", force=True)  # there is none: the button says that it is disabled
    assert tab.round() == (1, 3)
    page.keyboard.press("ArrowLeft")  # the button has the focus
    page.keyboard.press("ArrowLeft")
    assert tab.round() == (1, 1)
    page.focus("#slider")
    page.keyboard.press("ArrowLeft")  # one step, not two
    assert tab.round() == (1, 0)
    page.locator("#slider").fill("3")
    assert tab.round() == (1, 3)
    page.click("#mismatch")  # from the start again
    assert tab.round() == (1, 2)
    page.click("#strip > :nth-child(2)")
    assert tab.round() == (1, 1)
    page.select_option("#response", "2")
    assert tab.round() == (2, 2)
    page.click("#previous")
    page.wait_for_url("**#response=2&round=1")
    for index in range(4):
        page.evaluate(f"location.hash = '#response=1&round={index}'")
        page.wait_for_function(f"document.getElementById('slider').value === '{index}'")
        assert page.evaluate("document.documentElement.scrollWidth") <= view[0]
    tab.close()


def test_what_a_round_shows(browser: Any, file: Path) -> None:
    tab = Tab(browser, file)
    page = tab.page
    tab.open("#response=1&round=2")
    assert page.locator("#tree .arc").get_attribute("d")
    assert page.locator("#tree g.elsewhere").count() == 1
    assert page.locator("#tree g.accepted").count() == 3
    assert page.locator("#tree g.wanted text").first.text_content() == "\N{OPEN BOX}the"
    assert page.locator("#text .accepted").all_text_contents() == [" cat", " sat"]
    before = "A" + AWKWARD + AWKWARD + " and"
    assert page.text_content("#text") == before + " cat sat the"
    assert page.locator("#text b, #tree b, #prompt b").count() == 0
    title = page.locator("#tree title").all_text_contents()[2]
    assert title.startswith(r"</script><b>&" + "\"'" + r"\u2028\n<!--")

    tab.open("#response=1&round=3")  # 201 nodes: the best, the path, and how many more
    assert page.locator("#tree .arc").count() == 0
    assert page.locator("#tree g.rest text").first.text_content() == "+168"
    page.check("#all")
    assert page.locator("#tree g").count() == 202
    tab.close()


def test_links_open_rounds_and_bad_ones_do_no_harm(browser: Any, file: Path) -> None:
    tab = Tab(browser, file)
    tab.open("#response=2&round=1")
    assert tab.round() == (2, 1)
    tab.page.evaluate("location.hash = '#section-1'")  # as the contents do
    assert tab.round() == (2, 1)
    bad = ("#response=9&round=0", "#response=1&round=4", "#response=0&round=0", "#round=1")
    for hash in (*bad, "#response=-1&round=x", "#%%&=", "#response=constructor&round=length"):
        tab.open(hash)
        assert tab.round() == (1, 2)
    tab.close()


def test_a_page_without_a_viewer_opens(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(render(page_of([])), encoding="utf-8")
    for view in VIEWS:
        tab = Tab(browser, file, view)
        tab.open("#response=0&round=0")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= view[0]
        tab.close()
