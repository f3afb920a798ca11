// A layout as tiles. Both sides of a plan share one scale, so that a box lies at the same place in both.

const MOST_SLICES = 36;

const volume = ({ lo, hi }) => lo.reduce((product, a, dim) => product * (hi[dim] - a), 1);
const ranges = ({ lo, hi }) => lo.map((a, dim) => `${a}:${hi[dim]}`).join(", ");
const boxText = (box) => (box.lo.length ? `[${ranges(box)}]` : "the one cell");
const overlap = (a, b) => a.lo.every((lo, dim) => lo < b.hi[dim] && b.lo[dim] < a.hi[dim]);
const common = (a, b) => ({
  lo: a.lo.map((lo, dim) => Math.max(lo, b.lo[dim])),
  hi: a.hi.map((hi, dim) => Math.min(hi, b.hi[dim])),
});

function tilesOf(layout) {  // rows of the data as boxes with their holders
  const dims = layout.shape.length;
  return layout.tiles.map((row) => ({
    lo: row.slice(0, dims), hi: row.slice(dims, 2 * dims), holders: layout.sets[row[2 * dims]],
  }));
}

// Where a cell lies along a dim, from 0 to 1. Thin parts are drawn wider than they are, so that they can be seen.
function scaleOf(tiles, dim, size) {
  const cuts = [...new Set([0, size, ...tiles.flatMap((tile) => [tile.lo[dim], tile.hi[dim]])])].sort((a, b) => a - b);
  const places = [0];
  for (let at = 0; at + 1 < cuts.length; at++) {
    places.push(places[at] + (0.65 * (cuts[at + 1] - cuts[at])) / (size || 1) + 0.35 / (cuts.length - 1));
  }
  const place = (x) => {
    let low = 0, high = cuts.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (cuts[middle] <= x) low = middle; else high = middle;
    }
    const inside = (x - cuts[low]) / (cuts[low + 1] - cuts[low] || 1);
    return places[low] + inside * (places[low + 1] - places[low] || 0);
  };
  return { cuts, place };
}

function slicesOf(scales) {  // the boxes of all dims but the last two
  let found = [{ lo: [], hi: [] }];
  for (const { cuts } of scales.slice(0, -2)) {
    const sides = cuts.slice(1).map((hi, at) => [cuts[at], hi]);
    found = found.slice(0, 4096).flatMap(({ lo, hi }) => sides.map(([a, b]) => ({ lo: [...lo, a], hi: [...hi, b] })));
  }
  return found;
}

function placed(box, scales) {  // where a box lies in its slice
  const dims = box.lo.length;
  const side = (dim) => (dim < 0 ? [0, 1] : [scales[dim].place(box.lo[dim]), scales[dim].place(box.hi[dim])]);
  const [left, right] = side(dims - 1), [top, bottom] = side(dims - 2);
  return { left: per(left), top: per(top), width: per(right - left), height: per(bottom - top) };
}

function kindOf(layout, holders) {
  if (layout.terms > 1) return "partial";
  return holders.replicas > 1 ? "replicas" : "single";
}

function heldBy(layout, { holders }) {
  const start = { partial: `${layout.op} of terms on`, replicas: "replicas on", single: "on" }[kindOf(layout, holders)];
  return `${start} ${called(holders.who)}`;
}

class LayoutPanel {
  constructor(side, layout, scales) {
    Object.assign(this, { side, layout, scales, tiles: tilesOf(layout), shown: [], slices: slicesOf(scales) });
    this.planes = this.slices.slice(0, MOST_SLICES).map((slice) => this.plane(slice));
    const name = { source: "Source", target: "Target", only: "Layout" }[side];
    const words = `${name} layout ${layout.text}: ${plural(this.tiles.length, "tile")}; arrow keys move between them`;
    this.grid = el("div", { class: this.planes.length > 1 ? "slices" : "", role: "group", "aria-label": words },
      ...this.planes.map((plane) => plane.whole));
    this.columns();
    this.whole = el("div", { class: `layout ${side}` }, el("h3", {}, name, " ", el("code", {}, layout.text)),
      this.tiles.length ? this.grid : el("p", { class: "empty" }, "This tensor has no cells."),
      ...this.notes().map((note) => el("p", { class: "note" }, note)));
    roving(this.grid, ".tile");
  }

