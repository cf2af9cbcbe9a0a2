"""Which of a rank's last lines are its final exception, and whether a lost peer explains that."""

from __future__ import annotations

import pytest

from elasticctl_launcher.ranks.failure_evidence import (
    find_final_exception,
    is_wrong_use,
    last_error_line,
    lines_apart_from_exception,
    shown_lines,
)

TRACEBACK = ("Traceback (most recent call last):", '  File "train.py", line 9, in <module>', "    step()")
FRAMES = tuple(f"frame #{n}: c10d::TCPStore::ping() + 0xf9 (0x7f1 in libtorch_cpu.so)" for n in range(60))
GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, {}, NCCL version 2.27.3"
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
NOISE = "[W1123 10:00:00.1 TCPStore.cpp:347] recvValue failed: Connection reset by peer"
THROWN = ("terminate called after throwing an instance of 'c10::DistBackendError'",)
WATCHDOG = "  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: NCCL error: {}"
CAUSED = "The above exception was the direct cause of the following exception:"


def prefixed(*lines: str) -> tuple[str, ...]:
    return tuple(f"[rank3]: {line}" for line in lines)


@pytest.mark.parametrize(
    "lines",
    [
        (*TRACEBACK, GLOO),
        prefixed(*TRACEBACK, GLOO),
        (*TRACEBACK, NCCL.format("remote process exited"), REMOTE, "Last error:", "NET/IB : Got completion with error"),
        (*TRACEBACK, "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes.", *FRAMES),
        (*TRACEBACK, "ValueError: no", "", CAUSED, "", *TRACEBACK, GLOO),
        (*THROWN, WATCHDOG.format(REMOTE), *FRAMES),
        (*TRACEBACK, "KeyError: 'x'", *THROWN, WATCHDOG.format(REMOTE)),
        (*TRACEBACK, "ConnectionResetError: [Errno 104] Connection reset by peer"),
    ],
    ids=["gloo", "with torch's prefix", "NCCL", "frames", "raised from another", "C++", "C++ after Python", "socket"],
)
def test_errors_of_a_lost_peer_are_recognized(lines: tuple[str, ...]) -> None:
    final = find_final_exception(lines)
    assert final is not None
    assert final.is_of_peers


@pytest.mark.parametrize(
    "lines",
    [
        ("Connection reset by peer", *TRACEBACK, "ValueError: no"),
        (*TRACEBACK, GLOO, "retrying", *TRACEBACK, "ValueError: no"),
        (*TRACEBACK, GLOO, "", CAUSED, "", *TRACEBACK, "ValueError: no"),
        (*TRACEBACK, "ValueError: no", NOISE, f"[rank3]:{NOISE}"),
        (*prefixed(*TRACEBACK, "ValueError: no"), "gloo:: says goodbye: Broken pipe"),
        (*TRACEBACK, NCCL.format("invalid usage"), USAGE),
        (*TRACEBACK, NCCL.format("unhandled cuda error"), "ncclUnhandledCudaError: Call to CUDA function failed."),
        (*THROWN, WATCHDOG.format("ncclInternalError: Internal check failed.")),
        (*TRACEBACK, "ValueError: no", "terminate called without an active exception"),
        (*TRACEBACK, "ValueError: no", f"terminate called recursively: {GLOO}"),
    ],
    ids=[
        "said before", "survived before", "handled before", "C++ logs", "others' lines", "wrong use", "own GPU",
        "own fault in C++", "threads at the end", "twice",
    ],
)  # fmt: skip
def test_errors_of_the_rank_itself_are_not_blamed_on_peers(lines: tuple[str, ...]) -> None:
    final = find_final_exception(lines)
    assert final is not None
    assert not final.is_of_peers


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ((*TRACEBACK, "ValueError: no", "and goodbye"), "ValueError: no"),
        (prefixed(*TRACEBACK, "KeyError: 'x'"), "KeyError: 'x'"),
        (('  File "bad.py", line 1', "    x = (", "        ^", "SyntaxError: '(' was never closed"), "SyntaxError: '"),
        ((*TRACEBACK, "AssertionError"), "AssertionError"),
        ((*THROWN, "  what():  no GPU"), "no GPU"),
        ((*TRACEBACK, "ValueError: no", '  File "x.py", line 3 in main (most recent call first)'), "ValueError: no"),
    ],
    ids=["last words", "prefix", "syntax", "no message", "C++", "stacks after it"],
)
def test_the_first_line_of_the_exception_is_found(lines: tuple[str, ...], line: str) -> None:
    final = find_final_exception(lines)
    assert final is not None
    assert final.line.startswith(line)


