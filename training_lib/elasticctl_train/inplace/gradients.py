"""DistributedDataParallel that survives the loss of a peer: what fails is the step, not the script.

Whatever a lost peer makes fail in a forward or backward pass is caught here, below the script's loop. From then on the
pass is only this rank's own; what it computes is not used, because the optimizer's step is left out (`steps`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.futures import Future

from elasticctl_train.data_parallel import Buckets, ResumableDataParallel
from elasticctl_train.dist import Channel, GroupOver, collective_errors, finish, finish_on_gpu
from elasticctl_train.inplace import releases
from elasticctl_train.inplace.waits import ReduceWaits

_OWN_ERRORS = ("Expected to ", "CUDA error", "CUDA out of memory", "DataLoader worker")
"""What errors begin with that no loss of a peer explains: DistributedDataParallel's about unused parameters first, and
torch's about a worker of a DataLoader that has died, which its handler of SIGCHLD raises wherever the rank is.
"""
_OWN_CODES = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError")
"""What NCCL calls such errors; it refuses two ranks on one GPU with the first."""


def is_own(error: BaseException) -> bool:
    """Has this process or its script failed, and not a peer? It would do so again in any other group."""
    words = str(error)
    is_ours = words.startswith(_OWN_ERRORS) or any(code in words for code in _OWN_CODES)
    return is_ours or isinstance(error, torch.OutOfMemoryError)


OnLoss = Callable[[BaseException], None]


class PeerWatch:
    """Has a collective failed since the last step? `on_loss(error)` is called for the first that does, from any thread.

    It is that of the group in which it failed: the next group may be under way by then. Gradients go through the group
    for training of `channel`, of `size` ranks. `survives`: what fails is caught, as somebody heeds it. `buckets` are
    those of gradients that the ranks have settled on; `recorded` is what is known of them by now. `waits`: for how long
    gradients are waited for. `is_on_gpu`: a GPU has been told to reduce some, and nobody has asked for the result.
    """

    def __init__(self, size: int, on_loss: OnLoss, channel: Channel | None = None) -> None:
        self.size, self._on_loss = size, on_loss
        self.channel = channel or Channel()
        self.waits = ReduceWaits()
        self._lock = threading.Lock()
        self.lost = False
        self.survives = True
        self.buckets: Buckets | None = None
        self.recorded: dict[int, list[int]] | None = None
        self.is_on_gpu = False

    @property
    def group(self) -> dist.ProcessGroup | None:
        """What gradients go through."""
        return self.channel.training

    def note(self, error: BaseException) -> None:
        """A collective has failed. Raises the error itself where nobody would heed it, or no peer is to blame."""
        if not self.survives or is_own(error):
            raise error
        with self._lock:
            if self.lost:
                return
            self.lost, on_loss = True, self._on_loss
        on_loss(error)

    def finish_on_gpu(self) -> None:
        """Wait for gradients that a GPU reduces, and note it if the group was given up before it had. Raises as `note`.

        To be called before anything is made of them for good.
        """
        if self.is_on_gpu:
            self.is_on_gpu = False
            try:
                finish_on_gpu(self.channel)
            except GroupOver as error:
                self.note(error)

    def reset(self, size: int, on_loss: OnLoss) -> None:
        """A new group has been formed, of `size` ranks."""
        with self._lock:
            self.size, self.lost, self.recorded, self._on_loss = size, False, None, on_loss
            self.is_on_gpu = False

    def record(self, index: int, parameters: list[int], *, is_last: bool) -> None:
        """One of the buckets, while they are recorded."""
        if self.recorded is None:
            return
        self.recorded[index] = parameters
        if is_last:
            self.buckets, self.recorded = [self.recorded[key] for key in sorted(self.recorded)], None


class ElasticDataParallel(ResumableDataParallel):
    """As DistributedDataParallel, over the watch's group, and over another one after each `reform`.

    Rank 0's buffers go to the others at the end of a step, and not as the next one begins: so they outlive rank 0, and
    an evaluation needs nobody else.
    """

    _watch: PeerWatch
    _shared: frozenset[str]
    _has_buffers_of_rank_0 = False

    def __init__(self, module: torch.nn.Module, watch: PeerWatch, *, init_sync: bool) -> None:
        """`init_sync`: begin with rank 0's parameters; without it they have to be equal on all ranks already."""
        self.__dict__["_watch"] = watch  # before Module's own constructor, which would refuse
        if "_shared" not in self.__dict__:
            self.__dict__["_shared"] = frozenset(name for name, _ in module.named_buffers())
        with releases.construction(init_sync=init_sync) as options:
            super().__init__(module, process_group=watch.group, **options)
        if init_sync and watch.size > 1 and next(module.parameters()).is_cuda:
            finish_on_gpu(watch.channel)
        numbers: dict[torch.Tensor, int] = {each: number for number, each in enumerate(self.reduced())}
        self.register_comm_hook(Means(watch, numbers), Means.hand_in)

    @property
    def known_buckets(self) -> Buckets | None:  # type: ignore[override]
        """Those that the ranks have settled on."""
        return self._watch.buckets

    def buckets(self) -> Buckets | None:
        """As noted while they were handed in."""
        return self._watch.buckets

    def reform(self) -> None:
        """Go on over the group as it is now; parameters are equal on all its ranks."""
        was_training = self.training
        self.__init__(self.module, self._watch, init_sync=False)  # type: ignore[misc]
        self.training = was_training
        self._has_buffers_of_rank_0 = False

    def settle(self) -> None:
        """Settle on the parameters as they are now, in other buckets. All ranks must call."""
        self._watch.buckets = self._watch.recorded = None
        self.reform()

    def reduce_waits_s(self) -> float:
        """For how long gradients of other ranks have been waited for."""
        return self._watch.waits.total_s()

    def share_buffers(self) -> None:
        """A step has been made: take over rank 0's buffers. All ranks must call. Raises RuntimeError."""
        if self.broadcast_buffers and self.modules_buffers and self._watch.size > 1:
            self._sync_buffers()  # type: ignore[no-untyped-call]
            self._has_buffers_of_rank_0 = True

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """As DistributedDataParallel, but leaves `tensors` alone if it raises RuntimeError: GroupOver if none come."""
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
        """Share those that the model had at first: a newcomer has not made yet what passes have registered since."""
        found = {name: buffer for name, buffer in self.module.named_buffers() if name in self._shared}
        self.modules_buffers, self.named_module_buffers = list(found.values()), found

    def _check_sync_bufs_pre_fwd(self) -> bool:
        has_them = self._has_buffers_of_rank_0 or self._watch.size == 1
        self._has_buffers_of_rank_0 &= not self.training
        return not has_them and bool(super()._check_sync_bufs_pre_fwd())  # type: ignore[no-untyped-call]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._watch.lost:
            had_settled = self._has_rebuilt_buckets
            try:
                passed = super()._pre_forward(*inputs, **kwargs)
                if self._has_rebuilt_buckets and not had_settled:
                    self._watch.recorded = {}
                return passed
            except RuntimeError as error:
                self._watch.note(error)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if not self._watch.lost:
            try:
                return super()._post_forward(output)
            except RuntimeError as error:
                self._watch.note(error)
        return output


