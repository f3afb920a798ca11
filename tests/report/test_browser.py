"""The pages in a real browser: headless Chromium opens them, points, selects, types; and what it shows is compared."""

import json
import shutil
from time import perf_counter

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from shardwise import parse, plan
from shardwise.planning import redistributed, size
from shardwise.report import Row, page, write

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
PLAN = plan("8x6/S0@4", "8x6/S1@3")
SUMS = plan("8x6x4/P,S0@2x2", "8x6x4/S1,R@2x2")
ON_MESH = plan("64x64/S0@4", "64x64/S1@4")
HOSTILE = '<img src=x onerror="window.hit=1"></script><script>window.hit=1</script>'


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """One browser for all tests here, with a profile of its own."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.fail(
            "Chromium or its driver is missing, and the pages are tested in a real browser. Run `make browser`, or "
            "install them yourself: apt-get install chromium chromium-driver",
            pytrace=False,
        )
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    yield found
    found.quit()


class Opened:
    """A page in the browser."""

    def __init__(self, driver, path):
        self.driver, self.path = driver, path

    def open(self, text, width=1200, scheme="light"):
        self.resize(width)
        self.prefer(scheme)
        self.driver.get(write(self.path, text).as_uri())
        assert self.one("html").get_attribute("data-ready") == "true"
        return self

    def resize(self, width):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme, motion="no-preference"):
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        asked = {"features": [{"name": name, "value": value} for name, value in features.items()]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", asked)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        return [found.text for found in self.all(selector)]

    def figure(self, name):
        return self.one(f'[data-figure="{name}"]').text

    def figures(self, name):
        return self.texts(f'[data-figure="{name}"]')

    def script(self, code, *values):
        return self.driver.execute_script(code, *values)

    def point(self, selector):
        target = self.one(selector)
        self.script("arguments[0].scrollIntoView({block: 'center'})", target)
        ActionChains(self.driver).move_to_element(target).perform()

    def press(self, *keys):
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def focus(self, selector):
        self.script("arguments[0].focus()", self.one(selector))

    def focused(self):
        return self.driver.switch_to.active_element.get_attribute("aria-label")

    def rows(self, selector):
        """The cells of a table, row by row; read at once, as there may be many."""
        code = "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
        return self.script(code + ".map(row => [...row.children].map(cell => cell.textContent))", selector)

    def asked(self):
        """The addresses that were asked for since the last look."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


@pytest.fixture
def opened(chromium, tmp_path):
    """A page to open; when the test is over, no script has failed and nobody else was asked for anything."""
    found = Opened(chromium, tmp_path / "page.html")
    chromium.get("about:blank")
    for log in "browser", "performance":
        chromium.get_log(log)
    yield found
    assert [entry["message"] for entry in chromium.get_log("browser")] == []
    assert set(found.asked()) <= {found.path.as_uri(), "about:blank"}


def names(tile):
    return f'[aria-label^="{tile}"]'


# --- what is shown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [PLAN, SUMS, ON_MESH, plan("64x64/S0@8", "64x64/S1@8", max_bytes=1000)])
def test_the_figures_shown_are_the_plans(opened, made):
    opened.open(page(made))
    assert opened.figure("moves") == size(made.bytes_moved)
    assert opened.figure("stays") == size(made.bytes_local)
    assert opened.figure("messages") == f"{made.messages:,}"
    assert opened.figure("peak") == size(made.peak_bytes)
    assert opened.figure("bound") == size(made.lower_bound)
    assert opened.figure("ours") == size(made.bytes_moved)
    expected = [
        [str(o), size(made.sent[o]), size(made.received[o]), size(made.kept[o]), size(peak)]
        for o, peak in zip(made.owners, made.traffic.peaks().tolist(), strict=True)
    ]
    assert opened.rows("#owners") == expected


def test_sizes_are_written_as_in_the_terminal(opened):
    amounts = [0, 1, 1023, 1024, 1152, 1157, 1536, 1162, 2**20 - 1, 2**20, 5 * 2**30 + 12345, 2**52]
    opened.open(page(PLAN))
    assert opened.script("return arguments[0].map(bytes)", amounts) == [size(n) for n in amounts]


