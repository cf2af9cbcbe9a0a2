"""Who may connect to the rendezvous port, which every pod of a cluster can reach. Pure: times are parameters.

A stranger is a connection on which no valid token has been shown yet. What strangers can take is limited by address;
what a job's workers can take, by job. A worker shows its token within milliseconds of connecting, and gets back then
what its connection took from its address: thousands of workers behind one address are let in as they come.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

CONNECTS, CONNECTS_PER_S = 2048.0, 200.0
"""How many strangers may connect from one address at once, and per second in the long run."""
STRANGERS_PER_ADDRESS = 1024
STRANGERS = 4096
"""How many strangers may be connected at a time; the one that has been silent longest goes for the next."""
PER_WORKER, PER_JOB = 16, 64
"""Connections of a job: a launcher needs 3 or 4, and a worker that is replaced may leave some of its own behind."""
ADDRESSES = 16_384


@dataclass(slots=True)
class _Address:
    tokens: float
    at_s: float
    strangers: int = 0


@dataclass(slots=True)
class Admission:
    """Counts connections, and the rate of new ones, per address."""

    _addresses: dict[str, _Address] = field(default_factory=dict)

    def admit(self, peer: str, now_s: float) -> bool:
        """A stranger connects: may it? `now_s` is of a monotonic clock."""
        network = network_of(peer)
        found = self._addresses.pop(network, None) or _Address(CONNECTS, now_s)
        self._addresses[network] = found  # the one that was heard of last is at the end
        found.tokens = min(CONNECTS, found.tokens + (now_s - found.at_s) * CONNECTS_PER_S)
        found.at_s = now_s
        if found.tokens < 1 or found.strangers >= STRANGERS_PER_ADDRESS:
            return False
        found.tokens -= 1
        found.strangers += 1
        if len(self._addresses) > ADDRESSES:
            self._forget_one()
        return True

    def leave(self, peer: str, *, known: bool) -> None:
        """A stranger has gone, or (`known`) has shown a token and is none any more."""
        found = self._addresses.get(network_of(peer))
        if found is not None:
            found.strangers -= 1
            found.tokens += known

    def _forget_one(self) -> None:
        """Forget the address that was silent longest, of those that nobody is connected from."""
        for network, found in self._addresses.items():
            if not found.strangers:
                del self._addresses[network]
                return


def network_of(peer: str) -> str:
    """What one machine can choose its address from: of IPv6, 64 bits."""
    if ":" not in peer:
        return peer
    address = ipaddress.IPv6Address(peer.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def most_connections(workers: int) -> int:
    """How many connections a job may have with that many live workers."""
    return PER_JOB + PER_WORKER * workers