class Means:
    """The means of one pass's gradients over all ranks: DistributedDataParallel's communication hook.

    On a CPU they are waited for when the last bucket is handed in, behind which a pass computes next to nothing: so
    they need no other thread, which would need the interpreter.
    """

    def __init__(self, watch: PeerWatch, numbers: Mapping[torch.Tensor, int]) -> None:
        self._watch, self._numbers = watch, numbers
        self._begun: deque[tuple[Any, torch.Tensor, Future[torch.Tensor]]] = deque()

    def hand_in(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """The mean of a bucket, or just anything once a peer is lost."""
        watch, index, is_last = self._watch, bucket.index(), bucket.is_last()
        if watch.recorded is not None:
            of_bucket = [self._numbers[parameter] for parameter in bucket.parameters()]
            watch.record(index, of_bucket, is_last=is_last)
        buffer = bucket.buffer()
        mean: Future[torch.Tensor] = Future()
        if buffer.is_cuda and watch.size > 1 and not watch.lost:
            return self._on_gpu(buffer, mean, is_last=is_last)
        if index == 0:
            self._begun.clear()  # of a pass that the script has broken off
        self._settle(only_ended=True)
        self._begun.append((self._begin(buffer), buffer, mean))
        if is_last:
            began_s = time.monotonic()
            self._settle()
            watch.waits.add(time.monotonic() - began_s)
        return mean

    def _begin(self, buffer: torch.Tensor) -> Any:
        """The reduction of a bucket as torch's Work; None where there is nobody to reduce it with."""
        watch = self._watch
        if watch.size == 1 or watch.lost or watch.group is None:
            return None
        try:
            buffer.div_(watch.size)
            return watch.group.allreduce([torch.view_as_real(buffer) if buffer.is_complex() else buffer])
        except RuntimeError as error:
            watch.note(error)
            return None

    def _settle(self, *, only_ended: bool = False) -> None:
        """Wait for what is under way, in its order; with `only_ended`, as far as it has ended already."""
        while self._begun:
            work, buffer, mean = self._begun[0]
            if only_ended and work is not None and not work.is_completed():
                return
            self._begun.popleft()
            try:
                if work is not None:
                    finish(work, self._watch.channel)
            except RuntimeError as error:
                self._watch.note(error)
            mean.set_result(buffer)

    def _on_gpu(self, buffer: torch.Tensor, mean: Future[torch.Tensor], *, is_last: bool) -> Future[torch.Tensor]:
        """There it is the device that waits, and `PeerWatch.finish_on_gpu` that asks it for the result."""
        watch = self._watch

        def averaged(_: Future[Any]) -> torch.Tensor:
            watch.waits.take_on_gpu(mark)
            return buffer

        try:
            mark = watch.waits.begin_on_gpu() if is_last else None
            work = dist.all_reduce(buffer.div_(watch.size), group=watch.group, async_op=True)
            watch.is_on_gpu = True
            reduced: Future[torch.Tensor] = work.get_future().then(averaged)
            return reduced
        except RuntimeError as error:
            watch.note(error)
        mean.set_result(buffer)
        return mean
