"""States of recurrent layers: which are kept, what truncation goes back to, and that memory is shared and reused."""

from __future__ import annotations

import pytest

from tinyllm.state_cache import PROMPT_ROWS, StateHistory, StatePool


@pytest.fixture
def pool() -> StatePool:
    return StatePool([100, 0, 64])


def run(history: StateHistory, *steps: int) -> None:
    for n_rows in steps:
        if n_rows >= PROMPT_ROWS:
            history.mark_prompt()
        history.begin(n_rows)
        history.commit()


def positions(history: StateHistory) -> list[int]:
    return [state.position for state in history._states]


def test_layers_lie_one_after_another_in_whole_cache_lines(pool: StatePool) -> None:
    assert pool.offsets == [0, 128, 128]
    assert pool.n_bytes == 192
    assert pool.take().address % 64 == 0


def test_history_keeps_the_start_the_last_prompt_and_the_last_two_steps(pool: StatePool) -> None:
    history = StateHistory(pool)
    run(history, 40, 1, 1, 1)
    assert positions(history) == [0, 42, 43]
    run(history, 50)
    assert positions(history) == [0, 43, 93]
    run(history, 1, 1, 1)
    assert positions(history) == [0, 43, 95, 96]


@pytest.mark.parametrize(("n", "left"), [(96, 96), (95, 95), (94, 43), (43, 43), (42, 0), (0, 0)])
def test_truncation_goes_back_to_a_state_that_has_not_seen_more(pool: StatePool, n: int, left: int) -> None:
    history = StateHistory(pool)
    run(history, 43, 50, 1, 1, 1)
    history.truncate(n)
    assert history.position == left


def test_interrupted_step_changes_nothing(pool: StatePool) -> None:
    history = StateHistory(pool)
    run(history, 40, 1)
    before, (source, target) = positions(history), history.begin(5)
    assert source != target
    history.abort()
    history.abort()
    assert positions(history) == before
    assert history.begin(5)[0] == source


def test_copies_share_states_until_they_go_their_own_way(pool: StatePool) -> None:
    history, copy = StateHistory(pool), StateHistory(pool)
    run(history, 40, 1)
    history.copy_to(copy)
    assert copy.begin(1)[0] == history.begin(1)[0]
    copy.commit()
    history.abort()
    assert (history.position, copy.position) == (41, 42)
    history.truncate(0)
    assert positions(copy) == [0, 41, 42]


def test_memory_is_reused_when_nobody_holds_a_state_any_more(pool: StatePool) -> None:
    history, copy = StateHistory(pool), StateHistory(pool)
    run(history, 1, 1)
    history.copy_to(copy)
    held = {id(state) for state in history._states[1:]}
    history.truncate(0)
    assert id(pool.take()) not in held
    copy.truncate(0)
    assert {id(pool.take()), id(pool.take())} <= held | {id(pool.start)}
    assert pool.start.users > 0
