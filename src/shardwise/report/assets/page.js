// The page: its head, the picture of a plan or layout, and for many tensors the overview that leads to theirs.

class View {  // a picture with what is selected in it
  constructor(picture, prefix) {
    Object.assign(this, { picture, prefix, selected: null, parts: [] });
  }

  id(name) { return `${this.prefix}${name}`; }

  select(group) {
    this.selected = group === this.selected ? null : group;
    for (const part of this.parts) part.mark(this.selected);
  }

  clear() {
    this.selected = null;
    for (const part of this.parts) part.mark(null);
  }

  sections() {
    const { picture } = this, found = [];
    if (picture.totals) found.push(comparison(picture.totals, this.id("least")));
    if (picture.source) found.push(new TilesPart(this).whole);
    if (picture.flows) {
      const matrix = this.add(new MatrixPanel(this));
      const bars = this.add(new BarsPanel(this));
      found.push(el("div", { class: "pair" },
        section(this.id("flows"), "Who sends to whom", flowWords(picture), matrix.whole, () => flowTable(picture)),
        section(this.id("owners"), `By ${DATA.owner}`, "", bars.whole)));
    }
    if (picture.stages) found.push(timeline(picture, this.id("rounds")));
    return found;
  }

  add(part) { this.parts.push(part); return part; }
}

function flowWords(picture) {
  const { labels, owners } = picture.groups;
  if (!picture.flows.length) return "Nothing is sent: every cell is already where it belongs.";
  return owners > labels.length ? `${whole(owners)} ${DATA.owner}s in ${labels.length} groups.` : `Rows send, columns receive. Select a ${DATA.owner} to follow it.`;
}

class TilesPart {
  constructor(view) {
    const { picture } = view, layouts = [["source", picture.source], ["target", picture.target]].filter(([, layout]) => layout);
    Object.assign(this, { view, copies: copiesOf(picture) });
    const every = layouts.flatMap(([, layout]) => sideOf(layout));
    const scales = picture.source.shape.map((size, dim) => scaleOf(every, dim, size));
    this.panels = layouts.map(([side, layout]) => new LayoutPanel(view, layouts.length > 1 ? side : "only", layout, scales));
    this.said = el("div", { class: "detail", "aria-live": "polite" });
    const pictures = el("div", {}, el("div", { class: `layouts of-${this.panels.length}` }, ...this.panels.map((panel) => panel.whole)), this.said);
    this.whole = section(view.id("tiles"), "Where the cells live", "", pictures, () => this.table());
    this.whole.querySelector(".head").insertBefore(this.picker(), this.whole.querySelector(".swap"));
    for (const panel of this.panels) this.listen(panel);
    view.add(this);
    this.mark(null);
  }

  picker() {
    const { labels } = this.view.picture.groups;
    this.pick = el("select", { "aria-label": `Select a ${DATA.owner}` }, el("option", { value: "" }, `every ${DATA.owner}`),
      ...labels.map((label, group) => el("option", { value: group }, called(label))));
    this.pick.addEventListener("change", () => {
      const group = this.pick.value === "" ? this.view.selected : Number(this.pick.value);
      if (group !== null && group !== this.view.selected || this.pick.value === "") this.view.select(group);
    });
    return this.pick;
  }

