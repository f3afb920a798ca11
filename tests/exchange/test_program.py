"""Programs and schedules: an owner's part of a plan as views, and as messages in turns."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from copying import FULL, limited
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import numbered
from threads import FORMS, forms, plain, rooms, tensors_of, turned

from shardwise import Layout, parse, plan
from shardwise.exchange import view_of
from shardwise.exchange.messages import FIRST, Program, program, schedule
from shardwise.testing import scatter, strategies


def tensors(made, owner, source=plain, target=plain):
    """An owner's tensors on both sides; those of the source are numbered."""
    held = scatter(numbered(made.source.shape), made.source).get(owner, [])
    return tensors_of(held, torch.int64, source), rooms(made, owner, torch.int64, target)


def strides(some):
    return tuple(tensor.stride() for tensor in some)


def written(made, owner, *forms):
    return program(made, owner, *map(strides, tensors(made, owner, *forms)))


def volume(cut):
    return int(np.prod(cut.shape))


def carried(made, owner):
    """Cells by step, round, direction and peer, as the plan has them."""
    found = defaultdict(int)
    part = made.for_owner(owner)
    for copy in part.sends:
        found[copy.step, copy.round, "sends", copy.target] += copy.box.volume
    for copy in part.receives:
        found[copy.step, copy.round, "receives", copy.source] += copy.box.volume
    return found


@given(limited())
@settings(max_examples=15)
def test_segments_have_the_cells_that_the_plan_sends(made):
    for owner in made.owners:
        found = {
            (*key, side, cells.peer): cells.volume
            for key, stage in written(made, owner).stages.items()
            for side in ("sends", "receives")
            for cells in getattr(stage, side)
        }
        assert found == carried(made, owner)


@given(strategies.pairs(FULL), forms)
@settings(max_examples=15)
def test_every_cell_of_a_message_has_a_place_here(pair, form):
    made = plan(*pair)
    for owner in made.owners:
        for stage in written(made, owner, form, form).stages.values():
            for cells in (*stage.sends, *stage.receives):
                message = torch.zeros(cells.volume, dtype=torch.int64)
                for here, there in cells.pairs:
                    assert here.shape == there.shape
                    view_of(there, [message]).fill_(1)
                assert message.all()


@given(strategies.pairs(FULL), forms)
@settings(max_examples=15)
def test_what_is_whole_lies_here_as_in_the_message(pair, form):
    made = plan(*pair)
    for owner in made.owners:
        source, _ = tensors(made, owner, form)
        for stage in written(made, owner, form).stages.values():
            for cells in stage.sends:
                message = torch.zeros(cells.volume, dtype=torch.int64)
                for here, there in cells.pairs:
                    view_of(there, [message]).copy_(view_of(here, source))
                if cells.whole is None:
                    assert len(cells.pairs) > 1 or not cells.pairs[0].here.contiguous
                else:
                    torch.testing.assert_close(view_of(cells.whole, source).reshape(-1), message, rtol=0, atol=0)
                    assert (
                        view_of(cells.whole, source).reshape(-1).data_ptr() == view_of(cells.whole, source).data_ptr()
                    )


def test_rows_are_whole_and_columns_are_not():
    rows = written(plan("8x6/S0@2", "8x6/R@1:2"), 0).stages[FIRST].sends[0]
    columns = written(plan("8x6/S0@2", "8x6/S1@2:2,3"), 0).stages[FIRST].sends[0]
    assert rows.whole == rows.pairs[0].here
    assert (columns.whole, len(columns.pairs)) == (None, 1)


def test_rows_of_a_tensor_that_is_turned_are_not_whole():
    made = plan("8x6/S0@2", "8x6/R@1:2")
    assert written(made, 0, turned).stages[FIRST].sends[0].whole is None


@pytest.mark.parametrize("form", FORMS)
def test_what_stays_is_copied_between_our_own_tensors(form):
    made = plan("8x6/S0@2", "8x6/S1@2")
    source, target = tensors(made, 1, form, form)
    (stage,) = written(made, 1, form, form).stages.values()
    for here, there in stage.local:
        view_of(there, target).copy_(view_of(here, source))
    np.testing.assert_array_equal(target[0][4:].numpy(), numbered((8, 6))[4:, 3:])


@given(strategies.pairs(["partial"], FULL))
@settings(max_examples=15)
def test_every_reduced_cell_gets_all_terms_in_their_order(pair):
    made = plan(*pair)
    if not made.reducing:
        return
    whose = made.source.form.holders
    for owner in made.owners:
        for (step, _), stage in written(made, owner).stages.items():
            assert not (stage.reductions and step)
            for target, terms in stage.reductions:
                assert {term.window.shape for term in terms} == {target.shape}
                sources = np.array([owner if term.peer is None else term.peer for term in terms])
                assert whose.term_of(sources).tolist() == list(range(made.source.terms))


@given(strategies.pairs(["partial"], FULL))
@settings(max_examples=15)
def test_reductions_and_later_steps_write_every_cell_of_the_target(pair):
    made = plan(*pair)
    if not made.reducing:
        return
    for owner in made.target.owners():
        _, target = tensors(made, owner)
        for stage in written(made, owner).stages.values():
            places = [r.target for r in stage.reductions]
            places += [here for cells in stage.receives for here, _ in cells.pairs]
            for place in places:
                view_of(place, target).fill_(-1)
        assert all((tensor == -1).all() for tensor in target)


def test_terms_that_arrive_lie_nowhere_yet():
    (stage,) = written(plan("6/P@3", "6/R@1"), 0).stages.values()
    assert [(s.peer, s.volume, s.pairs, s.whole) for s in stage.receives] == [(1, 6, (), None), (2, 6, (), None)]
    ((target, terms),) = stage.reductions
    assert volume(target) == 6
    assert [term.peer for term in terms] == [None, 1, 2]


