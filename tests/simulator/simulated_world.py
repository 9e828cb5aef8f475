# SPDX-License-Identifier: Apache-2.0
"""Time, processes, a store and groups under one seeded scheduler, all in one thread.

Real code runs unchanged in greenlets. Whatever waits - a request, a sleep, a collective - hands
over to the scheduler, which takes the next event in simulated time; the seed draws every
latency, fault and crash, so a seed is a schedule.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from greenlet import GreenletExit, getcurrent, greenlet

from raydist.errors import ObjectExistsError, ObjectMissingError, StorageError

TIMEOUT_S = 5.0
"""After which a request without a reply is an error."""


class HangError(Exception):
    """The simulated world did not come to rest."""


class RankLostError(Exception):
    """A collective broke because a member is gone, as gloo says it."""


class Process:
    """What dies at once: a driver or a rank."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.actors: list[greenlet] = []
        self.on_death: list[Callable[[], None]] = []
        self.requests = 0
        self.crash_at: int | None = None
        """Number of the request at which it is killed."""
        self.freeze_at: int | None = None
        self.freeze_s = 0.0
        """From that request on it stands still for so long, as under SIGSTOP."""
        self.frozen_until_s = 0.0
        self.broken_until_s = 0.0
        """Every request of it fails before then."""

    def start(self, work: Callable[[], None]) -> None:
        def body() -> None:
            try:
                work()
            except GreenletExit:
                pass

        actor = greenlet(body, parent=self.world.hub)
        actor.process = self
        self.actors.append(actor)
        self.world.at(0.0, lambda: self.world.resume(actor))

    def end(self) -> None:
        """Be gone at once, as under SIGKILL; its requests stay on their way."""
        if not self.alive:
            return
        self.alive = False
        self.world.at(0.0, self._reap)
        for told in self.on_death:
            told()

    def _reap(self) -> None:
        for actor in self.actors:
            if not actor.dead:
                actor.throw(GreenletExit)


class World:
    """The scheduler and simulated time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.hub = getcurrent()
        self.trace: list[str] | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, event))

    def run(self, *, limit_s: float, max_events: int = 5_000) -> None:
        """Take events until there are none.

        Raises:
            HangError: Simulated time or events ran out.
        """
        events = self._events
        taken = 0
        while events:
            time_s, _, event = heapq.heappop(events)
            self.now_s = time_s
            taken += 1
            if time_s > limit_s or taken > max_events:
                raise HangError(f"still busy at {time_s:.0f} s after {taken} events")
            event()

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_s:9.3f}  {text}")

    def resume(self, actor: greenlet, *values: Any) -> None:
        """Go on with an actor until it waits again; from the hub only."""
        if actor.process.alive and not actor.dead:
            actor.switch(*values)

    def wait(self) -> Any:
        """Hand over until somebody resumes this actor. From an actor only."""
        if not getcurrent().process.alive:
            raise GreenletExit
        return self.hub.switch()

    def sleep(self, seconds: float) -> None:
        actor = getcurrent()
        self.at(seconds, lambda: self.resume(actor))
        self.wait()


class SimulatedClock:
    """Implements Clock on simulated time, with a skew of its own."""

    def __init__(self, world: World, skew_s: float = 0.0) -> None:
        self._world = world
        self._skew_s = skew_s

    def now_unix_s(self) -> float:
        return 1.7e9 + self._world.now_s + self._skew_s

    def monotonic_s(self) -> float:
        return self._world.now_s

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)


@dataclass(kw_only=True)
class Faults:
    """How often what goes wrong with a request.

    Fields:
        refused: It has no effect, and an error comes back.
        reply_lost: It has its effect, and an error comes back.
        late: An error comes back, and its effect comes later, up to ``late_s``.
    """

    refused: float = 0.0
    reply_lost: float = 0.0
    late: float = 0.0
    late_s: float = 60.0
    only: str = ""
    """Only requests on keys with this part."""


class Bucket:
    """What the storage holds, and who watches it change."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.on_change: Callable[[str, bytes | None, bytes | None], None] = lambda *_: None

    def put(self, key: str, data: bytes, *, if_absent: bool) -> None:
        old = self.objects.get(key)
        if if_absent and old is not None:
            raise ObjectExistsError(key=key)
        self.objects[key] = data
        self.on_change(key, old, data)

    def get(self, key: str) -> bytes:
        data = self.objects.get(key)
        if data is None:
            raise ObjectMissingError(key=key)
        return data

    def delete(self, key: str) -> None:
        old = self.objects.pop(key, None)
        if old is not None:
            self.on_change(key, old, None)


