// Figures of a plan: totals, sender x receiver, owners one by one, rounds.

function cards(totals, facts) {
  const all = totals ? totals.moved + totals.local : 0, found = [];
  const card = (name, value, note) => found.push(el("div", { class: "card" },
    el("dt", {}, name), el("dd", {}, el("b", { "data-figure": name }, value), note ? el("small", {}, note) : null)));
  if (totals) {
    card("moves", bytes(totals.moved), `${percent(totals.moved, all)} of ${bytes(all)}`);
    card("stays", bytes(totals.local), "copied where it is");
    card("messages", whole(totals.messages), totals.rounds === undefined ? "if every tensor went alone" : `in ${plural(totals.rounds, "round")}`);
    if (totals.peak !== undefined) card("peak", bytes(totals.peak), totals.limit ? `staged at most; the limit is ${bytes(totals.limit)}` : `staged at most by any ${DATA.owner}`);
    if (totals.seconds !== undefined) card("estimate", duration(totals.seconds), "by the cost model");
    if (totals.balance !== undefined) card("balance", percent(totals.balance, 1), "mean load over the busiest");
  }
  for (const [name, value] of Object.entries(facts || {})) card(name, value);
  return el("dl", { class: "cards" }, ...found);
}

const times = (ratio) => `${ratio >= 100 ? whole(Math.round(ratio)) : ratio.toPrecision(2)}x`;

function comparison(totals, id) {
  const [gpu, cpu] = totals.redistribute, rows = [];
  if (totals.bound !== null) rows.push(["No plan can move less than", totals.bound, "bound"]);
  rows.push(["This plan moves", totals.moved, "ours"]);
  if (gpu !== null) rows.push([cpu === gpu ? "DTensor.redistribute" : "DTensor.redistribute, with all-to-all", gpu, "model"]);
  if (cpu !== null && cpu !== gpu) rows.push(["DTensor.redistribute, on CPUs", cpu, "model"]);
  const most = Math.max(1, ...rows.map((row) => row[1]));
  const bar = ([name, value, kind]) => el("div", { class: `rival ${kind}` }, el("span", {}, name),
    el("span", { class: "track", "aria-hidden": "true" }, el("i", { style: { width: per(value / most) } })),
    el("b", { "data-figure": kind }, bytes(value)), el("small", {}, kind === "model" && totals.moved ? `${times(value / totals.moved)}` : ""));
  const steps = totals.steps ? (cpu !== gpu ? totals.steps[1] : totals.steps[0]) : [];
  const said = gpu === null
    ? `DTensor.redistribute cannot do ${totals.refused ? `${plural(totals.refused, "tensor")} of this` : "this"}: ${totals.why_not}.`
    : `For redistribute this is a model, not a measurement: one collective per mesh axis, without padding${steps.length ? ` (${steps.join("; then ")})` : ""}.`;
  return section(id, "Against the least, and against torch", "", el("div", {}, ...rows.map(bar), el("p", { class: "note" }, said)),
    () => table("Bytes that move", ["way", "bytes"], rows.map(([name, value]) => [name, bytes(value)]), { numeric: [1] }));
}

class MatrixPanel {
  constructor(view) {
    const { labels } = view.picture.groups, count = labels.length, flows = view.picture.flows;
    Object.assign(this, { view, cells: [] });
    const most = flows.reduce((found, flow) => Math.max(found, flow[2]), 1);
    const heat = el("div", { class: count > 24 ? "heat dense" : "heat", style: { "--count": String(count) } });
    for (const [source, target, size] of flows) {
      const warmth = 0.12 + 0.88 * Math.sqrt(size / most);
      const words = `${called(labels[source])} to ${called(labels[target])}: ${bytes(size)}`;
      const cell = el("div", { class: "flow", tabindex: "-1", role: "img", "aria-label": words, "data-shade": shade(warmth), style: {
        left: per(target / count), top: per(source / count), width: per(1 / count), height: per(1 / count),
        "--heat": String(warmth) } }, count <= 16 ? el("span", {}, bytes(size)) : "");
      cell.flow = [source, target, words];
      this.cells.push(cell);
      heat.append(cell);
    }
    const every = Math.ceil(count / (count > 16 ? 8 : 16));
    const axis = (name, edge) => el("div", { class: `axis ${name}`, "aria-hidden": "true" }, ...labels.map((label, at) =>
      (at % every ? "" : el("i", { style: { [edge]: per((at + 0.5) / count) } }, count > 16 ? label.split(/[-…]/)[0] : label))));
    heat.setAttribute("role", "group");
    heat.setAttribute("aria-label", `Bytes from each sender (row) to each receiver (column); ${plural(flows.length, "flow")}; arrow keys move between them`);
    this.said = el("p", { class: "said", "aria-live": "polite" }, "\u00a0");
    this.whole = el("div", { class: "matrix" }, el("div", { class: "heat-frame" }, el("em", { class: "to" }, "to"), el("em", { class: "from" }, "from"),
      axis("across", "left"), axis("down", "top"), heat), el("div", { class: "legend" }, el("span", {}, "0 B"), el("i", {}), el("span", {}, bytes(most))), this.said);
    new ResizeObserver(() => heat.classList.toggle("narrow", heat.clientWidth / count < 44 || heat.clientHeight / count < 28)).observe(heat);
    const say = (event) => { const at = event.target.closest(".flow"); if (at) this.said.textContent = at.flow[2]; };
    heat.addEventListener("pointerover", say);
    heat.addEventListener("focusin", say);
    heat.addEventListener("click", (event) => { const at = event.target.closest(".flow"); if (at) view.select(at.flow[0]); });
    roving(heat, ".flow");
  }

