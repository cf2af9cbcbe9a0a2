"""Makes a step completely or not at all: the optimizers' gate, and the way back to the end of the last step.

State that is small, or changes in each pass, is copied at the end of each step: buffers, random number generators,
schedulers, gradient scalers. State that is large and changes after the optimizer's step (averages of the weights) is
still unchanged when a loss is noticed, and is copied only then. If a script changes such state, or parameters, in any
other order, a lost step cannot be undone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from elasticctl_train import rng
from elasticctl_train.checkpoint import tree
from elasticctl_train.checkpoint.parts import Stateful, sample
from elasticctl_train.inplace.elastic_ddp import PeerWatch

_SMALL_BYTES = 1 << 16
"""A part with tensors of this total size or less is copied in each step, which takes microseconds."""
_CHECKED_STEPS = 3
"""How many first steps to check for large parts that replace their tensors, and for parameters that change early."""
_IMMUTABLE = frozenset({type(None), bool, int, float, str})
"""Most of an optimizer's settings have these types, and a script may have one parameter group per parameter."""

Buffers = dict[str, torch.Tensor | None]
"""The buffers of a module by name, in the dictionary in which torch keeps them."""


class StepGate:
    """Skips the steps of optimizers while a peer is lost.

    If more than one will be made in the same step, as a GAN's are, a loss may come between them. What an optimizer
    changes is then copied first, unless its step is the last one.
    """

    def __init__(
        self,
        watch: PeerWatch,
        optimizers: Sequence[torch.optim.Optimizer],
        before_first: Callable[[], None],
        *,
        before_each: Callable[[], None] = lambda: None,
        on_skip: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_first()` is called before the first optimizer step in each step, `before_each()` before every one: it
        may notice a loss. `on_skip()` is called instead of an optimizer step that is skipped."""
        self._watch, self._before_first, self._before_each, self._on_skip = watch, before_first, before_each, on_skip
        self._made = self._most = 0
        self._is_within = self._is_torn = False
        self._kept: dict[torch.optim.Optimizer, OptimizerCopy] = {}
        for optimizer in optimizers:
            self._guard(optimizer)

    @property
    def is_made(self) -> bool:
        """True if the optimizers have made as many steps as in any step of the script so far."""
        return 0 < self._made >= self._most and not self._is_within

    @property
    def undone(self) -> list[torch.Tensor]:
        """The parameters that `undo` restores."""
        return [parameter for kept in self._kept.values() for parameter in kept.parameters]

    def end_step(self) -> None:
        """Record the end of the script's step."""
        self._most = max(self._most, self._made)
        self._made, self._kept, self._is_torn = 0, {}, False

    def undo(self) -> bool:
        """Undo the steps that were made before the loss was noticed; return False if one cannot be undone."""
        for kept in self._kept.values():
            kept.put_back()
        return not self._is_torn

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        make_step: Callable[..., Any] = optimizer.step

        # A method rather than a function, because schedulers that are created later wrap only methods.
        @functools.wraps(getattr(make_step, "__func__", make_step))  # keeps a scheduler's marks
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._watch.finish_on_gpu()
            self._before_each()
            if self._watch.lost:
                self._on_skip()
                return _call_closure(*args, **kwargs)
            if not self._made:
                self._before_first()
            self._made += 1
            # A copy is needed if a loss can still come after this optimizer has changed something: within a closure,
            # or because another optimizer step of this step follows.
            takes_closure = bool(args) or "closure" in kwargs
            if (takes_closure or self._made < self._most) and optimizer not in self._kept and not self._is_torn:
                self._kept[optimizer] = OptimizerCopy(optimizer)
            self._is_torn |= optimizer not in self._kept
            self._is_within = True
            try:
                return make_step(*args, **kwargs)
            finally:
                self._is_within = False

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


class OptimizerCopy:
    """The parameters and the state of an optimizer, as they were before its first step in a step of the script's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._copies = [parameter.detach().clone() for parameter in self.parameters]
        self._state = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}

    def put_back(self) -> None:
        """Undo what has changed since."""
        with torch.no_grad():
            for parameter, before in zip(self.parameters, self._copies, strict=True):
                parameter.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


class LastStep:
    """The state at the end of the last step, except parameters and optimizer states, which a lost step does not change.

    It includes what schedulers have set in the optimizers (learning rates). Between two steps, for example in an
    evaluation, nothing is undone, because nothing of that is repeated. `changes_early`: in one of the first steps, the
    script has changed parameters before an optimizer did.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], others: Mapping[str, Stateful]
    ) -> None:
        self._homes = [module._buffers for module in model.modules()]
        self._parameters = list(model.parameters())
        self._optimizers = optimizers
        self._small = {name: part for name, part in others.items() if _size_bytes(part) <= _SMALL_BYTES}
        self._large = {name: part for name, part in others.items() if name not in self._small}
        self._is_begun = self._is_early = False
        self._buffers: list[tuple[Buffers, Buffers]] = []
        self._kept_buffers: list[torch.Tensor] = []
        self._kept_groups: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []
        self._kept: dict[str, Any] = {}
        self._begun = 0
        self._watched: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._samples: list[torch.Tensor] | None = None
        self._first_samples: list[torch.Tensor] | None = None
        self.changes_early = False
        self._generators, self._rng = rng.Capture(), dict[str, Any]()
        self._begins_with_pass = False

    @property
    def is_begun(self) -> bool:
        """True in a step: from its beginning until it is made or undone."""
        return self._is_begun

    def begin_step(self, *, is_lost: bool = False) -> None:
        """Start a step: the current state is the end of the last one. `is_lost`: this step will have to be undone."""
        if self._begun < _CHECKED_STEPS:
            self._watch_large()
        self._keep_buffers()
        self._rng = self._generators.capture()
        self._kept = {name: copy.deepcopy(part.state_dict()) for name, part in self._small.items()}
        self._kept_groups = [[(group, _settings(group)) for group in each.param_groups] for each in self._optimizers]
        self._versions = [tensor._version for tensor in self._watched]
        self._is_begun, self._is_early, self._samples = True, False, None
        self._first_samples = sample(self._parameters) if self._begun < _CHECKED_STEPS else None
        if is_lost:
            self.copy_large()

    def begin_with_pass(self, *, is_lost: bool) -> None:
        """Start a step that the script has prepared already, as far as it draws random numbers: for its data."""
        self._begins_with_pass, drawn_from = True, self._rng
        self.begin_step(is_lost=is_lost)
        self._rng = drawn_from or self._rng

    def copy_large(self) -> None:
        """Copy large state because a peer is lost: later changes will have to be undone."""
        if self._is_begun and self._samples is None:
            self._is_early = self._versions != [tensor._version for tensor in self._watched]
            self._kept |= {name: copy.deepcopy(part.state_dict()) for name, part in self._large.items()}
            self._samples = sample(self._parameters)

    def accept_parameters(self) -> None:
        """Accept the current parameters, which rank 0 has just broadcast, as unchanged by the script."""
        if self._first_samples is not None:
            self._first_samples = sample(self._parameters)

    def check_parameters(self) -> None:
        """Check for early changes, just before an optimizer makes its step."""
        if self._first_samples is not None:
            self.changes_early |= not all(map(torch.equal, self._first_samples, sample(self._parameters)))
            self._first_samples = None

    def end_step(self) -> None:
        """Record that the step has been made."""
        self._is_begun, self._kept, self._kept_groups, self._samples = False, {}, [], None
        self._rng = self._generators.capture() if self._begins_with_pass else {}

    def restore(self, undone: Sequence[torch.Tensor] = ()) -> bool:
        """Return to the beginning of the step; return False if the script has changed state that cannot be restored.

        The gate restores the parameters in `undone`, regardless of what has changed them: an optimizer with a closure
        continues after the loss.
        """
        if not self._is_begun:
            return True
        is_whole = not self._is_early and self._is_as_kept(frozenset(undone))
        with torch.no_grad():
            self._put_buffers_back()
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        rng.restore(self._rng)
        for name, state in self._kept.items():
            {**self._small, **self._large}[name].load_state_dict(state)
        for optimizer, groups in zip(self._optimizers, self._kept_groups, strict=True):
            optimizer.param_groups[:] = [group for group, _ in groups]  # the script may have added some
            for group, settings in groups:
                group.update(settings)
        self.end_step()
        return is_whole

    def _is_as_kept(self, undone: frozenset[torch.Tensor]) -> bool:
        """Return whether all parameters but the `undone` ones are as they were when the loss was noticed."""
        if self._samples is None:
            return True
        now = zip(self._parameters, self._samples, sample(self._parameters), strict=True)
        return all(parameter in undone or torch.equal(before, sample) for parameter, before, sample in now)

    def _keep_buffers(self) -> None:
        """Copy the buffers, and remember their tensors, because a pass may replace them."""
        self._buffers = [(home, dict(home)) for home in self._homes if home]
        now = _tensors(self._buffers)
        if len(now) != len(self._kept_buffers) or not all(map(_is_alike, now, self._kept_buffers)):
            self._kept_buffers = [torch.empty_like(buffer) for buffer in now]
        with torch.no_grad():
            for kept, buffer in zip(self._kept_buffers, now, strict=True):
                kept.copy_(buffer)

    def _put_buffers_back(self) -> None:
        """Restore the buffers; keep those that were registered since."""
        for home, before in self._buffers:
            home.update(before)
        for kept, buffer in zip(self._kept_buffers, _tensors(self._buffers), strict=True):
            buffer.copy_(kept)

    def _watch_large(self) -> None:
        """Remember the tensors of large parts, to notice changes, unless a part replaces its tensors in each step."""
        leaves = [leaf for part in self._large.values() for _, leaf in tree.leaves(part.state_dict(), "")]
        known = [tensor.data_ptr() for tensor in self._watched]
        self._begun += 1
        self._watched = leaves if self._begun == 1 or known == [leaf.data_ptr() for leaf in leaves] else []


def _call_closure(closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> Any:
    """What a skipped step returns: the result of the closure, as the script may expect."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _tensors(buffers: Sequence[tuple[Buffers, Buffers]]) -> list[torch.Tensor]:
    return [buffer for _, before in buffers for buffer in before.values() if buffer is not None]


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer's parameter group that refers to the same parameters."""
    settings = {**group, "params": list(group["params"])}
    for key, value in group.items():
        if key != "params" and not _is_immutable(value):
            settings[key] = copy.deepcopy(value)
    return settings


def _is_immutable(value: object) -> bool:
    return type(value) in _IMMUTABLE or (type(value) is tuple and _IMMUTABLE.issuperset(map(type, value)))


def _size_bytes(part: Stateful) -> int:
    return sum(leaf.nbytes for _, leaf in tree.leaves(part.state_dict(), ""))
