"""Tests of the HTML report in a real Chromium: it draws what the plan says, every control works, nothing is logged to
the console, and nothing is requested from the network.

Axe, the accessibility checker, finds no violation in light and dark mode. Hovering and the keyboard cursor show the
plan's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest

WIDTH, HEIGHT = 1180, 900
STILL = "[data-zoom], .tools:not(:has(select)), figure details { display: none }"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    pages.write_every_kind(path)
    return path


@contextmanager
def opened_page(browser: Any, file: Path) -> Iterator[Any]:
    """Open the page, and check at the end that nothing was logged, failed, or was requested from the network."""
    opened = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    opened.goto(file.as_uri())
    yield opened
    opened.close()
    assert said == []


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    """A page for one test, which may use its controls."""
    with opened_page(browser, file) as opened:
        yield opened


@pytest.fixture(scope="module")
def read_page(browser: Any, file: Path) -> Iterator[Any]:
    """One page for all tests that only point at pictures, because drawing a page takes a second."""
    with opened_page(browser, file) as opened:
        yield opened


def pixels(page: Any, selector: str) -> str:
    """Return the picture of a canvas as text, so that two pictures can be compared."""
    return str(page.locator(selector).first.evaluate("canvas => canvas.toDataURL()"))


def picture(name: str, section: int = 1) -> str:
    return f'figure[data-picture={name}][data-section="{section}"]'


def hover(page: Any, figure: str, x: float, y: float, left: int, top: int, right: int = 8, bottom: int = 24) -> str:
    """Return what the tooltip says at the fraction ``x``, ``y`` of the picture inside its margins."""
    canvas = page.locator(f"{figure} canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    px = left + x * (box["width"] - left - right)
    py = top + y * (box["height"] - top - bottom)
    page.mouse.move(box["x"] + px, box["y"] + py)
    tip = page.locator("#tip")
    return str(tip.inner_text()) if tip.is_visible() else ""


def test_every_canvas_has_a_picture(read_page: Any) -> None:
    figures = read_page.locator("figure[data-picture]")
    kinds = {figures.nth(i).get_attribute("data-picture") for i in range(figures.count())}
    assert kinds == {"batch", "kept", "matrix", "tree", "traffic", "timeline", "balance", "strategies", "lines"}
    colours = "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    for i in range(figures.count()):
        assert figures.nth(i).locator("canvas").evaluate(colours) > 3, figures.nth(i).get_attribute("data-picture")


def test_the_matrix_says_who_computes(read_page: Any) -> None:
    plan = pages.two_masks()
    regions, length = plan.placement.regions[0], pages.LENGTHS[0]
    for x, y in ((0.1, 0.5), (0.5, 0.9), (0.02, 0.97), (0.3, 0.35)):
        text = hover(read_page, picture("matrix"), x, y, left=58, top=6)
        row, key = (int(part.split()[1].replace(",", "")) for part in text.split("\n")[0].split(": ")[1].split(", "))
        assert abs(row - y * length) < 0.01 * length and abs(key - x * length) < 0.01 * length
        at = (
            (regions.document == 0)
            & (regions.q0 <= row)
            & (row < regions.q1)
            & (regions.k0 <= key)
            & (key < regions.k1)
        )
        at &= regions.h0 == 0
        assert np.count_nonzero(at) == 1
        assert f"computed by rank {int(regions.rank[at][0])}," in text
    assert "masked" in hover(read_page, picture("matrix"), 0.9, 0.1, left=58, top=6)


def test_a_tree_says_what_is_where_and_who_keeps_it(read_page: Any) -> None:
    """The lanes of the tree are its sequences of segments, 0-1-2, 0-1-3 and 0-4; the longest has 900 tokens."""
    kept = pages.trees().placement.kept
    where = {(0.2, 0.9): (0, 180), (0.6, 0.2): (1, 140), (0.8, 0.5): (3, 120), (0.6, 0.8): (4, 140)}
    for (x, y), (segment, token) in where.items():
        text = hover(read_page, picture("tree", 7), x, y, left=58, top=6)
        assert f"document 0, segment {segment}," in text
        found = int(text.split("token ")[1].split(" of")[0].replace(",", ""))
        assert abs(found - token) < 10
        stream = [0, 400, 600, 700, 1000][segment] + found
        assert f"kept by rank {int(kept.rank[np.searchsorted(kept.stop, stream, 'right')])}" in text
    assert hover(read_page, picture("tree", 7), 0.95, 0.1, left=58, top=6) == ""


def test_the_stream_says_who_keeps(read_page: Any) -> None:
    kept = pages.two_masks().placement.kept
    for x in (0.03, 0.4, 0.77, 0.99):
        text = hover(read_page, picture("kept"), x, 0.3, left=64, top=0)
        token = int(text.split("token ")[1].split(" of")[0].replace(",", ""))
        token += int(np.cumsum([0, *pages.LENGTHS])[int(text.split()[1].strip(","))])
        rank = int(kept.rank[np.searchsorted(kept.stop, token, "right")])
        assert f"kept by rank {rank}," in text


def test_traffic_says_the_plans_bytes(read_page: Any) -> None:
    plan = pages.two_masks()
    forward, backward = plan.bytes(), plan.bytes(backward=True)
    source, target = (int(v) for v in np.unravel_index(np.argmax(forward), forward.shape))

    def text() -> str:
        return hover(read_page, picture("traffic"), (target + 0.5) / 8, (source + 0.5) / 8, left=40, top=6)

    said = text()
    assert said.startswith(f"rank {source} to rank {target}")
    assert said.endswith(f"{forward[source, target] / 1e6:.1f} MB")
    read_page.locator(f"{picture('traffic')} select[data-choice=direction]").select_option("1")
    assert text().endswith(f"{backward[source, target] / 1e6:.1f} MB")
    read_page.locator(f"{picture('traffic')} select[data-choice=direction]").select_option("0")


def test_times_and_lines_say_their_numbers(read_page: Any) -> None:
    assert "ms" in hover(read_page, picture("balance"), 0.2, 0.5, left=40, top=4)
    assert hover(read_page, picture("timeline"), 0.001, 0.06, left=40, top=4).startswith("rank 0 at ")
    assert hover(read_page, picture("batch"), 0.01, 0.9, left=58, top=8).startswith(
        "document 0\n24,000 tokens\n1. longest of 7"
    )
    fastest = min(pages.strategy_times(), key=lambda s: s.total_ns)
    assert hover(read_page, picture("strategies", 3), 0.1, 0.05, left=130, top=4, right=70).startswith(fastest.name)
    assert "blocks: 2.10000" in hover(read_page, picture("lines", 4), 0.99, 0.5, left=58, top=8, right=12)


@pytest.mark.parametrize("width", [WIDTH, 380])
def test_names_of_strategies_are_drawn_whole(browser: Any, tmp_path: Path, width: int) -> None:
    """Every name is drawn uncut and inside the picture. The page of ``flexcp advise`` has the longest names."""
    pages.write_advice(tmp_path / "advice.html")
    opened = browser.new_page(viewport={"width": width, "height": HEIGHT})
    opened.add_init_script(
        "window.drawn = []; const draw = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        "  const wide = this.measureText(text).width;"
        "  window.drawn.push([text, this.textAlign === 'right' ? x - wide : x]); draw.call(this, text, x, y); };"
    )
    opened.goto((tmp_path / "advice.html").as_uri())
    drawn = opened.evaluate("window.drawn")
    for name in ("ring", 'auto, layout="contiguous"'):
        assert [left >= 0 for text, left in drawn if text == name] != [], name
        assert all(left >= 0 for text, left in drawn if text == name), name
    assert not [text for text, _ in drawn if "\u2026" in text]
    opened.close()


def test_every_control_changes_what_it_should(page: Any) -> None:
    """Every zoom button and every legend button changes its picture and changes it back, and so does every list of more
    than one choice, though two of its choices may look the same.
    """
    figures = page.locator("figure[data-picture]")
    for i in range(figures.count()):
        figure = figures.nth(i)
        where = (
            f"{picture(str(figure.get_attribute('data-picture')), int(figure.get_attribute('data-section')))} canvas"
        )
        whole = pixels(page, where)
        if figure.locator("[data-zoom]").count():
            figure.locator("[data-zoom=in]").click()
            near = pixels(page, where)
            assert near != whole, where
            figure.locator("[data-zoom=out]").click()
            assert pixels(page, where) != near, where
            figure.locator("[data-zoom=all]").click()
            assert pixels(page, where) == whole, where
        for select in figure.locator("select:enabled").all():
            options = select.locator("option").all()
            seen = {whole}
            for option in options[1:]:
                select.select_option(option.get_attribute("value"))
                seen.add(pixels(page, where))
            assert len(seen) > 1 or len(options) == 1, (where, select.get_attribute("data-choice"))
            select.select_option(options[0].get_attribute("value"))
            assert pixels(page, where) == whole, (where, select.get_attribute("data-choice"))
    before = pixels(page, f"{picture('kept')} canvas")
    buttons = page.locator('.legend[data-section="1"] button')
    assert buttons.count() == 8
    for rank in range(8):
        buttons.nth(rank).click()
        assert buttons.nth(rank).get_attribute("aria-pressed") == "true"
        assert pixels(page, f"{picture('kept')} canvas") != before
    buttons.nth(7).click()
    assert buttons.nth(7).get_attribute("aria-pressed") == "false"
    assert pixels(page, f"{picture('kept')} canvas") == before


def test_the_wheel_zooms_only_with_focus_and_a_drag_moves(page: Any) -> None:
    canvas = page.locator(f"{picture('kept')} canvas")
    canvas.scroll_into_view_if_needed()
    whole = pixels(page, f"{picture('kept')} canvas")
    canvas.hover()
    page.mouse.wheel(0, -10)
    page.wait_for_timeout(50)
    assert pixels(page, f"{picture('kept')} canvas") == whole
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    canvas.hover()
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(50)
    near = pixels(page, f"{picture('kept')} canvas")
    assert near != whole
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 30)
    page.mouse.up()
    assert pixels(page, f"{picture('kept')} canvas") != near


def test_the_keyboard_reads_a_picture(page: Any) -> None:
    plan = pages.two_masks()
    canvas = page.locator(f"{picture('traffic')} canvas")
    canvas.focus()
    live = page.locator("#live")
    canvas.press("ArrowRight")
    assert live.inner_text() == "rank 0 to rank 0 (itself), nothing"
    canvas.press("ArrowRight")
    canvas.press("ArrowDown")
    canvas.press("ArrowDown")
    assert live.inner_text() == f"rank 2 to rank 1, inside a node, {plan.bytes()[2, 1] / 1e3:.1f} kB"
    before = pixels(page, f"{picture('traffic')} canvas")
    for key in ("+", "-", "0"):
        canvas.press(key)
        now = pixels(page, f"{picture('traffic')} canvas")
        assert (now != before) == (key == "+"), key
    canvas.press("Escape")
    assert not page.locator("#tip").is_visible()
    assert pixels(page, f"{picture('traffic')} canvas") != before


def test_tables_unfold_and_sort(page: Any) -> None:
    for details in page.locator("details").all():
        details.locator("summary").click()
        assert details.locator("table").is_visible()
    table = page.locator("#s5 table")
    column = "rows => rows.map(r => r.children[1].textContent)"
    header = table.locator("th").nth(1)
    for state, order in (("ascending", ["9", "10", "300"]), ("descending", ["300", "10", "9"])):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == state
        assert table.locator("tbody tr").evaluate_all(column) == order
    table.locator("th").nth(0).locator("button").click()
    assert header.get_attribute("aria-sort") == "none"


def test_light_and_dark(page: Any) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    light, drawn = page.evaluate(back), pixels(page, f"{picture('balance')} canvas")
    page.locator("#theme").click()
    assert page.evaluate(back) != light
    assert pixels(page, f"{picture('balance')} canvas") != drawn
    page.locator("#theme").click()
    assert (page.evaluate(back), pixels(page, f"{picture('balance')} canvas")) == (light, drawn)
    page.emulate_media(color_scheme="dark")
    for _ in range(100):  # the page is notified a moment later
        if page.evaluate(back) != light:
            break
        page.wait_for_timeout(50)
    assert page.evaluate(back) != light


def test_links_lead_to_sections(page: Any) -> None:
    for link in page.locator("nav a").all():
        link.click()
        assert page.locator(str(link.get_attribute("href"))).is_visible()
    page.keyboard.press("Control+Home")
    page.locator("a.skip").focus()
    page.keyboard.press("Enter")
    assert page.url.endswith("#main")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, tmp_path: Path, scheme: str) -> None:
    """The page has few rows, because Axe measures the contrast of every cell."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    pages.write_few_rows(tmp_path / "few.html")
    page = browser.new_page(color_scheme=scheme)
    page.goto((tmp_path / "few.html").as_uri())
    for details in page.locator("details").all():
        details.locator("summary").click()
    found = axe.Axe().run(page).response["violations"]
    page.close()
    assert [(v["id"], v["help"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found] == []


def test_a_narrow_screen_scrolls_only_down(browser: Any, file: Path) -> None:
    small = browser.new_page(viewport={"width": 380, "height": 700})
    small.goto(file.as_uri())
    assert small.evaluate("document.documentElement.scrollWidth") <= 380
    small.close()


def test_pictures_for_the_docs(browser: Any, screenshots: Path, tmp_path: Path) -> None:
    """Takes the pictures of docs/pictures, all from one page; ``--screenshots`` keeps them.

    Single pictures are taken without what only works on the page: buttons and the folded table below a picture.
    """
    path = tmp_path / "example.html"
    pages.write_example(path)
    opened = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    opened.goto(path.as_uri())
    opened.screenshot(path=screenshots / "report-light.png")
    for name in ("kept", "matrix", "traffic", "timeline"):
        opened.locator(picture(name, 0)).screenshot(path=screenshots / f"{name}.png", style=STILL)
    opened.locator(picture("strategies", 1)).screenshot(path=screenshots / "strategies.png", style=STILL)
    opened.close()
    assert all(file.stat().st_size > 5_000 for file in screenshots.glob("*.png"))
    assert len(list(screenshots.glob("*.png"))) == 6
