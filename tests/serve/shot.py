"""Make the screenshot of the page: PYTHONPATH=tests python tests/serve/shot.py http://127.0.0.1:8000 docs/serve.jpg."""

import sys

from playwright.sync_api import sync_playwright
from serve.test_page import READY
from support.browser import CHROMIUM, FLAGS


def shoot(url: str, path: str) -> None:
    """Save the page with the example photo and the pale of the eye in the second stage."""
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(url)
        page.wait_for_selector(READY)
        page.click("#example")
        page.wait_for_selector("#strip button[data-view='3']")
        page.wait_for_selector(READY)
        page.click("#strip button[data-view='1']")
        page.click("#modes button[data-value=pale]")
        page.hover("#main", position={"x": 290, "y": 195})
        page.wait_for_timeout(500)
        page.screenshot(path=path, type="jpeg", quality=82, full_page=True)
        browser.close()


if __name__ == "__main__":
    shoot(*sys.argv[1:3])
