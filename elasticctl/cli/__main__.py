"""`python -m elasticctl.cli`: the command line where no script is installed."""

import sys

from elasticctl.cli.main import main

sys.exit(main())