  columns() {  // of four dims and more the slices of one dim stand side by side, where they are few
    const count = this.scales.length > 3 ? this.scales.at(-3).cuts.length - 1 : 0;
    if (count && count <= 6) this.grid.style.gridTemplateColumns = `repeat(${count}, minmax(0, 1fr))`;
  }

  notes() {
    const { total, merged, idle, terms, op, sets } = this.layout, shown = this.tiles.length, said = [];
    const replicas = Math.max(0, ...sets.map((set) => set.replicas));
    if (merged) said.push(`Showing ${whole(shown)} tiles that stand for ${whole(total)}: neighbours are put together.`);
    else if (shown < total) said.push(`Showing the first ${whole(shown)} of ${whole(total)} tiles.`);
    if (this.slices.length > this.planes.length) said.push(`Showing ${MOST_SLICES} of ${whole(this.slices.length)} slices.`);
    if (terms > 1) said.push(`Dotted: partial, the ${op} of ${terms} terms is the value.`);
    else if (replicas > 1) said.push(`Hatched: replicas, up to ${replicas} owners hold the same cells.`);
    if (idle) said.push(`Nothing on ${called(idle)}.`);
    return said;
  }

  plane(slice) {
    const ratio = this.ratio(), cells = el("div", { class: "plane", style: { "aspect-ratio": String(ratio) } });
    this.tiles.forEach((tile, number) => { if (overlap(slice, tile)) cells.append(this.tile(tile, number)); });
    const inner = slice.lo.length > 0;
    const whole = el("figure", { class: inner ? "" : "ticked", style: { "--ratio": String(ratio) } }, cells, ...(inner ? [] : this.ticks()),
      inner ? el("figcaption", {}, `[${ranges(slice)}, :, :]`) : "");
    new ResizeObserver(() => fit(cells, whole)).observe(cells);
    return { slice, cells, whole };
  }

  ratio() {  // wide tensors are wide and tall ones tall, but less so
    const [rows, columns] = this.layout.shape.slice(-2);
    return columns === undefined ? 6 : Math.min(2, Math.max(0.75, Math.sqrt(columns / (rows || 1)) || 1));
  }

  tile(tile, number) {
    const one = el("div", {
      class: `tile ${kindOf(this.layout, tile.holders)}`, tabindex: "-1", role: "button",
      "aria-label": `${boxText(tile)}, ${heldBy(this.layout, tile)}`, "data-tile": number,
      style: { ...placed(tile, this.scales), ...colours(tile.holders.groups[0]) },
    }, el("span", {}, tile.holders.who));
    this.shown.push([one, tile]);
    return one;
  }

  ticks() {
    const sides = [["across", this.scales.at(-1), "left"], ["down", this.scales.at(-2), "top"]];
    return sides.filter(([, scale]) => scale).map(([name, scale, edge]) =>
      el("div", { class: `ticks ${name}`, "aria-hidden": "true" },
        ...scale.cuts.map((cut) => el("i", { style: { [edge]: per(scale.place(cut)) } }, String(cut)))));
  }

  light(lit) {  // the tiles for which `lit` holds; null gives all their light back
    this.whole.classList.toggle("dimmed", lit !== null);
    for (const [one, tile] of this.shown) one.classList.toggle("lit", lit !== null && lit(tile));
  }

  outline(boxes) {
    for (const { slice, cells } of this.planes) {
      for (const old of cells.querySelectorAll(".outline")) old.remove();
      for (const box of boxes.filter((one) => overlap(slice, one))) {
        cells.append(el("div", { class: box.stays ? "outline stays" : "outline", style: placed(box, this.scales) }));
      }
    }
  }
}

function fit(cells, whole) {  // labels and ticks only where there is room for them
  const { clientWidth: width, clientHeight: height } = cells;
  for (const tile of cells.querySelectorAll(".tile")) {
    const wide = (parseFloat(tile.style.width) / 100) * width, high = (parseFloat(tile.style.height) / 100) * height;
    tile.classList.toggle("bare", high < 13 || wide < 7 * tile.textContent.length + 3);
  }
  for (const [name, edge, length, room] of [["across", "left", width, 36], ["down", "top", height, 15]]) {
    const marks = [...whole.querySelectorAll(`.${name} i`)];
    let last = -Infinity;
    for (const mark of marks) {
      const at = (parseFloat(mark.style[edge]) / 100) * length;
      mark.hidden = mark !== marks.at(-1) && (at - last < room || length - at < room);
      if (!mark.hidden) last = at;
    }
  }
}
