"""Log lines as JSON objects, one a line, as collectors of a cluster's logs read them."""

from __future__ import annotations

import json
import logging
import sys

from elasticctl.api.codec import to_rfc3339


class JsonFormatter(logging.Formatter):
    """`time`, `level`, `logger`, `message`, and `error` with the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as a line."""
        line = {
            "time": to_rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(level: int = logging.INFO) -> None:
    """Have everything logged to stderr like this."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    for noisy in ("aiohttp.access", "kubernetes", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
