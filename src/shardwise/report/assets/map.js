// All tensors as a map: as large as they are, nested as their names are.

function treeOf(tensors) {
  const root = { name: "", below: new Map(), size: 0, tensor: null };
  const grow = (at, name, key, size) => {
    if (!at.below.has(key)) at.below.set(key, { name, below: new Map(), size: 0, tensor: null });
    const found = at.below.get(key);
    found.size += size;
    return found;
  };
  tensors.forEach((tensor, number) => {
    let at = root;
    for (const part of tensor.name.split(".")) at = grow(at, part, part, tensor.size);
    if (at.tensor) at = grow(at, `number ${number}`, number, tensor.size);  // a name that stands there twice
    at.tensor = tensor;
  });
  return joined(root);
}

function joined(node) {  // the largest first; a branch with one branch is one
  const below = [...node.below.values()].map(joined);
  if (below.length && node.tensor) {  // a name that others go on from has a place of its own among them
    below.push({ ...node, below: [], size: node.tensor.size });
    node = { ...node, tensor: null };
  }
  if (below.length !== 1) return { ...node, below: below.sort((a, b) => b.size - a.size) };
  return { ...below[0], name: node.name ? `${node.name}.${below[0].name}` : below[0].name };
}

// Rectangles [node, x, y, width, height] for sizes (falling): row by row, each as long as keeps its squares square.
function squares(nodes, x, y, width, height) {
  const found = [], total = nodes.reduce((sum, node) => sum + node.size, 0), scale = (width * height) / (total || 1);
  let at = 0;
  while (total && at < nodes.length && width > 0 && height > 0) {
    const side = Math.min(width, height), count = inRow(nodes, at, scale, side), row = nodes.slice(at, at + count);
    const thick = (row.reduce((sum, node) => sum + node.size, 0) * scale) / side;
    let along = 0;
    for (const node of row) {
      const length = (node.size * scale) / (thick || 1);
      found.push(width >= height ? [node, x, y + along, thick, length] : [node, x + along, y, length, thick]);
      along += length;
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    at += count;
  }
  return found;
}

function inRow(nodes, at, scale, side) {  // how many go into a row before the worst of them gets worse
  let sum = 0, worst = Infinity, next = at;
  for (; next < nodes.length; next++) {
    const area = (sum + nodes[next].size) * scale, most = nodes[at].size * scale, least = nodes[next].size * scale;
    const ratio = Math.max((side * side * most) / (area * area), (area * area) / (side * side * least || 1e-9));
    if (next > at && ratio > worst) break;
    [sum, worst] = [sum + nodes[next].size, ratio];
  }
  return next - at;
}

const MOST_SHOWN = 1500, NODES = ".leaf, .branch";

class TreeMap {
  constructor(tensors, choose) {
    Object.assign(this, { choose, root: treeOf(tensors), path: [] });
    this.most = highest([2, ...tensors.map((tensor) => tensor.shards)]);
    this.field = el("div", { class: "treemap", role: "group",
      "aria-label": "Tensors by size; arrow keys move between them, Enter opens one, Escape goes back" });
    this.crumbs = el("nav", { class: "crumbs", "aria-label": "Part of the names" });
    this.key = el("div", { class: "legend" });
    this.whole = el("div", {}, el("div", { class: "bar-row" }, this.crumbs, this.picker(tensors)), this.field, this.key,
      saying(this.field, NODES));
    this.listen();
  }

  picker(tensors) {  // what the colours are to tell
    const ways = tensors[0].share === null ? [["shards", "number of shards"]] : [["share", "what moves"]];
    if (new Set(tensors.map((tensor) => tensor.dtype)).size > 1) ways.push(["dtype", "dtype"]);
    if (ways[0][0] === "shards" && tensors.every((tensor) => tensor.shards < 2)) ways.reverse();
    this.way = ways[0][0];
    const options = ways.map(([way, words]) => el("option", { value: way }, `coloured by ${words}`));
    const pick = el("select", { "aria-label": "Colour by" }, ...options);
    pick.addEventListener("change", () => { this.way = pick.value; this.draw(); });
    return ways.length > 1 ? pick : "";
  }

  listen() {
    this.field.addEventListener("click", (event) => this.open(event.target.closest(NODES)));
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.path.length) return;
      event.stopPropagation();
      this.go(this.path.slice(0, -1));
    });
    roving(this.field, NODES);
    let before = 0;
    new ResizeObserver(() => {
      if (this.field.clientWidth !== before) this.draw();
      before = this.field.clientWidth;
    }).observe(this.field);
  }

  open(at) {
    if (at && at.node.tensor) this.choose(at.node.tensor);
    else if (at) this.go([...this.path, at.node]);
  }

  go(path) {
    this.path = path;
    this.draw();
    this.field.querySelector(NODES)?.focus({ preventScroll: true });
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.field;
    this.field.replaceChildren();
    this.fill(this.path.at(-1) || this.root, 0, 0, width, height);
    reachable(this.field, this.field.querySelector(NODES));
    const steps = [["all tensors", []], ...this.path.map((node, at) => [node.name, this.path.slice(0, at + 1)])];
    this.crumbs.replaceChildren(...steps.map(([name, path], at) => el("button", {
      type: "button", disabled: at === steps.length - 1, onclick: () => this.go(path) }, name)));
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
      const room = wide >= 26 && high >= 26 && this.field.childElementCount < MOST_SHOWN, inside = child.below.length && room;
      this.put(inside ? "branch" : "leaf", child, left, top, wide, high);
      const head = high > 44 && wide > 40 ? 17 : 0;  // room for the name
      if (inside) this.fill(child, left + 2, top + 1 + head, wide - 4, high - 3 - head);
    }
  }

  put(kind, node, left, top, wide, high) {
    const hued = this.way === "dtype" && kind === "leaf", warmth = this.warmth(node);
    const one = el("div", {
      class: hued ? "leaf hued" : kind, role: "button", tabindex: "-1", "aria-label": this.words(node),
      "data-shade": shade(warmth),
      style: { left: `${left}px`, top: `${top}px`, width: `${wide}px`, height: `${high}px`, "--heat": String(warmth),
        ...(hued ? colours(this.dtype(node)) : {}) },
    }, wide > 34 && high > 15 ? el("span", {}, node.name) : "");
    one.node = node;
    this.field.append(one);
  }

  warmth(node) {  // of what is in it, by size
    const part = (tensor) => (this.way === "shards" ? Math.log2(tensor.shards || 1) / Math.log2(this.most) : tensor.share || 0);
    let sum = 0;
    const walk = (at) => { if (at.tensor) sum += part(at.tensor) * at.size; else at.below.forEach(walk); };
    walk(node);
    return 0.06 + (0.94 * sum) / (node.size || 1);
  }

  dtype(node) {  // of the largest tensor in it
    while (!node.tensor) node = node.below[0];
    return DATA.dtypes.indexOf(node.tensor.dtype);
  }

  words({ name, size, tensor }) {
    if (!tensor) return `${name}: ${amount(size)} in all`;
    const moves = tensor.moved === null ? plural(tensor.shards, "shard") : `${bytes(tensor.moved)} move`;
    return `${tensor.name}: ${[tensor.shape, tensor.dtype, amount(size), moves].filter(Boolean).join(", ")}`;
  }
}
