"""The entry point of the command line: `elasticctl`, or `python -m elasticctl.cli` where no script is installed.

A verb takes a fraction of a second, a fifth of which went into garbage collection: Python looked for cycles among all
that had been imported, again and again, and once more at the end. Here it starts late.
"""

import gc
import sys

GARBAGE_AFTER_OBJECTS = 50_000
"""More objects than a short verb creates; garbage of long-running ones is still collected."""

INTERRUPTED = 130


def run() -> int:
    """Run the command line of this process and return its exit code."""
    gc.set_threshold(GARBAGE_AFTER_OBJECTS)
    try:
        from elasticctl.cli.main import main
    except ModuleNotFoundError as e:  # an image of workers has the program, but not what it needs
        says = f"error: the command line needs the package {e.name}, which is not installed here"
        sys.exit(f"{says}\nFIX: pip install elasticctl")
    except KeyboardInterrupt:  # main knows what to do with it, but is not there yet
        return INTERRUPTED

    code = main()
    gc.freeze()  # nothing is searched at the end: the system takes all of it back
    return code


if __name__ == "__main__":
    sys.exit(run())
