"""Detects whether the script waits for peers in one of torch's calls that can no longer end."""

from __future__ import annotations

import os
import sys
import time
from types import FrameType

import torch.distributed
from torch.autograd import graph
from torch.nn.parallel import distributed

_WAITS = (os.path.dirname(torch.distributed.__file__), distributed.__file__, graph.__file__)
"""Where Python enters a collective: by a direct call, for parameters or buffers, or at the end of a backward pass."""
_LONG_S = 2.0
_IDLE = 0.2
"""A process that uses less than this share of one core does not compute."""


def is_stuck(thread: int) -> bool:
    """Observe the thread with this identifier for two seconds; return False if it moves or is not in such a call.

    Also return False if the process computes.
    """
    before, used_s = _where(thread), time.process_time()
    time.sleep(_LONG_S)
    return before is not None and before == _where(thread) and time.process_time() - used_s < _IDLE * _LONG_S


def _where(thread: int) -> tuple[FrameType, int] | None:
    """The thread's frame and position in a call that may wait for peers; None if it is in no such call, or over."""
    frame = sys._current_frames().get(thread)
    if frame is None or not frame.f_code.co_filename.startswith(_WAITS):
        return None
    return frame, frame.f_lasti
