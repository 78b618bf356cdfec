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
    "speed_search": {"state": "done", "text": ""},
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

ANSWERS: Mapping[str, object] = {
    "health": {
        "status": "ready",
        "ready": True,
        "draining": False,
        "models": [_MODEL],
        "fronts": [_FRONT],
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
