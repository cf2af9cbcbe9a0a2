"""Whatever a log holds and wherever its stream breaks, each line comes once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.cluster.kube.read_logs import LogCursor, split_stamp

# Stamps grow, but two writers may be a few milliseconds out of order, over the edge of a second too.
STEPS = st.lists(
    st.tuples(st.sampled_from([0, 1, 400, 200_000, 700_000, 3_000_000]), st.integers(-4000, 4000)), max_size=30
)


@settings(max_examples=50)
@given(STEPS, st.lists(st.integers(0, 12), max_size=8))
def test_each_line_comes_once_wherever_the_stream_breaks(steps: list[tuple[int, int]], cuts: list[int]) -> None:
    at, log = 1_700_000_000_000_000, []
    for number, (step, jitter) in enumerate(steps):
        at += step
        log.append((at + jitter, number))
    cursor = LogCursor()
    got: list[int] = []
    for cut in [*cuts, len(log) + 1]:
        since = cursor.resume()
        wanted = [line for line in log if since is None or line[0] >= since * 1e6]
        got += [number for stamp, number in wanted[:cut] if cursor.is_new(stamp)]
    assert got == list(range(len(log)))


def test_a_rotated_log_loses_nothing_that_is_still_there() -> None:
    cursor = LogCursor()
    second = 1_700_000_000_000_000
    assert all(cursor.is_new(second + n) for n in range(10))
    assert cursor.resume() == 1_699_999_999.0
    # The ten lines have been rotated away meanwhile; what comes is new, however few lines were passed over.
    assert [cursor.is_new(second + n) for n in (20, 21)] == [True, True]


def test_stamps_in_any_zone_and_lines_without_one() -> None:
    assert split_stamp(b"2026-01-02T03:04:05.123456789Z hello there\n") == (1_767_323_045_123_456, "hello there")
    assert split_stamp(b"2026-01-02T05:04:05.5+02:00 \xff") == (1_767_323_045_500_000, "\ufffd")
    assert split_stamp(b"2026-01-02T03:04:05Z \n") == (1_767_323_045_000_000, "")
    for garbage in (b"", b"unable to retrieve container logs for x\n", b"2026-01-02T03:04:05 no zone\n"):
        assert split_stamp(garbage) is None
