"""The page in a real browser: phone and desktop, no errors, nothing loaded, nothing executed, and the parts that react."""

import io
import json

import pytest
from report_samples import HOSTILE, SAMPLES
from tools import chromium, require_module

from portable_flash.validate import html, summary

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
TEXT = "return document.body.textContent"


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


def show(browser, tmp_path, name: str, size: str = "desktop", theme: str = "light"):
    """Open a sample's page; the path of its file."""
    width, height = SIZES[size]
    path = tmp_path / f"{name}.html"
    path.write_text(html.render(SAMPLES[name]()), encoding="utf-8")
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    for log in ("browser", "performance"):
        browser.get_log(log)  # what came before
    browser.get(path.as_uri())
    return path


def everything_unfolded(browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["clean", "failing", "no_verdict", "node", "hostile"])
def test_fits_and_loads_nothing(browser, tmp_path, name, size):
    made = SAMPLES[name]()
    path = show(browser, tmp_path, name, size, theme="dark" if size == "phone" else "light")
    banner = browser.find_element("css selector", ".banner")
    assert banner.is_displayed() and banner.find_element("tag name", "h1").text == summary.HEADLINES[made.verdict]
    said = browser.execute_script(TEXT)
    for each in made.devices:
        assert not [check.id for check in each.checks if summary.clean(check.id, 1000) not in said]
    for unfolded in (False, True):
        if unfolded:
            everything_unfolded(browser)
        # a phone's window grows with what sticks out, so that its width is compared with the screen's
        width = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert max(width) <= SIZES[size][0], f"unfolded: {unfolded}"
    assert browser.get_log("browser") == []
    requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {event["params"]["request"]["url"] for event in requests if event["method"] == "Network.requestWillBeSent"}
    assert urls - {"data:,"} == {path.as_uri()}


def test_hostile_texts_do_nothing(browser, tmp_path):
    show(browser, tmp_path, "hostile")
    everything_unfolded(browser)
    assert "owned" in browser.title  # the host's name is in it, as text
    assert browser.title != "owned"
    found = browser.execute_script("return [...document.querySelectorAll('script, img, link[href*=passwd], [onerror]')].length")
    assert found == 0
    said = browser.execute_script(TEXT)
    for text in HOSTILE:
        assert summary.clean(text, 1000) in said


def test_the_policy_stops_scripts(browser, tmp_path):
    """A script that a mistake of the templates lets in would not run."""
    bad = "<main><script>document.title = 'owned'</script><img src='http://192.0.2.1/x.png'>"
    (tmp_path / "broken.html").write_text(html.render(SAMPLES["clean"]()).replace("<main>", bad), encoding="utf-8")
    browser.get((tmp_path / "broken.html").as_uri())
    assert browser.title == "Pass: node-017"
    assert len([entry for entry in browser.get_log("browser") if "Content Security Policy" in entry["message"]]) == 2


def test_boxes_hide_rows(browser, tmp_path):
    show(browser, tmp_path, "failing")
    everything_unfolded(browser)
    rows = "return [...document.querySelectorAll('.checks tbody tr')].filter(row => row.offsetParent).map(row => row.classList[0])"
    found = summary.counts(SAMPLES["failing"]().devices[0].checks)
    before = browser.execute_script(rows)
    assert {status: before.count(f"s-{status}") for status in found} == found
    browser.find_element("css selector", "label.s-pass").click()
    after = browser.execute_script(rows)
    assert {status: after.count(f"s-{status}") for status in found} == found | {"pass": 0}
    browser.find_element("css selector", "input.show-pass").send_keys(" ")  # by keyboard back again
    assert browser.execute_script(rows) == before


def test_a_tile_leads_to_its_device(browser, tmp_path):
    show(browser, tmp_path, "node")
    devices = browser.find_elements("css selector", "details.device")
    assert [device.get_attribute("open") for device in devices] == [None] * 5 + ["true"] + [None] * 2
    browser.find_elements("css selector", ".tile")[2].click()
    assert devices[2].get_attribute("open") == "true"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_something_is_painted(browser, tmp_path, theme):
    require_module("PIL")
    from PIL import Image

    show(browser, tmp_path, "failing", "phone", theme)
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    assert picture.size == SIZES["phone"]
    shades = picture.getcolors(1 << 24)
    ground = max(shades)
    assert len(shades) > 100 and ground[0] < 0.8 * picture.width * picture.height
    assert (sum(ground[1]) < 200) == (theme == "dark")
