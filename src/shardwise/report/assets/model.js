// Many tensors: a map by size, nested as their names are, and a table to search and sort. Both lead to a tensor's picture.

const MOST_ROWS = 100;

function tensorsOf(data) {
  return data.rows.map(([name, kind, size, dtype, note], number) => {
    const picture = data.pictures[kind], totals = picture.totals;
    const shape = (picture.target || picture.source).shape;
    const layouts = [picture.source, picture.target].filter(Boolean).map((layout) => layout.text.split("/").slice(1).join("/"));
    return {
      number, name, picture, size, note, dtype: data.dtypes[dtype], shape: shape.join(" x ") || "scalar", layout: layouts.join(" → "),
      moved: totals ? totals.moved : null, share: totals ? totals.moved / (totals.moved + totals.local || 1) : null,
      shards: picture.source.total, cells: shape.reduce((a, b) => a * b, 1),
    };
  });
}

function treeOf(tensors) {
  const root = { name: "", below: new Map(), size: 0, tensor: null };
  for (const tensor of tensors) {
    let at = root;
    for (const part of tensor.name.split(".")) {
      at.size += tensor.size;
      if (!at.below.has(part)) at.below.set(part, { name: part, below: new Map(), size: 0, tensor: null });
      at = at.below.get(part);
    }
    at.size += tensor.size;
    at.tensor = tensor;
  }
  return joined(root);
}

function joined(node) {  // a branch with one branch is one
  const below = [...node.below.values()].map(joined);
  if (below.length && node.tensor) {  // a name that others go on from has a place of its own among them
    below.push({ ...node, below: [], size: node.tensor.size });
    node = { ...node, tensor: null };
  }
  if (below.length === 1 && !node.tensor) {
    const only = below[0];
    return { ...only, name: node.name ? `${node.name}.${only.name}` : only.name };
  }
  return { ...node, below: below.sort((a, b) => b.size - a.size) };
}

