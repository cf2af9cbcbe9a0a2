"""Detects whether the script waits for peers in one of torch's calls that can no longer end."""

from __future__ import annotations

import os
import sys
import threading
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


def is_stuck() -> bool:
    """Observe the main thread for two seconds; return False if it moves, computes, or is not in such a call."""
    before, used_s = _where(), time.process_time()
    time.sleep(_LONG_S)
    return before is not None and before == _where() and time.process_time() - used_s < _IDLE * _LONG_S


def _where() -> tuple[FrameType, int] | None:
    """The main thread's frame and position in a call that may wait for peers; None if it is in no such call."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.startswith(_WAITS):
        return None
    return frame, frame.f_lasti
