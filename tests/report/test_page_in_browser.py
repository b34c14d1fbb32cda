"""The page works in a real browser, without a network and without JavaScript."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.report.pages import EVERY_FIGURE, write_page
from tests.report.simulated import simulate

if find_spec("matplotlib") is None or find_spec("jinja2") is None:
    pytest.skip("matplotlib is not installed: pip install '.[report]'", allow_module_level=True)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(
    BROWSER is None, reason="no browser: install chromium (Debian: apt-get install chromium)"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=5000",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"
MEASURE = """
<script>
window.onload = () => {
  const found = {};
  for (const figure of document.querySelectorAll("figure")) {
    const svg = figure.querySelector("svg"), box = svg && svg.getBoundingClientRect();
    const texts = svg ? [...svg.querySelectorAll("text")].filter(t => t.textContent.trim()) : [];
    const boxes = texts.map(t => t.getBoundingClientRect());
    const overlaps = [], outside = [];
    boxes.forEach((a, i) => {
      if (a.left < box.left - 1 || a.right > box.right + 1
          || a.top < box.top - 1 || a.bottom > box.bottom + 1)
        outside.push(texts[i].textContent);
      boxes.slice(i + 1).forEach((b, j) => {
        const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (w > 2 && h > 4) overlaps.push([texts[i].textContent, texts[i + 1 + j].textContent]);
      });
    });
    found[figure.id] = {width: box ? box.width : 0, height: box ? box.height : 0, overlaps, outside,
                        caption: figure.querySelector("figcaption").textContent};
  }
  const colours = [getComputedStyle(document.querySelector("svg text")).fill,
                   getComputedStyle(document.body).backgroundColor];
  const answer = document.createElement("pre");
  answer.id = "measured";
  const scrolls = document.body.scrollWidth > innerWidth;
  answer.textContent = JSON.stringify({figures: found, colours, scrolls});
  document.body.append(answer);
};
</script>
"""


def browse(path: Path, width: int, profile: Path, *flags: str) -> tuple[dict[str, Any], list[str]]:
    """Return what a script in a copy of the page has measured, and what the browser's console says."""
    copy = path.with_name(f"measured_{width}.html")
    copy.write_text(path.read_text().replace("</body>", f"{MEASURE}</body>"))
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={profile}", f"--window-size={width},1400"]
    done = subprocess.run(
        [*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")), console


Simulated = Callable[..., Path]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """Makes runs for tests that leave them as they are, each once."""
    done: dict[tuple[int, int], Path] = {}

    def get(blocks: int, seed: int = 0) -> Path:
        if (blocks, seed) not in done:
            folder = tmp_path_factory.mktemp("simulated")
            done[blocks, seed] = simulate(folder / f"run_{seed}/version_0", blocks, seed=seed)
        return done[blocks, seed]

    return get


@pytest.fixture(scope="module")
def page_of_three(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of three blocks."""
    return write_page(tmp_path_factory.mktemp("page"), simulated(3))


@in_browser
@pytest.mark.parametrize(
    ("blocks", "runs", "width", "flags", "dark"),
    [(3, 1, 1280, (), False), (60, 1, 1280, (DARK,), True), (60, 2, 2560, (), False)],
)
def test_every_figure_is_seen_and_no_text_lies_on_another(
    simulated: Simulated,
    page_of_three: Path,
    tmp_path: Path,
    blocks: int,
    runs: int,
    width: int,
    flags: tuple[str, ...],
    dark: bool,
) -> None:
    """The page is dark where the reader wants it."""
    folders = [simulated(blocks, seed) for seed in range(runs)]
    written = page_of_three if blocks == 3 else write_page(tmp_path / "page", *folders)
    seen, console = browse(written, width, tmp_path / "profile", *flags)
    assert console == []
    assert {name.removesuffix("-1").removesuffix("-2") for name in seen["figures"]} == (EVERY_FIGURE)
    for name, figure in seen["figures"].items():
        assert not figure["overlaps"], name
        assert not figure["outside"], name
        assert figure["width"] > 300, name
        assert figure["height"] > 100, name
        assert re.search(r"\d", figure["caption"]), f"{name}: no number in its conclusion"
    assert not seen["scrolls"]
    text, background = (sum(map(int, re.findall(r"\d+", c)[:3])) for c in seen["colours"])
    if dark:
        assert background < 200 < 500 < text
    else:
        assert text < 350 < 650 < background


def test_the_page_needs_no_network_and_no_javascript(page_of_three: Path) -> None:
    text = page_of_three.read_text()
    assert "<script" not in text
    addresses = set(re.findall(r'(?:src|href)="([^"#][^"]*)"', text)) | set(
        re.findall(r"url\(([^#)]+)", text)
    )
    assert [address for address in addresses if not address.startswith("data:")] == []
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
