"""What `import elasticctl` offers, for type checkers; `__init__.py` imports it on use."""

from elasticctl.jobs import Job as Job
from elasticctl.jobs import JobOptions as JobOptions
from elasticctl.jobs import submit as submit

__version__: str
