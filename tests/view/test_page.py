"""The interactive page: its data, its arithmetic, and its controls in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.browser import CHROMIUM, needs_chromium
from view.traces import each_mode, traced

from pale.view.page import page, save


class TestPage:
    def test_the_page_is_complete_and_sends_no_request(self) -> None:
        text = page(traced(), (10, 20), title="</script><b>x")
        assert "<b>x" not in text
        assert not re.findall(r"""(?:src|href)=["']?(?!data:)\S+""", text)
        assert not re.findall(r"https?://|url\(|import\(|fetch\(|XMLHttpRequest", text)
        data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
        assert [len(s["blocks"]) for s in data["stages"]] == [2, 2]
        assert data["image"].startswith("data:image/jpeg;base64,")
        assert data["start"]["x"] == pytest.approx(10.5 * data["width"] / 90)

    def test_an_unknown_suffix_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"\.html or name an image format"):
            save(traced(), tmp_path / "out.doc")
        with pytest.raises(ValueError, match="no block 9"):
            save(traced(), tmp_path / "out.html", stage=0, block=8)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's arithmetic")
class TestArithmeticOfThePage:
    @each_mode
    def test_the_page_computes_the_weights_and_the_rollout_of_the_operator(
        self, attention: str, project: Path
    ) -> None:
        one = traced(attention)
        text = page(one)
        data = text.split('type="application/json">')[1].split("</script>")[0]
        core = project / "src" / "pale" / "view" / "pages" / "attention.js"
        done = subprocess.run(
            ["node", str(Path(__file__).parent / "page_numbers.js"), str(core)],
            input=data,
            capture_output=True,
            text=True,
            check=True,
        )
        out = json.loads(done.stdout)
        assert len(out["weights"]) == 3 * 2 * (2 + 4)
        for s, b, i, j, n, weights, region in out["weights"]:
            wanted = one.weights(s, (i, j), b)[n].ravel()
            np.testing.assert_allclose(weights, wanted, rtol=0.02, atol=1e-4)
            np.testing.assert_array_equal(region, one.attended(s, (i, j), b)[n].ravel())
            assert sum(weights) == pytest.approx(1, abs=1e-9)
        for s, i, j, rolled in out["rollout"]:
            np.testing.assert_allclose(rolled, one.rollout(s, (i, j)).ravel(), rtol=0.02, atol=1e-4)


ACT = (Path(__file__).parent / "page_acts.js").read_text()


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [1200, 500], ids=["wide", "narrow"])
def test_the_page_works_in_a_browser(width: int, tmp_path: Path) -> None:
    one = traced()
    file = tmp_path / "page.html"
    file.write_text(
        page(one, (45, 35)).replace("<head>", f"<head><script>{ACT}</script>"), encoding="utf-8"
    )
    assert CHROMIUM
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"]
    words += [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *words, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout)
    assert found, done.stderr[-2000:]
    out = json.loads(found[1])
    h, w = one.stages[1][0].q.shape[:2]
    i, j = one.token((45, 35), 1)
    assert out["start"]["token"] == f"row {i}, column {j}"
    assert out["start"]["sum"] == "1.0000"
    assert out["corner"]["token"] == "row 0, column 0"
    assert out["pinned"]["token"] == f"row {h - 1}, column {w - 1}"
    assert out["up"]["token"] == f"row {h - 2}, column {w - 1}"
    rows = one.attended(1, (h - 2, w - 1))[0].sum()
    assert out["rows"]["tokens"] == str(rows)
    assert out["pale"]["rows"] == f"{rows} tokens"
    assert out["rollout"]["sum"] == "1.0000"
    assert out["cam"]["class"] == one.scores[0].name
    assert out["first"]["stage"].startswith("1 of 2")
    assert out["wide"] <= 0  # nothing to scroll sideways
