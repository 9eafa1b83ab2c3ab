"""trace.html in a headless browser, where Debian's chromium is installed: it draws without a network."""

import re
import shutil
import subprocess

import pytest
from test_trace_reader import training
from tiers import tier

from pycomm.trace.__main__ import main

pytest.importorskip("plotly")


def page(folder):
    training(folder)
    assert main([str(folder), "--html"]) == 0
    return folder / "trace.html"


def test_page_needs_no_network(tmp_path):
    text = page(tmp_path).read_text()
    without_library = re.sub(r"<script>.*?</script>", "", text, count=1, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", without_library)
    assert "Rank 2 came last in 100% of 5 all_reduces" in text
    for name in ("timeline", "costs", "bandwidth"):
        assert f'id="{name}"' in text


@tier(slow=1)
def test_page_in_a_browser(tmp_path):
    """Chromium, cut off from the network, lays out the bars; what its console says is an error here."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(
            "--enable-logging=stderr",
            "--virtual-time-budget=20000",
            f"--user-data-dir={tmp_path / 'profile'}",
        ),
        *("--dump-dom", page(tmp_path).as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Uncaught" not in done.stderr, done.stderr[-2000:]
    bars = re.findall(r'<g class="point"', done.stdout)
    assert len(bars) >= 4 * 5 * 3  # ranks, steps, and forward, waiting, moving in each
    assert "rank 3 computation" in done.stdout
