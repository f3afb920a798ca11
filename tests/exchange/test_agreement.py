"""Agreement: all ranks reach the same verdict, and raise the same error that says who differs in what."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import PATIENCE, outcomes, together

from shardwise import ExchangeError, Layout, parse, plan
from shardwise.errors import RefusedValueError
from shardwise.exchange import Exchange, Move, Proposal, in_words
from shardwise.exchange.agreement import WORDS, Status, Verdict, judge, refusal, weigh
from shardwise.transports.in_memory import in_memory_transports

FIELDS = {
    "operation": ("reshard", "gather"),
    "shape": ((8, 6), (6, 8)),
    "dtype": (torch.float32, torch.bfloat16),
    "source": (parse("8x6/S0@4"), parse("8x6/R@4")),
    "target": (parse("8x6/S1@4"), parse("8x6/S1@2")),
    "max_bytes": (None, 4096),
}
SAME = {name: values[0] for name, values in FIELDS.items()}
FAILURES = [None, ValueError("no such layout"), TypeError("no tensor"), KeyError("weight")]
UNKNOWN = frozenset({"shape", "dtype", "source"})
OWNERS = [3, 4, 5, 9]


def verdict(terms):
    return judge(weigh(np.stack([one.header() for one in terms])).max(axis=0))


def refused(terms, owners=None):
    return str(refusal([one.explanation() for one in terms], owners or range(len(terms))))


def but(name):
    """The terms that everybody has, with another value of one field."""
    return Proposal(SAME | {name: FIELDS[name][1]})


fields = st.tuples(*map(st.sampled_from, FIELDS.values())).map(lambda values: dict(zip(FIELDS, values, strict=True)))
sure = fields.map(Proposal)
lacking = st.builds(Proposal, fields, st.frozensets(st.sampled_from(sorted(UNKNOWN)), min_size=1))
failed = st.sampled_from(FAILURES[1:]).map(lambda error: Proposal({"operation": "reshard"}, error=error))


# --- the verdict -----------------------------------------------------------------------------------------------------


@given(sure, st.lists(sure, max_size=3), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_ranks_that_know_go_where_all_headers_are_equal_and_only_there(first, others, copies, random):
    terms = [first] * copies + others
    random.shuffle(terms)
    equal = len({one.header().tobytes() for one in terms}) == 1
    assert equal == all(one.fields == first.fields for one in terms)
    assert verdict(terms) is (Verdict.GO if equal else Verdict.REFUSE)


def expected(terms):
    """The verdict, by looking at everybody's fields one by one."""
    known = {name: {one.fields[name] for one in terms if name not in one.unknown} for name in FIELDS}
    if all(one.unknown for one in terms) or any(len(values) > 1 for values in known.values()):
        return Verdict.REFUSE
    return Verdict.LEARN if any(one.unknown for one in terms) else Verdict.GO


@given(st.lists(sure | lacking, min_size=1, max_size=4))
@settings(max_examples=80)
def test_where_ranks_lack_knowledge_the_verdict_is_that_of_everybodys_fields(terms):
    assert verdict(terms) is expected(terms)


@given(st.lists(sure | lacking, max_size=4), failed, st.integers(0, 4))
@settings(max_examples=40)
def test_one_rank_that_fails_stops_all(terms, one, place):
    assert verdict([*terms[:place], one, *terms[place:]]) is Verdict.REFUSE