def test_redistribute_is_shown_as_a_model(opened):
    opened.open(page(ON_MESH))
    ways = [redistributed(ON_MESH.source, ON_MESH.target, 4, all_to_all=way).bytes for way in (True, False)]
    assert opened.figures("model") == [size(ways[0]), size(ways[1])]
    assert "a model, not a measurement" in opened.one("#least").text
    assert "cannot do this: source and target are different meshes" in opened.open(page(PLAN)).one("#least").text


def test_the_matrix_has_the_plans_flows(opened):
    opened.open(page(PLAN))
    shown = {found.get_attribute("aria-label") for found in opened.all(".flow")}
    matrix = PLAN.matrix()
    assert shown == {
        f"rank {a} to rank {b}: {size(int(matrix[i, j]))}"
        for i, a in enumerate(PLAN.owners)
        for j, b in enumerate(PLAN.owners)
        if matrix[i, j]
    }


def test_a_table_stands_in_for_every_picture(opened):
    opened.open(page(PLAN))
    for button in opened.all(".swap"):
        button.click()
    assert opened.one("#tiles .layouts").is_displayed() is False
    assert opened.rows("#tiles-table")[:2] == [["[0:2, 0:6]", "on rank 0", "12"], ["[2:4, 0:6]", "on rank 1", "12"]]
    assert len(opened.rows("#flows-table")) == PLAN.messages
    assert opened.rows("#least-table")[1] == ["This plan moves", size(PLAN.bytes_moved)]
    assert opened.rows("#rounds-table")[0][:3] == ["round 1", size(PLAN.bytes_moved), str(PLAN.messages)]
    assert all(found.text for found in opened.all("table caption"))
    assert all(found.get_attribute("scope") in ("row", "col") for found in opened.all("th"))


def test_rounds_are_a_timeline(opened):
    made = plan("64x64/S0@8", "64x64/S1@8", max_bytes=1000)
    opened.open(page(made))
    assert len(opened.all(".stage")) == made.rounds
    opened.point(".stage")
    assert "round 1: " in opened.one("#rounds .said").text


def test_replicas_and_partial_sums_are_marked_and_said(opened):
    opened.open(page(SUMS))
    assert len(opened.all(".source .tile.partial")) > 0
    assert len(opened.all(".target .tile.replicas")) > 0
    assert "the sum of 2 terms is the value" in opened.one(".source").text
    assert "up to 2 owners hold the same cells" in opened.one(".target").text
    assert "sum of terms on ranks 0+2" in opened.one(".source .tile").get_attribute("aria-label")


@pytest.mark.parametrize(
    "text", ["scalar/R@2", "0x6/S0@3", "9/cyclic0=2@2", "4x2x2/S0@2", "2x3x4x4/S0,S1@2x3", "2x2x2x2x2/S0,S3@2x2"]
)
def test_layouts_of_every_number_of_dims_are_drawn(opened, text):
    layout = parse(text)
    opened.open(page(layout))
    assert len(opened.all(".tile")) == layout.form.cells.boxes.count
    assert opened.one("h3 code").text == text


def test_a_page_of_nothing_says_so(opened):
    assert opened.open(page({})).one("main").text == "There is nothing to show."


def test_owners_with_nothing_are_named(opened):
    assert "Nothing on rank 3" in opened.open(page(parse("5x6/S0@4"))).one("#tiles").text


# --- pointing, selecting, the keyboard ------------------------------------------------------------------------------


def test_pointing_at_a_tile_shows_its_box_and_its_copies(opened):
    opened.open(page(PLAN))
    opened.point(f".source {names('[2:4, 0:6]')}")
    said = opened.one(".detail").text
    assert "source [2:4, 0:6] 12 cells · 48 B · on rank 1" in said
    assert "to rank 0 [2:4, 0:2] 16 B" in said
    assert "stays on rank 1 [2:4, 2:4] 16 B" in said
    assert len(opened.all(".source .tile.lit")) == 1
    assert len(opened.all(".target .tile.lit")) == 3
    assert len(opened.all(".target .outline")) == 3
    assert len(opened.all(".target .outline.stays")) == 1


def test_a_target_tile_lights_up_where_its_cells_come_from(opened):
    opened.open(page(PLAN))
    opened.point(f".target {names('[0:8, 4:6]')}")
    assert len(opened.all(".source .tile.lit")) == 4
    assert "from rank 3 [6:8, 4:6] 16 B" in opened.one(".detail").text


