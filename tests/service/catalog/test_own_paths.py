"""Which model answers at which path, while versions come and go over fake workers."""

import pytest

from inferpool.models.spec import Interface
from inferpool.service.api.exchange import Predict
from inferpool.service.errors import ConflictError
from inferpool.service.parts.swap.changes import Changes
from tests.service.catalog.test_catalog import ROOM, Kept, answering, asked, keep
from tests.service.pools import until

__all__ = ["keep"]
CLASSIFY = Interface(path="/classify", envelope=False)


async def test_the_path_of_a_class_opens_once_it_is_known_and_moves_with_what_serves(keep):
    kept: Kept = keep()
    kept.engine.interfaces["m"] = CLASSIFY
    catalog = kept.catalog
    predict = Predict(catalog.entries, default="m")
    answering(kept)
    assert (await asked(predict, "/classify")).status_code == 404
    await until(lambda: catalog.serving["m"].is_ready)
    assert (await asked(predict, "/classify")).json() == 1
    second = await kept.ready()
    assert (await asked(predict, "/classify")).json() == 1
    catalog.serve(second)
    assert (await asked(predict, "/classify")).json() == 2
    third = await kept.ready(path="/other")
    catalog.serve(third)
    assert (await asked(predict, "/classify")).status_code == 404
    assert (await asked(predict, "/other")).json() == 3
    fourth = await kept.ready(path="", envelope=True)
    catalog.serve(fourth)
    assert (await asked(predict, "/other")).status_code == 404
    assert (await asked(predict, "/predict/m")).json() == {"predictions": [4]}
    await catalog.remove("m", 5)
    assert not catalog.entries


async def test_the_path_of_a_setting_is_open_before_a_worker_is_ready(keep):
    kept: Kept = keep()
    await until(lambda: kept.catalog.serving["m"].is_ready)
    second = await kept.ready(path="/set")
    kept.catalog.serve(second)
    for slot in second.pool.slots:
        await second.pool.pause(slot, 0, "for a test")
    answer = await asked(Predict(kept.catalog.entries, default="m"), "/set")
    assert answer.status_code == 503


@pytest.mark.parametrize("path", ["/classify", "/metrics", "/v1/x", "/a//b"])
async def test_a_model_is_not_ready_if_its_class_has_a_path_that_it_may_not_have(
    keep, path: str, caplog: pytest.LogCaptureFixture
):
    kept: Kept = keep()
    kept.engine.interfaces = {"m": CLASSIFY, "n": Interface(path=path)}
    await until(lambda: kept.catalog.serving["m"].is_ready)
    model = kept.catalog.version("m").settings
    version = kept.catalog.load("n", model)
    await until(lambda: version.pool.is_lost)
    assert f"its path {path!r}" in version.pool.reason
    assert "set another path for it" in version.pool.reason
    assert [worker.is_gone for worker in kept.engine.started] == [False, True]
    other = kept.catalog.load("o", model.model_copy(update={"path": "/fine"}))
    await until(lambda: other.pool.is_ready)


async def test_a_change_to_a_path_of_another_model_is_refused_at_once(keep):
    kept: Kept = keep()
    kept.engine.interfaces["m"] = CLASSIFY
    await until(lambda: kept.catalog.serving["m"].is_ready)
    changes = Changes(kept.catalog, kept.metrics, None, ROOM, grace_s=1)
    with pytest.raises(ConflictError, match="path: '/classify' is the path of the model m too"):
        changes.begin_add({"name": "n", "source": "echo", "path": "/classify"})
    assert len(kept.engine.started) == 1
    changes.begin_swap("m", {"path": "/classify", "policy": "force"})
    await changes.until_decided("m")
    await changes.stop()
