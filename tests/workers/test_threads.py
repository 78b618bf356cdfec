import threading

from workers.threads import started_pool


def test_every_thread_is_there_before_the_first_is_needed():
    before = threading.active_count()
    with started_pool(3, "mine") as pool:
        assert threading.active_count() == before + 3
        assert pool.submit(lambda: threading.current_thread().name).result().startswith("mine")
        assert threading.active_count() == before + 3