def test_what_is_lit_goes_out_when_the_pointer_leaves(opened):
    opened.open(page(PLAN))
    opened.point(".source .tile")
    opened.point("h1")
    assert opened.all(".lit") == opened.all(".outline") == []


def test_a_click_selects_a_rank_everywhere(opened):
    opened.open(page(PLAN))
    opened.one(f".source {names('[6:8, 0:6]')}").click()
    assert Select(opened.one("select")).first_selected_option.text == "rank 3"
    assert opened.texts("#owners tr.chosen th") == ["3"]
    assert len(opened.all(".flow.lit")) == 3
    assert "sends 48 B, receives 0 B, keeps 0 B" in opened.one(".detail").text
    assert "sends to: 0 (16 B), 1 (16 B), 2 (16 B)" in opened.one(".detail").text


def test_a_rank_is_selected_from_the_list_and_given_back(opened):
    opened.open(page(PLAN))
    Select(opened.one("select")).select_by_visible_text("rank 1")
    assert opened.texts("#owners tr.chosen th") == ["1"]
    Select(opened.one("select")).select_by_visible_text("rank 2")
    assert opened.texts("#owners tr.chosen th") == ["2"]
    Select(opened.one("select")).select_by_visible_text("every rank")
    assert opened.all("#owners tr.chosen") == []


def test_a_flow_selects_its_sender_by_the_keyboard_too(opened):
    opened.open(page(PLAN))
    opened.focus(".flow")
    opened.press(Keys.ARROW_DOWN, Keys.ENTER)
    assert opened.focused() == "rank 2 to rank 1: 16 B"
    assert opened.texts("#owners tr.chosen th") == ["2"]


def test_what_is_handed_on_inside_a_host_is_said(opened):
    opened.open(page(plan("8x6/S0@4", "8x6/R@8", hosts=4)))
    assert opened.figure("between hosts") == size(8 * 6 * 4)
    Select(opened.one("select")).select_by_visible_text("rank 5")
    opened.focus(".target .tile")
    said = opened.one(".detail").text
    assert "from rank 4 to rank 5, handed on [0:2, 0:6] 48 B" in said
    assert "from rank 1 to rank 5 [2:4, 0:6] 48 B" in said


def test_arrow_keys_move_enter_selects_and_escape_clears(opened):
    opened.open(page(PLAN))
    opened.focus(".source .tile")
    assert opened.focused().startswith("[0:2, 0:6]")
    opened.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert opened.focused().startswith("[4:6, 0:6]")
    assert "source [4:6, 0:6]" in opened.one(".detail").text
    opened.press(Keys.ARROW_UP, Keys.ENTER)
    assert opened.texts("#owners tr.chosen th") == ["1"]
    opened.press(Keys.ESCAPE)
    assert opened.all("#owners tr.chosen") == []
    assert opened.all(".lit") == []


def test_tab_reaches_every_picture_and_what_has_the_focus_is_seen(opened):
    opened.open(page(PLAN))
    seen = set()
    for _ in range(40):
        opened.press(Keys.TAB)
        code = "const at = document.activeElement; return [at.className, getComputedStyle(at).outlineStyle]"
        kind, outline = opened.script(code)
        assert outline == "solid" or kind == "", kind
        seen.update(kind.split())
    assert {"tile", "flow", "pick", "stage", "swap", "theme"} <= seen


def test_all_that_can_be_focused_has_a_name(opened):
    opened.open(page(SUMS))
    code = """return [...document.querySelectorAll("[tabindex], button, select, input")]
        .filter(one => !(one.getAttribute("aria-label") || one.textContent.trim())).length"""
    assert opened.script(code) == 0


# --- light, dark, small ---------------------------------------------------------------------------------------------

