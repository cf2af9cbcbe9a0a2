"""The end of an epoch that a script's own count has brought too early: test_kinds_of_training has real losses."""

from __future__ import annotations

import logging

import pytest
import torch

from elasticctl_train.data.sample_order import Cursor, EpochPlan, Feed
from elasticctl_train.inplace.atomic_steps import LastStep
from elasticctl_train.inplace.rest_of_epoch import RestOfEpoch

PLAN = EpochPlan(80, 8)


def test_only_as_many_batches_as_were_repeated_are_a_rest() -> None:
    feed = Feed()
    rest = RestOfEpoch(feed, None)
    assert not rest.is_left(PLAN, Cursor(position=64)), "nothing was repeated: the script has left for a reason"
    feed.repeated = 2
    assert rest.is_left(PLAN, Cursor(position=64))
    assert not rest.is_left(PLAN, Cursor(position=56))
    assert not rest.is_left(None, Cursor(position=64)), "the end of a stream is not known"
    feed.is_done = True
    assert not rest.is_left(PLAN, Cursor(position=64))


@pytest.mark.parametrize("changes_parameters", [False, True])
def test_the_end_of_the_epoch_is_undone(changes_parameters: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    feed, here = Feed(repeated=1), Cursor(epoch=3, position=72)
    rest = RestOfEpoch(feed, LastStep(model, [optimizer], {"scheduler": scheduler}))
    rest.keep(PLAN, here)
    optimizer.step()
    scheduler.step()
    if changes_parameters:
        with torch.no_grad():
            model.bias.add_(1)
    with caplog.at_level(logging.INFO, "elasticctl_train"):
        assert rest.go_back(here, is_main=True) != changes_parameters
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert scheduler.last_epoch == 0
    assert "epoch 3 goes on with the batches that are left (1)" in caplog.text
    assert not rest.is_left(PLAN, here), "the rest is begun, with nothing repeated yet"
