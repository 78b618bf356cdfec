"""An example of what each route but `/predict` answers, by the operation's id."""

from collections.abc import Mapping

_WORKER = {
    "name": "resnet/0",
    "state": "ready",
    "device": "cuda:0",
    "incarnation": 1,
    "pid": 4711,
    "num_batches": 1204,
    "last_beat_age_s": 0.02,
    "last_answer_age_s": 0.31,
    "rss_bytes": 812_345_344,
    "restarts": 1,
    "placement": "replicate",
    "ranks": [],
    "split": None,
    "speed": "channels_last",
    "speed_gain": 1.4,
    "speed_deviation": 0.0003,
    "decode": "fast",
    "reason": "",
    "last_ending": {"cause": "signal", "reason": "killed by SIGKILL", "age_s": 84.2},
}
_MODEL = {
    "name": "resnet",
    "ready": True,
    "reason": "",
    "queue_depth": 3,
    "inputs": [{"name": "image", "dtype": "uint8", "shape": [-1, -1, -1, 3]}],
    "example": None,
    "reads_own_form": False,
    "speed_search": {"state": "done", "text": ""},
    "restart": {"state": "none", "text": ""},
    "workers": [_WORKER],
}
_FRONT = {
    "name": "front",
    "state": "up",
    "pid": 4700,
    "num_connections": 12,
    "restarts": 0,
    "reason": "",
}
_GPU = {
    "index": 0,
    "uuid": "GPU-5f0c2a8e-3b1d-4c57-9e64-0a7d2f8b6c13",
    "name": "NVIDIA H100 80GB HBM3",
    "up": True,
    "memory_bytes": 85520809984,
    "memory_used_bytes": 7516192768,
    "utilization": 0.37,
    "temperature_c": 61.0,
    "power_w": 312.5,
    "xid_errors": 0,
    "last_xid": 0,
}
_HEALTH = {
    "status": "ready",
    "ready": True,
    "draining": False,
    "models": [_MODEL],
    "fronts": [_FRONT],
    "gpus": [_GPU],
    "forkserver": {"state": "ready", "pid": 4690, "incarnation": 0},
}
_SAMPLE = {
    "requests_per_s": 180.0,
    "instances_per_s": {
        "accepted": 181.0,
        "succeeded": 180.0,
        "failed": 0.0,
        "expired": 0.0,
        "cancelled": 0.0,
    },
    "rejected_per_s": {"queue_full": 4.0},
    "latency_ms": {"p50": 31.2, "p95": 44.0, "p99": 61.5},
    "queue_ms": {"p50": 12.1, "p95": 20.4, "p99": 31.0},
    "inference_ms": {"p50": 15.9, "p95": 18.2, "p99": 22.4},
    "batch_sizes": {"4": 12, "8": 17},
    "num_batched": 180,
    "queue_depth": 3,
    "in_flight": 19,
}
_ENDING = {
    "worker": "resnet/0",
    "incarnation": 0,
    "time": 1795304399.412,
    "cause": "signal",
    "reason": "killed by SIGKILL",
}
_LIVE = {
    **_SAMPLE,
    "source": "torchvision:resnet50",
    "queue_limit": 1024,
    "max_batch_size": 8,
    "quarantined": 0,
    "endings": [_ENDING],
}

ANSWERS: Mapping[str, object] = {
    "health": _HEALTH,
    "events": {
        "time": 1795304481.004,
        "interval_s": 1.0,
        "uptime_s": 3605.2,
        "version": "0.1.0",
        "default_model": "resnet",
        "health": _HEALTH,
        "host": {"connections": 12, "arena_bytes": 268_435_456, "arena_used_bytes": 4_194_304},
        "models": {"resnet": _LIVE},
        "history": [{"time": 1795304480.004, "models": {"resnet": _SAMPLE}}],
    },
    "live": {"status": "live"},
    "ready": {"status": "ready"},
    "drain": {"draining": True},
    "resume": {"draining": False},
    "restart_model": {"workers": ["resnet/0", "resnet/1"]},
    "restart_worker": {"workers": ["resnet/1"]},
    "settings": {
        "port": {"value": 8000, "origin": "default"},
        "models.resnet.replicas": {"value": 2, "origin": "flag --replicas"},
    },
    "log_level": {"level": "info"},
    "set_log_level": {"level": "debug"},
}