// Rectangles for sizes (falling), as square as rows of them allow.
function squares(nodes, x, y, width, height) {
  const found = [], total = nodes.reduce((sum, node) => sum + node.size, 0);
  if (!total || width <= 0 || height <= 0) return found;
  const scale = (width * height) / total;
  let at = 0;
  while (at < nodes.length && width > 0 && height > 0) {
    const side = Math.min(width, height);
    let sum = 0, count = 0, worst = Infinity;
    for (let next = at; next < nodes.length; next++) {
      const area = (sum + nodes[next].size) * scale, most = nodes[at].size * scale, least = nodes[next].size * scale;
      const ratio = Math.max((side * side * most) / (area * area), (area * area) / (side * side * least || 1e-9));
      if (count && ratio > worst) break;
      [sum, count, worst] = [sum + nodes[next].size, count + 1, ratio];
    }
    const thick = (sum * scale) / side;
    let along = 0;
    for (const node of nodes.slice(at, at + count)) {
      const length = (node.size * scale) / (thick || 1);
      found.push(width >= height ? [node, x, y + along, thick, length] : [node, x + along, y, length, thick]);
      along += length;
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    at += count;
  }
  return found;
}

class TreeMap {
  constructor(tensors, choose) {
    Object.assign(this, { tensors, choose, root: treeOf(tensors), path: [] });
    this.ways = [tensors[0].share !== null ? ["share", "what moves"] : ["shards", "number of shards"], ["dtype", "dtype"]];
    if (new Set(tensors.map((tensor) => tensor.dtype)).size < 2) this.ways.pop();
    this.way = this.ways[0][0];
    this.most = Math.max(2, ...tensors.map((tensor) => tensor.shards));
    this.field = el("div", { class: "treemap", role: "group", "aria-label": "Tensors by size; arrow keys move between them, Enter opens one" });
    this.crumbs = el("nav", { class: "crumbs", "aria-label": "Part of the names" });
    this.said = el("p", { class: "said", "aria-live": "polite" }, "\u00a0");
    this.key = el("div", { class: "legend" });
    const pick = el("select", { "aria-label": "Colour by" }, ...this.ways.map(([way, words]) => el("option", { value: way }, `coloured by ${words}`)));
    pick.addEventListener("change", () => { this.way = pick.value; this.draw(); });
    this.whole = el("div", {}, el("div", { class: "bar-row" }, this.crumbs, this.ways.length > 1 ? pick : ""), this.field, this.key, this.said);
    const say = (event) => { const at = event.target.closest(".leaf, .branch"); if (at) this.said.textContent = at.getAttribute("aria-label"); };
    this.field.addEventListener("pointerover", say);
    this.field.addEventListener("focusin", say);
    this.field.addEventListener("click", (event) => this.open(event.target.closest(".leaf, .branch")));
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.open(event.target.closest(".leaf, .branch")); }
      if (event.key === "Escape" && this.path.length) { event.stopPropagation(); this.path.pop(); this.draw(); }
    });
    roving(this.field, ".leaf, .branch");
    let before = 0;
    new ResizeObserver(() => { if (this.field.clientWidth !== before) { before = this.field.clientWidth; this.draw(); } }).observe(this.field);
  }

  open(at) {
    if (!at) return;
    if (at.node.tensor) this.choose(at.node.tensor);
    else { this.path.push(at.node); this.draw(); }
  }

  draw() {
    const top = this.path.at(-1) || this.root;
    this.field.replaceChildren();
    this.fill(top, 0, 0, this.field.clientWidth, this.field.clientHeight);
    const first = this.field.querySelector(".leaf, .branch");
    if (first) first.tabIndex = 0;
    const steps = [["all tensors", []], ...this.path.map((node, at) => [node.name, this.path.slice(0, at + 1)])];
    this.crumbs.replaceChildren(...steps.map(([name, path], at) => el("button", {
      type: "button", disabled: at === steps.length - 1, onclick: () => { this.path = path; this.draw(); } }, name)));
    this.key.replaceChildren(...this.legend());
  }

  legend() {
    if (this.way === "dtype") {
      return DATA.dtypes.map((name, at) => el("span", { class: "chip", style: colours(at) }, name || "no dtype"));
    }
    const [low, high] = this.way === "share" ? ["all stays", "all moves"] : ["1 shard", plural(this.most, "shard")];
    return [el("span", {}, low), el("i", {}), el("span", {}, high)];
  }

  fill(node, x, y, width, height) {
    for (const [child, left, top, wide, high] of squares(node.below.length ? node.below : [node], x, y, width, height)) {
      if (wide < 2 || high < 2) continue;
      const small = wide < 26 || high < 26 || this.field.childElementCount > 1500;
      if (child.below.length && !small) {
        const head = high > 44 && wide > 40 ? 17 : 0;
        this.put("branch", child, left, top, wide, high);
        this.fill(child, left + 2, top + 1 + head, wide - 4, high - 3 - head);
      } else this.put("leaf", child, left, top, wide, high);
    }
  }

  put(kind, node, left, top, wide, high) {
    const text = node.tensor ? `${node.tensor.name}: ${this.words(node.tensor)}` : `${node.name}: ${amount(node.size)} in all`;
    const one = el("div", { class: kind, role: "button", tabindex: "-1", "aria-label": text, style: {
      left: `${left}px`, top: `${top}px`, width: `${wide}px`, height: `${high}px`, ...this.paint(node) } },
      wide > 34 && high > 15 ? el("span", {}, node.name) : "");
    one.dataset.shade = shade(this.warmth(node));
    if (this.way === "dtype") one.classList.add("hued");
    one.node = node;
    this.field.append(one);
  }

  warmth(node) {  // of what is in it, by size
    let sum = 0;
    const part = (tensor) => (this.way === "share" ? tensor.share : Math.log2(tensor.shards || 1) / Math.log2(this.most));
    const walk = (at) => { if (at.tensor) sum += part(at.tensor) * at.size; else at.below.forEach(walk); };
    walk(node);
    return 0.06 + (0.94 * sum) / (node.size || 1);
  }

  paint(node) {
    if (this.way !== "dtype") return { "--heat": String(this.warmth(node)) };
    let at = node;
    while (!at.tensor) at = at.below[0];
    return colours(DATA.dtypes.indexOf(at.tensor.dtype));
  }

  words(tensor) {
    const moves = tensor.moved === null ? plural(tensor.shards, "shard") : `${bytes(tensor.moved)} move`;
    return [tensor.shape, tensor.dtype, amount(tensor.size), moves].filter(Boolean).join(", ");
  }
}