@pytest.mark.parametrize(
    "name",
    ["SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "x.errors.NotFiniteError"],
)
def test_permanent_errors_are_recognized(name: str) -> None:
    final = find_final_exception((*TRACEBACK, f"{name}: no"))
    assert final is not None
    assert final.is_permanent


@pytest.mark.parametrize(
    "line", ["ValueError: ImportError: no", "mine.LateImportError: no", "RuntimeError: SyntaxError"]
)
def test_other_errors_are_not_permanent(line: str) -> None:
    final = find_final_exception((*TRACEBACK, line))
    assert final is not None
    assert not final.is_permanent


@pytest.mark.parametrize("lines", [(), ("Connection reset by peer", ""), ("Broken pipe: no",), TRACEBACK])
def test_lines_without_an_exception(lines: tuple[str, ...]) -> None:
    assert find_final_exception(lines) is None
    assert last_error_line(lines) == next((line.strip() for line in reversed(lines) if line), "")


HIT = ("Current thread 0x00007f2 (most recent call first):", '  File "train.py", line 4 in kernel', "  ...")
OTHER = ("Thread 0x00007f1 (most recent call first):", '  File "threading.py", line 982 in run')
DUMP = ("Fatal Python error: Segmentation fault", "", *OTHER, "", *HIT, "", "Extension modules: torch._C (total: 1)")


@pytest.mark.parametrize("before", [(), (*TRACEBACK, "ValueError: was caught"), ("epoch 3", "epoch 4")])
def test_a_fatal_signal_reported_by_python_is_found(before: tuple[str, ...]) -> None:
    lines = (*before, *DUMP)
    final = find_final_exception(lines)
    assert final is not None
    assert final.line == "Fatal Python error: Segmentation fault"
    assert (final.is_of_peers, final.is_permanent) == (False, False)
    assert shown_lines(lines, 20) == (final.line, *HIT)
    assert shown_lines(lines, 3) == (final.line, *HIT[:2])


def test_frames_of_the_bootstrap_are_left_out() -> None:
    start = '  File "/site-packages/elasticctl_launcher/bootstrap.py", line 57 in main'
    assert shown_lines((DUMP[0], "", *HIT, start, start), 4) == (DUMP[0], *HIT)


def test_a_signal_of_another_process_does_not_hide_the_exception() -> None:
    lines = (*DUMP, *TRACEBACK, "RuntimeError: DataLoader worker is killed by signal: Segmentation fault.")
    final = find_final_exception(lines)
    assert final is not None
    assert final.line == lines[-1]
    assert shown_lines(lines, 2) == lines[-2:]


def test_the_main_thread_is_shown_if_the_signal_hit_no_python_thread() -> None:
    main = ("Thread 0x00007f3 (most recent call first):", '  File "train.py", line 9 in <module>')
    assert shown_lines(("Fatal Python error: Aborted", "", *OTHER, "", *main, ""), 20) == (
        "Fatal Python error: Aborted",
        *main,
    )
    assert shown_lines(("Fatal Python error: Aborted",), 20) == ("Fatal Python error: Aborted",)


def test_the_stacks_after_a_cpp_exception_belong_to_it() -> None:
    lines = (*THROWN, WATCHDOG.format(REMOTE), "Fatal Python error: Aborted", *DUMP[1:])
    final = find_final_exception(lines)
    assert final is not None
    assert final.is_of_peers
    assert lines_apart_from_exception(lines, final) == []


ARGPARSE = ("usage: train.py [-h] [--epochs EPOCHS]", "train.py: error: unrecognized arguments: --epoch 3")
CLICK = ("Usage: train.py [OPTIONS]", "Try 'train.py --help' for help.", "", "Error: No such option: --epoch")


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (2, ARGPARSE),
        (2, ("imported", *CLICK)),
        (2, ("python: can't open file '/x/train.py': [Errno 2] No such file or directory",)),
        (2, ("cannot open 'train.py': No such file or directory",)),
        (127, ("bash: line 1: trainer: command not found",)),
        (127, ("cannot start './trainer': No such file or directory",)),
        (126, ("bash: ./run.sh: Permission denied",)),
    ],
)
def test_wrong_usage_is_recognized(code: int, lines: tuple[str, ...]) -> None:
    assert is_wrong_use(code, lines)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (1, ARGPARSE),
        (-2, ARGPARSE),
        (2, ("error: the loss is odd",)),
        (2, ()),
        (127, ("the loss was 127",)),
        (2, ARGPARSE[:1]),
    ],
)
def test_exit_codes_alone_do_not_prove_wrong_usage(code: int, lines: tuple[str, ...]) -> None:
    assert not is_wrong_use(code, lines)
