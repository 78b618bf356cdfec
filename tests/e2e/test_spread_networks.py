"""A model that is spread over hosts of a network, whose links are cut.

Each agent is in a network namespace, joined by a bridge. So nothing that works only over loopback
passes, and a cut link tells nobody that it is cut.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.hosts import KEYS, agent_at
from tests.e2e.running import Running, asking, running, until
from tests.e2e.test_spread import SPREAD, START_S, is_right
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class BridgedNetwork:
    """A bridge to which the namespaces of some hosts are joined. It needs the rights of root."""

    def __init__(self, *names: str) -> None:
        number = os.getpid() % 60_000
        self._subnet = f"10.{200 + number // 250 % 50}.{number % 250}"
        self._names = names
        self._mark = f"{number:05}"
        self.address = f"{self._subnet}.1"

    def __enter__(self) -> "BridgedNetwork":
        bridge = f"ip{self._mark}"
        try:
            self._ip(f"link add {bridge} type bridge")
            self._ip(f"addr add {self.address}/24 dev {bridge}")
            self._ip(f"link set {bridge} up")
            for number, name in enumerate(self._names, start=2):
                space = self.space_of(name)
                self._ip(f"netns add {space}")
                self._ip(f"link add {self.link_of(name)} type veth peer name to0 netns {space}")
                self._ip(f"link set {self.link_of(name)} master {bridge} up")
                self._ip(f"-n {space} addr add {self._subnet}.{number}/24 dev to0")
                self._ip(f"-n {space} link set to0 up")
                self._ip(f"-n {space} link set lo up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"no network can be made: {error}")
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                self._ip(f"netns del {self.space_of(each)}")
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            self._ip(f"link del ip{self._mark}")

    def space_of(self, name: str) -> str:
        return f"ip{self._mark}{name}"

    def link_of(self, name: str) -> str:
        return f"v{self._mark}{name}"

    def cut(self, name: str, *, again: bool = False) -> None:
        """Cut the link of a host, or join it again. Nobody is told."""
        self._ip(f"link set {self.link_of(name)} {'up' if again else 'down'}")

    def _ip(self, arguments: str) -> None:
        subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


@contextlib.contextmanager
def on_network(
    network: BridgedNetwork, *names: str
) -> Iterator[tuple[Running, dict[str, Running]]]:
    """Start a front end on the bridge, and an agent in the namespace of each name."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        arguments = ["--cluster-host", network.address, "--cluster-port", str(port)]
        service = stack.enter_context(
            running(*arguments, settings=SPREAD, env=KEYS, port=free_port(), ready=False)
        )
        agents = {
            name: stack.enter_context(
                agent_at(
                    f"{network.address}:{port}",
                    name,
                    prefix=["ip", "netns", "exec", network.space_of(name)],
                )
            )
            for name in names
        }
        yield service, agents


def test_ranks_meet_over_the_network_and_a_cut_link_ends_them_all():
    with BridgedNetwork("a", "b", "c") as network, on_network(network, "a", "b", "c") as made:
        service, agents = made
        service.wait_until_listening(START_S)  # it says so once the model is ready
        until(lambda: [len(each["ranks"]) for each in service.workers()] == [2], START_S)
        (worker,) = service.workers()
        lead, follower = worker["host"].split("+")
        assert [rank["host"] for rank in worker["ranks"]] == [lead, follower]

        def is_back() -> bool:
            (now,) = service.workers() or [worker]
            return now["state"] == "ready" and now["host"] != worker["host"]

        with asking(lambda: service.ask({"n": 21, "rank": 1}), 4) as answers:
            until(lambda: len(answers) > 8)
            network.cut(follower)
            until(is_back)
            num = len(answers)
            until(lambda: len(answers) > num + 8)
            network.cut(follower, again=True)
            agents[follower].wait_for_log("is lost")  # it has ended what it ran before
        assert all(map(is_right, answers)), [each.text for each in answers if not is_right(each)]
        assert answers[-1].status_code == 200
