"""DistributedDataParallel that survives the loss of a peer: the step fails, but the script does not.

Every error that a lost peer causes in a forward or backward pass is caught here, below the script's loop. The pass then
continues on this rank alone. Its result is not used, because the optimizer's step is skipped (`atomic_steps`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.futures import Future

from elasticctl_store.errors import TrainError
from elasticctl_train import torch_releases
from elasticctl_train.data_parallel import Buckets, ResumableDataParallel
from elasticctl_train.dist import Channel, GroupOver, collective_errors, finish, finish_on_gpu
from elasticctl_train.step_times import ReduceWaits

_OWN_ERRORS = ("Expected to ", "CUDA error", "CUDA out of memory", "DataLoader worker")
"""The beginnings of errors that no lost peer explains: DistributedDataParallel's about unused parameters, CUDA's, and
torch's about a DataLoader worker that has died, which its handler of SIGCHLD raises wherever the rank is.
"""
_OWN_CODES = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError")
"""NCCL's names for such errors. It refuses two ranks on one GPU with the first."""
_NO_BACKWARD = -1
"""What torch says instead of the number of the backward pass that this thread is in."""
_USUAL_SAMPLE_RATE = 100
"""Of so many iterations, DistributedDataParallel measures one by default."""


def is_own(error: BaseException) -> bool:
    """True if this process or its script has failed, rather than a peer. The error would recur in any other group."""
    words = str(error)
    is_ours = words.startswith(_OWN_ERRORS) or any(code in words for code in _OWN_CODES)
    return is_ours or isinstance(error, torch.OutOfMemoryError)


OnLoss = Callable[[BaseException], None]
OnPass = Callable[[Sequence[object], Mapping[str, object]], None]


