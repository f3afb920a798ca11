// What every part of a page is made of: tables, sections, a line that says what is pointed at, and the keyboard.

function table(caption, heads, rows, numeric = []) {
  const side = (at) => (numeric.includes(at) ? { class: "number" } : {});
  const head = (text, at) => el("th", { scope: "col", ...side(at) }, text);
  const cell = (text, at) => (at ? el("td", side(at), text) : el("th", { scope: "row", ...side(at) }, text));
  return scrolling(caption, el("table", {}, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...heads.map(head))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell))))));
}

function scrolling(name, ...children) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, ...children);
}

// A section whose picture can be swapped for a table; the table is made when it is first asked for.
function section(id, title, words, picture, makeTable) {
  const place = el("div", { class: "tabled", id: `${id}-table`, hidden: true });
  const swap = el("button", { type: "button", class: "swap", "aria-pressed": "false", "aria-controls": place.id }, "Table");
  swap.addEventListener("click", () => {
    if (!place.firstChild) place.append(makeTable());
    place.hidden = !place.hidden;
    picture.hidden = !place.hidden;
    swap.setAttribute("aria-pressed", String(!place.hidden));
  });
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("header", { class: "head" }, el("h2", { id: `${id}-title` }, title), makeTable ? swap : ""),
    words ? el("p", { class: "words" }, words) : "", picture, place);
}

// A line of text that repeats the name of what is pointed at or focused inside of `root`.
function saying(root, selector, first) {
  const line = el("p", { class: "said", "aria-live": "polite" }, first || "\u00a0");
  const say = (event) => {
    const at = event.target.closest(selector);
    if (at) line.textContent = at.getAttribute("aria-label");
  };
  root.addEventListener("pointerover", say);
  root.addEventListener("focusin", say);
  return line;
}

// One of many can be reached with Tab; arrow keys go on from there to the nearest one, and Enter is a click.
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function roving(root, selector) {
  root.addEventListener("keydown", (event) => {
    const from = event.target.closest(selector), step = ARROWS[event.key];
    if (!from || !(step || event.key === "Enter" || event.key === " ")) return;
    event.preventDefault();
    if (!step) from.click();
    else nearest(from, [...root.querySelectorAll(selector)], step)?.focus();
  });
  root.addEventListener("focusin", (event) => reachable(root, event.target.closest(selector)));
  reachable(root, root.querySelector(selector));
}

function reachable(root, one) {
  if (!one) return;
  for (const before of root.querySelectorAll('[tabindex="0"]')) before.tabIndex = -1;
  one.tabIndex = 0;
}

function nearest(from, all, [right, down]) {
  const middle = (one) => {
    const box = one.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const [x, y] = middle(from);
  let best = null, least = Infinity;
  for (const one of all) {
    const [a, b] = middle(one);
    const ahead = (a - x) * right + (b - y) * down;
    const cost = ahead + 3 * (Math.abs((a - x) * down) + Math.abs((b - y) * right));
    if (ahead > 0.5 && cost < least) [best, least] = [one, cost];
  }
  return best;
}
