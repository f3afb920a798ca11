// Figures of a plan: totals, against the least, sender x receiver, owner by owner, rounds.

function cards(totals, facts) {
  const card = ([name, value, note]) => el("div", { class: "card" }, el("dt", {}, name),
    el("dd", {}, el("b", { "data-figure": name }, value), note ? el("small", {}, note) : ""));
  return el("dl", { class: "cards" }, ...[...(totals ? figures(totals) : []), ...Object.entries(facts || {})].map(card));
}

function figures(totals) {  // [name, value, note]; those of several plans together are fewer
  const all = totals.moved + totals.local, alone = totals.rounds !== undefined;
  const found = [
    ["moves", bytes(totals.moved), `${percent(totals.moved, all)} of ${bytes(all)}`],
    ["stays", bytes(totals.local), "copied where it is"],
    ["messages", whole(totals.messages), alone ? `in ${plural(totals.rounds, "round")}` : "if every tensor went alone"],
  ];
  if (!alone) return found;
  const limit = totals.limit ? `staged at most; the limit is ${bytes(totals.limit)}` : `staged at most by any ${DATA.owner}`;
  if (totals.hosts) found.push(["between hosts", bytes(totals.across), `of ${plural(totals.hosts, "host")}`]);
  return [...found, ["peak", bytes(totals.peak), limit], ["estimate", duration(totals.seconds), "by the cost model"],
    ["balance", percent(totals.balance, 1), "mean load over the busiest"]];
}

function comparison(totals, id) {
  const [gpu, cpu] = totals.redistribute, rows = [["This plan moves", totals.moved, "ours"]];
  if (totals.bound !== null) rows.unshift(["No plan can move less than", totals.bound, "bound"]);
  if (gpu !== null) rows.push([`DTensor.redistribute${cpu === gpu ? "" : ", with all-to-all"}`, gpu, "model"]);
  if (cpu !== gpu) rows.push(["DTensor.redistribute, on CPUs", cpu, "model"]);
  const most = highest(rows.map((row) => row[1]));
  const bar = ([name, value, kind]) => el("div", { class: `rival ${kind}` }, el("span", {}, name),
    el("span", { class: "track", "aria-hidden": "true" }, el("i", { style: { width: per(value / most) } })),
    el("b", { "data-figure": kind }, bytes(value)),
    el("small", {}, kind === "model" && totals.moved ? times(value / totals.moved) : ""));
  return section(id, "Against the least, and against torch", "",
    el("div", {}, ...rows.map(bar), el("p", { class: "note" }, aboutModel(totals))),
    () => table("Bytes that move", ["way", "bytes"], rows.map(([name, value]) => [name, bytes(value)]), [1]));
}

function aboutModel({ redistribute: [gpu, cpu], steps, why_not: why, refused }) {
  if (gpu === null) return `DTensor.redistribute cannot do ${refused ? `${plural(refused, "tensor")} of this` : "this"}: ${why}.`;
  const done = steps ? steps[cpu === gpu ? 0 : 1] : [];
  return "For redistribute this is a model, not a measurement: one collective per mesh axis, without padding"
    + `${done.length ? ` (${done.join("; then ")})` : ""}.`;
}

class MatrixPanel {
  constructor(view) {
    const { groups, flows } = view.picture, count = groups.labels.length, most = highest(flows.map((flow) => flow[2]));
    Object.assign(this, { view, labels: groups.labels, count });
    this.cells = flows.map((flow) => this.cell(flow, most));
    const words = "Bytes from each sender (row) to each receiver (column); "
      + `${plural(flows.length, "flow")}; arrow keys move between them`;
    const heat = el("div", { class: count > 24 ? "heat dense" : "heat", style: { "--count": String(count) }, role: "group",
      "aria-label": words }, ...this.cells);
    const key = el("div", { class: "legend" }, el("span", {}, "0 B"), el("i", {}), el("span", {}, bytes(most)));
    this.whole = el("div", { class: "matrix" }, el("div", { class: "heat-frame" }, el("em", { class: "to" }, "to"),
      el("em", { class: "from" }, "from"), this.axis("across", "left"), this.axis("down", "top"), heat), key,
      saying(heat, ".flow"));
    const narrow = () => heat.clientWidth / count < 44 || heat.clientHeight / count < 28;
    new ResizeObserver(() => heat.classList.toggle("narrow", narrow())).observe(heat);
    roving(heat, ".flow");
  }

  cell([source, target, size], most) {
    const warmth = 0.12 + 0.88 * Math.sqrt(size / most), side = per(1 / this.count);
    const cell = el("div", {
      class: "flow", tabindex: "-1", role: "button", "data-shade": shade(warmth),
      "aria-label": `${called(this.labels[source])} to ${called(this.labels[target])}: ${bytes(size)}`,
      style: { left: per(target / this.count), top: per(source / this.count), width: side, height: side,
        "--heat": String(warmth) },
      onclick: () => this.view.select(source),
    }, this.count <= 16 ? el("span", {}, bytes(size)) : "");
    cell.sides = [source, target];
    return cell;
  }

