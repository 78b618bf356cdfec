"""Checks of the limits of the process and its container."""

from collections.abc import Iterator

from inferpool.service.api.wire.descriptors import MIN_CONNECTIONS, max_connections
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.client.texts import in_words
from inferpool.service.settings.settings import Settings

_FEW_CONNECTIONS = 256
MORE_FILES = "raise the hard limit: LimitNOFILE=65536, or docker's --ulimit nofile=65536"
_BASE_PIDS = 12
"""Processes and threads of the front end, the forkserver and multiprocessing."""
_DECODER_PIDS = 4
"""A decoder and its threads."""
_FRONT_END_AS_BYTES = 4 << 30


def check_descriptors(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check the file descriptors; each connection needs one, each worker a few."""
    limit = facts.num_files
    fitting = max_connections(limit, facts.num_processes + facts.num_decoders)
    message = f"{limit} open files leave room for {fitting} connections"
    if fitting <= MIN_CONNECTIONS:
        yield error("descriptors", f"{message}, and may be too few for the workers", MORE_FILES)
    elif fitting < _FEW_CONNECTIONS:
        yield warning("descriptors", message, MORE_FILES)
    else:
        yield ok("descriptors", message)


def check_processes(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check the limits of processes, which count threads too."""
    need = _BASE_PIDS + _DECODER_PIDS * facts.num_decoders
    for name, placements in facts.placements.items():
        each = settings.models[name].prepare_threads
        for placement in placements:
            preparing = each if each != "auto" else min(8, placement.num_threads)
            need += (4 + placement.num_threads) * placement.num_ranks + preparing
    left = facts.cgroup.num_pids_left
    advice = "raise it: docker's --pids-limit, Kubernetes' podPidsLimit or TasksMax="
    if left is not None and left < need:
        message = (
            f"{left} more processes and threads are allowed (pids.max), about {need} are needed"
        )
        is_fatal = left < _BASE_PIDS // 2
        yield error("processes", message, advice, is_fatal=is_fatal)
    elif left is not None:
        yield ok("processes", f"{left} more are allowed (pids.max), about {need} are needed")
    limit = facts.rlimits.get("NPROC")
    if limit is not None and limit < need:
        yield warning(
            "processes",
            f"this user may have {limit} (ulimit -u), about {need} are needed",
            "raise it with `ulimit -u`",
        )
    elif left is None:
        yield ok("processes", f"about {need} are needed, far below the limit")


def check_ulimits(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check the limits of address space, file size, core dumps and locked memory."""
    space = facts.rlimits.get("AS")
    if space is not None and space < settings.arena_bytes + _FRONT_END_AS_BYTES:
        yield error(
            "address space",
            f"{in_words(space)} (ulimit -v): torch alone maps several GiB",
            "ulimit -v unlimited; bound memory by a control group instead",
        )
    size = facts.rlimits.get("FSIZE")
    if size is not None and size < settings.arena_bytes:
        yield error(
            "file size",
            f"{in_words(size)} (ulimit -f) is less than the arena, which counts as a file",
            "ulimit -f unlimited",
            is_fatal=True,
        )
    if facts.rlimits.get("CORE") != 0:
        yield note(
            "core dumps",
            "a crash would write memory to disk, weights and inputs included",
            "ulimit -c 0",
        )
    locked = facts.rlimits.get("MEMLOCK")
    if facts.host.gpus and locked is not None and locked < 64 << 20:
        yield note(
            "locked memory",
            f"{in_words(locked)} (ulimit -l): CUDA's pinned memory is not bound by it, RDMA is",
        )


def check_timeouts(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that a hang is found before the requests behind it expire."""
    for name, model in settings.models.items():
        timeout_s = model.batch_timeout_s
        if timeout_s != "auto" and timeout_s >= settings.default_timeout_s:
            yield warning(
                f"batch_timeout_s of {name}",
                f"{timeout_s:g} s, but requests wait {settings.default_timeout_s:g} s "
                "(default_timeout_s): all requests behind an input that hangs will expire",
                "lower batch_timeout_s, or leave it at auto",
            )


def check_container(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check for memory, an init process and time to stop, which containers often lack."""
    if facts.cgroup.memory_bytes is not None:
        yield ok(
            "container memory",
            f"the control group allows {in_words(facts.cgroup.memory_bytes)}, "
            f"{in_words(facts.cgroup.memory_left_bytes or 0)} of it are free",
        )
    if facts.pid == 1:
        yield note(
            "process 1",
            "nothing reaps the processes that a model may leave behind",
            "run with an init: `docker run --init`, or `init: true` in compose",
        )
    grace_s = settings.shutdown_delay_s + settings.drain_timeout_s + 5
    yield note(
        "stop grace",
        f"a stop may take {grace_s:.0f} s (shutdown_delay_s + drain_timeout_s + 5 s); docker or "
        "Kubernetes may kill the service before that",
        "docker kills after 10 s, Kubernetes after 30 s: set stop_grace_period, or "
        "terminationGracePeriodSeconds, to more",
    )
    if facts.is_root_read_only:
        yield ok("read-only root", "the service writes only to the temporary folder")


def check_cores(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Compare the number of computing threads with the cores."""
    cores = facts.host.num_cores
    threads = sum(p.num_threads * p.num_ranks for ps in facts.placements.values() for p in ps)
    quota = facts.cgroup.num_cores
    bound = f", bound by a quota of {quota:g}" if quota is not None and quota < cores + 1 else ""
    message = f"{threads} computing threads on {cores} core{'s' if cores != 1 else ''}{bound}"
    chosen = [
        name
        for name in facts.placements
        if (settings.models[name].replicas, settings.models[name].threads_per_replica)
        != ("auto", "auto")
    ]
    if threads > 2 * cores and chosen:
        yield warning(
            "cores",
            f"{message}: they take turns, which costs much speed",
            f"lower replicas or threads_per_replica of {', '.join(chosen)}, or leave both at auto",
        )
    elif threads > 2 * cores:
        yield note(
            "cores",
            f"{message}, since each of {len(facts.placements)} models needs at least one: if "
            "all are asked at once, they take turns",
            "serve fewer models, or use more cores",
        )
    elif threads > cores and len(facts.placements) == 1:
        yield note("cores", message, "best: replicas times threads_per_replica equals the cores")
    else:
        yield ok("cores", message)
    if quota is not None and quota < 1:
        yield warning(
            "cores",
            f"a quota of {quota:g} cores: the kernel stops the front end in the middle of requests",
            "allow at least one core, and one for each CPU replica",
        )
