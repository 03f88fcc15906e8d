"""The demo's page in a real browser: everything is drawn, at a desk and on a phone, and attacks stay text."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "viz"))
from test_page import ATTACK, result, story

from mmlens.viz.html import write
from mmlens.viz.page import page

selenium = pytest.importorskip("selenium.webdriver")


@pytest.fixture(scope="module")
def browser():
    import shutil

    options = selenium.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1"):
        options.add_argument(flag)
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.fail("chromedriver is not installed: apt-get install chromium chromium-driver")
    found = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    found.set_page_load_timeout(60)
    yield found
    found.quit()


def _open(browser, path, width):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.set_window_size(width, 1000)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.get(path.as_uri())
    WebDriverWait(browser, 30).until(lambda b: b.execute_script("return document.body.dataset.drawn") == "yes")


@pytest.mark.parametrize("width", [1280, 390])
def test_everything_is_drawn_and_fits(browser, tmp_path, width):
    _open(browser, write(tmp_path / "index.html", page(result(), story(), command="mmlens demo")), width)
    assert browser.execute_script("return document.querySelectorAll('.failure').length") == 0
    assert browser.execute_script("return document.querySelectorAll('.js-plotly-plot .main-svg').length") >= 3
    assert browser.execute_script("return document.querySelectorAll('#pattern canvas, #pattern svg').length") >= 1
    cells = browser.execute_script(
        "return document.querySelector('#heads .heatmaplayer image')?.getAttribute('href')?.length || 0"
    )
    assert cells > 100
    overflow = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 1


def test_attacks_stay_text(browser, tmp_path):
    _open(browser, write(tmp_path / "index.html", page(result(), story(ATTACK), command=ATTACK)), 1280)
    body = browser.find_element("tag name", "body").text
    assert ATTACK in body
    with pytest.raises(Exception, match="no such alert"):
        _ = browser.switch_to.alert.text


def test_nothing_is_asked_of_the_network(browser, tmp_path):
    _open(browser, write(tmp_path / "index.html", page(result(), story(), command="x")), 1280)
    names = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [n for n in names if not n.startswith(("data:", "blob:"))] == []
