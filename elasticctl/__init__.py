"""elasticctl: elastic PyTorch training on spot GPUs, from a laptop to any cloud.

`from elasticctl import submit, Job` is its Python API (docs/jobs.md).
"""

__version__ = "0.1.0"

_API = ("Job", "JobOptions", "submit")


def __getattr__(name: str) -> object:
    """The Python API, imported on use: the command line and the controllers start without it."""
    if name in _API:
        from importlib import import_module  # every command line comes by here, before it can put anything off

        return getattr(import_module("elasticctl.jobs"), name)
    raise AttributeError(f"module 'elasticctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_API]
