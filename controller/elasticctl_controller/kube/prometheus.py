"""Counters, gauges and histograms in Prometheus' text format; the few lines of it that a controller needs."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(Protocol):
    """Something that can be scraped."""

    name: str
    kind: str
    help: str

    def samples(self) -> Iterator[str]:
        """Its lines, without the comments above them."""


class Counter:
    """Counts, by the values of `labels`; thread-safe."""

    kind = "counter"

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name, self.help, self._labels = name, help, labels
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self._values[()] = 0.0

    def add(self, *values: str, by: float = 1.0) -> None:
        """Count one more; `values` are the labels', in order."""
        with self._lock:
            self._values[values] += by

    def samples(self) -> Iterator[str]:
        """One line for each combination of labels seen."""
        with self._lock:
            found = dict(self._values)
        for values, value in sorted(found.items()):
            yield _line(self.name, zip(self._labels, values, strict=True), value)


class Gauge:
    """What `read` returns at each scrape: the values of the label -> a number."""

    kind = "gauge"

    def __init__(self, name: str, help: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        self.name, self.help, self._label, self._read = name, help, label, read

    def samples(self) -> Iterator[str]:
        """One line for each value of the label; "" stands for no label."""
        for value, number in sorted(self._read().items()):
            yield _line(self.name, [(self._label, value)] if value else [], number)


class Histogram:
    """How observations are distributed over `buckets` (upper bounds, growing); thread-safe."""

    kind = "histogram"

    def __init__(self, name: str, help: str, buckets: tuple[float, ...]) -> None:
        self.name, self.help, self._buckets = name, help, buckets
        self._lock = threading.Lock()
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float) -> None:
        """Add one observation."""
        with self._lock:
            self._counts[bisect_left(self._buckets, value)] += 1
            self._sum += value

    def samples(self) -> Iterator[str]:
        """The cumulative buckets, the sum and the count."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        running = 0
        for bound, count in zip((*map(_number, self._buckets), "+Inf"), counts, strict=True):
            running += count
            yield _line(f"{self.name}_bucket", [("le", bound)], running)
        yield _line(f"{self.name}_sum", [], total)
        yield _line(f"{self.name}_count", [], running)


def render(metrics: tuple[Metric, ...]) -> str:
    """The page that Prometheus reads."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *metric.samples()]
    return "\n".join([*lines, ""])


def _line(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{shown}}} {_number(value)}" if shown else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
