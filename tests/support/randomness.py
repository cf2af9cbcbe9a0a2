"""The same tests in every run; with `--seed`, others: `make soak` searches so for what fails.

As a rule, Hypothesis derives the examples of a property from the property itself, and a test that is marked with
`seeds(N)` takes the numbers up to N as its argument `seed`. `--seed=S` has both begin with S, and try more of them.
`-m randomized` selects what such a search is worth for: the properties, and the tests with seeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, configuration, core, settings
from hypothesis.internal.conjecture import providers

from tests.support.selection import only_quick

SEARCH_TIMES = 5
"""With `--seed`, so many times the examples of a property are tried."""
QUICK_SHARE, QUICK_LEAST = 6, 10
"""`make quick` tries a sixth of the examples of a property, and so many at least; and a sixth of the seeds."""


class Tally:
    """Notes how each test went, for tests/soak.py."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line for each test, and for each other failure."""
        if report.when == "call" or not report.passed:
            with self._file.open("a") as file:
                file.write(f"{getattr(report, 'examples', 0)}\t{report.outcome}\t{report.nodeid}\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make soak` gives."""
    parser.addoption("--seed", type=int, help="try the examples and the seeds that begin with this one")
    parser.addoption("--tally", type=Path, help="note in this file how each test went, and how many examples it tried")


def pytest_configure(config: pytest.Config) -> None:
    """Let nothing but the seed decide what is tried: no time, no earlier run, no module that happens to be imported."""
    config.addinivalue_line("markers", "seeds(count, search=count): takes so many seeds, or so many with --seed")
    config.addinivalue_line(
        "markers", "randomized: a property, or a test with seeds; set by tests/support/randomness.py"
    )
    core.global_force_seed = config.option.seed
    fixed = config.option.seed is None
    checks = [HealthCheck.too_slow]  # so is every property on a busy machine
    settings.register_profile(
        "fixed", derandomize=fixed, database=None, deadline=None, suppress_health_check=checks, print_blob=False
    )
    settings.load_profile("fixed")
    configuration.set_hypothesis_home_dir(
        "/dev/null"
    )  # it keeps a table there, which takes a tenth of a second to make
    nothing = providers._local_constants
    providers._get_local_constants = lambda: nothing
    if config.option.tally and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally(config.option.tally))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what has nothing randomized, when only that is wanted: seconds of each process and round."""
    if config.option.markexpr != "randomized" or collection_path.suffix != ".py":
        return None
    return None if re.search(r"hypothesis|mark\.seeds", collection_path.read_text()) else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test with the marker `seeds` its seeds."""
    marker = metafunc.definition.get_closest_marker("seeds")
    if marker is None:
        return
    first, count = metafunc.config.option.seed, marker.args[0]
    if first is not None:
        count = marker.kwargs.get("search", count)
    elif only_quick(metafunc.config):
        count = -(-count // QUICK_SHARE)
    metafunc.parametrize("seed", range(first or 0, (first or 0) + count))


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is randomized, and have each property try as many examples as are wanted now."""
    owners = set()
    for item in items:
        owner = _settings_owner(item)
        if owner or item.get_closest_marker("seeds"):
            item.add_marker(pytest.mark.randomized)
        owners.add(owner)
    for holder, name in owners - {None}:
        given = getattr(holder, name)
        count = given.max_examples
        if config.option.seed is not None:
            count *= SEARCH_TIMES
        elif only_quick(config):
            count = min(count, max(QUICK_LEAST, count // QUICK_SHARE))
        setattr(holder, name, settings(given, max_examples=count))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Count examples: Hypothesis gives the figure only in words."""
    report: pytest.TestReport = yield
    words = getattr(item, "hypothesis_statistics", "")
    report.examples = sum(map(int, re.findall(r"(\d+) passing", words)))  # type: ignore[attr-defined]
    return report


def _settings_owner(item: pytest.Item) -> tuple[object, str] | None:
    """Where Hypothesis keeps the settings of a property or of a state machine."""
    if not isinstance(item, pytest.Function) or not getattr(item.function, "is_hypothesis_test", False):
        return None
    if hasattr(item.cls, "settings"):
        return item.cls, "settings"
    return item.function, "_hypothesis_internal_use_settings"
