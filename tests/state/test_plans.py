"""The plan of a model: explained, saved, held against a file; and how far a run has come."""

import json

import pytest
import torch
from models import Llama, all_same, held, lies, numbers, refused, same, same_refusals, sharded, state, weights
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import Concat, report

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
WHOLE = numbers(8, 6)


def sides(source="8x6/S0@4", target="8x6/S1@4", dtype=torch.float32, names="ab"):
    given = {name: held(WHOLE.to(dtype), source) for name in names}
    return given, {name: held(WHOLE.to(dtype) * 0 - 1, target) for name in names}


def test_a_plan_says_in_words_and_figures_what_will_be_done(ranks):  # noqa: F811
    def run(rank):
        plan = sw.Resharder(*sides()).plan
        text = plan.explain()
        assert "2 tensors become 2, in 1 exchange" in text
        assert "2 x 8x6/S0@4 float32 -> 8x6/S1@4 float32" in text
        figures = json.loads(plan.to_json())
        one = sw.plan(sw.parse("8x6/S0@4"), sw.parse("8x6/S1@4"), itemsize=4)
        assert (plan.bytes_moved, plan.bytes_local) == (2 * one.bytes_moved, 2 * one.bytes_local)
        assert figures["bytes_moved"] == plan.bytes_moved
        assert figures["targets"]["b"] == {"shape": [8, 6], "dtype": "torch.float32", "layout": "8x6/S1@4"}
        assert {name: list(sources) for name, sources in figures["links"].items()} == {"a": ["a"], "b": ["b"]}
        model = sw.Resharder(sharded("fsdp", 1).state_dict(), sharded("tp", 2).state_dict(), max_bytes=4000).plan
        assert f"{len(weights(Llama(0)))} tensors become" in model.explain()
        assert model.peak_bytes <= 4000
        return text, plan.to_json(), plan.fingerprint, model.to_json(), model.explain()

    found = ranks(4, run)
    assert found == [found[0]] * 4


def test_a_plan_says_what_crosses_between_hosts(tmp_path, ranks):  # noqa: F811
    def run(rank):
        source, target = held(WHOLE, "8x6/S0@4"), held(WHOLE * 0, "8x6/R@4")
        near, far = (sw.Resharder({"a": source}, {"a": target}, hosts=hosts).plan for hosts in (None, 2))
        page = far.html(tmp_path / f"{rank}.html").read_text()
        return near.bytes_across, near.explain(), far.bytes_across, far.explain(), page

    nothing, near, across, far, page = ranks(4, run)[0]
    assert nothing == 0
    assert "hosts" not in near
    assert across == 2 * WHOLE.nbytes // 2  # each host lacks a half
    assert "192 B of them between 2 hosts" in far
    assert "between 2 hosts" in page


def test_a_plan_is_drawn(ranks):  # noqa: F811
    def run(rank):
        given, room = sides()
        plan = sw.Resharder(given, room).plan
        with pytest.raises(sw.PlanError, match=r"the target has no 'aa' \(nearest: 'a'\)"):
            plan.draw("aa")
        return plan.draw("a"), plan.draw()

    found = ranks(4, run)
    assert found == [found[0]] * 4
    one, every = found[0]
    rows, columns = sw.parse("8x6/S0@4"), sw.parse("8x6/S1@4")
    flows = report.matrix(sw.plan(rows, columns))
    assert one == f"a\n{report.draw(rows)}\n\n-> a\n{report.draw(columns)}\n\n{flows}"
    assert every == report.matrix(*[sw.plan(rows, columns)] * 2)


def test_nothing_is_moved_that_lies_where_it_should(ranks):  # noqa: F811
    def run(rank):
        given, room = sides("8x6/S0@4", "8x6/S0@4")
        sync = sw.Resharder(given, room)
        assert (sync.plan.bytes_moved, sync.plan.bytes_local) == (0, 2 * 8 * 6 * 4)
        sync.run()
        lies(room["b"], WHOLE, "8x6/S0@4")

    ranks(4, run)


