"""A rendezvous of one worker, whose service answers as a test says, and launchers that run in the test's process."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from elasticctl_launcher import rendezvous
from elasticctl_launcher.main import main
from elasticctl_launcher.rendezvous import GroupChange, WorkerIdentity
from elasticctl_launcher.service.client import ServiceClient
from elasticctl_protocol.requests import WIRE, Doing, Member, Polled

Answer = dict[str, Any] | Exception | Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass
class ScriptedRendezvous:
    """A group of one. `answers` are the service's, by verb: one for all requests, or a list whose last one stays.
    An answer may be a function of the request's body.

    `on_join` is called with each generation as it forms. `asked` are the requests, `said` what the launcher did.
    `on_change` is the launcher's, once it has connected.
    """

    answers: Mapping[str, Answer | list[Answer]] = field(default_factory=dict)
    on_join: Callable[[ScriptedRendezvous], None] = lambda handler: None
    generation: int = 0
    restarts_all: bool = False
    stale_reason: str = "test"
    identity: WorkerIdentity = WorkerIdentity("uid-a-0", "a-0", "127.0.0.1", 1)
    on_change: Callable[[int, GroupChange], None] = lambda generation, change: None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    said: list[Doing] = field(default_factory=list)
    was_away: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def client(self) -> ScriptedRendezvous:
        return self

    @property
    def heartbeat(self) -> ScriptedRendezvous:
        return self

    @property
    def members(self) -> tuple[Member, ...]:
        return (Member(self.identity.uid, slots=1),)

    def connect(self, *arguments: Any) -> ScriptedRendezvous:
        """The rendezvous of a launcher, whose last argument is `on_change`."""
        self.on_change = arguments[-1]
        return self

    def end_generation(self, generation: int) -> None:
        self.on_change(generation, GroupChange.OVER)

    def bodies(self, verb: str) -> list[dict[str, Any]]:
        """What was sent with `verb`, in order."""
        with self._lock:
            return [body for asked, body in self.asked if asked == verb]

    def say(self, doing: Doing, generation: int) -> None:
        self.said.append(doing)

    def call(self, verb: str, body: Mapping[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        with self._lock:
            self.asked.append((verb, dict(body)))
            answer = self.answers.get(verb, {})
            if isinstance(answer, list):
                answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer(body) if callable(answer) else answer

    send = ServiceClient.send

    def poll(self, request: Polled) -> dict[str, Any]:
        return self.call(request.verb, WIRE.encode(request))

    def next_rendezvous(self) -> RendezvousInfo:
        self.generation += 1
        self.on_join(self)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 1))

    def get_backend(self) -> str:
        return "scripted"

    def get_run_id(self) -> str:
        return "default.job"

    def shutdown(self) -> bool:
        return True


def raising(error: Exception, generation: int = 1) -> Callable[[ScriptedRendezvous], None]:
    """Have joining `generation` fail."""

    def join(handler: ScriptedRendezvous) -> None:
        if handler.generation == generation:
            raise error

    return join


Launch = Callable[..., int]


@contextmanager
def launching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Runs the launcher in this process: `launch(handler, *command, options=())` returns its exit code."""
    message = tmp_path / "message"
    environment = {"JOB": "job", "WORKER": "a-0", "POD_UID": "uid-a-0", "RDZV_ENDPOINT": "x", "RDZV_TOKEN_FILE": "x"}
    for name, value in {**environment, "TERMINATION_LOG": str(message)}.items():
        monkeypatch.setenv(f"ELASTICCTL_{name}", value)
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    levels = {name: logging.getLogger(name).level for name in ("torch", "torch.distributed.elastic", "botocore")}

    def run(handler: ScriptedRendezvous, *command: str, options: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(rendezvous, "handler_from_environment", handler.connect)
        code = main(["--preload", "none", "--stop-grace", "1", *options, "--", *command])
        assert message.exists() == (code != 0)
        assert code == 0 or json.loads(message.read_text())["exitCode"] == code
        return code

    yield run
    for number, action in signals.items():
        signal.signal(number, action)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def get_sigterm(handler: ScriptedRendezvous) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def end_soon(handler: ScriptedRendezvous) -> None:
    """The generation is over in a moment; one that ends before its rank is suspended is followed by another."""
    threading.Timer(0.3, handler.end_generation, [handler.generation]).start()
