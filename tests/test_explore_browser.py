"""The page of `jaxacct explore` in a real browser: keyboard, narrow screen, link, files and Stop.

Without playwright or a browser these tests are skipped; with BROWSER=required in the environment they fail.
"""

import csv
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import jaxacct as ja
from jaxacct.sweeps import read_table

if os.environ.get("BROWSER") != "required":
    pytest.importorskip("streamlit")
    pytest.importorskip("playwright")
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no browser", allow_module_level=True)

from playwright.sync_api import sync_playwright

PATIENCE = 60_000
"""Milliseconds that the browser waits for what must appear."""
GAUSSIAN = "A.rate=sampling_probability&A.sampling_probability=1&A.length=steps&A.steps=4&A.noise_multiplier=2"
"""Settings whose answers are quick."""
LONG = "A.sampling=with_replacement&A.batch_size=256&A.dataset_size=50000&A.epochs=10"
"""Settings whose trade-off curve takes minutes."""


@pytest.fixture(scope="module")
def address():
    """Run the page in a process of its own and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxacct", "explore", "--no-browser", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}/"
    for _ in range(600):
        try:
            urllib.request.urlopen(url, timeout=5).read()
            break
        except OSError:
            assert server.poll() is None
            time.sleep(0.1)
    yield url
    server.send_signal(signal.SIGINT)
    assert server.wait(30) == 0
    assert url.strip("/") in server.stdout.read()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(address, browser):
    """A function that opens the page at a link, and waits for a text."""
    opened = []

    def go(link="", width=1280, wait_for="ε ≤"):
        page = browser.new_page(viewport={"width": width, "height": 844}, accept_downloads=True)
        page.set_default_timeout(PATIENCE)
        opened.append(page)
        page.asked = []
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(f"{address}?{link}")
        page.get_by_text(wait_for).first.wait_for()
        return page

    yield go
    for page in opened:
        page.close()


def number(page):
    """Return the epsilon on the page, after waiting until it is computed."""
    return float(page.get_by_role("heading", name="ε ≤").first.inner_text().removeprefix("ε ≤ "))


def overflow(page):
    """Pixels by which the page is wider than the screen."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_the_keyboard_moves_a_slider_and_the_link_holds_it(visit):
    page = visit(GAUSSIAN)
    first = number(page)
    assert first == pytest.approx(float(ja.epsilon(ja.dp_sgd(2.0, 1.0, 4), 1e-5).upper), rel=1e-3)
    page.get_by_text("in words").first.wait_for()
    for _ in range(40):  # Tab moves from field to field, without a mouse
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "noise multiplier, slider":
            break
    page.keyboard.press("ArrowRight")
    page.wait_for_function("!location.search.includes('A.noise_multiplier=2&')")
    page.get_by_text("in words").first.wait_for()
    moved = number(page)
    box = page.get_by_label("noise multiplier", exact=True)
    assert moved < first and 2.0 < float(box.input_value()) < 2.2
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    page.wait_for_function("location.search.includes('A.noise_multiplier=3&')")
    page.wait_for_function(f"!document.body.innerText.includes('ε ≤ {moved:g}')")
    typed = number(page)
    assert typed < moved
    again = visit(page.url.partition("?")[2])
    assert number(again) == typed
    assert (
        {url.split("/")[2] for url in page.asked}
        == {url.split("/")[2] for url in again.asked}
        == {page.url.split("/")[2]}
    )


def test_a_narrow_screen_shows_the_number_first_and_the_settings_behind_a_button(visit):
    page = visit(GAUSSIAN, width=390)
    page.get_by_text("in words").first.wait_for()
    assert overflow(page) == 0
    assert page.get_by_role("heading", name="ε ≤").bounding_box()["y"] < 400
    for place in page.get_by_test_id("stImage").all():
        box = place.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    page.get_by_test_id("stExpandSidebarButton").click()
    page.get_by_label("noise multiplier", exact=True).fill("1")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("A.noise_multiplier=1&"))


def test_three_runs_and_their_files(visit, tmp_path):
    runs = "&".join(GAUSSIAN.replace("A.", f"{name}.") for name in "ABC").replace("C.steps=4", "C.steps=9")
    page = visit(f"runs=3&{runs}", wait_for="risks of run C in words")
    found = [float(one.removeprefix("ε ≤ ")) for one in page.get_by_role("heading", name="ε ≤").all_inner_texts()]
    assert len(found) == 3 and found[0] == found[1] < found[2] and overflow(page) == 0
    for stem in ("epsilon_over_steps", "tradeoff", "risks"):
        for ending in ("png", "csv"):
            with page.expect_download() as download:
                page.get_by_role("button", name=f"{stem}.{ending}").click()
            download.value.save_as(tmp_path / f"{stem}.{ending}")
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        rows = list(csv.DictReader(io.StringIO((tmp_path / f"{stem}.csv").read_text())))
        assert {row.get("run") or row["name"].removeprefix("run ") for row in rows} == {"A", "B", "C"}
    table = read_table(tmp_path / "epsilon_over_steps.csv")  # a file that `jaxacct plot` takes
    assert float(table["upper"].max()) == pytest.approx(found[2], rel=1e-3)


def test_a_long_question_is_stopped_and_the_page_goes_on(visit):
    page = visit(LONG)
    page.get_by_text("Computing:").wait_for()
    page.get_by_role("button", name="Stop").last.click()
    page.get_by_text("answers are not computed").wait_for()
    page.get_by_role("button", name="Go on").wait_for()
    page.get_by_label("noise multiplier", exact=True).fill("-1")
    page.keyboard.press("Enter")
    page.get_by_text("run A: noise_multiplier = -1 must be > 0").wait_for()
    assert "Traceback" not in page.content()


def test_the_page_is_at_one_loopback_address_alone(address):
    """If the page listened at all addresses of the machine, it would also answer at 127.0.0.2."""
    with socket.socket() as tried:
        tried.settimeout(5)
        assert tried.connect_ex(("127.0.0.2", int(address.rstrip("/").rpartition(":")[2]))) != 0