  mark(selected) {
    this.whole.classList.toggle("dimmed", selected !== null);
    for (const cell of this.cells) cell.classList.toggle("lit", selected !== null && cell.flow.slice(0, 2).includes(selected));
  }
}

function flowTable(picture) {
  const { labels } = picture.groups, rows = [...picture.flows].sort((a, b) => b[2] - a[2]).slice(0, 500);
  const left = picture.flows.length - rows.length;
  return table(`Bytes by sender and receiver${left ? `: the largest ${rows.length} of ${whole(picture.flows.length)}` : ""}`,
    ["from", "to", "bytes"], rows.map(([source, target, size]) => [labels[source], labels[target], bytes(size)]), { numeric: [2] });
}

const BARS = [["sent", "sends"], ["received", "receives"], ["kept", "keeps"], ["peak", "peak"]];

class BarsPanel {
  constructor(view) {
    const { labels, sizes, owners } = view.picture.groups, bars = view.picture.bars, grouped = owners > labels.length;
    const kinds = BARS.filter(([name]) => bars[name]);
    const most = Math.max(1, ...kinds.flatMap(([name]) => bars[name]));
    const cell = (value, kind) => el("td", {}, el("span", { class: "value" }, bytes(value)),
      el("span", { class: `bar ${kind}`, "aria-hidden": "true" }, el("i", { style: { width: per(value / most) } })));
    this.rows = labels.map((label, group) => {
      const pick = el("button", { type: "button", class: "pick", style: colours(group), "aria-label": `select ${called(label)}` }, label);
      pick.addEventListener("click", () => view.select(group));
      return el("tr", {}, el("th", { scope: "row" }, pick),
        ...kinds.map(([name]) => cell(bars[name][group], name)));
    });
    const caption = grouped ? `${whole(owners)} ${DATA.owner}s in groups of ${sizes[0]}: bytes of all in a group; the peak is of any one of them` : `Bytes${bars.peak ? "; the peak is what is staged at most in one round" : ""}`;
    this.whole = el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": caption }, el("table", { class: "bars" }, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, DATA.owner), ...kinds.map(([, head]) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...this.rows)));
  }

  mark(selected) {
    this.rows.forEach((row, group) => row.classList.toggle("chosen", group === selected));
  }
}

function timeline(picture, id) {
  const stages = picture.stages, all = stages.reduce((sum, stage) => sum + stage[4], 0) || 1;
  const name = ([first, last]) => (first === last ? `round ${first}` : `rounds ${first} to ${last}`);
  const words = (stage) => `${name(stage)}: ${bytes(stage[2])} in ${plural(stage[3], "message")}, about ${duration(stage[4])}`;
  const said = el("p", { class: "said", "aria-live": "polite" }, stages.length ? `All: about ${duration(picture.totals.seconds)}.` : "Nothing is sent.");
  const line = el("div", { class: "timeline", role: "group", "aria-label": `${plural(stages.length, "part")} of the timeline; arrow keys move between them` },
    ...stages.map((stage) => el("div", { class: "stage", tabindex: "-1", role: "img", "aria-label": words(stage), style: { "flex-grow": String(stage[4] / all) } },
      el("b", {}, stage[0] === stage[1] ? String(stage[0]) : `${stage[0]}-${stage[1]}`), el("small", {}, bytes(stage[2])))));
  const say = (event) => { const at = event.target.closest(".stage"); if (at) said.textContent = at.getAttribute("aria-label"); };
  line.addEventListener("pointerover", say);
  line.addEventListener("focusin", say);
  roving(line, ".stage");
  const { hosts, reduces } = picture.totals;
  const model = "In every round the busiest pays for its messages (20 µs each) and its bytes (10 GB/s each way)"
    + `${hosts ? `; inside one of the ${hosts} hosts 5 µs and 50 GB/s` : ""}. A model, not a measurement.`
    + `${reduces ? ` Reduced on arrival: ${reduces}.` : ""}`;
  return section(id, "Rounds", model, el("div", {}, line, said), () => table("Rounds",
    ["round", "bytes", "messages", "time by the model"], stages.map((s) => [name(s), bytes(s[2]), whole(s[3]), duration(s[4])]), { numeric: [1, 2, 3] }));
}
