"use strict";
// Elements, numbers for people, names and colours of owners. Texts are only ever set as text.

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
const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;
const percent = (part, all) => (all ? `${Math.round((100 * part) / all)}%` : "0%");
const times = (ratio) => `${ratio >= 100 ? whole(Math.round(ratio)) : ratio.toPrecision(2)}x`;
const per = (fraction) => `${(100 * fraction).toFixed(4)}%`;
const highest = (numbers) => numbers.reduce((most, n) => Math.max(most, n), 1);

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

const amount = (n) => (DATA.unit === "cells" ? plural(n, "cell") : bytes(n));

function duration(seconds) {
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (seconds >= scale) return `${(seconds / scale).toPrecision(3)} ${unit}`;
  }
  return seconds ? `${(seconds / 1e-9).toPrecision(3)} ns` : "0 s";
}

function called(owners) {  // an owner, or several by the text that lists them
  if (!/^\d+$/.test(owners)) return owners.includes("owners") ? owners : `${DATA.owner}s ${owners}`;
  return DATA.names[owners] ? `${DATA.owner} ${owners} (${DATA.names[owners]})` : `${DATA.owner} ${owners}`;
}

// Owners have eight hues of different lightness by turns, then the same a little darker or lighter.
const HUES = [[255, 0.78], [55, 0.84], [165, 0.74], [340, 0.82], [100, 0.9], [295, 0.74], [205, 0.86], [25, 0.75]];
function colours(number) {
  const [hue, light] = HUES[number % 8], turn = Math.floor(number / 8) % 3;
  return { "--hue": String(hue), "--light": String(light + [0, -0.09, 0.05][turn]) };
}

// How text is to stand on a heat from 0 to 1, in light and in dark mode.
const shade = (heat) => (heat > 0.72 ? "strong" : heat > 0.5 ? "middle" : "weak");
