"""Every error this library raises on purpose, in one tree.

    TrainError
    ├── DataError               the dataset or the batch size does not fit what is asked of it
    ├── StateError              the state holds something a checkpoint cannot hold; names the path in the tree
    ├── NotFiniteError          the loss is NaN or infinite, and the job was told to stop then
    ├── RollbackError           the loss is NaN or infinite, and the next attempt goes on from before that
    ├── RestoreError            a whole checkpoint was found, but it is not one of this model
    └── StorageError            the storage refused or failed; what was committed before is untouched
        ├── ExistsError             an object of that name is already there
        ├── MissingError            no object of that name
        ├── DamagedError            an object is not what was written: torn, truncated or altered
        │   └── FormatError             it is whole, and written by another version of this library
        ├── FullError               the storage has no room left
        ├── NoMemoryError           this process has no memory for a checkpoint's bytes
        ├── SaveError               a checkpoint could not be written
        └── FencedError             a newer run has taken over this URL
            └── MovedError              the job has been moved to another URL for good

Each message says what failed, the value, and what to do next, in one or two lines.
"""

from __future__ import annotations


class TrainError(Exception):
    """Base of all errors shown to a user as one clear line."""


class DataError(TrainError):
    """The dataset, the global batch or the use of the loader is wrong."""


class StateError(TrainError):
    """A value in the state cannot be stored in a checkpoint; nothing was written."""


class NotFiniteError(TrainError):
    """The loss is no longer a finite number; nothing was saved since."""


class RollbackError(TrainError):
    """The loss is no longer a finite number; the next attempt continues from before that, without the batches since."""


class RestoreError(TrainError):
    """The checkpoint is whole but does not fit the objects it is to be put into."""


class StorageError(TrainError):
    """The storage cannot be reached, refused a request or failed in it."""


class ExistsError(StorageError):
    """The object was to be created and is already there."""


class MissingError(StorageError):
    """The object is not there."""


class DamagedError(StorageError):
    """The object does not match its checksum or its format."""


class FormatError(DamagedError):
    """The object is whole, but another version of this library wrote it."""


class FullError(StorageError):
    """The disk, or the quota on it, has no room for what was to be written."""


class NoMemoryError(StorageError):
    """There is no memory to copy a share into, or to read one into."""


class SaveError(StorageError):
    """A checkpoint was not committed; the last committed one stands."""


class FencedError(StorageError):
    """A newer run owns the URL: this one may neither commit nor delete any more."""


class MovedError(FencedError):
    """The job continues at another URL; its journal here is closed."""
