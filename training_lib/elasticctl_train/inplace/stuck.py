"""Does the script wait for peers, in one of torch's calls that nothing can end any more?"""

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
"""Where Python enters a collective: by name, for parameters or buffers, or at the end of a backward pass."""
_LONG_S = 2.0
_IDLE = 0.2
"""Below this share of one core, nothing in this process computes."""


def is_stuck() -> bool:
    """Look for two seconds. A pass that computes on, or a script that sleeps, is not stuck."""
    before, used_s = _where(), time.process_time()
    time.sleep(_LONG_S)
    return before is not None and before == _where() and time.process_time() - used_s < _IDLE * _LONG_S


def _where() -> tuple[FrameType, int] | None:
    """In which of torch's calls that may wait for peers the main thread is, and where in it; None: in no such call."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.startswith(_WAITS):
        return None
    return frame, frame.f_lasti
