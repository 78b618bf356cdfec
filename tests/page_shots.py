"""Takes pictures of the page at `/`: `python -m tests.page_shots FOLDER [STATE...]`.

Light and dark, wide and narrow. The states are made up, so that they look like a busy host; the
predictions are real.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser import chromium
from tests.e2e.running import running
from tests.page_states import Scenario, scenarios

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PHOTO = Path(__file__).resolve().parents[1] / "models/vision/photos/chelsea.jpg"
_SIZES = {"wide": (1280, 900), "narrow": (360, 760)}
_SETTLE_MS = 700


def main(folder: Path, names: list[str]) -> None:
    """Take all pictures, or only those of the named states."""
    folder.mkdir(parents=True, exist_ok=True)
    with running("efficientnet_lite0", "--replicas", "1") as service, chromium() as browser:
        for name, scenario in scenarios().items():
            if names and name not in names:
                continue
            for size in _SIZES:
                for scheme in ("light", "dark"):
                    path = folder / f"{name}-{size}-{scheme}.png"
                    _take(browser, service.url, scenario, path, size=size, scheme=scheme)


def _take(
    browser: "Browser", url: str, scenario: Scenario, path: Path, *, size: str, scheme: str
) -> None:
    width, height = _SIZES[size]
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]  # "light" or "dark"
    )
    page.add_init_script(scenario.script())
    page.goto(url)
    page.wait_for_selector("body:not([data-link=connecting])")
    if scenario.status == 200 and scenario.events[0].models:
        page.wait_for_selector(".main-svg", state="attached")
    if path.name.startswith(("busy", "overloaded")):
        page.set_input_files("#file", PHOTO)
        page.wait_for_selector("#answer h3")
    if path.name.startswith("split"):
        page.click("#send")  # the real model refuses the example of the made-up one
        page.wait_for_selector(".problem")
    page.wait_for_timeout(_SETTLE_MS)
    page.screenshot(path=path, full_page=True)
    page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
