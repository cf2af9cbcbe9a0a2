"""A newcomer's compiled model is compiled before it joins, and does not change otherwise."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from elasticctl_train.dist import Channel
from elasticctl_train.inplace import warmup
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel, PeerWatch
from elasticctl_train.inplace.warmup import ExampleInputs, is_compiled, repeat_call, warm_up
from tests.support.launcher_lab import Lab
from tests.support.train.unbroken_workers import COMPILED, ENDLESS, Workers


class Recorder:
    """A compiler that counts."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1
        return graph.forward


@pytest.fixture
def watch() -> Iterator[PeerWatch]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield PeerWatch(1, lambda error: pytest.fail(str(error)), Channel(training=dist.group.WORLD))
    dist.destroy_process_group()
    torch.compiler.reset()


def examples_of(*batches: torch.Tensor) -> ExampleInputs:
    examples = ExampleInputs()
    for batch in batches:
        examples.record((batch,), {})
    return ExampleInputs(examples.pop_report() or "")


def test_after_the_warmup_the_first_step_compiles_nothing_and_the_model_is_unchanged(watch: PeerWatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compiler = Recorder()
    compiled: Any = torch.compile(model, backend=compiler)
    warm_up(compiled, examples_of(torch.randn(8, 4), torch.randn(6, 4)), watch)
    assert compiler.compiled == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    wrapped = ElasticDataParallel(compiled, watch, init_sync=False)
    for size in (8, 6, 7):
        wrapped(torch.randn(size, 4)).sum().backward()
    assert compiler.compiled == 2


def test_the_warmup_does_not_change_random_numbers(watch: PeerWatch) -> None:
    compiled: Any = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), backend="eager")
    examples = examples_of(torch.randn(8, 4))
    before = torch.get_rng_state()
    warm_up(compiled, examples, watch)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_warmup_does_not_reduce_gradients(watch: PeerWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    reducers: list[weakref.ref[Any]] = []

    class Observed(ElasticDataParallel):
        def release(self) -> None:
            reducers.append(weakref.ref(self.reducer))
            super().release()

    monkeypatch.setattr(warmup, "ElasticDataParallel", Observed)
    gc.disable()
    try:
        warm_up(torch.compile(nn.Linear(4, 1), backend="eager"), examples_of(torch.randn(8, 4)), watch)  # type: ignore[arg-type]
        assert [reducer() for reducer in reducers] == [None]
    finally:
        gc.enable()


def test_a_model_that_accepts_no_zeros_is_compiled_later(watch: PeerWatch, caplog: pytest.LogCaptureFixture) -> None:
    class Particular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 1)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if not batch.any():
                raise ValueError("an empty picture")
            out: torch.Tensor = self.last(batch)
            return out

    model: Any = torch.compile(Particular(), backend="eager")
    with caplog.at_level(logging.WARNING):
        warm_up(model, examples_of(torch.randn(8, 4)), watch)
    assert "does not accept zeros: ValueError: an empty picture" in caplog.text
    ElasticDataParallel(model, watch, init_sync=False)(torch.ones(8, 4)).sum().backward()


def test_a_model_is_compiled_as_a_whole_or_in_part() -> None:
    assert not is_compiled(nn.Sequential(nn.Linear(1, 1)))
    whole: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    assert is_compiled(whole)
    assert is_compiled(nn.Sequential(whole))
    by_method: Any = nn.Linear(1, 1)
    by_method.forward = torch.compile(by_method.forward, backend="eager")
    assert is_compiled(by_method)
    in_part = nn.Sequential(nn.Linear(1, 1))
    in_part[0].compile(backend="eager")
    assert is_compiled(in_part)