@given(st.lists(sure | lacking | failed, min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_the_verdict_does_not_depend_on_who_brings_what(terms, random):
    shuffled = random.sample(terms, len(terms))
    assert verdict(shuffled) is verdict(terms) is verdict([*terms, *terms])


@given(st.lists(sure | lacking | failed, min_size=2, max_size=5), st.integers(1, 4))
@settings(max_examples=40)
def test_weights_may_be_reduced_in_parts(terms, cut):
    headers = np.stack([one.header() for one in terms])
    halves = [weigh(half).max(axis=0) for half in (headers[:cut], headers[cut:]) if len(half)]
    assert judge(np.max(halves, axis=0)) is verdict(terms)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_ranks_that_lack_knowledge_have_to_learn_whatever_stands_in_its_place(name):
    assert verdict([Proposal(SAME), Proposal(SAME, UNKNOWN)]) is Verdict.LEARN
    assert verdict([Proposal(SAME), Proposal(SAME, UNKNOWN), Proposal(but(name).fields, UNKNOWN)]) is Verdict.LEARN


def test_where_nobody_knows_all_refuse():
    lacks = Proposal(SAME, UNKNOWN)
    assert verdict([lacks, lacks]) is Verdict.REFUSE
    assert refused([lacks, lacks], [4, 7]) == (
        "none of ranks 4, 7 holds a part of the source of this reshard: at least one must know it"
    )


def test_a_rank_that_lacks_knowledge_is_held_to_what_it_knows():
    lacks = Proposal(but("target").fields, UNKNOWN)
    assert verdict([Proposal(SAME), lacks]) is Verdict.REFUSE
    assert "disagree on the target" in refused([Proposal(SAME), lacks])


# --- the header ------------------------------------------------------------------------------------------------------


def test_the_status_of_a_rank_is_what_it_knows():
    assert Proposal(SAME).status is Status.KNOWS
    assert Proposal(SAME, UNKNOWN).status is Status.LACKS
    assert Proposal(SAME, UNKNOWN, FAILURES[1]).status is Status.FAILED


def test_a_header_has_the_same_length_whatever_the_fields():
    for terms in (Proposal({}), Proposal(SAME), Proposal({"operation": "x" * 1000}), Proposal({}, error=FAILURES[1])):
        assert (terms.header().shape, terms.header().dtype) == ((WORDS,), np.int64)


def test_equal_layouts_have_equal_headers_however_they_are_written():
    one = Layout.chunk((8, 6), 0, owners=2)
    same = Layout.boxes((8, 6), [(0, (0, 0), (4, 6)), (1, (4, 0), (8, 6))])
    assert str(one) != str(same)
    np.testing.assert_array_equal(Proposal({"source": one}).header(), Proposal({"source": same}).header())


def test_values_that_are_equal_but_of_other_types_differ():
    found = [Proposal({"verify": value}).header()[1] for value in (1, True, None, 0, False)]
    assert len(set(found)) == 5


# --- the error -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("rank", range(4))
def test_a_field_that_differs_is_named_with_its_values_and_ranks(name, rank):
    terms = [Proposal(SAME)] * 4
    terms[rank] = but(name)
    assert verdict(terms) is Verdict.REFUSE
    message = refused(terms, OWNERS)
    others = [owner for owner in OWNERS if owner != OWNERS[rank]]
    assert f"the ranks disagree on the {name} of this " in message
    assert f"rank {OWNERS[rank]}: {FIELDS[name][1]}" in message
    assert f"{in_words(others)}: {FIELDS[name][0]}" in message
    assert message.endswith("Every rank of the group must ask for the same")


def test_the_first_field_that_differs_is_reported():
    terms = [Proposal(SAME), Proposal(SAME | {name: FIELDS[name][1] for name in ("dtype", "target")})]
    assert refused(terms) == (
        "the ranks disagree on the dtype of this reshard: rank 0: torch.float32; rank 1: torch.bfloat16. "
        "Every rank of the group must ask for the same"
    )


def test_what_a_rank_does_not_know_is_not_held_against_it():
    wrong = Proposal(SAME | {"shape": (1, 1), "max_bytes": 7}, UNKNOWN)
    message = refused([Proposal(SAME), wrong])
    assert "disagree on the max_bytes" in message
    assert "(1, 1)" not in message


@given(st.lists(st.sampled_from(FAILURES), min_size=1, max_size=5).filter(any))
@settings(max_examples=40)
def test_errors_are_told_with_the_ranks_that_had_them(errors):
    terms = [Proposal(SAME, error=error) for error in errors]
    message = refused(terms)
    different = {str(error): [r for r, e in enumerate(errors) if e is error] for error in errors if error}
    if None not in errors and len(different) == 1:
        (error,) = {*errors}
        assert message == f"reshard: {said(error)}"
    else:
        assert message.split("\n") == [
            f"{in_words(whose)} cannot take part in this reshard: {said(errors[whose[0]])}"
            for whose in different.values()
        ]


def said(error):
    """Values and types say all in their words; of others it helps to know what they are."""
    return str(error) if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"


def test_errors_come_before_differences():
    assert refused([but("dtype"), Proposal(SAME), Proposal({"operation": "reshard"}, error=FAILURES[2])]) == (
        "rank 2 cannot take part in this reshard: no tensor"
    )


def test_an_exchange_without_a_name_is_an_exchange():
    assert refused([Proposal({}), Proposal({}, error=FAILURES[1])]) == (
        "rank 1 cannot take part in this exchange: no such layout"
    )


@given(st.sets(st.integers(0, 30), min_size=1), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_ranks_are_told_as_ranges_that_name_exactly_them(numbers, random):
    word, _, listed = in_words(random.sample(sorted(numbers), len(numbers))).partition(" ")
    found = []
    for run in listed.split(", "):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(numbers)
    assert word == ("rank" if len(numbers) == 1 else "ranks")
    assert all(int(run.split("-")[1]) - int(run.split("-")[0]) > 1 for run in listed.split(", ") if "-" in run)


# --- on a transport --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["all_to_all", "all_reduce"])
def transports(request, monkeypatch):
    """Transports of four ranks, once as they are and once as in a group that is too large for slots."""
    if request.param == "all_reduce":
        monkeypatch.setattr("shardwise.transports.endpoint.MOST_SLOTS", 2)
    return in_memory_transports(OWNERS, timeout=PATIENCE)


def agreed(transports, terms):
    """What an exchange of these terms gives or raises on every rank."""
    brought = dict(zip(OWNERS, terms, strict=True))
    return outcomes(transports, lambda transport: Exchange(transport, brought[transport.me]).start().finish())


def test_ranks_that_agree_are_done(transports):
    assert agreed(transports, [Proposal(SAME)] * 4) == [None] * 4


def test_ranks_that_lack_knowledge_hear_what_the_others_know(transports):
    assert agreed(transports, [Proposal(SAME), *[Proposal(SAME, UNKNOWN)] * 3]) == [[SAME, None, None, None]] * 4


REFUSED = {
    **{f"another {name}": [Proposal(SAME), but(name), Proposal(SAME), Proposal(SAME)] for name in FIELDS},
    "one fails": [*[Proposal(SAME)] * 3, Proposal({}, error=FAILURES[1])],
    "some fail": [
        Proposal({}, error=FAILURES[1]),
        Proposal(SAME),
        Proposal({}, error=FAILURES[1]),
        Proposal({}, error=FAILURES[2]),
    ],
    "all fail": [Proposal({}, error=FAILURES[3])] * 4,
    "nobody knows": [Proposal(SAME, UNKNOWN)] * 4,
}


@pytest.mark.parametrize("terms", REFUSED.values(), ids=REFUSED)
def test_every_rank_raises_the_same_error(transports, terms):
    errors = agreed(transports, terms)
    kinds = {type(one.error) for one in terms if one.error}
    differ = not kinds and not all(one.unknown for one in terms)
    assert {type(error) for error in errors} == {
        RefusedValueError if kinds == {ValueError} or differ else ExchangeError
    }
    assert {str(error) for error in errors} == {refused(terms, OWNERS)}
    assert [error.__cause__ for error in errors] == [one.error for one in terms]


def test_a_refusal_leaves_the_transport_as_it_was(transports):
    for terms in REFUSED.values():
        assert all(isinstance(error, ExchangeError) for error in agreed(transports, terms))
    assert agreed(transports, [Proposal(SAME)] * 4) == [None] * 4


def test_those_who_know_tell_those_who_unknown_wrong(transports):
    wrong = Proposal(SAME | {"shape": (1, 1)}, UNKNOWN)
    found = agreed(transports, [wrong, Proposal(SAME), Proposal(SAME, UNKNOWN), wrong])
    assert found == [[None, SAME, None, None]] * 4


def test_terms_are_remembered_once_all_have_agreed_on_them(transports):
    agreed(transports, [Proposal(SAME), but("dtype"), *[Proposal(SAME)] * 2])
    assert [transport.agreed for transport in transports] == [set()] * 4
    agreed(transports, [Proposal(SAME)] * 4)
    assert [transport.agreed for transport in transports] == [{Proposal(SAME).header().tobytes()}] * 4


def test_where_the_ranks_disagree_nothing_is_written_that_others_can_see(transports):
    made = plan("4x6/S0@4:3,4,5,9", "4x6/S1@4:3,4,5,9")
    targets = {owner: torch.zeros(made.target.local_shape(owner)) for owner in OWNERS}

    def work(transport):
        source = torch.ones(made.source.local_shape(transport.me))
        move = Move.of(made, transport.me, [source], [targets[transport.me]], torch.float32)
        terms = but("dtype") if transport.me == 9 else Proposal(SAME)
        return Exchange(transport, terms, [move], fresh=False).start().finish()

    assert {type(error) for error in outcomes(transports, work)} == {RefusedValueError}
    assert not any(target.any() for target in targets.values())


def test_a_large_group_moves_the_same_values(transports):
    made = plan("4x6/S0@4:3,4,5,9", "4x6/S1@4:9,5,4,3")
    whole = torch.arange(24.0).reshape(4, 6)

    def work(transport):
        source = whole[OWNERS.index(transport.me)][None]
        target = torch.empty(made.target.local_shape(transport.me))
        assert (
            Exchange(transport, Proposal(SAME), [Move.of(made, transport.me, [source], [target], torch.float32)])
            .start()
            .finish()
            is None
        )
        return target

    found = together(transports, work)
    torch.testing.assert_close(torch.cat(found[::-1], dim=1), whole, rtol=0, atol=0)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("owners", [3, 20])  # few, that write to everybody, and more
def test_notes_come_to_the_same_sums_on_all_ranks(monkeypatch, many, owners):
    monkeypatch.setattr(Exchange, "_many", many)
    notes = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, (owners, 8))

    def work(transport):
        exchange = Exchange(transport, Proposal(SAME), note=notes[transport.me].tolist()).start()
        exchange.finish()
        return exchange.noted()

    for found in together(in_memory_transports(owners, timeout=PATIENCE), work):
        np.testing.assert_array_equal(found, notes.sum(axis=0), strict=True)


def test_more_numbers_than_a_note_holds_are_a_mistake():
    (alone,) = in_memory_transports(1)
    with pytest.raises(AssertionError, match="run into a message"):
        Exchange(alone, Proposal(SAME), note=range(9))


@pytest.mark.parametrize("owners", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("length", [0, 100, 2040, 2041, 5000])
def test_everybody_gets_the_values_of_all_however_long_one_is(owners, length):
    def work(transport):
        return transport.all_gather((transport.me, b"x" * (length if transport.me == owners - 1 else 0)))

    for found in together(in_memory_transports(owners, timeout=PATIENCE), work):
        assert found == [(me, b"x" * (length if me == owners - 1 else 0)) for me in range(owners)]
