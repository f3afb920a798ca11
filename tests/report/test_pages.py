"""What a page holds is what the plan says: totals, owners, flows, rounds and tiles, also where much is put together."""

from itertools import pairwise

import numpy as np
import pytest
from embedded import data
from hypothesis import given
from hypothesis import strategies as st

from shardwise import parse, plan
from shardwise.geometry import Box
from shardwise.layout import Grid
from shardwise.planning import redistributed
from shardwise.report import Row, page, write
from shardwise.report.groups import Groups
from shardwise.report.pictures import Limits, picture
from shardwise.report.tiles import tiles
from shardwise.testing.strategies import layouts, pairs

LIMITS = st.builds(Limits, st.integers(1, 5), st.integers(1, 9), st.integers(0, 20)) | st.just(Limits())


def covered(layout, found):
    """How often each cell is in a tile."""
    count = np.zeros(layout.shape, dtype=int)
    for row in found["tiles"]:
        count[tuple(map(slice, row[: layout.ndim], row[layout.ndim : 2 * layout.ndim]))] += 1
    return count


@given(pairs(), LIMITS, st.none() | st.integers(100, 200))
def test_figures_are_the_plans_own(both, limits, max_bytes):
    p = plan(*both, max_bytes=max_bytes and max_bytes * 4)
    found, groups = picture(p, limits), Groups.of(p.owners, limits.groups)
    totals, bars = found["totals"], found["bars"]
    assert (totals["moved"], totals["local"], totals["messages"]) == (p.bytes_moved, p.bytes_local, p.messages)
    assert (totals["rounds"], totals["peak"], totals["seconds"]) == (p.rounds, p.peak_bytes, p.estimate())
    assert totals["bound"] in (None, p.lower_bound)
    for name, by_owner in ("sent", p.sent), ("received", p.received), ("kept", p.kept):
        assert bars[name] == groups.add(np.array(list(by_owner.values())))
        assert sum(bars[name]) == sum(by_owner.values())
    assert max(bars["peak"], default=0) == p.peak_bytes
    assert found["groups"]["labels"] == groups.labels()


