"""`docs/record_page.py` records what the page shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.retro.server.browser import MARKS

Image = pytest.importorskip("PIL.Image")
pytestmark = MARKS


def test_a_recording_begins_with_the_page_and_visits_tokens(url: str, tmp_path: Path) -> None:
    path = tmp_path / "page.gif"  # in a process of its own: Playwright runs once in a process
    subprocess.run([sys.executable, "-m", "docs.record_page", url, str(path)], check=True)
    with Image.open(path) as animation:
        frames = []
        for number in range(animation.n_frames):
            animation.seek(number)
            frames.append((animation.convert("RGB").tobytes(), animation.info["duration"]))
    assert len({image for image, _ in frames}) >= 4
    assert frames[0][1] > frames[-2][1]  # readers need time for the page
