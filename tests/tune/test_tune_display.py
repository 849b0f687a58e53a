"""What a person sees: the live display on a terminal, lines elsewhere, JSON on request."""

import io
import json
import sys

import pytest
from tools import require_module
from tune_fake import DEVICE, FakeNode, microseconds, name

from portable_flash.tune.display import Display, LiveDisplay, display
from portable_flash.tune.journal import Journal
from portable_flash.tune.keys import key_set
from portable_flash.tune.session import Event, Session
from portable_flash.tune.space import shortlist

KEYS = key_set("triton", kernels=("forward",), dtypes=("bf16",), head_dims=(64,), buckets=(512, 4096), causal=(False,))


def run(tell):
    bad = min(shortlist(KEYS[1], DEVICE)[1:], key=lambda t: microseconds(KEYS[1], t))
    return Session(DEVICE, [FakeNode(bad=[(name(bad), "wrong")])], Journal(None, {}), tell=tell).run(KEYS)


def test_the_live_display_shows_keys_candidates_best_and_progress():
    require_module("rich")
    from rich.console import Console

    console = Console(record=True, force_terminal=True, width=200, file=io.StringIO())
    with LiveDisplay(len(KEYS), 60.0, console) as tell:
        tell(Event("search", "12 candidates", KEYS[0], node="gpu 0"))
        tell._live.refresh()
        report = run(tell)
        tell._live.refresh()
    text = console.export_text()
    assert f"gpu 0: {KEYS[0]}, 12 candidates" in text and "candidates and 10 neighbours" in text
    for outcome in report.outcomes:
        assert f"{outcome.key}: {outcome.chosen.median_us:.1f} us, {outcome.speedup:.2f}x of the default" in text
    assert "wrong: out: fail" in text and "0/2" in text and "2/2" in text


def test_plain_lines_say_how_far_it_is_and_what_was_rejected():
    stream = io.StringIO()
    with Display(len(KEYS), 100.0, stream) as tell:
        report = run(tell)
    lines = stream.getvalue().splitlines()
    assert lines[-2].startswith("[2/2 0 s left] ") and str(report.outcomes[1].key) in lines[-2] and "2 keys are saved" in lines[-1]
    assert any("wrong" in line for line in lines) and not any("candidates" in line for line in lines)


def test_json_lines_are_events():
    stream = io.StringIO()
    with Display(len(KEYS), None, stream, as_json=True) as tell:
        report = run(tell)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    rows = [e for e in events if e["event"] == "key"]
    assert [(r["key"], r["median_us"]) for r in rows] == [(str(o.key), o.chosen.median_us) for o in report.outcomes]


@pytest.mark.parametrize(("terminal", "rich", "kind"), [(True, True, LiveDisplay), (True, False, Display), (False, True, Display)])
def test_the_best_display_that_is_there_is_taken(terminal, rich, kind, monkeypatch):
    if rich:
        require_module("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert type(display(2, None, as_json=False)) is kind and type(display(2, None, as_json=True)) is Display
