"""Random number generators, captured and restored."""

from __future__ import annotations

import random

import numpy as np
import torch

from elasticctl_train import rng
from tests.support.train.states import through_json


def draw() -> tuple[object, ...]:
    normal = np.random.normal()  # caches its second number, which is part of the state
    return random.random(), random.gauss(0, 1), normal, np.random.rand(), *torch.rand(3).tolist()


def test_every_generator_continues_where_it_was() -> None:
    rng.seed_all(1)
    draw()
    state = through_json(rng.capture())
    expected = [draw(), draw()]
    rng.seed_all(2)
    rng.restore(state)
    assert [draw(), draw()] == expected


def test_equal_seeds_give_equal_streams() -> None:
    streams = []
    for parts in [(1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 3, 3), (12, 3), (1, 23)]:
        rng.seed_all(*parts)
        streams.append(draw())
    assert streams[0] == streams[1]
    assert len(set(streams)) == 5


def test_repeated_captures_return_the_newest_state() -> None:
    rng.seed_all(1)
    capture = rng.Capture()
    for change in (lambda: None, *[np.random.normal] * 3, lambda: None, random.random, lambda: torch.rand(1)):
        change()
        state = capture.capture()
        expected = draw()
        rng.restore(state)
        assert draw() == expected
        rng.restore(state)