class TensorTable {
  constructor(tensors, choose) {
    const plans = tensors[0].moved !== null, dtypes = tensors.some((tensor) => tensor.dtype);
    this.columns = [["name", "name"], ...(dtypes ? [["dtype", "dtype"]] : []), ["shape", "shape", "cells"], ["layout", "layout"],
      ["size", "size", "size", amount], plans ? ["moves", "moved", "moved", bytes] : ["shards", "shards", "shards", whole]];
    Object.assign(this, { tensors, choose, by: null, falling: false, most: MOST_ROWS });
    const hint = "Search names, dtypes, layouts";
    this.search = el("input", { type: "search", placeholder: hint, "aria-label": hint, autocomplete: "off", spellcheck: "false" });
    this.search.addEventListener("input", () => { this.most = MOST_ROWS; this.draw(); });
    this.count = el("p", { class: "note", role: "status" });
    this.body = el("tbody", {});
    this.heads = this.columns.map(([head, , key], at) => {
      const button = el("button", { type: "button" }, head);
      button.addEventListener("click", () => this.sort(at));
      return el("th", { scope: "col", class: key && at > 2 ? "number" : "" }, button);
    });
    this.more = el("button", { type: "button", class: "swap" }, "Show more");
    this.more.addEventListener("click", () => { this.most *= 5; this.draw(); });
    this.whole = el("div", {}, el("div", { class: "bar-row" }, this.search, this.count),
      el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Tensors" },
        el("table", { class: "tensors" }, el("caption", {}, "All tensors"), el("thead", {}, el("tr", {}, ...this.heads)), this.body)), this.more);
    this.draw();
  }

  sort(at) {
    const [, , key] = this.columns[at];
    this.falling = this.by === at ? !this.falling : Boolean(key);
    this.by = at;
    this.heads.forEach((head, n) => (n === at ? head.setAttribute("aria-sort", this.falling ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    this.draw();
  }

  found() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (tensor) => `${tensor.name} ${tensor.dtype} ${tensor.shape} ${tensor.layout} ${tensor.note}`.toLowerCase();
    const found = words.length ? this.tensors.filter((tensor) => words.every((word) => text(tensor).includes(word))) : [...this.tensors];
    if (this.by === null) return found;
    const [, name, key] = this.columns[this.by], by = key || name, turn = this.falling ? -1 : 1;
    const order = (a, b) => (typeof a[by] === "number" ? a[by] - b[by] : a[by].localeCompare(b[by], "en", { numeric: true }));
    return found.sort((a, b) => turn * order(a, b));
  }

  draw() {
    const found = this.found(), shown = found.slice(0, this.most);
    this.count.textContent = `Showing ${whole(shown.length)} of ${plural(found.length, "tensor")}`;
    this.more.hidden = shown.length === found.length;
    this.body.replaceChildren(...shown.map((tensor) => this.row(tensor)));
  }

  row(tensor) {
    const name = el("button", { type: "button", class: "name" }, tensor.name || "(no name)");
    name.addEventListener("click", () => this.choose(tensor));
    const note = tensor.note ? el("small", {}, ` ${tensor.note}`) : "";
    return el("tr", {}, ...this.columns.map(([head, field, key, show], at) => (at === 0 ? el("th", { scope: "row" }, name, note)
      : el("td", { class: show ? "number" : "" }, head === "layout" ? el("code", {}, tensor.layout) : show ? show(tensor[field]) : tensor[field]))));
  }
}