CONTRAST = """
const paper = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const light = (colour) => {
  paper.fillStyle = colour; paper.fillRect(0, 0, 1, 1);
  const [r, g, b] = [...paper.getImageData(0, 0, 1, 1).data].map(v => v / 255)
    .map(v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const found = getComputedStyle(one).backgroundColor;
    if (!/rgba\\(0, 0, 0, 0\\)|transparent/.test(found)) return found;
  }
  return "white";
};
return Math.min(...[...document.querySelectorAll(arguments[0])].filter(one => one.textContent.trim())
  .map(one => ratio(light(getComputedStyle(one).color), light(behind(one)))));
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_modes(opened, scheme):
    opened.open(page(plan("64x64/S0@24", "64x64/S1@24")), scheme=scheme)
    for selector in ".tile span", ".pick", "p, small, caption, dt, dd, h1, h2, h3, td, th, button, .ticks i, .axis i":
        assert opened.script(CONTRAST, selector) >= 4.5, selector
    uneven = plan("64x64/split0=1,2,4,7,11,16,23@7", "64x64/S1@7")
    moving = [plan("64x64/S0@8", f"64x64/split0={8 + n},{56 - n},0,0,0,0,0,0@8") for n in range(0, 56, 3)]
    opened.open(page({str(n): made for n, made in enumerate([uneven, *moving])}), scheme=scheme)
    for selector in ".leaf, .branch, .tensors button", ".flow span":
        assert opened.script(CONTRAST, selector) >= 4.5, selector


def test_the_page_follows_the_system_and_the_button_turns_it(opened):
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = opened.open(page(PLAN)).script(paper)
    dark = opened.open(page(PLAN), scheme="dark").script(paper)
    assert light != dark
    assert opened.one(".theme").text == "Light"
    opened.one(".theme").click()
    assert opened.script(paper) == light
    assert opened.one(".theme").text == "Dark"


def test_nothing_moves_for_people_who_asked_for_less_motion(opened):
    opened.open(page(PLAN))
    opened.prefer("light", motion="reduce")
    assert opened.script("return getComputedStyle(document.querySelector('.tile')).transitionDuration") == "0s"


@pytest.mark.parametrize(
    "shown",
    [PLAN, SUMS, plan("4096x4096/S0@64", "4096x4096/S1@64"), {f"model.layers.{n}.{HOSTILE}": PLAN for n in range(40)}],
    ids=["plan", "sums", "many", "model"],
)
def test_a_phone_never_scrolls_sideways(opened, shown):
    opened.open(page(shown), width=380)
    assert opened.script("return document.documentElement.scrollWidth") <= 380
    assert opened.one("h1").is_displayed()


# --- many ranks, many tensors ---------------------------------------------------------------------------------------


def test_a_page_of_4096_ranks_is_small_and_opens_fast(opened):
    made = plan("65536x8192/S0,S1@512x8", "65536x8192/S1@4096", itemsize=2)
    text = page(made)
    assert len(text) < 3_000_000
    start = perf_counter()
    opened.open(text)
    assert perf_counter() - start < 5
    assert opened.figure("moves") == size(made.bytes_moved)
    assert "Showing 512 tiles that stand for 4,096" in opened.one(".source").text
    assert "4,096 ranks in 64 groups" in opened.one("#flows").text
    rows = opened.rows("#owners")
    assert len(rows) == 64
    assert rows[1][:2] == ["64-127", size(sum(made.sent[rank] for rank in range(64, 128)))]
    opened.point(".target .tile")
    assert "too many to list" in opened.one(".detail").text
    assert len(opened.all(".source .tile.lit")) > 0


def model():
    """A small one."""
    wide, long = plan("64x32/S0@4", "64x32/S1@4"), plan("32/S0@4", "32/R@4")
    names = {f"model.layers.{n}.{part}": wide for n in range(30) for part in ("up", "down", "gate")}
    rows = [Row(name, made, dtype="bfloat16") for name, made in names.items()]
    return [*rows, Row("model.norm", long, dtype="float32", note="from norm")]


def test_a_model_has_a_map_that_leads_to_every_tensor(opened):
    opened.open(page(model()))
    moved = 90 * model()[0].shown.bytes_moved + model()[-1].shown.bytes_moved
    assert opened.figure("moves") == size(moved)
    leaf = opened.one('.leaf[aria-label^="model.layers.0.up"]')
    assert "64 x 32, bfloat16, 8.00 KiB, 6.00 KiB move" in leaf.get_attribute("aria-label")
    leaf.click()
    assert opened.one("#tensor h2").text == "model.layers.0.up"
    assert opened.one('#tensor [data-figure="moves"]').text == size(model()[0].shown.bytes_moved)
    assert len(opened.all("#tensor .source .tile")) == 4


def test_a_checkpoint_names_its_files_and_is_coloured_by_shards_or_dtype(opened):
    rows = [
        Row("w", parse("64x32/S0@2"), itemsize=2, dtype="bfloat16"),
        Row("norm", parse("2048/S0@1:1"), itemsize=4, dtype="float32"),
    ]
    opened.open(page(rows, owner="file", names=["a.safetensors", "b.safetensors"], facts={"format": "sharded"}))
    assert opened.figure("format") == "sharded"
    assert opened.rows(".tensors") == [
        ["w", "bfloat16", "64 x 32", "S0@2", "4.00 KiB", "2"],
        ["norm", "float32", "2048", "whole", "8.00 KiB", "1"],
    ]
    Select(opened.one("select")).select_by_visible_text("coloured by dtype")
    assert opened.texts(".chip") == ["bfloat16", "float32"]
    opened.one('.leaf[aria-label^="norm"]').click()
    assert opened.one("#tensor .tile").get_attribute("aria-label") == "[0:2048], on file 1 (b.safetensors)"


def test_the_map_is_walked_with_the_keyboard(opened):
    opened.open(page(model()))
    opened.focus(".branch, .leaf")
    opened.press(Keys.ENTER)
    assert len(opened.all(".crumbs button")) == 2
    opened.focus(".branch, .leaf")
    opened.press(Keys.ESCAPE)
    assert len(opened.all(".crumbs button")) == 1
    opened.focus(".leaf")
    opened.press(Keys.ARROW_RIGHT, Keys.ENTER)
    assert opened.all("#tensor .tile")


def test_a_name_that_others_go_on_from_has_a_place_of_its_own(opened):
    opened.open(page({"a": PLAN, "a.b": PLAN, "a.c": PLAN}))
    assert sorted(found.get_attribute("aria-label").split(":")[0] for found in opened.all(".leaf")) == [
        "a",
        "a.b",
        "a.c",
    ]


def test_names_that_stand_there_twice_have_a_place_each(opened):
    opened.open(page([Row("a.w", PLAN), Row("a.w", SUMS), Row("b", PLAN)]))
    assert sorted(found.get_attribute("aria-label").split(":")[0] for found in opened.all(".leaf")) == [
        "a.w",
        "a.w",
        "b",
    ]


def test_plans_without_names_are_called_by_their_layouts(opened):
    opened.open(page(PLAN, SUMS))
    assert opened.texts(".tensors .name") == [f"{made.source} → {made.target}" for made in (PLAN, SUMS)]


def test_the_table_of_tensors_is_searched_and_sorted(opened):
    opened.open(page(model()))
    assert "Showing 91 of 91 tensors" in opened.one("#tensors").text
    opened.one("input[type=search]").send_keys("layers.7. up")
    assert [row[0] for row in opened.rows(".tensors")] == ["model.layers.7.up"]
    opened.one("input[type=search]").send_keys(Keys.CONTROL, "a", Keys.DELETE)
    next(button for button in opened.all(".tensors thead button") if button.text == "size").click()
    assert opened.rows(".tensors")[-1][:2] == ["model.norm from norm", "float32"]
    assert opened.one("[aria-sort]").get_attribute("aria-sort") == "descending"
    opened.one(".tensors .name").click()
    assert opened.one("#tensor h2").text == "model.layers.0.up"


def test_ten_thousand_tensors_open_fast(opened):
    kinds = [plan(f"{64 * n}x64/S0@64", f"{64 * n}x64/S1@64") for n in range(1, 13)]
    text = page({f"model.layers.{n // 12}.block.{n % 12}.weight": kinds[n % 12] for n in range(10_000)})
    start = perf_counter()
    opened.open(text)
    assert perf_counter() - start < 5
    assert "Showing 100 of 10,000 tensors" in opened.one("#tensors").text


@pytest.mark.slow
def test_hostile_names_are_only_text(opened):
    opened.open(page({HOSTILE: PLAN, f"a.{HOSTILE}": PLAN}, title=HOSTILE, facts={HOSTILE: HOSTILE}))
    assert opened.driver.title == HOSTILE
    assert opened.one("h1").text == HOSTILE
    assert opened.texts(".tensors .name") == [HOSTILE, f"a.{HOSTILE}"]
    opened.one(".tensors .name").click()
    assert opened.one("#tensor h2").text == HOSTILE
    assert opened.script("return window.hit") is None
    assert opened.all("img") == []
