"""A watch outlives a cluster that does not answer for a while, and asks a slow one less often."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from elasticctl.api.errors import BusyError, NotFoundError, UnreachableError
from elasticctl.cli.views import follow, watch
from elasticctl.cli.views.watch import Screenful, render_frame
from elasticctl.operations import lifecycle, target
from elasticctl.operations.target import Poller, Target
from elasticctl.settings.contexts import Context
from elasticctl.terminal import Terminal, console
from tests.support.job_samples import job
from tests.support.reports import Reports


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REDRAW_EVERY_S", 0.001)


def replies(*given: Any) -> Callable[[], Any]:
    """A query with these answers, one after the other; an exception is raised."""
    left: Iterator[Any] = iter(given)

    def ask() -> Any:
        reply = next(left)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    return ask


def test_the_last_answer_stays_while_the_cluster_is_silent() -> None:
    reports = Reports()
    given = ("a", UnreachableError("gone"), BusyError("busy"), "b", NotFoundError("deleted"))
    answers = Poller(replies(*given), 0.001, observer=reports)
    each = answers.each()
    seen = [(next(each), answers.trouble.partition(": ")[2]) for _ in range(4)]
    assert seen == [("a", ""), ("a", "gone"), ("a", "busy"), ("b", "")]
    assert reports.lines == ["retrying: gone"]
    with pytest.raises(NotFoundError):
        next(each)


def test_the_first_query_must_be_answered() -> None:
    with pytest.raises(UnreachableError):
        next(Poller(replies(UnreachableError("gone")), 0.001).each())


def test_a_slow_cluster_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = itertools.count(0.0, 1.0)  # a second passes at each look: an answer takes one
    fake = SimpleNamespace(sleep=slept.append, monotonic=lambda: next(clock), time=time.time)
    monkeypatch.setattr(target, "time", fake)
    found = Poller(replies(*"abc"), 0.001).each()
    assert [next(found) for _ in range(3)] == ["a", "b", "c"]
    assert all(pause_s >= 4.0 for pause_s in slept)
    assert len(slept) == 2


def test_no_pause_goes_beyond_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(target, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 100.0))
    found = Poller(replies(*"ab"), 60.0, until=107.0).each()
    assert [next(found) for _ in range(2)] == ["a", "b"]
    assert slept == [7.0]


def place(*answers: Any) -> Any:
    """A target whose job has these states, one answer after the other."""
    ask = replies(*answers)
    cluster: Any = SimpleNamespace(get_job=lambda namespace, name: ask())
    return Target(Context("lab", "kubernetes"), "default", cluster, Terminal())


def test_waiting_survives_an_outage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(target.time, "sleep", lambda pause_s: None)
    gone = [UnreachableError("no answer"), BusyError("busy")]
    assert follow.await_end(place(job(), *gone, job(), job(phase="Succeeded")), job()) == 0
    assert capsys.readouterr().err.splitlines()[0] == "retrying: no answer"
    monkeypatch.setattr(lifecycle, "PATIENCE_S", 0.0)
    with pytest.raises(UnreachableError):
        follow.await_end(place(job(), *gone), job())


def test_trouble_is_printed_once_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    gone = UnreachableError("gone")
    watch.watch_job(place(job(), job(), gone, gone, job(), job(phase="Succeeded")), job())
    said = capsys.readouterr()
    assert [line.split("\t")[1] for line in said.out.splitlines()] == ["PHASE", "Running", "Succeeded"]
    assert said.err.count("gone") == 1
    assert said.err == "retrying: gone\n"


def another(**status: Any) -> Any:
    """A job that was created under the same name when the watched one was gone."""
    made = job(**status)
    return {**made, "metadata": {**made["metadata"], "uid": "uid-of-another"}}


def test_watching_does_not_continue_with_another_job_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.time, "sleep", lambda pause_s: None)
    replaced = "digits was deleted, and another job now has its name. Next: elasticctl status digits"
    with pytest.raises(NotFoundError, match=replaced):
        follow.await_end(place(job(), job(), another(phase="Failed")), job())
    with pytest.raises(NotFoundError, match=replaced):
        watch.watch_job(place(job(), another()), job())
    assert follow.code_of_followed(place(another(phase="Failed")), job()) == 0
    assert follow.code_of_followed(place(job(phase="Failed")), job()) == 1


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_does_not_cancel_another_job_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Iterator[Any]:
        raise KeyboardInterrupt

    patched: list[Any] = []
    cluster: Any = SimpleNamespace(
        get_job=lambda namespace, name: another(),
        patch_job=lambda *given: patched.append(given),
        logs=interrupted,
    )
    monkeypatch.setattr(follow.sys, "stdin", TerminalText())
    monkeypatch.setattr(follow.sys, "stderr", TerminalText())
    monkeypatch.setattr(follow.typer, "prompt", lambda *_, **__: "cancel")
    with pytest.raises(NotFoundError):
        follow.attach(Target(Context("lab", "kubernetes"), "default", cluster), job())
    assert patched == []


@pytest.mark.parametrize("answer", ["", "D", "detach", typer.Abort()])
def test_ctrl_c_asks_and_the_job_may_go_on(answer: str | BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C is an answer, too."""
    cluster: Any = SimpleNamespace(logs=lambda *_: iter(replies(KeyboardInterrupt()), None))
    monkeypatch.setattr(follow.sys, "stdin", TerminalText())
    monkeypatch.setattr(follow.sys, "stderr", TerminalText())
    monkeypatch.setattr(follow.typer, "prompt", lambda *_, **__: replies(answer)())
    assert follow.attach(Target(Context("lab", "kubernetes"), "default", cluster), job()) == 130


def test_trouble_stands_below_the_table() -> None:
    stream = io.StringIO()
    width = 50
    frame = Screenful(None, "no jobs; start one", "this is from 12s ago, retrying: no answer from the cluster at x")
    console(stream, width).print(render_frame(frame, console(stream, width)))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0] == "no jobs; start one"
    assert lines[1].startswith("this is from 12s ago")
    assert len(lines) == 2
    assert all(len(line) <= width for line in lines)


def test_a_pipe_is_no_screen_nor_is_a_terminal_whose_cursor_cannot_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not watch.can_redraw()
    monkeypatch.setattr("sys.stdout", TerminalText())
    for name, can in (("dumb", False), ("xterm", True)):
        monkeypatch.setenv("TERM", name)
        assert watch.can_redraw() == can