class SimulatedStore:
    """Implements ObjectStore for one process; every request takes time and may go wrong."""

    def __init__(self, process: Process, bucket: Bucket, faults: Faults) -> None:
        self._process = process
        self._world = process.world
        self._bucket = bucket
        self._faults = faults

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        raw = bytes(data)
        bucket = self._bucket
        self._request("put", key, lambda: bucket.put(key, raw, if_absent=if_absent))

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        bucket = self._bucket
        data = self._request("get", key, lambda: bucket.get(key))
        return data[start:] if length is None else data[start : start + length]

    def size(self, key: str) -> int | None:
        data = self._request("size", key, lambda: self._bucket.objects.get(key))
        return None if data is None else len(data)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        objects = self._bucket.objects
        yield from self._request(
            "list",
            prefix,
            lambda: sorted((k, len(v)) for k, v in objects.items() if k.startswith(prefix)),
        )

    def delete(self, key: str) -> None:
        bucket = self._bucket
        self._request("delete", key, lambda: bucket.delete(key))

    def _request(self, operation: str, key: str, effect: Callable[[], Any]) -> Any:
        process, world = self._process, self._world
        if not process.alive:
            raise GreenletExit
        process.requests += 1
        if process.requests == process.freeze_at:
            process.frozen_until_s = world.now_s + process.freeze_s
            world.note(f"{process.name} stands still until {process.frozen_until_s:.3f}")
        if process.frozen_until_s > world.now_s:
            world.sleep(process.frozen_until_s - world.now_s)
        if process.requests == process.crash_at:
            self._crash(operation, key, effect)
        fate = ""
        if process.broken_until_s > world.now_s:
            fate = "refused"
        elif self._faults.only in key:
            fate = self._draw_fate()
        if fate:
            self._fail(fate, operation, key, effect)
        actor = getcurrent()
        delay_s = 0.001 + 0.02 * world.rng.random()
        world.at(delay_s, lambda: self._answer(operation, key, effect, actor))
        error, value = world.wait()
        if error is not None:
            raise error
        return value

    def _crash(self, operation: str, key: str, effect: Callable[[], Any]) -> NoReturn:
        world, draw = self._world, self._world.rng.random
        fate = ("never sent", "no reply", "late")[int(3 * draw())]
        world.note(f"{self._process.name} is killed at {operation} {key} ({fate})")
        if fate != "never sent":
            delay_s = (60.0 if fate == "late" else 0.02) * draw()
            world.at(delay_s, lambda: self._take_effect(operation, key, effect))
        self._process.end()
        raise GreenletExit

    def _fail(self, fate: str, operation: str, key: str, effect: Callable[[], Any]) -> NoReturn:
        world, draw = self._world, self._world.rng.random
        if fate == "late":
            late_s = TIMEOUT_S + self._faults.late_s * draw() ** 2
            world.at(late_s, lambda: self._take_effect(operation, key, effect))
        elif fate == "reply lost":
            world.at(0.02 * draw(), lambda: self._take_effect(operation, key, effect))
        world.note(f"{self._process.name}: {operation} {key}: {fate}")
        world.sleep(1.0 if fate == "refused" else TIMEOUT_S)
        raise StorageError(problem=f"{operation} {key}: {fate}")

    def _draw_fate(self) -> str:
        faults, drawn = self._faults, self._world.rng.random()
        for fate, rate in (
            ("refused", faults.refused),
            ("reply lost", faults.reply_lost),
            ("late", faults.late),
        ):
            if drawn < rate:
                return fate
            drawn -= rate
        return ""

    def _take_effect(self, operation: str, key: str, effect: Callable[[], Any]) -> None:
        self._world.note(f"{self._process.name}: {operation} {key} takes effect unseen")
        try:
            effect()
        except StorageError:
            return

    def _answer(self, operation: str, key: str, effect: Callable[[], Any], actor: greenlet) -> None:
        world = self._world
        error, value = None, None
        try:
            value = effect()
        except StorageError as failure:
            error = failure
        if world.trace is not None:
            outcome = f" -> {type(error).__name__}" if error else ""
            world.note(f"{self._process.name}: {operation} {key}{outcome}")
        world.resume(actor, (error, value))  # its next request has a latency of its own