class PeerWatch:
    """Tracks whether a collective has failed since the last step.

    Gradients go through the training group of `channel`, which has `size` ranks. `survives`: errors are caught, because
    the process may stay for the next group. `buckets` are the gradient buckets that the ranks have settled on. `waits`
    measures how long this rank waits for gradients.
    """

    def __init__(self, size: int, on_loss: OnLoss, channel: Channel | None = None, *, survives: bool = True) -> None:
        """`on_loss(error)` is called for the first failure, from any thread. Each group has its own `on_loss`, because
        the next group may be under way by then."""
        self.size, self._on_loss = size, on_loss
        self.channel = channel or Channel()
        self.waits = ReduceWaits()
        self._lock = threading.Lock()
        self.lost = self._is_gpu_reducing = False
        self.survives = survives
        self.buckets: Buckets | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group for gradients."""
        return self.channel.training

    def record_loss(self, error: BaseException) -> None:
        """Record that a collective has failed.

        Raises the error itself if the process does not stay, or if no peer is to blame.
        """
        if not self.survives or is_own(error):
            raise error
        with self._lock:
            if self.lost:
                return
            self.lost, on_loss = True, self._on_loss
        on_loss(error)

    def expect_gpu(self) -> None:
        """Record that a GPU reduces gradients, whose result has not been checked."""
        self._is_gpu_reducing = True

    def finish_on_gpu(self) -> None:
        """Wait for gradients that a GPU reduces, and record a loss if the group was given up before that.

        Call this before the gradients have any lasting effect. Raises the same errors as `record_loss`.
        """
        if self._is_gpu_reducing:
            self._is_gpu_reducing = False
            try:
                finish_on_gpu(self.channel)
            except GroupOver as error:
                self.record_loss(error)

    def reset(self, size: int, on_loss: OnLoss) -> None:
        """Start with a new group of `size` ranks."""
        with self._lock:
            self.size, self._on_loss = size, on_loss
            self.lost = self._is_gpu_reducing = False

    def close(self) -> None:
        """Raise all errors from now on."""
        self.survives = False

    def put_buckets(self, buckets: Buckets | None) -> None:
        """Record the buckets that the ranks have agreed on; None if they have to agree again."""
        self.buckets = buckets

    def start_with_buckets(self, buckets: Buckets | None) -> None:
        """Record the buckets that the run has resumed with, unless the ranks have settled already."""
        self.buckets = self.buckets or buckets


class ElasticDataParallel(ResumableDataParallel):
    """DistributedDataParallel over the watch's group, and over another group after each `reform`.

    Rank 0's buffers are broadcast at the end of a step, not at the beginning of the next. So they survive the loss of
    rank 0, and an evaluation needs no communication.
    """

    _watch: PeerWatch
    _on_pass: OnPass | None
    _shared: frozenset[str]
    _has_buffers_of_rank_0 = False

    def __init__(
        self, module: torch.nn.Module, watch: PeerWatch, *, init_sync: bool, on_pass: OnPass | None = None
    ) -> None:
        """`init_sync`: start with rank 0's parameters; otherwise they must already be equal on all ranks.
        `on_pass(inputs, options)` is called before each pass in training, while the watch survives."""
        # Module.__setattr__ would refuse attributes before its own constructor.
        self.__dict__ |= {"_watch": watch, "_on_pass": on_pass}
        if "_shared" not in self.__dict__:
            self.__dict__["_shared"] = frozenset(name for name, _ in module.named_buffers())
        with torch_releases.construction(init_sync=init_sync) as options:
            super().__init__(module, process_group=watch.group, **options)
        if init_sync and watch.size > 1 and next(module.parameters()).is_cuda:
            finish_on_gpu(watch.channel)
        super().register_comm_hook(Means(watch), Means.hand_in)

    @property
    def known_buckets(self) -> Buckets | None:  # type: ignore[override]
        """The buckets that the ranks have settled on."""
        return self._watch.buckets

    def buckets(self) -> Buckets | None:
        """Return the buckets that the ranks have settled on."""
        return self._watch.buckets

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Raise TrainError: DistributedDataParallel takes one communication hook, which is in use here."""
        raise TrainError(
            "run.model has a communication hook already, which keeps this process when a peer is lost. FIX: call "
            "init_process_group yourself, and pass Run the model in DistributedDataParallel with your hook; ranks then "
            "restart when the group changes"
        )

    def reform(self) -> None:
        """Continue over the current group; the parameters must be equal on all its ranks."""
        was_training = self.training
        self.__init__(self.module, self._watch, init_sync=False, on_pass=self._on_pass)  # type: ignore[misc]
        self.training = was_training
        self._has_buffers_of_rank_0 = False

    def release(self) -> None:
        """Let go of the parameters, whose gradients would still come here; this object cannot be used any more."""
        del self.reducer, self.logger

    def adopt_parameters(self) -> None:
        """Rebuild the buckets for the parameters as they are now. All ranks must call this."""
        self._watch.put_buckets(None)
        self.reform()

    def rebuild_buckets(self) -> None:
        """Rebuild the buckets now if the next pass would. All ranks must call this, after a backward pass.

        Parameters are not changed before it, so a step that counts is never without the buckets of the next one, which
        decide how gradients are summed up.
        """
        if self._has_rebuilt_buckets or self._watch.lost or torch._C._current_graph_task_id() != _NO_BACKWARD:
            return
        try:
            if self.reducer._rebuild_buckets():
                self._has_rebuilt_buckets = True
                self._read_buckets()
                if self._watch.size > 1 and next(self.module.parameters()).is_cuda:
                    self._watch.expect_gpu()
        except RuntimeError as error:
            if not is_own(error):  # the next pass raises such an error, and says what to do
                self._watch.record_loss(error)
        self._watch.finish_on_gpu()

    def reduce_waits_s(self) -> float:
        """Return for how many seconds this rank has waited for gradients of other ranks."""
        return self._watch.waits.total_s()

    def share_buffers(self) -> None:
        """Take over rank 0's buffers at the end of a step. All ranks must call this. Raises RuntimeError."""
        if self.broadcast_buffers and self.modules_buffers and self._watch.size > 1:
            self._sync_buffers()  # type: ignore[no-untyped-call]
            self._has_buffers_of_rank_0 = True

    def _read_buckets(self) -> None:
        """Record the buckets, which have just been rebuilt. torch describes them only in iterations that it samples."""
        logger: Any = self.logger
        self.reducer._set_ddp_runtime_logging_sample_rate(1)
        logger.set_runtime_stats_and_log()
        self.reducer._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE)
        self._watch.put_buckets(super().buckets())

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """As in DistributedDataParallel, but `tensors` do not change if it fails.

        Raises RuntimeError; its subclass GroupOver if the group is over.
        """
        channel = self._watch.channel
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = _flatten_dense_tensors(alike)  # type: ignore[no-untyped-call]
            with collective_errors():
                work = dist.broadcast(flat, group=channel.training, group_src=authoritative_rank, async_op=True)
                if flat.is_cuda:
                    work.wait()
                    finish_on_gpu(channel)
                else:
                    finish(work, channel)
            parts = _unflatten_dense_tensors(flat, alike)  # type: ignore[no-untyped-call]
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part)

    def _assign_modules_buffers(self) -> None:
        """Share the buffers that the model had at first: a newcomer does not have those that were registered since."""
        found = {name: buffer for name, buffer in self.module.named_buffers() if name in self._shared}
        self.modules_buffers, self.named_module_buffers = list(found.values()), found

    def _check_sync_bufs_pre_fwd(self) -> bool:
        has_them = self._has_buffers_of_rank_0 or self._watch.size == 1
        self._has_buffers_of_rank_0 &= not self.training
        return not has_them and bool(super()._check_sync_bufs_pre_fwd())  # type: ignore[no-untyped-call]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._on_pass is not None and self.training and torch.is_grad_enabled() and self._watch.survives:
            self._on_pass(inputs, kwargs)
        if not self._watch.lost:
            had_settled = self._has_rebuilt_buckets
            try:
                passed = super()._pre_forward(*inputs, **kwargs)
                if self._has_rebuilt_buckets and not had_settled:
                    self._read_buckets()
                return passed
            except RuntimeError as error:
                self._watch.record_loss(error)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if not self._watch.lost:
            try:
                return super()._post_forward(output)
            except RuntimeError as error:
                self._watch.record_loss(error)
        return output


