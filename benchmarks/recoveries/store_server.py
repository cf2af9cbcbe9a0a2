"""A c10d store outside of all workers, for stock torchrun: `python store_server.py PORT`, until its stdin is closed."""

from __future__ import annotations

import sys

from torch._C._distributed_c10d import TCPStore


def main() -> None:
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
