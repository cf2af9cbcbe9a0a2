"""Which connections the rendezvous port accepts; every pod of a cluster can reach it. Pure: times are parameters.

A client is unknown until it has shown a valid token. Unknown clients are limited by address, the workers of a job by
job. A worker shows its token within milliseconds of connecting, and its address then gets back what the connection
took, so thousands of workers behind one address are let in as they come.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

CONNECTS, CONNECTS_PER_S = 2048.0, 200.0
"""How many unknown clients may connect from one address at once, and per second in the long run."""
UNKNOWN_PER_ADDRESS = 1024
UNKNOWN_CLIENTS = 4096
"""How many unknown clients may be connected at a time; the oldest one is closed for the next."""
PER_WORKER, PER_JOB = 16, 64
"""How many connections a job may have: a launcher needs 3 or 4, and a replaced worker may leave some behind."""
ADDRESSES = 16_384


@dataclass(slots=True)
class _Address:
    tokens: float
    at_s: float
    unknown: int = 0


@dataclass(slots=True)
class Admission:
    """Counts connections, and the rate of new ones, per address."""

    _addresses: dict[str, _Address] = field(default_factory=dict)

    def admit(self, peer: str, now_s: float) -> bool:
        """Count an unknown client that connects; False if it may not. `now_s` is the time of a monotonic clock."""
        network = network_of(peer)
        found = self._addresses.pop(network, None) or _Address(CONNECTS, now_s)
        self._addresses[network] = found  # the one that was heard of last is at the end
        found.tokens = min(CONNECTS, found.tokens + (now_s - found.at_s) * CONNECTS_PER_S)
        found.at_s = now_s
        if found.tokens < 1 or found.unknown >= UNKNOWN_PER_ADDRESS:
            return False
        found.tokens -= 1
        found.unknown += 1
        if len(self._addresses) > ADDRESSES:
            self._drop_oldest()
        return True

    def leave(self, peer: str, *, known: bool) -> None:
        """An unknown client has disconnected or, if it is `known` now, has shown a token."""
        found = self._addresses.get(network_of(peer))
        if found is not None:
            found.unknown -= 1
            found.tokens += known

    def _drop_oldest(self) -> None:
        """Drop the address that has been silent longest and has no connections."""
        for network, found in self._addresses.items():
            if not found.unknown:
                del self._addresses[network]
                return


def network_of(peer: str) -> str:
    """The range that one machine can choose its addresses from: with IPv6, a network of 64 bits."""
    if ":" not in peer:
        return peer
    address = ipaddress.IPv6Address(peer.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def most_connections(workers: int) -> int:
    """How many connections a job may have with that many live workers."""
    return PER_JOB + PER_WORKER * workers
