// Layouts as tiles. Both sides of a plan share one scale, so that a box lies at the same place in both.

const MOST_SLICES = 36;

function sideOf(layout) {  // rows of the data as objects
  const dims = layout.shape.length;
  return layout.tiles.map((row) => ({ lo: row.slice(0, dims), hi: row.slice(dims, 2 * dims), holders: layout.sets[row[2 * dims]] }));
}

function copiesOf(picture) {
  const rows = picture.copies && picture.copies.rows;
  if (!rows) return null;
  const dims = picture.source.shape.length;
  return rows.map((row) => ({
    lo: row.slice(0, dims), hi: row.slice(dims, 2 * dims), source: row[2 * dims], target: row[2 * dims + 1], step: row[2 * dims + 2],
  }));
}

const overlap = (a, b) => a.lo.every((lo, dim) => lo < b.hi[dim] && b.lo[dim] < a.hi[dim]);
function common(a, b) {
  return { lo: a.lo.map((lo, dim) => Math.max(lo, b.lo[dim])), hi: a.hi.map((hi, dim) => Math.min(hi, b.hi[dim])) };
}

// Where a cell lies along a dim, from 0 to 1. Thin parts are drawn wider than they are, so that they can be seen.
function scaleOf(tiles, dim, size) {
  const cuts = [...new Set([0, size, ...tiles.flatMap((tile) => [tile.lo[dim], tile.hi[dim]])])].sort((a, b) => a - b);
  const share = (at) => 0.65 * ((cuts[at + 1] - cuts[at]) / (size || 1)) + 0.35 / (cuts.length - 1);
  const places = [0];
  for (let at = 0; at + 1 < cuts.length; at++) places.push(places[at] + share(at));
  const place = (x) => {
    let low = 0, high = cuts.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (cuts[middle] <= x) low = middle; else high = middle;
    }
    const inside = (x - cuts[low]) / ((cuts[low + 1] - cuts[low]) || 1);
    return places[low] + inside * ((places[low + 1] - places[low]) || 0);
  };
  return { cuts, place };
}

function slicesOf(scales) {  // the boxes of all dims but the last two
  let found = [{ lo: [], hi: [] }];
  for (const { cuts } of scales.slice(0, -2)) {
    const next = [];
    for (const one of found) {
      for (let at = 0; at + 1 < cuts.length && next.length < 4096; at++) {
        next.push({ lo: [...one.lo, cuts[at]], hi: [...one.hi, cuts[at + 1]] });
      }
    }
    found = next;
  }
  return found;
}

const inSlice = (box, slice) => slice.lo.every((lo, dim) => lo < box.hi[dim] && box.lo[dim] < slice.hi[dim]);
const per = (fraction) => `${(100 * fraction).toFixed(4)}%`;

function placed(box, scales) {  // left, top, width and height of a box in its slice
  const dims = box.lo.length;
  const side = (dim) => (dim < 0 ? [0, 1] : [scales[dim].place(box.lo[dim]), scales[dim].place(box.hi[dim])]);
  const [left, right] = side(dims - 1), [top, bottom] = side(dims - 2);
  return { left: per(left), top: per(top), width: per(right - left), height: per(bottom - top) };
}

function kindOf(layout, holders) {
  if (layout.terms > 1) return "partial";
  return holders.replicas > 1 ? "replicas" : "single";
}

function tileWords(layout, tile) {
  const kind = kindOf(layout, tile.holders), who = calledAll(tile.holders.who);
  if (kind === "partial") return `${layout.op} of terms on ${who}`;
  return kind === "replicas" ? `replicas on ${who}` : `on ${who}`;
}

class LayoutPanel {
  constructor(view, side, layout, scales) {
    Object.assign(this, { view, side, layout, scales, tiles: sideOf(layout), shown: [] });
    this.slices = slicesOf(scales);
    this.planes = this.slices.slice(0, MOST_SLICES).map((slice) => this.plane(slice));
    const grid = el("div", { class: this.planes.length > 1 ? "slices" : "slice-only" }, ...this.planes.map((p) => p.whole));
    if (scales.length > 3 && scales[scales.length - 3].cuts.length <= 7) {
      grid.style.gridTemplateColumns = `repeat(${scales[scales.length - 3].cuts.length - 1}, minmax(0, 1fr))`;
    }
    this.grid = grid;
    const name = { source: "Source", target: "Target", only: "Layout" }[side];
    this.whole = el("div", { class: `layout ${side}` }, el("h3", {}, name, " ", el("code", {}, layout.text)),
      this.tiles.length ? grid : el("p", { class: "empty" }, "This tensor has no cells."), ...this.notes());
    grid.setAttribute("role", "group");
    grid.setAttribute("aria-label", `${name} layout ${layout.text}: ${plural(this.tiles.length, "tile")}; arrow keys move between them`);
    roving(grid, ".tile");
  }

