from inferpool.models.split.micro_batches import MicroBatches


def tried(micro_batches, num_rows, seconds, num_calls):
    """The numbers of pieces of so many batches, which take what `seconds` says of each number."""
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


def test_more_pieces_than_are_clearly_too_many_are_not_tried():
    assert set(tried(MicroBatches(), 16, lambda number: number, 60)) == {1, 2}


def test_another_number_is_found_once_it_has_become_the_better_one():
    micro_batches = MicroBatches()
    assert tried(micro_batches, 8, lambda number: number, 99)[-1] == 1
    assert tried(micro_batches, 8, lambda number: 1 / number, 1500)[-1] == 8
