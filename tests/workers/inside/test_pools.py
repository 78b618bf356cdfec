import decimal
import json
import threading

from inferpool.workers.host.local import LocalEngine
from inferpool.workers.inside.pools import started_pool
from tests.workers.contract import config_of
from tests.workers.inside.test_overlap import serving


def test_every_thread_is_there_before_the_first_is_needed():
    def num_threads() -> int:
        return sum(thread.name.startswith("mine") for thread in threading.enumerate())

    with started_pool(3, "mine") as pool:
        assert num_threads() == 3
        assert pool.submit(lambda: threading.current_thread().name).result().startswith("mine")
        assert num_threads() == 3


def test_settings_of_a_thread_do_not_apply_to_others():
    def be_coarse() -> None:
        decimal.getcontext().prec = 3

    before = decimal.getcontext().prec
    with started_pool(1, "coarse") as pool:
        pool.submit(be_coarse).result()
    assert decimal.getcontext().prec == before


async def test_settings_that_load_makes_apply_to_all_threads_of_the_model(engine: LocalEngine, put):
    config = config_of("tests.setting_model:SettingModel", prepare_threads=2)
    worker = await serving(config, 2, engine)
    batches = [worker.run([put(1), put(2)]) for _ in range(4)]
    for batch in batches:
        assert [json.loads(each) for each in (await batch).outcomes] == ["", ""]
    await worker.stop(5)