@pytest.mark.timeout(600)
def test_ranks_do_not_wait_while_a_newcomer_compiles(lab: Lab) -> None:
    """Two batch sizes were used before it joins, so torch compiles for any size, and a third one follows."""
    workers = Workers(lab, 3, ENDLESS, COMPILED, SLOW="w3", STEP_S="0.02")
    workers.begin(5)
    workers.lose("w1")
    lab.until(lambda: any(row["of"] == 2 for row in workers.ledger().made))
    workers.join("w3")
    lab.until((lab.folder / "compiled-w3").exists)
    workers.train_to(workers.ledger().furthest + 10)
    assert all(row["of"] == 2 for row in workers.ledger().made[-10:])
    (lab.folder / "go-on").touch()
    lab.until(lambda: any(row["worker"] == "w3" for row in workers.ledger().made))
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    assert set((lab.folder / "compiled-w3").read_text().split()) == {"0"}, "it compiled after it had joined"
    assert workers.ledger().redone() == 0


TENSORS = st.builds(
    lambda shape, dtype, turned: torch.ones(shape, dtype=dtype).t() if turned else torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 3), min_size=2, max_size=2),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.booleans(),
)
VALUES = st.recursive(
    st.one_of(TENSORS, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda items: st.one_of(
        st.lists(items, max_size=3),
        st.lists(items, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), items, max_size=3),
    ),
    max_leaves=5,
)


class Witness(nn.Module):
    """Records its arguments, and whether autocast was enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, *inputs: Any, **options: Any) -> list[Any]:
        self.seen.append((list(inputs), options, torch.is_autocast_enabled("cpu")))
        return [self.scale * 2, {"not a tensor": 1}]


def alike(one: Any, other: Any) -> bool:
    """True if two values have the same structure, with tensors of the same kind."""
    if isinstance(one, torch.Tensor):
        kinds = [(each.dtype, each.shape, each.stride(), each.device.type) for each in (one, other)]
        return kinds[0] == kinds[1] and not other.any()
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    return bool(one == other)


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.sampled_from("abc"), VALUES, max_size=2))
def test_the_call_is_repeated_with_zeros(inputs: list[Any], options: dict[str, Any]) -> None:
    examples = ExampleInputs()
    examples.record(inputs, options)
    (call,) = ExampleInputs(examples.pop_report() or "").calls
    model = Witness()
    repeat_call(call, model, torch.device("cpu"))
    assert alike([inputs, options], list(model.seen[0][:2]))
    assert model.scale.grad is not None
    assert not model.scale.grad.any()


def test_autocast_is_recorded_and_repeated() -> None:
    examples, model = ExampleInputs(), Witness()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        examples.record([torch.ones(1)], {})
    repeat_call(examples.calls[0], model, torch.device("cpu"))
    assert model.seen[0][2] is True


def test_the_number_of_reported_calls_is_limited() -> None:
    examples = ExampleInputs()
    reports = 0
    for size in range(1, 50):
        examples.record([torch.ones(size)], {})
        reports += examples.pop_report() is not None
    assert reports == 4


def test_only_the_newest_calls_are_kept_and_each_is_reported_once_in_a_group() -> None:
    examples = ExampleInputs()
    for size in (1, 2, 1, 3, 4, 5):
        examples.record([torch.ones(size)], {})
    assert len(examples.calls) == 4
    assert examples.pop_report() is not None
    assert examples.pop_report() is None
    examples.record([torch.ones(5)], {})
    assert examples.pop_report() is None
    examples.enter_group()
    assert examples.pop_report() is not None


@pytest.mark.parametrize("value", [object(), {1: 2}, torch.ones(2).to_sparse(), nn.Parameter(torch.ones(1)), {1, 2}])
def test_calls_that_cannot_be_reproduced_are_not_recorded(value: object) -> None:
    examples = ExampleInputs()
    examples.record([value], {})
    assert examples.calls == []
    assert examples.pop_report() is None


def test_calls_that_are_too_large_are_not_reported() -> None:
    examples = ExampleInputs()
    examples.record([torch.ones(1)] * 500, {})
    assert examples.pop_report() is None