def test_later_steps_send_what_earlier_ones_wrote():
    made = plan("131072/P@4", "131072/R@4")
    stages = written(made, 1).stages
    assert sorted(stages) == [(0, 0), (1, 0)]
    (reduced,) = (target for target, _ in stages[0, 0].reductions)
    assert [cells.whole for cells in stages[1, 0].sends] == [reduced] * 3


@pytest.mark.parametrize(("op", "fill"), [("sum", 0), ("product", 1), ("bxor", 0), ("max", None)])
def test_terms_that_nobody_brings_start_neutral(op, fill):
    made = plan("6x5/R@3", f"6x5/P{op}@3")
    assert [written(made, owner).fill for owner in range(3)] == [None, fill, fill]


def test_an_owner_without_a_part_does_nothing():
    found = program(plan("8x6/S0@2", "8x6/S1@2"), 7, (), ())
    assert (found.stages, found.fill) == ({}, None)


def test_programs_are_kept_by_value():
    one, same = (plan(parse("8x6/S0@2"), Layout.chunk((8, 6), 1, owners=2)) for _ in range(2))
    assert written(one, 0) is written(same, 0)
    assert written(one, 0) is not written(one, 0, turned)
    assert written(one, 0) is not written(one, 1)


# --- schedules -------------------------------------------------------------------------------------------------------


def schedules(made, dtypes=(torch.float32,), inline=0):
    """The schedule of every owner, when several tensors move by the same plan."""
    return {o: schedule(tuple((written(made, o), dtype) for dtype in dtypes), o, inline) for o in made.owners}


DTYPES = st.lists(
    st.sampled_from([torch.bool, torch.int8, torch.int16, torch.bfloat16, torch.float32, torch.complex128]),
    min_size=1,
    max_size=4,
)


@given(limited(), DTYPES, st.sampled_from([0, 16, 10**6]))
@settings(max_examples=8)
def test_both_ends_of_a_message_expect_the_same_parts(made, dtypes, inline):
    sent, received = {}, {}
    for owner, found in schedules(made, tuple(dtypes), inline).items():
        for round_ in found.rounds:
            for small, sends in (False, round_.sends), (True, round_.small_sends):
                sent |= {(owner, p.peer, round_.key): (small, parts(p)) for p in sends}
            for small, receives in (False, round_.receives), (True, round_.small_receives):
                received |= {(p.peer, owner, round_.key): (small, parts(p)) for p in receives}
    assert sent == received


def parts(message):
    return message.bytes, [(part.move, part.cells.volume, part.start, part.stop) for part in message.parts]


@given(strategies.pairs(FULL), DTYPES)
@settings(max_examples=15)
def test_parts_follow_each_other_and_start_where_their_dtype_may(pair, dtypes):
    for found in schedules(plan(*pair), tuple(dtypes)).values():
        assert found.align == max(dtype.itemsize for dtype in dtypes)
        for round_ in found.rounds:
            for message in (*round_.sends, *round_.receives):
                edges = [part.start for part in message.parts] + [message.bytes]
                assert edges == [0] + [part.stop for part in message.parts]
                assert sorted(part.move for part in message.parts) == list(range(len(dtypes)))
                for part in message.parts:
                    assert part.start % part.dtype.itemsize == 0
                    assert part.dtype == dtypes[part.move]
                    assert part.stop - part.start == part.cells.volume * part.dtype.itemsize


def test_messages_up_to_the_limit_travel_with_the_agreement():
    made = plan("8x6/S0@2", "8x6/S1@2", itemsize=4)
    for inline, small in (47, 0), (48, 1):
        (round_,) = schedules(made, inline=inline)[0].rounds
        assert (len(round_.small_sends), len(round_.small_receives)) == (small, small)
        assert (len(round_.sends), len(round_.receives)) == (1 - small, 1 - small)
        assert round_.bytes == (1 - small) * 96


def test_only_the_first_turn_travels_with_the_agreement():
    first, second = schedules(plan("12/P@4", "12/R@4"), inline=10**6)[0].rounds  # owner 0 reduces for all
    assert (first.key, second.key) == (FIRST, (1, 0))
    assert (len(first.small_receives), len(first.receives)) == (3, 0)
    assert (len(second.small_sends), len(second.sends)) == (0, 3)


def test_there_is_a_first_turn_where_nothing_moves():
    made = plan("12/R@2", "12/R@2")
    for owner, found in schedules(made).items():
        assert [(round_.key, round_.bytes) for round_ in found.rounds] == [(FIRST, 0)], owner
    (round_,) = schedule((), 0, 64).rounds
    assert (round_.key, round_.bytes) == (FIRST, 0)
    (round_,) = schedule(((Program({}, None), torch.int8),), 0, 64).rounds
    assert (round_.key, round_.bytes) == (FIRST, 0)


def test_nobody_is_sent_to_by_all_others_at_a_time():
    found = schedules(plan("60x60/S0@6:3,8,1,4,9,5", "60x60/S1@6:3,8,1,4,9,5"))
    for nth in range(5):
        sends = {owner: one.rounds[0].sends[nth].peer for owner, one in found.items()}
        assert sorted(sends.values()) == sorted(found)
        assert {sends[one.rounds[0].receives[nth].peer] == owner for owner, one in found.items()} == {True}


def test_schedules_are_kept_by_the_programs_in_them():
    made = plan("8x6/S0@2", "8x6/S1@2")
    assert schedules(made)[0] is schedules(made)[0]
    assert schedules(made)[0] is not schedules(made, inline=64)[0]
