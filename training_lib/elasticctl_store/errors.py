"""The errors that this library raises on purpose, as one tree.

    TrainError
    ├── DataError               the dataset, the batch size or the use of the loader is wrong
    ├── StateError              the state holds a value that a checkpoint cannot hold; names its path in the tree
    ├── NotFiniteError          the loss is NaN or infinite, and the job is configured to stop then
    ├── RollbackError           the loss is NaN or infinite, and the next attempt continues from before that
    ├── RestoreError            an intact checkpoint was found, but it belongs to another model
    └── StorageError            the storage cannot be reached, or refused; what was committed before is untouched
        ├── ExistsError             an object of that name exists already
        ├── MissingError            no object of that name exists
        ├── DamagedError            an object is not what was written: torn, truncated or altered
        │   └── FormatError             it is intact, but another version of this library wrote it
        ├── FullError               the storage has no room left
        ├── NoMemoryError           this process has no memory for the bytes of a checkpoint
        ├── SaveError               a checkpoint could not be written
        └── FencedError             a newer run has taken over this URL
            └── MovedError              the job has moved to another URL for good

Each message says what failed, the value, and what to do next, in one or two lines.
"""

from __future__ import annotations


class TrainError(Exception):
    """Base class of all errors that are shown to the user as one message, without a traceback."""


class DataError(TrainError):
    """The dataset, the global batch or the use of the loader is wrong."""


class StateError(TrainError):
    """A value in the state cannot be stored in a checkpoint; nothing was written."""


class NotFiniteError(TrainError):
    """The loss is not a finite number; nothing has been saved since."""


class RollbackError(TrainError):
    """The loss is not a finite number; the next attempt continues from before that, and skips the batches since."""


class RestoreError(TrainError):
    """The checkpoint is intact but does not fit the objects that are to be restored."""


class StorageError(TrainError):
    """The storage cannot be reached, refused a request, or failed to carry it out."""


class ExistsError(StorageError):
    """The object was to be created, but exists already."""


class MissingError(StorageError):
    """The object does not exist."""


class DamagedError(StorageError):
    """The object does not match its checksum or its format. `found` is the checksum of what was read, if known."""

    def __init__(self, message: str, *, found: str = "") -> None:
        super().__init__(message)
        self.found = found


class FormatError(DamagedError):
    """The object is intact, but another version of this library wrote it."""


class FullError(StorageError):
    """The disk, or the quota on it, has no room for the data."""


class NoMemoryError(StorageError):
    """There is not enough memory to copy a share into, or to read one into."""


class SaveError(StorageError):
    """A checkpoint was not committed; the last committed one remains valid."""


class FencedError(StorageError):
    """A newer run owns the URL; this run may no longer commit or delete."""


class MovedError(FencedError):
    """The job continues at another URL; its journal here is closed."""
