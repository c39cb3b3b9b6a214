"""The choice of a step's threads, for steps whose times are set here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.engine.cpu.engine import ThreadChoice

QUIET = {2: 18.0, 1: 28.0}
"""Milliseconds of a step of one row, by threads. Wide steps take WIDE times as long."""
BUSY = {2: 1190.0, 1: 36.0}
WIDE = 5.0

Times = Callable[[int, int], float]


def chosen(choice: ThreadChoice, times: Times, rows: Sequence[int]) -> list[int]:
    """The threads of successive steps with these numbers of rows."""
    threads = []
    for count in rows:
        threads.append(choice.choose(count))
        choice.record(count, threads[-1], times(count, threads[-1]) / 1e3)
    return threads


def of(table: dict[int, float]) -> Times:
    return lambda rows, threads: table[threads] * (WIDE if rows > 1 else 1.0)


def test_all_threads_where_nothing_disturbs_them() -> None:
    choice = ThreadChoice(2)
    chosen(choice, of(QUIET), [1] * 4)
    assert chosen(choice, of(QUIET), [1, 64] * 1000) == [2] * 2000


def test_trials_are_few_where_steps_differ_for_other_reasons() -> None:
    choice = ThreadChoice(2)
    contexts = iter([1.0, 1.5] * 2000)

    def uneven(rows: int, threads: int) -> float:
        return QUIET[threads] * next(contexts)

    threads = chosen(choice, uneven, [1] * 4000)
    lost = 1.5 * (QUIET[1] - QUIET[2]) * threads.count(1)
    assert 0 < lost <= 0.01 * 1.25 * QUIET[2] * len(threads)


def test_one_thread_while_another_process_takes_a_core() -> None:
    choice = ThreadChoice(2)
    chosen(choice, of(QUIET), [1] * 100)
    threads = chosen(choice, of(BUSY), [1] * 3000)
    assert threads[:3].count(2) == 2
    assert set(threads[3:50]) == {1}
    lost = (BUSY[2] - BUSY[1]) * threads[3:].count(2)
    assert 0 < lost <= 0.05 * sum(BUSY[count] for count in threads)


def test_one_slow_step_changes_nothing() -> None:
    choice = ThreadChoice(2)
    chosen(choice, of(QUIET), [1] * 10)
    chosen(choice, of(BUSY), [1])
    assert chosen(choice, of(QUIET), [1] * 20) == [2] * 20


def test_all_threads_again_once_they_are_let_alone() -> None:
    choice = ThreadChoice(2)
    chosen(choice, of(QUIET), [1] * 100)
    chosen(choice, of(BUSY), [1] * 20)
    threads = chosen(choice, of(QUIET), [1] * 1200)
    first = threads.index(2)
    assert 28 * first <= 31_000
    assert set(threads[first : first + 50]) == {2}


def test_a_kind_of_steps_learns_from_the_others() -> None:
    choice = ThreadChoice(2)
    chosen(choice, of(QUIET), [1, 64] * 20)
    chosen(choice, of(BUSY), [1] * 10)
    assert chosen(choice, of(BUSY), [64, 64, 300, 300]) == [1, 1, 1, 1]


def test_a_disturbed_start_does_not_stay() -> None:
    choice = ThreadChoice(2)
    threads = chosen(choice, of(BUSY), [1] * 20)
    assert threads == [2] + [1] * 19
    threads = chosen(choice, of(QUIET), [1] * 2000)
    assert set(threads[-60:]) == {2}


def test_few_threads_where_more_never_help() -> None:
    times = {8: 3.0, 7: 2.5, 4: 1.0, 1: 2.0}
    threads = chosen(ThreadChoice(8), of(times), [1] * 1000)
    assert threads[:4] == [8, 7, 4, 1]
    assert threads.count(4) >= 900


def test_one_core_less_where_one_is_taken() -> None:
    choice = ThreadChoice(8)
    free = {threads: 40.0 / threads for threads in range(1, 9)}
    assert chosen(choice, of(free), [1] * 200).count(8) >= 180
    assert chosen(choice, of(free | {8: 900.0}), [1] * 200).count(7) >= 190


def test_a_single_thread_is_all_there_is() -> None:
    assert chosen(ThreadChoice(1), lambda rows, threads: 1.0, [1, 9, 1]) == [1, 1, 1]
