"""Where a log breaks off, its stored copy continues: no line lost, none twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.cluster.stored_logs import OVERLAP_S, NumberedLine, ReadLines

LATENCY_S = 0.004
"""From a worker's own stamp to the one in the log."""

texts = st.sampled_from(["step", "loss 0.1", "", "epoch done"])
pauses = st.sampled_from([0.0, 0.0001, 0.01, 0.3, 2.0, 40.0])
printed = st.lists(st.tuples(texts, pauses), min_size=1, max_size=150)


def copy_of(said: list[tuple[str, float]]) -> list[NumberedLine]:
    lines, now = [], 1000.0
    for number, (text, pause_s) in enumerate(said, 1):
        now += pause_s
        lines.append(NumberedLine(number, now, text))
    return lines


def read(lines: list[NumberedLine], *, whole: bool) -> ReadLines:
    handover = ReadLines(whole=whole)
    for line in lines:
        handover.note_line(line.at + LATENCY_S, line.text)
    return handover


def part_that_is_needed(copy: list[NumberedLine], handover: ReadLines) -> list[NumberedLine]:
    since = handover.needs_since
    return [line for line in copy if since is None or line.at >= since]


@settings(max_examples=40)
@given(printed, st.integers(0, 150), st.integers(0, 150))
def test_after_reading_from_the_beginning_the_copy_continues_exactly_there(
    said: list[tuple[str, float]], read_lines: int, stored_lines: int
) -> None:
    """However alike the lines are, and whether the copy ends before or behind what has been read."""
    lines = copy_of(said)
    handover = read(lines[:read_lines], whole=True)
    copy = part_that_is_needed(lines[:stored_lines], handover)
    assert list(handover.rest(copy)) == lines[:stored_lines][read_lines:]


@settings(max_examples=40)
@given(printed, st.integers(0, 150), st.integers(1, 150), st.integers(0, 150))
def test_after_reading_only_the_end_the_place_is_found_by_its_lines(
    said: list[tuple[str, float]], start: int, read_lines: int, stored_lines: int
) -> None:
    lines = [NumberedLine(line.number, line.at, f"{line.number}: {line.text}") for line in copy_of(said)]
    seen = lines[start : start + read_lines]
    handover = read(seen, whole=False)
    rest = handover.rest(part_that_is_needed(lines[:stored_lines], handover))
    assert list(rest) == (
        [line for line in lines[:stored_lines] if line.number > seen[-1].number] if seen else lines[:stored_lines]
    )


@settings(max_examples=40)
@given(st.lists(texts, min_size=1, max_size=100), st.integers(1, 100), st.integers(1, 100), st.integers(1, 100))
def test_equal_lines_that_do_not_come_together_are_distinguished(
    said: list[str], start: int, read_lines: int, stored_lines: int
) -> None:
    lines = copy_of([(text, 0.6) for text in said])
    seen = lines[start : start + read_lines]
    handover = read(seen, whole=False)
    rest = handover.rest(part_that_is_needed(lines[:stored_lines], handover))
    assert list(rest) == (
        lines[:stored_lines] if not seen else [line for line in lines[:stored_lines] if line.number > seen[-1].number]
    )


def test_lines_that_only_the_log_has_do_not_lead_astray() -> None:
    """What an interpreter says as it dies goes past the launcher: it is counted, and is in no copy."""
    lines = [NumberedLine(number, 1000.0 + number, f"line {number}") for number in range(1, 40)]
    handover = read(lines[:20], whole=True)
    for text in ("Fatal Python error", "Segmentation fault"):
        handover.note_line(1020.0 + LATENCY_S, text)
    assert list(handover.rest(lines)) == lines[20:]


def test_a_long_line_that_was_broken_up_is_one_line() -> None:
    long = "x" * 40_000
    lines = [NumberedLine(1, 1000.0, "first"), NumberedLine(2, 1000.1, long), NumberedLine(3, 1000.2, "last")]
    handover = ReadLines(whole=True)
    for text in ("first", long[:16_384], long[16_384:32_768], long[32_768:]):
        handover.note_line(1000.1 + LATENCY_S, text)
    assert [line.text for line in handover.rest(lines)] == ["last"]


def test_a_long_log_needs_only_the_end_of_the_copy() -> None:
    lines = [NumberedLine(number, float(number), "x") for number in range(1, 10_000)]
    handover = read(lines[:9_000], whole=True)
    assert handover.needs_since == 9_000.0 + LATENCY_S - OVERLAP_S
    assert len(part_that_is_needed(lines, handover)) < 1_100