@given(pairs(), LIMITS)
def test_flows_and_rounds_add_up_to_what_is_sent(both, limits):
    p = plan(*both)
    found, groups = picture(p, limits), Groups.of(p.owners, limits.groups)
    expected = np.zeros((groups.count, groups.count), dtype=int)
    for (i, j), size in np.ndenumerate(p.matrix()):
        expected[i // groups.length, j // groups.length] += size
    flows = np.zeros_like(expected)
    for i, j, size in found["flows"]:
        flows[i, j] += size
    np.testing.assert_array_equal(flows, expected)
    assert sum(stage[2] for stage in found["stages"]) == p.bytes_moved
    assert sum(stage[3] for stage in found["stages"]) == p.messages
    assert sum(stage[4] for stage in found["stages"]) == pytest.approx(p.estimate())


@given(layouts(), st.integers(1, 9))
def test_tiles_cover_every_cell_once(layout, most):
    found = tiles(layout, Groups.of(layout.form.owners, 64), most)
    count = covered(layout, found)
    if isinstance(layout.form, Grid):
        np.testing.assert_array_equal(count, 1)
    assert count.max(initial=0) <= 1
    assert len(found["tiles"]) <= max(most, 1)
    everything = tiles(layout, Groups.of(layout.form.owners, 64), 10**6)
    np.testing.assert_array_equal(covered(layout, everything), 1)
    assert len(found["tiles"]) == min(most, found["total"]) or found["merged"]


@given(layouts(), st.integers(1, 20))
def test_tiles_name_those_who_hold_them(layout, most):
    owners = layout.form.owners
    found = tiles(layout, Groups.of(owners, 64), most)
    for row in found["tiles"]:
        box = Box(tuple(row[: layout.ndim]), tuple(row[layout.ndim : 2 * layout.ndim]))
        holders = found["sets"][row[-1]]
        assert [owners[group] for group in holders["groups"]] == list(layout.owners(box))
        if not found["merged"]:
            assert holders["replicas"] * layout.terms == len(holders["groups"])


@given(pairs())
def test_copies_fill_the_target(both):
    p = plan(*both, max_bytes=10**6)
    rows, dims = picture(p, Limits())["copies"]["rows"], p.target.ndim
    ours = [(tuple(row[:dims]), tuple(row[dims : 2 * dims]), p.owners[row[-3]], p.owners[row[-2]]) for row in rows]
    assert ours == [(c.box.lo, c.box.hi, c.source, c.target) for c in plan(*both).copies]


def test_many_rounds_are_put_together():
    p = plan("64x64/S0@4", "64x64/S1@4", max_bytes=60)
    stages = picture(p, Limits())["stages"]
    assert p.rounds > 64 >= len(stages)
    assert stages[0][0] == 1
    assert stages[-1][1] == p.rounds
    assert all(before[1] + 1 == after[0] for before, after in pairwise(stages))


def test_a_page_says_what_redistribute_would_move():
    p = plan("8x6/S0@4", "8x6/S1@4")
    totals = data(page(p))["pictures"][0]["totals"]
    assert totals["redistribute"] == [144, 576]
    assert totals["redistribute"][0] == redistributed(p.source, p.target, 4).bytes
    assert data(page(plan("8x6/S0@4", "8x6/S1@3")))["pictures"][0]["totals"]["why_not"] == (
        "source and target are different meshes"
    )


def test_the_least_is_not_claimed_where_another_order_of_terms_could_do_with_less():
    assert picture(plan("8x6/P@4", "8x6/P,R@2x2"), Limits())["totals"]["bound"] is None


def test_equal_plans_are_stored_once():
    names = {f"layers.{n}.w": plan("64x64/S0@4", "64x64/S1@4") for n in range(500)}
    found = data(page({**names, "norm": plan("64/S0@4", "64/R@4")}))
    assert len(found["pictures"]) == 2
    assert len(found["rows"]) == 501
    assert found["together"]["totals"]["moved"] == 500 * 12288 + 3 * 256
    assert sum(found["together"]["bars"]["sent"]) == found["together"]["totals"]["moved"]


def test_ten_thousand_tensors_of_a_dozen_kinds_are_a_small_page():
    kinds = [plan(f"{64 * n}x64/S0@64", f"{64 * n}x64/S1@64") for n in range(1, 13)]
    text = page({f"model.layers.{n // 12}.block.{n % 12}.weight": kinds[n % 12] for n in range(10_000)})
    assert len(text) < 3_000_000


def test_a_page_of_hundreds_of_kinds_stays_small_too():
    kinds = {str(n): plan(f"{64 * n}x64/S0@64", f"{64 * n}x64/S1@64") for n in range(1, 301)}
    assert len(page(kinds)) < 3_000_000


def test_a_plan_with_hosts_says_what_crosses_between_them():
    p = plan("1024x1024/S0@4", "1024x1024/R@8", hosts=4)
    across = sum(c.box.volume * 4 for c in p.copies if c.source // 4 != c.target // 4)
    assert picture(p, Limits())["totals"]["across"] == across == 4 * 1024 * 1024


def test_a_page_of_nothing_says_so():
    assert data(page({}))["rows"] == []


def test_names_cannot_break_out_of_the_page():
    name = "</script><script>alert(1)</script><!-- & \u2028 \ud800"
    text = page({name: parse("8x6/S0@2"), "w": parse("8x6/S0@2")}, title=name)
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "<!--" not in text
    assert data(text)["rows"][0][0] == name
    assert text.encode("utf-8")


@pytest.mark.parametrize("text", ["scalar/R@2", "0x6/S0@3", "9/cyclic0=2@2", "2x2x2x2/S3@2", "2x2x2x2x2/S4,P@2x2"])
def test_every_shape_has_a_page(text):
    assert data(page(parse(text)))["pictures"][0]["source"]["text"] == text


def test_rows_carry_dtypes_and_notes():
    found = data(page([Row("w", parse("8x6/S0@2"), itemsize=2, dtype="bfloat16", note="from v")]))
    assert found["rows"] == [["w", 0, 96, 0, "from v"]]
    assert found["dtypes"] == ["bfloat16"]
    assert found["unit"] == "bytes"
    assert data(page({"w": parse("8x6/S0@2")}))["unit"] == "cells"


@pytest.mark.parametrize("wrong", [3, "8x6/S0@2", {"w": 3}, [None]])
def test_what_cannot_be_shown_is_refused(wrong):
    with pytest.raises(TypeError, match="a page shows a Layout"):
        page(wrong)


def test_a_page_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "page.html"
    assert write(path, "before") == path
    with pytest.raises(UnicodeEncodeError):
        write(path, "\ud800")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_plans_write_their_page(tmp_path):
    p = plan("8x6/S0@4", "8x6/S1@3")
    path = p.html(tmp_path / "plan.html", title="rows to columns")
    assert path.read_text() == page(p, title="rows to columns")
