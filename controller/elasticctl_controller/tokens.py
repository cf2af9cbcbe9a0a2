"""The workers' bearer tokens: made from one key and the job's uid, so that there is nothing to store or to look up."""

from __future__ import annotations

import hashlib
import hmac


def token(key: bytes, job_uid: str) -> str:
    """The bearer token of a job's workers."""
    return hmac.new(key, job_uid.encode(), hashlib.sha256).hexdigest()
