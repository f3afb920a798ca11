// The page: its head, the picture of a plan or layout, and for many tensors the overview that leads to theirs.

class View {  // a picture, and the owner that is selected in it
  constructor(picture, prefix) {
    Object.assign(this, { picture, prefix, selected: null, parts: [] });
  }

  id(name) { return `${this.prefix}${name}`; }

  show(selected) {
    this.selected = selected;
    for (const part of this.parts) part.mark(selected);
  }

  select(group) { this.show(group === this.selected ? null : group); }

  sections() {
    const { picture } = this, found = [];
    if (picture.totals) found.push(comparison(picture.totals, this.id("least")));
    if (picture.source) found.push(this.part(new CellsPart(this)).whole);
    if (picture.flows) found.push(el("div", { class: "pair" }, this.matrix(), this.bars()));
    if (picture.stages) found.push(timeline(picture, this.id("rounds")));
    return found;
  }

  part(part) {
    this.parts.push(part);
    return part;
  }

  matrix() {
    const { picture } = this, { whole } = this.part(new MatrixPanel(this));
    return section(this.id("flows"), "Who sends to whom", flowWords(picture), whole, () => flowTable(picture));
  }

  bars() {
    return section(this.id("owners"), `By ${DATA.owner}`, "", this.part(new BarsPanel(this)).whole);
  }
}

function head(data) {
  const root = document.documentElement, button = el("button", { type: "button", class: "theme" });
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  system.addEventListener("change", name);
  name();
  return el("header", { class: "top" }, el("h1", { class: data.plain ? "notation" : "" }, data.title), button);
}

function overview(data) {
  const tensors = tensorsOf(data), place = el("div", { id: "tensor" });
  const all = data.together ? new View(data.together, "all-") : null;
  let one = null;
  const choose = (tensor) => {
    one = new View(tensor.picture, "one-");
    place.replaceChildren(...aboutTensor(tensor), ...one.sections());
    place.firstChild.focus({ preventScroll: true });
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    place.scrollIntoView({ behavior: calm ? "auto" : "smooth" });
  };
  const words = `${plural(tensors.length, "tensor")} of ${plural(data.pictures.length, "kind")}, each as large as it is. `
    + "Open one to see its picture; a group to look closer.";
  const [against, ...others] = all ? all.sections() : [""];
  const found = [against, section("map", "All tensors", words, new TreeMap(tensors, choose).whole),
    section("tensors", "As a table", "", new TensorTable(tensors, choose).whole), place, ...others];
  return { totals: all && all.picture.totals, found, views: () => [all, one].filter(Boolean) };
}

function aboutTensor({ name, shape, dtype, size, note, picture: { totals } }) {
  return [el("h2", { class: "chosen", tabindex: "-1" }, name || "(no name)"),
    el("p", { class: "words" }, [shape, dtype, amount(size), note].filter(Boolean).join(" · ")), totals ? cards(totals) : ""];
}

function single(picture) {
  const view = new View(picture, "");
  return { totals: picture.totals, found: view.sections(), views: () => [view] };
}

function start(data) {
  const nothing = { found: [el("p", {}, "There is nothing to show.")], views: () => [] };
  const named = data.rows.length > 1 || data.rows.some(([name]) => name);
  const { totals, found, views } = !data.rows.length ? nothing : named ? overview(data) : single(data.pictures[0]);
  document.body.append(head(data), el("main", {}, cards(totals, data.facts), ...found.filter(Boolean)),
    el("footer", {}, "Made by shardwise. This page holds all that it shows, and asks nobody for anything."));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const view of views()) view.show(null);
  });
  document.documentElement.dataset.ready = "true";
}

start(DATA);
