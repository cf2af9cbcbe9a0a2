from __future__ import annotations

import pytest

from elasticctl_train.storage import Storage
from tests.train.conftest import Cloud
from tests.train.storage_contract import StorageContract


class TestS3Storage(StorageContract):
    @pytest.fixture
    def storage(self, s3: Cloud) -> Storage:
        return s3.open()


class TestGcsStorage(StorageContract):
    @pytest.fixture
    def storage(self, gs: Cloud) -> Storage:
        return gs.open()
