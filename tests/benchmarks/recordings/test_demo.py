"""The recording of the demo: a picture that shows what the terminal did."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from benchmarks.recordings.demo import CAST, LINES, PICTURE, lines_of, picture

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_of_what_was_recorded_and_that_of_a_demo_that_went_well() -> None:
    events = [(at_s, text) for at_s, _, text in map(json.loads, CAST.read_text("utf-8").splitlines()[1:])]
    drawn = picture(lines_of(events), events[-1][0])
    assert drawn == PICTURE.read_text("utf-8")
    said = ["".join(text.itertext()) for text in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    assert any("demo: killed" in line for line in said)
    assert any("3 -> 4" in line for line in said)
    assert not any("did not happen" in line for line in said)
    assert events[-1][0] <= 60.0


def test_lines_are_seen_in_their_time_and_scroll_away() -> None:
    events = [
        (0.5, "working\r"),
        (1.0, "\x1b[2K\x1b[1;31mlost\x1b[0m\r\n"),
        *((2.0 + n, f"{n}\r\n") for n in range(40)),
    ]
    shown = lines_of(events)
    assert [(item.parts, item.since_s, item.until_s) for item in shown if item.line == 0] == [
        ((("working", "default", False),), 0.5, 1.0),
        ((("lost", "red", True),), 1.0, None),
    ]
    assert max(item.line for item in shown) == 40
    assert f"translate(0,-{(41 - LINES + 1) * 18 - 18})" in picture(shown, 45.0)
