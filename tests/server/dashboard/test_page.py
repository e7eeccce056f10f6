"""The live page in a real browser, under load. Skipped where Chromium or playwright (extra `browser`) is missing."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from watched_server import SPOKEN, watched_server

from jaxserve.text.tokenizer import Tokenizer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `browser`)")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed (extra `browser`)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH")

ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMEOUT_S = 30.0
KEY = "key-of-the-viewer"
SIZES = {390: 844, 768: 1024, 1440: 900}
LIGHT_MINE = (210, 87, 10)  # --mine of style.css


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with watched_server(tokenizer, num_pages=65, step_s=0.02) as live:
        yield live


@contextmanager
def opened(browser: Any, live: LiveServer, *, width: int = 1440, refused: int = 0, **options: Any) -> Iterator[Any]:
    """The page, ready to be looked at; in the end it has made no error and asked nobody else for anything.

    Args:
      refused: answers of 401 that the browser will have told of in its console.
    """
    context = browser.new_context(viewport={"width": width, "height": SIZES[width]}, color_scheme="light", **options)
    context.set_default_timeout(TIMEOUT_S * 1000)
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{live.url}/dashboard")
    yield page
    context.close()
    assert [error for error in errors if "401" not in error] == []
    assert len(errors) == refused
    assert {url for url in asked if not url.startswith(f"{live.url}/")} == set()


@contextmanager
def load(live: LiveServer, clients: int = 12) -> Iterator[None]:
    """Clients that ask again and again, half of them with the same beginning; more than have room at once."""
    stopping = threading.Event()

    def run(number: int) -> None:
        turn = 0
        while not stopping.is_set():
            turn += 1
            beginning = "You are a librarian who knows every shelf. " * 4 if number % 2 else ""
            content = f"{beginning}{number}, {turn}: " + "tell me more. " * (5 * (number % 4))
            body = {
                "model": "watched",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 20 + 4 * number,
            }
            assert live.post("/v1/chat/completions", body).status_code == 200

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join(TIMEOUT_S)


def wait_live(page: Any) -> None:
    playwright.expect(page.locator("#state")).to_have_text("live")


def number(page: Any, element: str) -> int:
    return int(page.locator(element).inner_text().replace(",", ""))


def wait_for(condition: Callable[[], bool], page: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, page.locator("main").inner_text()
        page.wait_for_timeout(50)


def pixels(page: Any, canvas: str, colour: tuple[int, int, int] = LIGHT_MINE) -> int:
    """How many pixels of a canvas have exactly this colour."""
    return page.evaluate(
        """([selector, [red, green, blue]]) => {
          const canvas = document.querySelector(selector);
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
          copy.drawImage(canvas, 0, 0);
          const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
          let count = 0;
          for (let i = 0; i < data.length; i += 4)
            count += data[i] === red && data[i + 1] === green && data[i + 2] === blue && data[i + 3] === 255;
          return count;
        }""",
        [canvas, list(colour)],
    )


def say(page: Any, text: str, max_tokens: int) -> None:
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_pages_and_requests_appear_under_load_and_vanish_with_it(browser: Any, live: LiveServer) -> None:
    with opened(browser, live) as page:
        wait_live(page)
        assert number(page, "#count-active") == 0
        with load(live):
            wait_for(lambda: number(page, "#count-active") > 8, page)
            wait_for(lambda: number(page, "#count-shared") > 0, page)
            wait_for(lambda: number(page, "#waiting") > 0, page)
            assert page.locator("#requests tr").count() > 4
            wait_for(lambda: page.locator("#tree li").count() > 3, page)
            first = page.locator("#requests tr").first.inner_text().split()[0]
            wait_for(lambda: first not in page.locator("#requests").inner_text(), page)  # it ended, and is gone
            wait_for(lambda: re.fullmatch(r"[\d.]+ m?s", page.locator("#first-token").inner_text()) is not None, page)
            wait_for(lambda: number(page, "#rate") > 20, page)
        wait_for(lambda: page.locator("#requests tr").count() == 0, page)
        assert number(page, "#count-active") == number(page, "#count-shared") == number(page, "#running") == 0
        assert number(page, "#count-cached") > 0


def test_the_chat_streams_and_its_own_request_is_lit_up(browser: Any, live: LiveServer) -> None:
    with opened(browser, live) as page, load(live, 4):
        wait_live(page)
        assert pixels(page, "#pool") == pixels(page, "#batch") == 0
        say(page, "Tell me a story, please.", 90)
        answer = page.locator(".message.assistant")
        wait_for(lambda: len(answer.inner_text()) > 20, page)
        early = len(answer.inner_text())
        wait_for(lambda: pixels(page, "#pool") > 0 and pixels(page, "#batch") > 0, page)
        assert page.locator("#requests tr.mine").count() == 1
        wait_for(lambda: len(answer.inner_text()) > early + 20, page)
        assert page.locator("#send").inner_text() == "Stop"  # it came piece by piece: it is not at its end
        playwright.expect(page.locator("#send")).to_have_text("Send")
        text = answer.inner_text()
        assert SPOKEN[:150] in text
        assert "90 tokens" in text
        wait_for(lambda: page.locator("#requests tr.mine").count() == 0, page)
        wait_for(lambda: pixels(page, "#pool") == 0, page)


def test_an_answer_can_be_stopped_and_the_request_ends(browser: Any, live: LiveServer) -> None:
    with opened(browser, live) as page:
        wait_live(page)
        say(page, "Go on for ever.", 400)
        wait_for(lambda: page.locator("#requests tr.mine").count() == 1, page)
        page.get_by_role("button", name="Stop").click()
        playwright.expect(page.locator(".message.assistant .meta")).to_have_text("stopped")
        wait_for(lambda: number(page, "#running") == 0, page)


def test_what_is_typed_or_refused_is_shown_as_text(browser: Any, live: LiveServer) -> None:
    with opened(browser, live) as page:
        wait_live(page)
        say(page, "<img src=x onerror=alert(1)><b>bold</b>", 5)
        playwright.expect(page.locator(".message.assistant .meta")).to_contain_text("5 tokens")
        assert "<img src=x onerror=alert(1)><b>bold</b>" in page.locator(".message.user").inner_text()
        assert page.locator("#log img, #log b").count() == 0


BOXES = """() => {
  const shown = (element) => element.getClientRects().length > 0 && !element.closest(".hidden, .skip, dialog");
  const name = (element) => element.id || element.className.baseVal || element.className || element.tagName;
  const box = (element) => {
    const { left, top, right, bottom } = element.getBoundingClientRect();
    return { name: String(name(element)), left, top, right, bottom };
  };
  const groups = ["body", ".top", ".board", ".gauges dl", ...document.querySelectorAll(
    ".panel, .heading, .under, .legend, .gauge, form, .ask, .controls, #log, #tree li, #requests tr")];
  return groups.flatMap((group) => (typeof group === "string" ? [document.querySelector(group)] : [group]))
    .filter(shown)
    .map((group) => ({ box: box(group), inside: [...group.children].filter(shown).map(box) }));
}"""


def test_nothing_overlaps_and_nothing_leaves_the_page(browser: Any, live: LiveServer) -> None:
    with load(live):
        for width in SIZES:
            check_boxes(browser, live, width)


def check_boxes(browser: Any, live: LiveServer, width: int) -> None:
    with opened(browser, live, width=width) as page:
        wait_live(page)
        say(page, "A story with averyveryverylongwordthatnobodywouldeverwriteinonepiecewithoutanyspaceatall.", 60)
        wait_for(lambda: page.locator("#requests tr.mine").count() == 1 and number(page, "#count-shared") > 0, page)
        groups = page.evaluate(BOXES)
        assert len(groups) > 20
        for group in groups:
            inside = group["inside"]
            for i, one in enumerate(inside):
                assert one["left"] >= group["box"]["left"] - 1, (group["box"], one)
                assert one["right"] <= group["box"]["right"] + 1, (group["box"], one)
                for other in inside[i + 1 :]:
                    across = min(one["right"], other["right"]) - max(one["left"], other["left"])
                    down = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
                    assert min(across, down) <= 0.5, (group["box"], one, other)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.evaluate(
            "[...document.querySelectorAll('.gauge dd, .gauge dt, h2, .legend li, button, .aside')]"
            ".filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map((e) => e.textContent)"
        )
        assert cut == []


def test_axe_finds_nothing_that_shuts_anybody_out(browser: Any, live: LiveServer) -> None:
    """Contrast, names, roles, landmarks: as the axe-core rules have them, in both palettes."""
    with load(live, 6):
        for width in (390, 1440):
            with opened(browser, live, width=width) as page:
                wait_live(page)
                say(page, "Hello.", 5)
                playwright.expect(page.locator(".message.assistant .meta")).to_contain_text("5 tokens")
                wait_for(lambda: page.locator("#requests tr").count() > 0, page)
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    found = axe.Axe().run(page)
                    assert found.violations_count == 0, found.generate_report()


def test_every_control_is_reached_by_the_keyboard_and_has_a_name(browser: Any, live: LiveServer) -> None:
    with opened(browser, live) as page:
        wait_live(page)
        seen = []
        for _ in range(14):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        wanted = ["skip", "pause", "pool", "scroll", "scroll", "clear", "log", "question", "send", "max-tokens"]
        assert [name for name in seen if name in {*wanted, "log scroll"}][: len(wanted)] == wanted
        for role, name in (
            ("link", "Skip to the chat"),
            ("button", "Pause"),
            ("button", "New chat"),
            ("button", "Send"),
            ("textbox", "Message"),
            ("spinbutton", "Max tokens"),
            ("spinbutton", "Temperature"),
            ("log", "Conversation"),
            ("region", "Page pool"),
            ("region", "Running batch"),
            ("img", re.compile("Page pool: of 64 pages 0 are held")),
            ("img", re.compile("Running batch, the last step")),
        ):
            assert page.get_by_role(role, name=name, exact=isinstance(name, str)).count() == 1, (role, name)


def test_arrow_keys_tell_of_a_page_and_a_click_picks_a_request(browser: Any, live: LiveServer) -> None:
    with opened(browser, live) as page, load(live):
        wait_live(page)
        wait_for(lambda: number(page, "#count-active") > 8, page)
        page.locator("#pool").focus()
        page.keyboard.press("ArrowRight")
        playwright.expect(page.locator("#pool-readout")).to_contain_text("Page 1: ")
        page.keyboard.press("ArrowRight")
        playwright.expect(page.locator("#pool-readout")).to_contain_text("Page 2: ")
        page.keyboard.press("ArrowLeft")
        playwright.expect(page.locator("#pool-readout")).to_contain_text("Page 1: ")
        pick = page.locator("#requests button").last
        pick.focus()
        page.keyboard.press("Space")
        playwright.expect(page.locator('#requests button[aria-pressed="true"]')).to_have_count(1)


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"viewer:{KEY}\n")
    with (
        watched_server(tokenizer, server={"security": {"api_keys_file": str(keys)}}) as live,
        opened(browser, live, refused=2) as page,
    ):
        dialog = page.get_by_role("dialog", name="This server asks for an API key")
        playwright.expect(dialog.get_by_role("alert")).to_have_count(0)
        dialog.get_by_label("API key").fill("a-wrong-one")
        dialog.get_by_role("button", name="Open").click()
        playwright.expect(dialog.get_by_role("alert")).to_have_text("this API key is unknown")
        dialog.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        wait_live(page)
        assert page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [[KEY], 0, ""]
        say(page, "Hello.", 3)
        playwright.expect(page.locator(".message.assistant .meta")).to_contain_text("3 tokens")
        page.reload()
        wait_live(page)
        assert KEY not in page.url


def test_pausing_ends_the_feed_and_going_on_opens_it_again(browser: Any, live: LiveServer) -> None:
    with opened(browser, live) as page:
        wait_live(page)
        page.get_by_role("button", name="Pause").click()
        playwright.expect(page.locator("#state")).to_have_text("paused")
        with load(live, 3):
            page.wait_for_timeout(600)
            assert number(page, "#running") == 0
            page.get_by_role("button", name="Pause").click()
            wait_for(lambda: number(page, "#running") > 0, page)


def test_reduced_motion_draws_once_a_second(browser: Any, live: LiveServer) -> None:
    with load(live, 3):
        assert drawings(browser, live, "reduce") <= 3 < drawings(browser, live, "no-preference")


def drawings(browser: Any, live: LiveServer, motion: str) -> int:
    """How often the pool is drawn in 2.5 seconds."""
    with opened(browser, live, reduced_motion=motion) as page:
        wait_for(lambda: page.locator("#requests tr").count() > 0, page)
        return page.evaluate(
            """() => new Promise((resolve) => {
              let drawn = 0;
              const canvas = document.getElementById("pool");
              const { clearRect } = CanvasRenderingContext2D.prototype;
              CanvasRenderingContext2D.prototype.clearRect = function (...box) {
                drawn += this.canvas === canvas;
                return clearRect.apply(this, box);
              };
              setTimeout(() => resolve(drawn), 2500);
            })"""
        )


def test_dark_and_light_are_two_palettes(browser: Any, live: LiveServer) -> None:
    with opened(browser, live) as page:
        wait_live(page)
        grounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert grounds == ["rgb(243, 242, 238)", "rgb(16, 19, 22)"]


def test_a_server_that_goes_away_is_told(browser: Any, tokenizer: Tokenizer) -> None:
    context = browser.new_context()
    page = context.new_page()
    with watched_server(tokenizer) as live:
        page.goto(f"{live.url}/dashboard")
        wait_live(page)
    playwright.expect(page.locator("#state")).to_have_attribute("data-tone", "bad")
    context.close()
