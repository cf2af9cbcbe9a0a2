"""The stream of news that a page follows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientResponse

Following = Callable[[str], Awaitable[dict[str, Any]]]


@asynccontextmanager
async def news_of(answer: ClientResponse) -> AsyncIterator[Following]:
    """What is yielded waits for the next event of a name, and returns its data with its id; EOFError: none comes."""

    async def following(name: str) -> dict[str, Any]:
        fields: dict[str, str] = {}
        while line := (await answer.content.readline()).decode():
            if line != "\n":
                key, _, fields[key] = line.rstrip("\n").partition(": ")
            elif fields.get("event") == name:
                return {"id": fields.get("id", ""), **json.loads(fields["data"])}
            else:
                fields = {}
        raise EOFError

    try:
        yield following
    finally:
        answer.close()
