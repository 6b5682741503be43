"""The site that ``make docs`` builds: it is made without a warning, no link of it is dead, and a browser shows it.

The tests of the browser open the pages as files, with no server, in a Chromium that reaches no network.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import shardwise
from tests import browser

ROOT = Path(__file__).parent.parent
MISSING = [
    name
    for name in ("sphinx", "myst_parser", "pydata_sphinx_theme")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.soak,  # the build takes more than a minute of one core
    pytest.mark.skipif(bool(MISSING), reason=f"pip install 'shardwise[docs]': {MISSING} is missing"),
    pytest.mark.timeout(1800),  # the build takes about a minute of two cores, and many on a crowded host
]
OPENED = {
    "README": "Shardwise",
    "docs/guides/own_loop": "loop",
    "docs/techniques/zero": "ZeRO",
    "docs/reference/engine": "Public names",
    "docs/modules/parallel.pipeline": "shardwise.parallel.pipeline",
}
"""Pages that the browser opens, each with a part of its title."""


SECRET = "a-value-of-whoever-builds-the-site"


def build(folder: Path, jobs: str) -> Path:
    command = [sys.executable, str(ROOT / "docs" / "make_site.py"), str(folder), f"--jobs={jobs}"]
    environment = os.environ | {"SHARDWISE_TESTS_SECRET": SECRET}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by one process, which takes the least time of all cores together."""
    return build(tmp_path_factory.mktemp("built") / "site", "1")


@pytest.fixture(scope="module")
def window(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    command = browser.program()
    if command is None:
        pytest.skip(f"none of {', '.join(browser.NAMES)} is installed")
    with browser.Browser(command, tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


class Page(HTMLParser):
    """The anchors of a page, the links on it, and the files that a browser loads to show it."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        is_loaded = tag == "link" and not {"next", "prev", "search", "index", "canonical"} & set(
            given["rel"].split()
        )
        if is_loaded:
            self.loaded.append(given["href"])
        if tag in ("script", "img", "iframe", "source", "video") and "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Page]:
    pages = [path for path in site.rglob("*.html") if path.relative_to(site).parts[0] != "_static"]
    return {path: Page(path) for path in pages}


def test_every_page_of_the_repository_is_on_the_site(site: Path, parsed: dict[Path, Page]) -> None:
    assert (site / "index.html").read_text() == (site / "README.html").read_text()
    for folder in (".", "docs", "docs/guides", "docs/techniques", "docs/reference", "examples"):
        for page in (ROOT / folder).glob("*.md"):
            assert site / page.relative_to(ROOT).with_suffix(".html") in parsed, page
    for lesson in (ROOT / "examples").glob("*.py"):
        assert site / "examples" / f"{lesson.name}.html" in parsed, lesson


def test_every_link_leads_to_a_page_and_a_place_on_it(site: Path, parsed: dict[Path, Page]) -> None:
    dead = []
    for path, page in parsed.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_there = target.is_file()
            if is_there and parts.fragment and target in parsed:
                is_there = unquote(parts.fragment) in parsed[target].anchors
            if not is_there:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead, f"{len(dead)} dead links, such as {dead[:20]}"
    assert sum(len(page.links) for page in parsed.values()) > 5000


def test_no_page_shows_the_environment_of_the_build(site: Path) -> None:
    """A default value ``os.environ`` once stood with all its variables in the signature of a function."""
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".js", ".inv", ".txt")]
    assert not [path for path in pages if SECRET in path.read_text(encoding="utf-8", errors="replace")]
    assert "os.environ" in (site / "docs" / "modules" / "comm.rendezvous.html").read_text(encoding="utf-8")


@pytest.mark.soak
def test_two_processes_build_the_same_pages(site: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "site", "2")
    one, two = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.html")}
        for folder in (site, other)
    )
    assert one.keys() == two.keys()
    assert not [name for name in one if one[name] != two[name]]


def test_nothing_is_loaded_from_the_network(site: Path, parsed: dict[Path, Page]) -> None:
    remote = {link for page in parsed.values() for link in page.loaded if urlsplit(link).netloc}
    styles = "\n".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    remote |= set(re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", styles))
    assert not remote


def test_the_reference_has_every_public_name_with_its_source(site: Path, parsed: dict[Path, Page]) -> None:
    page = parsed[site / "docs" / "reference" / "engine.html"]
    for name in set(shardwise.__all__) - {"launch"}:
        assert f"shardwise.{name}" in page.anchors
    assert "shardwise.Engine.backward" in page.anchors
    assert sum("_modules/" in link for link in page.links) >= len(shardwise.__all__)
    modules = parsed[site / "docs" / "modules" / "plan.html"]
    assert {"module-shardwise.plan.mesh", "shardwise.plan.mesh.Mesh"} <= modules.anchors


@pytest.mark.parametrize("name", OPENED)
def test_a_page_opens(name: str, site: Path, window: browser.Browser) -> None:
    for width, height in ((1400, 900), (390, 800)):
        window.resize(width, height)
        window.open((site / f"{name}.html").as_uri())
        assert OPENED[name] in window.evaluate("document.querySelector('h1').textContent")
        assert window.evaluate("document.querySelector('.bd-article').offsetHeight") > 500
        # The theme's sheet makes the header stick; without the sheet it would be a part of the page.
        assert window.evaluate("getComputedStyle(document.querySelector('.bd-header')).position") == "sticky"
        broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
        assert window.evaluate(broken) == []
        assert window.evaluate("document.documentElement.scrollWidth") <= width, (
            "the page is wider than the screen"
        )
        assert not window.complaints
        assert all(urlsplit(address).scheme in ("file", "data") for address in window.requests), (
            window.requests
        )


def test_the_search_finds_a_word(site: Path, window: browser.Browser) -> None:
    window.resize(1400, 900)
    window.open((site / "index.html").as_uri())
    window.evaluate("document.querySelector('.search-button__button').click()")
    window.evaluate(
        "document.querySelector('.search-button__search-container input, dialog input').value = 'reduce_scatter'"
    )
    window.evaluate("document.querySelector('.search-button__search-container form, dialog form').submit()")
    window.wait(
        "location.pathname.endsWith('/search.html') && document.querySelectorAll('#search-results li a').length"
    )
    found = window.evaluate("[...document.querySelectorAll('#search-results li a')].map(link => link.href)")
    assert any("/docs/" in link for link in found)
    assert not window.complaints
    window.open(found[0])
    assert not window.complaints


def test_the_search_says_that_a_word_is_nowhere(site: Path, window: browser.Browser) -> None:
    window.open((site / "search.html").as_uri() + "?q=qqxzzyv")
    window.wait("/did not match any documents/.test(document.querySelector('#search-results').textContent)")
    assert window.evaluate("document.querySelectorAll('#search-results li a').length") == 0


def test_a_reader_can_choose_light_and_dark(site: Path, window: browser.Browser) -> None:
    window.resize(1400, 900)
    window.open((site / "index.html").as_uri())
    colours = {}
    for mode in ("light", "dark"):
        window.evaluate(f"document.querySelector('.theme-change-button[data-mode={mode}]').click()")
        assert window.evaluate("document.documentElement.dataset.theme") == mode
        colours[mode] = window.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] == "rgb(255, 255, 255)"
    assert sum(map(int, re.findall(r"\d+", colours["dark"]))) < 200, colours
    window.open((site / "docs" / "techniques" / "zero.html").as_uri())
    assert window.evaluate("document.documentElement.dataset.theme") == "dark", (
        "another page keeps the choice"
    )
    assert not window.complaints
