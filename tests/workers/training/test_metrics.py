from inferpool.models.training.events import Noted, read_events
from inferpool.workers.training.metrics import MetricsFile


def test_lines_after_the_checkpoint_are_left_out_when_a_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, after_step=0)
    for step in range(6):
        metrics.write(Noted(step=step, at=0.0, text="hello"))
    metrics.close()
    with path.open("ab") as file:
        file.write(b'{"event":"noted","step"')  # a line that a kill has cut off
    again = MetricsFile(path, after_step=3)
    again.write(Noted(step=4, at=1.0, text="again"))
    again.close()
    with path.open("rb") as lines:
        found = [(event.step, event.at) for event in read_events(lines)]
    assert found == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)]
    MetricsFile(path, after_step=0).close()
    assert path.read_bytes() == b""


def test_the_end_of_a_process_is_told_however_often_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, after_step=0)
    metrics.write(Noted(step=2, at=0.0, text="hello"))
    metrics.write(Noted(step=7, at=1.0, text="process 0 died", is_lasting=True))
    metrics.close()
    for after_step in (5, 3, 0):
        MetricsFile(path, after_step=after_step).close()
        with path.open("rb") as lines:
            found = [(event.step, event.at) for event in read_events(lines)]
        assert found == [*([(2, 0.0)] if after_step else []), (after_step, 1.0)]