class Means:
    """The means of one pass's gradients over all ranks, as DistributedDataParallel's communication hook.

    On CPUs, it waits for them when the last bucket is handed in, because the pass computes almost nothing after that.
    So it needs no other thread, which would compete for the interpreter.
    """

    def __init__(self, watch: PeerWatch) -> None:
        self._watch = watch
        self._begun: deque[tuple[Any, torch.Tensor, Future[torch.Tensor]]] = deque()

    def hand_in(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Return the mean of a bucket; its content is arbitrary once a peer is lost."""
        watch, is_last, buffer = self._watch, bucket.is_last(), bucket.buffer()
        mean: Future[torch.Tensor] = Future()
        if buffer.is_cuda and watch.size > 1 and not watch.lost:
            return self._on_gpu(buffer, mean, is_last=is_last)
        if bucket.index() == 0:
            self._begun.clear()  # left over from a pass that the script has abandoned
        self._finish_reductions(only_ended=True)
        self._begun.append((self._begin_reduction(buffer), buffer, mean))
        if is_last:
            began_s = time.monotonic()
            self._finish_reductions()
            watch.waits.add(time.monotonic() - began_s)
        return mean

    def _begin_reduction(self, buffer: torch.Tensor) -> Any:
        """Start to reduce a bucket; return torch's Work, or None if there is no other rank."""
        watch = self._watch
        if watch.size == 1 or watch.lost or watch.group is None:
            return None
        try:
            buffer.div_(watch.size)
            return watch.group.allreduce([torch.view_as_real(buffer) if buffer.is_complex() else buffer])
        except RuntimeError as error:
            watch.record_loss(error)
            return None

    def _finish_reductions(self, *, only_ended: bool = False) -> None:
        """Wait for the pending reductions in order; with `only_ended`, only for those that have already ended."""
        while self._begun:
            work, buffer, mean = self._begun[0]
            if only_ended and work is not None and not work.is_completed():
                return
            self._begun.popleft()
            try:
                if work is not None:
                    finish(work, self._watch.channel)
            except RuntimeError as error:
                self._watch.record_loss(error)
            mean.set_result(buffer)

    def _on_gpu(self, buffer: torch.Tensor, mean: Future[torch.Tensor], *, is_last: bool) -> Future[torch.Tensor]:
        """On a GPU, the device waits for the reduction, and `PeerWatch.finish_on_gpu` checks its result."""
        watch = self._watch

        def averaged(_: Future[Any]) -> torch.Tensor:
            watch.waits.end_on_gpu(mark)
            return buffer

        try:
            mark = watch.waits.begin_on_gpu() if is_last else None
            work = dist.all_reduce(buffer.div_(watch.size), group=watch.group, async_op=True)
            watch.expect_gpu()
            reduced: Future[torch.Tensor] = work.get_future().then(averaged)
            return reduced
        except RuntimeError as error:
            watch.record_loss(error)
        mean.set_result(buffer)
        return mean