def test_a_saved_plan_is_taken_for_the_same_model_alone(ranks):  # noqa: F811
    def run(rank):
        given, room = sides()
        text = sw.Resharder(given, room).plan.to_json()
        sync = sw.Resharder(*sides(), plan=text)
        assert sync.plan.to_json() == text
        sync = sw.Resharder(given, room, plan=json.dumps(json.loads(text)))  # however it is written
        sync.run()
        lies(room["a"], WHOLE, "8x6/S1@4")
        fused = {"ab": held(torch.full((16, 6), -1.0), "16x6/S0@4")}
        others = {
            "names": (sides(names="ac"), {}),
            "order": (sides(names="ba"), {}),
            "fewer": (sides(names="a"), {}),
            "more": (sides(names="abc"), {}),
            "dtype": (sides(dtype=torch.float64), {}),
            "source": (sides(source="8x6/S0@4:1,0,2,3"), {}),
            "target": (sides(target="8x6/S1@2"), {}),
            "max_bytes": (sides(), {"max_bytes": 100}),
            "links": (sides(), {"rename": {"a": "b", "b": "a"}}),
            "remap": ((given, fused), {"remap": [Concat("ab", ["a", "b"])]}),
        }
        found = {}
        for name, (both, options) in others.items():
            found[name] = refused(lambda both=both, options=options: sw.Resharder(*both, plan=text, **options))
            for value in both[1].values():
                if value is not None and both[1] is not room:
                    same(value.shards[0], torch.full_like(value.shards[0], -1))
        for name, wrong in {"no plan": "x", "no json": "{", "another file": "{}", "nothing": "null"}.items():
            found[name] = refused(lambda wrong=wrong: sw.Resharder(*sides(), plan=wrong))
        one = sw.plan(sw.parse("8x6/S0@4"), sw.parse("8x6/S1@4")).to_json()
        found["of one tensor"] = refused(lambda: sw.Resharder(*sides(), plan=one))
        found["on one rank"] = refused(lambda: sw.Resharder(*sides(), plan="x" if rank == 2 else text))
        return found

    other = "the plan file is of another model: "
    same_refusals(
        ranks(4, run),
        names=other + "'sources' 'b' is only in the file",
        order=other + "'sources' has 'a' in the file where 'b' is here",
        fewer=other + "'sources' 'b' is only in the file",
        more=other + "'sources' 'c' is only here",
        dtype=other + "'sources' 'a' 'dtype' is torch.float32 in the file, but torch.float64 here",
        source=other + "'sources' 'a' 'layout' is 8x6/S0@4 in the file, but 8x6/S0@4:1,0,2,3 here",
        target=other + "'targets' 'a' 'layout' is 8x6/S1@4 in the file, but 8x6/S1@2 here",
        max_bytes=other + "'max_bytes' is None in the file, but 100 here",
        links=other + "'links' 'a' 'a' is only in the file",
        remap=other + "'targets' 'a' is only in the file",
        **{"no plan": "not a plan file", "no json": "not a plan file", "another file": "not the plan file of a model"},
        **{"nothing": "not the plan file of a model", "of one tensor": "not the plan file of a model"},
        **{"on one rank": ["rank 2", "not a plan file"]},
    )


def test_progress_rises_to_the_total(ranks):  # noqa: F811
    def run(rank):
        source, target = sharded("fsdp", 1, [0, 1]), sharded("tp", 2, [2, 3])
        given, room = state(source), state(target)
        everything = sum(value.numel() for value in Llama(0).state_dict().values()) * 4
        seen = []
        for options in {}, {"max_bytes": 2000}, {"max_bytes": 4000, "verify": True}:
            calls = []
            sync = sw.Resharder(given, room, progress=lambda *at, calls=calls: calls.append(at), **options)
            assert calls == []
            for _ in range(2):
                calls.clear()
                sync.run()
                done, totals = zip(*calls, strict=True)
                assert set(totals) == {everything}
                assert list(done) == sorted(set(done))
                assert done[-1] == everything
                assert len(calls) == len(list(sync.plan.buckets()))
                assert len(calls) > (10 if options else 0)
            seen.append(list(calls))
        return seen

    found = ranks(4, run)
    assert found == [found[0]] * 4


def test_progress_of_a_state_dict_counts_what_is_moved(ranks):  # noqa: F811
    def run(rank):
        calls = []
        given = {"w": held(WHOLE, "8x6/S0@4"), "kept": WHOLE, "step": 1, "v": held(WHOLE, "8x6/S0@4")}
        rules = [("kept", None), ("*", "8x6/S1@4")]
        sw.reshard_state_dict(given, rules, max_bytes=100, progress=lambda *at: calls.append(at))
        assert calls == [(192, 384), (384, 384)]

    ranks(4, run)


def test_a_bar_can_be_asked_for(ranks):  # noqa: F811
    def run(rank):
        given, room = sides()
        bar = "bar" if rank == 0 else None  # one is enough
        sync = sw.Resharder(given, room, progress=bar)
        sync.run()
        sync.run()
        lies(room["b"], WHOLE, "8x6/S1@4")
        found = sw.reshard_state_dict(given, [("*", "8x6/S1@4")], progress=bar)
        lies(found["b"], WHOLE, "8x6/S1@4")

    ranks(4, run)


def test_what_is_no_progress_is_refused_on_all_ranks(ranks):  # noqa: F811
    def run(rank):
        given, room = sides()
        asked = "line" if rank == 1 else None

        def sync():
            sw.Resharder(given, room, progress=asked).run()

        text = {"sync": refused(sync)}
        for value in room.values():
            same(value.shards[0], torch.full_like(value.shards[0], -1))
        text["reshard"] = refused(lambda: sw.reshard_state_dict(given, [("*", "8x6/S1@4")], progress=asked))
        return text

    same_refusals(ranks(4, run, timeout=20, patience=10), sync="progress=", reshard="progress=")


def test_a_step_costs_one_agreement_for_many_tensors(ranks):  # noqa: F811
    """All small tensors of a model travel in one exchange, however many runs there are."""

    def run(rank):
        names = [f"layers.{at}.w" for at in range(60)]
        given, room = sides(names=names)
        sync = sw.Resharder(given, room)
        assert len(list(sync.plan.buckets())) == 1
        for _ in range(3):
            sync.run()
        all_same({name: value.gather(None) for name, value in list(room.items())[:3]}, dict.fromkeys(names[:3], WHOLE))

    ranks(4, run)