  axis(name, edge) {
    const every = Math.ceil(this.count / (this.count > 16 ? 8 : 16));
    const label = (text) => (this.count > 16 ? text.split(/[-…]/)[0] : text);
    return el("div", { class: `axis ${name}`, "aria-hidden": "true" }, ...this.labels.map((text, at) =>
      (at % every ? "" : el("i", { style: { [edge]: per((at + 0.5) / this.count) } }, label(text)))));
  }

  mark(selected) {
    this.whole.classList.toggle("dimmed", selected !== null);
    for (const cell of this.cells) cell.classList.toggle("lit", cell.sides.includes(selected));
  }
}

function flowWords({ flows, groups: { labels, owners } }) {
  if (!flows.length) return "Nothing is sent: every cell is already where it belongs.";
  if (owners > labels.length) return `${whole(owners)} ${DATA.owner}s in ${labels.length} groups.`;
  return `Rows send, columns receive. Select a ${DATA.owner} to follow it.`;
}

function flowTable({ flows, groups: { labels } }) {
  const rows = [...flows].sort((a, b) => b[2] - a[2]).slice(0, 500);
  const left = rows.length < flows.length ? `: the largest ${rows.length} of ${whole(flows.length)}` : "";
  return table(`Bytes by sender and receiver${left}`, ["from", "to", "bytes"],
    rows.map(([source, target, size]) => [labels[source], labels[target], bytes(size)]), [2]);
}

const BARS = [["sent", "sends"], ["received", "receives"], ["kept", "keeps"], ["peak", "peak"]];

class BarsPanel {  // a table with a bar in every cell
  constructor(view) {
    const { groups: { labels }, bars } = view.picture, kinds = BARS.filter(([name]) => bars[name]);
    const most = highest(kinds.flatMap(([name]) => bars[name])), caption = this.caption(view.picture);
    const cell = (value, kind) => el("td", {}, el("span", { class: "value" }, bytes(value)),
      el("span", { class: `bar ${kind}`, "aria-hidden": "true" }, el("i", { style: { width: per(value / most) } })));
    const pick = (label, group) => el("button", {
      type: "button", class: "pick", style: colours(group), "aria-label": `select ${called(label)}`,
      onclick: () => view.select(group) }, label);
    this.rows = labels.map((label, group) => el("tr", {}, el("th", { scope: "row" }, pick(label, group)),
      ...kinds.map(([name]) => cell(bars[name][group], name))));
    const heads = [DATA.owner, ...kinds.map(([, head]) => head)].map((head) => el("th", { scope: "col" }, head));
    this.whole = scrolling(caption, el("table", { class: "bars" }, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...this.rows)));
  }

  caption({ groups: { labels, sizes, owners }, bars }) {
    if (owners > labels.length) {
      return `${whole(owners)} ${DATA.owner}s in groups of ${sizes[0]}: bytes of all in a group`
        + (bars.peak ? "; the peak is of any one of them" : "");
    }
    return bars.peak ? "Bytes; the peak is what is staged at most in one round" : "Bytes";
  }

  mark(selected) {
    this.rows.forEach((row, group) => row.classList.toggle("chosen", group === selected));
  }
}

function timeline({ stages, totals }, id) {
  const all = stages.reduce((sum, stage) => sum + stage[4], 0) || 1;
  const name = ([first, last]) => (first === last ? `round ${first}` : `rounds ${first} to ${last}`);
  const words = (stage) => `${name(stage)}: ${bytes(stage[2])} in ${plural(stage[3], "message")}, about ${duration(stage[4])}`;
  const part = (stage) => el("div", {
    class: "stage", tabindex: "-1", role: "img", "aria-label": words(stage), style: { "flex-grow": String(stage[4] / all) },
  }, el("b", {}, stage[0] === stage[1] ? String(stage[0]) : `${stage[0]}-${stage[1]}`), el("small", {}, bytes(stage[2])));
  const line = el("div", { class: "timeline", role: "group",
    "aria-label": `${plural(stages.length, "part")} of the timeline; arrow keys move between them` }, ...stages.map(part));
  const said = saying(line, ".stage", stages.length ? `All: about ${duration(totals.seconds)}.` : "Nothing is sent.");
  roving(line, ".stage");
  const rows = stages.map((stage) => [name(stage), bytes(stage[2]), whole(stage[3]), duration(stage[4])]);
  return section(id, "Rounds", costModel(totals), el("div", {}, line, said),
    () => table("Rounds", ["round", "bytes", "messages", "time by the model"], rows, [1, 2, 3]));
}

function costModel({ hosts, reduces }) {
  return "In every round the busiest pays for its messages (20 µs each) and its bytes (10 GB/s each way)"
    + `${hosts ? `; inside one of the ${hosts} hosts 5 µs and 50 GB/s` : ""}. A model, not a measurement.`
    + (reduces ? ` Reduced on arrival: ${reduces}.` : "");
}
