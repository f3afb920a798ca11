"use strict";
// Elements, numbers for people, tables, and moving about with the keyboard. Texts are only ever set as text.

const DATA = JSON.parse(document.getElementById("data").textContent);

function el(tag, attributes, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") for (const [key, to] of Object.entries(value)) found.style.setProperty(key, to);
    else if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (value === true) found.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) found.setAttribute(name, value);
  }
  found.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return found;
}

const whole = (n) => n.toLocaleString("en-US");
const plural = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;

function bytes(amount) {
  let value = amount, unit = "B";
  for (unit of ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]) {
    if (value < 1024 || unit === "PiB") break;
    value /= 1024;
  }
  return unit === "B" ? `${amount} B` : `${evenly(value)} ${unit}`;
}

function evenly(value) {  // two digits; halves to the even one, as Python has them
  const hundred = value * 100, down = Math.floor(hundred);
  const rounded = hundred - down === 0.5 ? down + (down % 2) : Math.round(hundred);
  return (rounded / 100).toFixed(2);
}

function duration(seconds) {
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (seconds >= scale) return `${(seconds / scale).toPrecision(3)} ${unit}`;
  }
  return seconds ? `${(seconds / 1e-9).toPrecision(3)} ns` : "0 s";
}

const amount = (n) => (DATA.unit === "cells" ? plural(n, "cell") : bytes(n));
const percent = (part, all) => (all ? `${Math.round((100 * part) / all)}%` : "0%");
const volume = (lo, hi) => lo.reduce((product, a, dim) => product * (hi[dim] - a), 1);
const boxText = (lo, hi) => (lo.length ? `[${lo.map((a, dim) => `${a}:${hi[dim]}`).join(", ")}]` : "the one cell");

// the name of a group of owners, and of any owners by the text that lists them
const called = (label) => (DATA.names[label] ? `${DATA.owner} ${label} (${DATA.names[label]})` : `${DATA.owner} ${label}`);
const calledAll = (text) => (/^\d+$/.test(text) ? called(text) : text.includes("owners") ? text : `${DATA.owner}s ${text}`);

const HUES = [[255, 0.78], [55, 0.84], [165, 0.74], [340, 0.82], [100, 0.9], [295, 0.74], [205, 0.86], [25, 0.75]];
function colours(number) {  // of an owner: eight hues of different lightness, then the same a little lighter or darker
  const [hue, light] = HUES[number % 8], turn = Math.floor(number / 8) % 3;
  return { "--hue": String(hue), "--light": String(light + [0, -0.09, 0.05][turn]) };
}

// How text is to stand on a heat from 0 to 1, in light and in dark mode.
const shade = (heat) => (heat > 0.72 ? "strong" : heat > 0.5 ? "middle" : "weak");

function table(caption, heads, rows, options = {}) {
  const numeric = new Set(options.numeric || []);
  const side = (at) => (numeric.has(at) ? { class: "number" } : {});
  const cell = (content, at) => (at === 0 && options.named !== false
    ? el("th", { scope: "row", ...side(at) }, content) : el("td", side(at), content));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads.map((head, at) => el("th", { scope: "col", ...side(at) }, head)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell))))));
}

// A section whose picture can be swapped for a table; the table is made when it is first asked for.
function section(id, title, words, picture, makeTable) {
  const place = el("div", { class: "tabled", hidden: true });
  const swap = el("button", { type: "button", class: "swap", "aria-pressed": "false", "aria-controls": `${id}-table` }, "Table");
  place.id = `${id}-table`;
  swap.addEventListener("click", () => {
    if (!place.firstChild) place.append(makeTable());
    const asTable = place.hidden;
    place.hidden = !asTable;
    picture.hidden = asTable;
    swap.setAttribute("aria-pressed", String(asTable));
  });
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("header", { class: "head" }, el("h2", { id: `${id}-title` }, title), makeTable ? swap : null),
    words ? el("p", { class: "words" }, words) : null, picture, place);
}

// One of many can be reached with Tab; arrow keys go on from there to the nearest in their direction.
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function roving(root, selector) {
  const all = () => [...root.querySelectorAll(selector)];
  root.addEventListener("keydown", (event) => {
    const from = event.target.closest(selector), step = ARROWS[event.key];
    if (!from || !step) return;
    event.preventDefault();
    const next = nearest(from, all(), step);
    if (next) next.focus();
  });
  root.addEventListener("focusin", (event) => {
    const one = event.target.closest(selector);
    if (!one) return;
    const before = root.querySelector(`${selector}[tabindex="0"]`);
    if (before) before.tabIndex = -1;
    one.tabIndex = 0;
  });
  const first = root.querySelector(selector);
  if (first) first.tabIndex = 0;
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
    const ahead = (a - x) * right + (b - y) * down, aside = Math.abs((a - x) * down) + Math.abs((b - y) * right);
    if (ahead > 0.5 && ahead + 3 * aside < least) [best, least] = [one, ahead + 3 * aside];
  }
  return best;
}
