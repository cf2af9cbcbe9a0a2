"""Where a process of the command line begins: `elasticctl`, or `python -m elasticctl.cli` where no script is installed.

A verb is done in a fraction of a second, of which Python's search for cycles of garbage took a fifth: it looked through
all that importing makes, again and again, and at the end once more. Now it begins late.
"""

import gc
import sys

GARBAGE_AFTER_OBJECTS = 50_000
"""More than a verb makes that ends at once; those that go on have their garbage collected all the same."""


def run() -> int:
    """Run the command line of this process and return its exit code."""
    gc.set_threshold(GARBAGE_AFTER_OBJECTS)
    try:
        from elasticctl.cli.main import main
    except ModuleNotFoundError as e:  # an image of workers has the program, but not what it needs
        says = f"error: the command line needs the package {e.name}, which is not installed here"
        sys.exit(f"{says}\nFIX: pip install elasticctl")

    code = main()
    gc.freeze()  # nothing is searched at the end: the system takes all of it back
    return code


if __name__ == "__main__":
    sys.exit(run())
