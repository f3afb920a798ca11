// All tensors as a table, to search and to sort.

const MOST_ROWS = 100;

function tensorsOf(data) {  // rows of the data as objects
  return data.rows.map(([name, kind, size, dtype, note]) => {
    const picture = data.pictures[kind], { source, target, totals } = picture, { shape } = target || source;
    const notation = (layout) => (!target && layout.shards === 1 ? "whole" : layout.text.split("/").slice(1).join("/"));
    const layouts = [source, target].filter(Boolean).map(notation);
    return {
      name, picture, size, note, dtype: data.dtypes[dtype], shape: shape.join(" x ") || "scalar", layout: layouts.join(" → "),
      cells: shape.reduce((product, n) => product * n, 1), shards: source.shards,
      moved: totals ? totals.moved : null, share: totals ? totals.moved / (totals.moved + totals.local || 1) : null,
    };
  });
}

class TensorTable {
  constructor(tensors, choose) {
    Object.assign(this, { tensors, choose, by: null, falling: false, most: MOST_ROWS, columns: this.columnsFor(tensors) });
    const hint = "Search names, dtypes, layouts";
    this.search = el("input", { type: "search", placeholder: hint, "aria-label": hint, autocomplete: "off", spellcheck: "false",
      oninput: () => this.draw(MOST_ROWS) });
    this.count = el("p", { class: "note", role: "status" });
    this.heads = this.columns.map(({ head, show }, at) => el("th", { scope: "col", class: show ? "number" : "" },
      el("button", { type: "button", onclick: () => this.sort(at) }, head)));
    this.body = el("tbody", {});
    this.more = el("button", { type: "button", class: "swap", onclick: () => this.draw(5 * this.most) }, "Show more");
    this.whole = el("div", {}, el("div", { class: "bar-row" }, this.search, this.count),
      scrolling("Tensors", el("table", { class: "tensors" }, el("caption", {}, "All tensors"),
        el("thead", {}, el("tr", {}, ...this.heads)), this.body)), this.more);
    this.draw(MOST_ROWS);
  }

  columnsFor(tensors) {  // what each is sorted by, where that is not what it shows, and how numbers are shown
    return [
      { head: "name" },
      ...(tensors.some((tensor) => tensor.dtype) ? [{ head: "dtype" }] : []),
      { head: "shape", by: "cells" },
      { head: "layout" },
      { head: "size", show: amount },
      tensors[0].moved === null ? { head: "shards", show: whole } : { head: "moves", by: "moved", show: bytes },
    ].map((column) => ({ by: column.head, ...column }));
  }

  sort(at) {
    const { by } = this.columns[at], numbers = typeof this.tensors[0][by] === "number";
    this.falling = this.by === by ? !this.falling : numbers;  // the largest first, but names from a to z
    this.by = by;
    for (const head of this.heads) head.removeAttribute("aria-sort");
    this.heads[at].setAttribute("aria-sort", this.falling ? "descending" : "ascending");
    this.draw(this.most);
  }

  found() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean), { by } = this;
    const text = ({ name, dtype, shape, layout, note }) => `${name} ${dtype} ${shape} ${layout} ${note}`.toLowerCase();
    const found = this.tensors.filter((tensor) => !words.length || words.every((word) => text(tensor).includes(word)));
    if (by === null) return found;
    const order = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    return found.sort((a, b) => (this.falling ? order(b[by], a[by]) : order(a[by], b[by])));
  }

  draw(most) {
    const found = this.found(), shown = found.slice(0, most);
    this.most = most;
    this.count.textContent = `Showing ${whole(shown.length)} of ${plural(found.length, "tensor")}`;
    this.more.hidden = shown.length === found.length;
    this.body.replaceChildren(...shown.map((tensor) => el("tr", {}, ...this.columns.map((column) => this.cell(tensor, column)))));
  }

  cell(tensor, { head, by, show }) {
    if (head === "layout") return el("td", {}, el("code", {}, tensor.layout));
    if (head !== "name") return el("td", { class: show ? "number" : "" }, show ? show(tensor[by]) : tensor[head]);
    const open = el("button", { type: "button", class: "name", onclick: () => this.choose(tensor) }, tensor.name || "(no name)");
    return el("th", { scope: "row" }, open, tensor.note ? el("small", {}, ` ${tensor.note}`) : "");
  }
}
