import decimal
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inferpool.workers.host.local import LocalEngine
from inferpool.workers.inside.pools import started_pool
from tests.workers.contract import config_of
from tests.workers.ranks.test_lead import serving


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


@pytest.mark.usefixtures("eight_openmp_threads")
@pytest.mark.parametrize(
    ("num_threads", "shares_openmp", "expected"),
    [(1, True, 8), (3, True, 2), (16, True, 1), (1, False, 8), (3, False, 8)],
)
def test_threads_of_a_pool_share_openmp_threads_only_if_told(
    num_threads: int, shares_openmp: bool, expected: int
):
    together = threading.Barrier(num_threads)

    def look() -> int:
        together.wait(60)  # so that each thread looks once
        return torch.get_num_threads()

    with (
        started_pool(num_threads, "sharing", shares_openmp=shares_openmp) as pool,
        started_pool(2, "later", shares_openmp=True),  # whose settings are not theirs
    ):
        looks = [pool.submit(look) for _ in range(num_threads)]
        assert [each.result() for each in looks] == [expected] * num_threads
    assert torch.get_num_threads() == 8


@pytest.mark.usefixtures("eight_openmp_threads")
def test_threads_of_others_have_all_openmp_threads_beside_a_pool_that_shares_them():
    with started_pool(4, "sharing", shares_openmp=True), ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 8


async def test_settings_that_load_makes_apply_to_all_threads_of_the_model(engine: LocalEngine, put):
    config = config_of("tests.setting_model:SettingModel", prepare_threads=2)
    worker = await serving(config, 2, engine)
    batches = [worker.run([put(1), put(2)]) for _ in range(4)]
    for batch in batches:
        assert [json.loads(each) for each in (await batch).outcomes] == ["", ""]
    await worker.stop(5)
