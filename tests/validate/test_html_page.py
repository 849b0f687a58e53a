"""The page's source: complete, loading nothing, obeying no text; and what its charts hold. In a browser: test_html_browser.py."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_samples import HOSTILE, SAMPLES, clean, failing, hostile, node

from portable_flash.validate import html, summary
from portable_flash.validate.report import Check

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


class Page(HTMLParser):
    """What a browser would make of the page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.ids: Counter[str] = Counter()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids.update(value for name, value in attrs if name == "id")

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_is_complete_and_loads_nothing(name):
    made = SAMPLES[name]()
    source = html.render(made)
    page = Page(source)
    text = "\n".join(page.text)
    assert source.startswith("<!doctype html>") and f"\n{summary.HEADLINES[made.verdict]}\n" in text
    assert not set(page.tags) & {"script", "img", "iframe", "object", "embed", "base", "form", "svg"}
    for tag, attribute, value in page.attributes:
        assert not attribute.startswith("on"), (tag, attribute)
        if attribute in ("href", "src", "action", "srcset", "data"):
            assert value == "data:," or re.fullmatch(r"#device-\d+", value), (tag, attribute, value)
    assert ("meta", "content", POLICY) in page.attributes
    assert not re.search(r"url\(|@import", source[: source.index("</style>")])
    assert max(page.ids.values()) == 1
    said = squeezed(text)
    for each in made.devices:
        for check in each.checks:
            assert squeezed(summary.clean(check.id, 1000)) in said
            for fact in (check.detail, check.hint) if check.status != "pass" else ():
                assert squeezed(summary.clean(fact, 1000)) in said
        for fact in filter(None, (each.reason, each.identity.serial, each.inputs_sha256)):
            assert squeezed(summary.clean(fact, 1000)) in said
    assert squeezed(summary.NOT_COVERED) in said


def test_hostile_texts_are_shown_as_they_are():
    said = "\n".join(Page(html.render(hostile())).text)
    for text in HOSTILE:
        assert summary.clean(text, 1000) in said
    assert "49" not in re.findall(r"\b49\b", said)  # {{ 7 * 7 }} is no template
    assert "\u202e" not in said and "\x1b" not in said


def test_charts_hold_the_limit_at_one_place():
    results = (("out", 1), ("lse", 2))
    made = html._shares([Check(id=f"accuracy/c/{name}", status="pass", measured=value, limit=2, unit="x") for name, value in results])
    assert [(track.label, track.text, [point.at for point in track.points]) for track in made] == [("c", "lse 2 of 2", [40.0, 80.0])]
    beyond = html._shares([Check(id="accuracy/c/out", status="fail", measured=1e9, limit=2)])[0]
    assert beyond.points[0].at == 100 and beyond.status == "fail"
    unknown = html._shares([Check(id="accuracy/c/out", status="fail")])[0]
    assert (unknown.text, unknown.points) == ("out fail", [])
    assert html._shares([Check(id="backends/chosen", status="pass")]) == []  # nothing to draw
    (alone,) = html._shares([Check(id="edges/strides", status="pass", measured=1, limit=3)])
    assert (alone.label, alone.text) == ("strides", "1 of 3")


def test_the_map_of_repeats_and_where_bits_differ():
    view = html._view(failing().devices[0], 1)
    assert view.repeats.columns == ["out", "lse", "dq", "dk", "dv", "dsinks"]
    assert [name for name, _ in view.repeats.rows] == [
        "cold/bf16-d128-causal", "load/bf16-d128-causal", "load/bf16-d192-sinks", "units/bf16-d128-large",
    ]  # fmt: skip
    assert [(cell.differ, cell.runs) if cell else None for cell in view.repeats.rows[1][1]] == [(0, 200)] * 3 + [(3, 200), (0, 200), None]
    (damage,) = view.damage
    assert len(damage.bits) == 32 and [31 - place for place, hit in enumerate(damage.bits) if hit] == [21, 11]
    assert [place for place, hit in enumerate(damage.lanes) if hit] == [0, 1, 17] and damage.tiles == [(3, 2), (7, 2)]


def test_devices_that_passed_are_folded_among_many():
    assert [view.open for view in (html._view(each, 8) for each in node().devices)] == [False] * 5 + [True] + [False] * 2
    assert html._view(clean().devices[0], 1).open


def test_colours_can_be_told_apart_from_their_ground():
    """WCAG 2 level AA: at least 4.5 to 1 for text, in both themes."""
    style = Path(html.__file__).with_name("templates").joinpath("style.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)[:2])

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for theme in (light, dark):
        for name in summary.STATUSES:
            for ground in (theme[f"{name}-tint"], theme["card"]):
                assert contrast(theme[name], ground) >= 4.5, (name, ground)
            assert contrast(theme["soft"], theme[f"{name}-tint"]) >= 4.5, name
        for ground in (theme["card"], theme["page"]):
            assert min(contrast(theme["text"], ground), contrast(theme["soft"], ground), contrast(theme["link"], ground)) >= 4.5
