"""What decides about a pod on its node: the probes of docker/kubernetes, faster."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx
import yaml

from tests.e2e.running import ROOT

MANIFEST = ROOT / "docker" / "kubernetes" / "cpu.yaml"
_FASTER = 20
"""So many times are periods shorter; thresholds, paths and timeouts are those of the manifest."""


@dataclass
class _Probe:
    path: str
    period_s: float
    timeout_s: float
    threshold: int
    failures: int = 0
    num_refused: int = 0
    """By an answer, rather than by none in time."""
    next_at: float = 0.0

    def passes(self, client: httpx.Client) -> bool:
        """Ask; whether it is no failure, or not yet one too many."""
        self.next_at = time.monotonic() + self.period_s
        try:
            is_good = 200 <= client.get(self.path, timeout=self.timeout_s).status_code < 400
            self.num_refused += not is_good
        except httpx.HTTPError:
            is_good = False
        self.failures = 0 if is_good else self.failures + 1
        return self.failures < self.threshold


@dataclass
class Kubelet:
    """Probes one service, until left. Running states are for the test to read at any time."""

    url: str
    manifest: Path = MANIFEST
    is_started: bool = False
    is_ready: bool = False
    is_terminating: bool = False
    reasons_to_kill: list[str] = field(default_factory=list)
    _is_over: bool = False

    @property
    def num_refused(self) -> int:
        """How often it was told that the pod is not ready."""
        return self._readiness.num_refused

    def __enter__(self) -> "Kubelet":
        document = next(yaml.safe_load_all(self.manifest.read_text()))
        (container,) = document["spec"]["template"]["spec"]["containers"]
        self._startup, self._liveness, self._readiness = (
            _Probe(
                path=(probe := container[name])["httpGet"]["path"],
                period_s=probe["periodSeconds"] / _FASTER,
                timeout_s=probe.get("timeoutSeconds", 1),
                threshold=probe["failureThreshold"],
            )
            for name in ("startupProbe", "livenessProbe", "readinessProbe")
        )
        self._startup.threshold *= _FASTER  # a process takes as long to start as it does
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self.url) as client:
            while not self._is_over:
                self._turn(client)
                time.sleep(0.01)

    def _turn(self, client: httpx.Client) -> None:
        now = time.monotonic()
        if not self.is_started:
            if now >= self._startup.next_at:
                if not self._startup.passes(client):
                    self.reasons_to_kill.append("it does not start")
                self.is_started = self._startup.failures == 0
            return
        if now >= self._liveness.next_at and not self.is_terminating:
            is_alive = self._liveness.passes(client) or self.is_terminating  # by now
            if not is_alive:
                self.reasons_to_kill.append("it is not alive")
        if now >= self._readiness.next_at:
            is_passed = self._readiness.passes(client)
            self.is_ready = is_passed and (self.is_ready or self._readiness.failures == 0)
