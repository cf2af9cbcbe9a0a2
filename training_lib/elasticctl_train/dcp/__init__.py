"""The checkpoint format as a storage for `torch.distributed.checkpoint`: `dcp.save`, `dcp.async_save` and `dcp.load`.

    from elasticctl_train.dcp import ElasticReader, ElasticWriter

    dcp.save(state_dict, storage_writer=ElasticWriter("s3://bucket/run"))
    dcp.load(state_dict, storage_reader=ElasticReader("s3://bucket/run"))

The planners, resharding and loading in place are PyTorch's own.
"""

from __future__ import annotations

from elasticctl_train.dcp.reader import ElasticReader
from elasticctl_train.dcp.writer import ElasticWriter

__all__ = ["ElasticReader", "ElasticWriter"]
