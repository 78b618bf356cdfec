from inferpool.models.split.micro_batches import MicroBatches


def tried(micro_batches, num_rows, seconds, num_calls):
    """Return the numbers of pieces chosen for batches; `seconds` gives the time by the number."""
    numbers = []
    for _ in range(num_calls):
        number = micro_batches.choose(num_rows)
        micro_batches.note(num_rows, number, seconds(number))
        numbers.append(number)
    return numbers


def test_best_number_is_found_and_kept():
    numbers = tried(MicroBatches(), 16, lambda number: 1 / number + number / 20, 60)
    assert set(numbers) == {1, 2, 4, 8, 16}
    assert set(numbers[15:]) == {4}


def test_numbers_beyond_one_that_is_clearly_too_many_are_not_tried():
    assert set(tried(MicroBatches(), 16, lambda number: number, 60)) == {1, 2}


def test_a_number_that_has_become_better_is_found():
    micro_batches = MicroBatches()
    assert tried(micro_batches, 8, lambda number: number, 99)[-1] == 1
    assert tried(micro_batches, 8, lambda number: 1 / number, 1500)[-1] == 8