  notes() {
    const said = [], shown = this.tiles.length, { total, merged, idle, terms, op } = this.layout;
    if (merged) said.push(`Showing ${whole(shown)} tiles that stand for ${whole(total)}: neighbours are put together.`);
    else if (shown < total) said.push(`Showing the first ${whole(shown)} of ${whole(total)} tiles.`);
    if (this.slices.length > this.planes.length) said.push(`Showing ${this.planes.length} of ${whole(this.slices.length)} slices.`);
    const replicas = Math.max(0, ...this.layout.sets.map((set) => set.replicas));
    if (terms > 1) said.push(`Dotted: partial, the ${op} of ${terms} terms is the value.`);
    else if (replicas > 1) said.push(`Hatched: replicas, up to ${replicas} owners hold the same cells.`);
    if (idle) said.push(`Nothing on ${calledAll(idle)}.`);
    return said.map((words) => el("p", { class: "note" }, words));
  }

  plane(slice) {
    const dims = this.scales.length, cells = el("div", { class: "plane" });
    const ratio = dims < 2 ? 6 : Math.sqrt(this.layout.shape[dims - 1] / (this.layout.shape[dims - 2] || 1));
    cells.style.aspectRatio = String(Math.min(6, Math.max(dims < 2 ? 6 : 0.75, Math.min(dims < 2 ? 6 : 2, ratio || 1))));
    this.tiles.forEach((tile, number) => {
      if (!inSlice(tile, slice)) return;
      const words = `${boxText(tile.lo, tile.hi)}, ${tileWords(this.layout, tile)}`;
      const one = el("div", {
        class: `tile ${kindOf(this.layout, tile.holders)}`, tabindex: "-1", role: "button", "aria-label": words,
        "data-tile": number, style: { ...placed(tile, this.scales), ...colours(tile.holders.groups[0]) },
      }, el("span", {}, tile.holders.who));
      this.shown.push([one, tile]);
      cells.append(one);
    });
    const ticks = slice.lo.length ? [] : this.ticks();
    const name = slice.lo.length ? el("figcaption", {}, `[${slice.lo.map((lo, dim) => `${lo}:${slice.hi[dim]}`).join(", ")}, :, :]`) : null;
    const found = el("figure", { class: ticks.length ? "ticked" : "" }, cells, ...ticks, name);
    new ResizeObserver(() => fit(cells, found)).observe(cells);
    return { slice, cells, whole: found };
  }

  ticks() {
    const dims = this.scales.length;
    return [["across", dims - 1, "left"], ["down", dims - 2, "top"]].filter(([, dim]) => dim >= 0).map(([name, dim, edge]) =>
      el("div", { class: `ticks ${name}`, "aria-hidden": "true" },
        ...this.scales[dim].cuts.map((cut) => el("i", { style: { [edge]: per(this.scales[dim].place(cut)) } }, String(cut)))));
  }

  // light up tiles for which `lit` holds; null lights up all
  light(lit) {
    this.whole.classList.toggle("dimmed", lit !== null);
    for (const [one, tile] of this.shown) one.classList.toggle("lit", lit !== null && lit(tile));
  }

  outline(boxes) {
    for (const { slice, cells } of this.planes) {
      for (const old of cells.querySelectorAll(".outline")) old.remove();
      for (const box of boxes) {
        if (inSlice(box, slice)) cells.append(el("div", { class: `outline ${box.stays ? "stays" : ""}`, style: placed(box, this.scales) }));
      }
    }
  }
}

function fit(cells, whole) {  // labels and ticks only where there is room
  const width = cells.clientWidth, height = cells.clientHeight;
  for (const tile of cells.querySelectorAll(".tile")) {
    const wide = (parseFloat(tile.style.width) / 100) * width, high = (parseFloat(tile.style.height) / 100) * height;
    tile.classList.toggle("bare", high < 13 || wide < 7 * tile.textContent.length + 3);
  }
  for (const [name, edge, length, room] of [["across", "left", width, 36], ["down", "top", height, 15]]) {
    let last = -Infinity;
    const marks = [...whole.querySelectorAll(`.${name} i`)], end = marks.at(-1);
    for (const mark of marks) {
      const at = (parseFloat(mark.style[edge]) / 100) * length;
      mark.hidden = mark !== end && (at - last < room || length - at < room);
      if (!mark.hidden) last = at;
    }
  }
}