  listen(panel) {
    const tile = (event) => { const at = event.target.closest(".tile"); return at && panel.tiles[Number(at.dataset.tile)]; };
    const grid = panel.grid, show = (event) => { const one = tile(event); if (one) this.hover(panel, one); };
    grid.addEventListener("pointerover", show);
    grid.addEventListener("focusin", show);
    grid.addEventListener("pointerleave", () => this.mark(this.view.selected));
    grid.addEventListener("focusout", () => this.mark(this.view.selected));
    grid.addEventListener("click", (event) => { const one = tile(event); if (one) this.view.select(one.holders.groups[0]); });
    grid.addEventListener("keydown", (event) => {
      const one = tile(event);
      if (!one || (event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      this.view.select(one.holders.groups[0]);
    });
  }

  // what is copied out of a source tile, or into a target tile
  copiesAt(panel, tile) {
    const side = panel.side === "target" ? "target" : "source";
    const groups = new Set(tile.holders.groups);
    return this.copies.filter((copy) => groups.has(copy[side]) && (side === "target" || copy.step === 0) && overlap(copy, tile))
      .map((copy) => ({ ...copy, ...common(copy, tile), stays: copy.source === copy.target }));
  }

  hover(panel, tile) {
    const other = this.panels.find((one) => one !== panel);
    const moves = other && this.copies ? this.copiesAt(panel, tile) : null;
    panel.light((one) => one === tile);
    panel.outline(moves || []);
    if (other) {
      const far = panel.side === "target" ? "source" : "target";
      other.light(moves ? (one) => moves.some((move) => one.holders.groups.includes(move[far]) && overlap(one, move)) : (one) => overlap(one, tile));
      other.outline(moves || [tile]);
    }
    this.say(panel, tile, moves);
  }

  say(panel, tile, moves) {
    const { layout, side } = panel, { picture } = this.view;
    const cells = volume(tile.lo, tile.hi), size = picture.itemsize ? ` · ${bytes(cells * picture.itemsize)}` : "";
    const title = el("p", {}, el("b", {}, `${side === "only" ? "" : `${side} `}${boxText(tile.lo, tile.hi)}`),
      ` ${plural(cells, "cell")}${size} · ${tileWords(layout, tile)}${layout.merged ? " · several tiles put together" : ""}`);
    this.said.replaceChildren(title, ...this.moveWords(panel, moves));
  }

  moveWords(panel, moves) {
    if (panel.side === "only") return [];
    const { labels } = this.view.picture.groups, { copies, itemsize } = this.view.picture;
    if (!moves) return [el("p", { class: "note" }, `${plural(copies.total, "copy").replace("copys", "copies")} in all are too many to list here; lit tiles share cells with this one.`)];
    const words = (move) => {
      if (move.stays) return `stays on ${called(labels[move.source])}`;
      return panel.side === "target" ? `from ${called(labels[move.source])}${move.step ? ", handed on" : ""}` : `to ${called(labels[move.target])}`;
    };
    const items = moves.slice(0, 8).map((move) => el("li", { class: move.stays ? "stays" : "" }, words(move), " ",
      el("code", {}, boxText(move.lo, move.hi)), " ", el("span", { class: "value" }, bytes(volume(move.lo, move.hi) * itemsize))));
    if (moves.length > 8) items.push(el("li", {}, `and ${moves.length - 8} more`));
    return [el("ul", {}, ...items)];
  }

  mark(selected) {
    this.pick.value = selected === null ? "" : String(selected);
    for (const panel of this.panels) {
      const far = panel.side === "target" ? "source" : "target", near = far === "source" ? "target" : "source";
      const boxes = selected === null || !this.copies ? [] : this.copies.filter((copy) => copy[far] === selected && copy[near] !== selected);
      panel.light(selected === null ? null : (tile) => tile.holders.groups.includes(selected));
      panel.outline(panel.side === "only" ? [] : boxes);
    }
    this.said.replaceChildren(...(selected === null ? [this.hint()] : this.aboutOwner(selected)));
  }

  hint() {
    return el("p", { class: "note" }, `Point at a tile or focus it to see its box and where it goes. Click or press Enter to select its ${DATA.owner}; Escape clears.`);
  }

  aboutOwner(group) {
    const { groups, bars, flows } = this.view.picture, name = called(groups.labels[group]);
    const held = this.panels.map((panel) => `${plural(panel.tiles.filter((tile) => tile.holders.groups.includes(group)).length, "tile")} of the ${panel.side === "only" ? "layout" : panel.side}`);
    const head = el("p", {}, el("b", {}, name), ` holds ${held.join(", ")}`);
    if (!bars) return [head];
    const peers = (from, to) => flows.filter((flow) => flow[from] === group).map((flow) => `${groups.labels[flow[to]]} (${bytes(flow[2])})`);
    const list = (verb, all) => el("li", {}, `${verb}: ${all.slice(0, 12).join(", ")}${all.length > 12 ? ` and ${all.length - 12} more` : ""}${all.length ? "" : "nobody"}`);
    const figures = `sends ${bytes(bars.sent[group])}, receives ${bytes(bars.received[group])}, keeps ${bytes(bars.kept[group])}`;
    return [head, el("ul", {}, el("li", {}, figures), list("sends to", peers(0, 1)), list("receives from", peers(1, 0)))];
  }

  table() {
    return el("div", {}, ...this.panels.map((panel) => {
      const shown = panel.tiles.slice(0, 1000);
      const rows = shown.map((tile) => [boxText(tile.lo, tile.hi), tileWords(panel.layout, tile), whole(volume(tile.lo, tile.hi))]);
      return table(`${panel.side === "only" ? "" : `${panel.side}: `}${panel.layout.text}${shown.length < panel.tiles.length ? `, the first ${shown.length} tiles` : ""}`, ["box", "held", "cells"], rows, { numeric: [2] });
    }));
  }
}

function head(data) {
  const button = el("button", { type: "button", class: "theme" }), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();
  const only = data.rows.length === 1 ? data.pictures[0] : null;
  const title = only && only.target && only.target.text && data.title.includes("→")
    ? el("h1", {}, el("code", {}, only.source.text), " → ", el("code", {}, only.target.text)) : el("h1", {}, data.title);
  return el("header", { class: "top" }, title, button);
}

function overview(data) {
  const tensors = tensorsOf(data), place = el("div", { id: "tensor" });
  let view = null;
  const choose = (tensor) => {
    view = new View(tensor.picture, "one-");
    place.replaceChildren(el("h2", { class: "chosen", tabindex: "-1" }, tensor.name || "(no name)"),
      el("p", { class: "words" }, [tensor.shape, tensor.dtype, amount(tensor.size), tensor.note].filter(Boolean).join(" · ")),
      tensor.picture.totals ? cards(tensor.picture.totals) : "", ...view.sections());
    place.querySelector("h2").focus({ preventScroll: true });
    place.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  };
  const kinds = plural(data.pictures.length, "kind");
  const map = section("map", "All tensors", `${plural(tensors.length, "tensor")} of ${kinds}, each as large as it is. Open one to see its picture; a group to look closer.`, new TreeMap(tensors, choose).whole);
  const listed = section("tensors", "As a table", "", new TensorTable(tensors, choose).whole);
  const all = data.together ? new View(data.together, "all-") : null;
  const [against, ...others] = all ? all.sections() : [""];
  return { found: [against, map, listed, place, ...others], views: () => [all, view].filter(Boolean) };
}

function start(data) {
  const main = el("main", {});
  const many = data.rows.length > 1 || Boolean(data.rows[0] && data.rows[0][0]);
  let views;
  if (!data.rows.length) { main.append(el("p", {}, "There is nothing to show.")); views = () => []; }
  else if (many) {
    const { found, views: known } = overview(data);
    main.append(cards(data.together && data.together.totals, data.facts), ...found);
    views = known;
  } else {
    const view = new View(data.pictures[0], "");
    main.append(cards(data.pictures[0].totals, data.facts), ...view.sections());
    views = () => [view];
  }
  document.body.append(head(data), main, el("footer", {}, "Made by shardwise. This page holds all that it shows, and asks nobody for anything."));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const view of views()) view.clear();
  });
  document.documentElement.dataset.ready = "true";
}

start(DATA);
