"""Copies of many tensors by several threads."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store import parallel
from elasticctl_store.errors import SaveError
from elasticctl_store.parallel import each
from elasticctl_train.checkpoint.memory import copying
from elasticctl_train.checkpoint.memory.copying import Background, Copier, CopyTarget
from tests.support.train.states import bits, same, tensors

COPIER = Copier()


def copied(sources: list[torch.Tensor], copier: Copier = COPIER) -> list[torch.Tensor]:
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    copier.copy([CopyTarget.of(target) for target in targets], sources)
    return targets


@given(st.lists(tensors(), max_size=6))
@settings(max_examples=40)
def test_every_kind_of_tensor_is_copied_exactly(sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        assert all(same(a, b.detach()) for a, b in zip(copied(sources), sources, strict=True))


@pytest.mark.parametrize("processors", [1, 2, 5, 64])
def test_several_threads_copy_large_tensors(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    monkeypatch.setattr(parallel, "per_rank", lambda: processors)
    copier = Copier()
    sizes = [copying.CHUNK_BYTES // 8 * 5 + 3, 3, copying.HELP_FROM_BYTES // 8, copying.SMALL_BYTES // 8]
    sources = [torch.randn(size, dtype=torch.float64) for size in sizes]
    sources += [torch.randn(copying.HELP_FROM_BYTES // 8 + number, dtype=torch.float64) for number in range(8)]
    for _ in range(3):
        assert [bits(target) for target in copied(sources, copier)] == [bits(source) for source in sources]


def test_lazy_conjugation_is_resolved() -> None:
    wave = torch.randn(50, dtype=torch.complex64)
    sources = [wave.conj(), wave.conj().imag]
    assert sources[1].is_neg()
    assert all(same(a, b) for a, b in zip(copied(sources), sources, strict=True))


def test_copying_works_on_systems_without_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    Copier().copy([], [])


def test_jobs_run_one_at_a_time() -> None:
    background, gate, done = Background("test"), threading.Event(), []
    assert not background.busy
    background.start(lambda: done.append(gate.wait(60)))
    background.join(0.0)
    assert background.busy
    gate.set()
    background.join()
    assert not background.busy
    background.start(lambda: done.append(False))
    background.join()
    assert done == [True, False]


def test_a_failed_job_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background("test-that-fails"), list[bool]()

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    background.start(fail)
    background.join()
    background.start(lambda: done.append(True))
    background.join(60)
    assert done == [True]
    assert "can't start new thread" in caplog.text


@pytest.mark.needs("linux")  # elsewhere, the process has one priority
def test_niceness_applies_to_the_thread_and_those_that_it_starts() -> None:
    found: list[int] = []

    def note() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def job() -> None:
        note()
        each(lambda _: note(), range(4), threads=2)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    background = Background("test-nice", 5)
    background.start(job)
    background.join()
    assert found == [max(before, 5)] * 5
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.needs("linux")  # elsewhere, the process has one priority
def test_training_does_not_wait_for_low_priority_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[int] = set()
    move = ctypes.memmove

    def note(to: int, source: int, size_bytes: int) -> None:
        found.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        move(to, source, size_bytes)

    source = torch.randn(copying.LATE_CHUNK_BYTES)
    target = torch.empty_like(source)
    late = COPIER.copy([CopyTarget.of(target)], [source], [True])
    assert late is not None
    monkeypatch.setattr(ctypes, "memmove", note)
    saving = Background("test-nice", 5)
    saving.start(late.synchronize)
    saving.join()
    assert found == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert bits(target) == bits(source)
    late.confirm()
    late.check()


def test_a_write_by_an_unfinished_operation_is_detected() -> None:
    """Its version increases at its end, possibly after everything was copied, so the version after that counts."""
    source = torch.zeros(copying.LATE_CHUNK_BYTES)
    target = torch.empty_like(source)
    late = COPIER.copy([CopyTarget.of(target)], [source], [True])
    assert late is not None
    source.numpy()[:] = 1  # the first half of what an operation does
    late.finish()
    source.add_(0)  # and the second
    late.confirm()
    assert late.is_torn
    with pytest.raises(SaveError):
        late.check()


def test_without_confirmation_an_operation_is_assumed_over_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CONFIRM_S", 0.1)
    source = torch.zeros(copying.LATE_CHUNK_BYTES)
    late = COPIER.copy([CopyTarget.of(torch.empty_like(source))], [source], [True])
    assert late is not None
    late.check()
    assert not late.is_torn
    assert late.waited_s >= 0.1


def test_the_thread_ends_with_its_object() -> None:
    background = Background("test-that-ends")
    thread = next(thread for thread in threading.enumerate() if thread.name == "test-that-ends")
    background.start(lambda: None)
    background.join()
    del background
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
