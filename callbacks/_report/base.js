"use strict";
// Shared by the charts: elements, numbers, axes. Text from the run is only ever set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Adds an SVG element to its parent.
function draw(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(text);
  return parent.appendChild(element);
}

function rangeOf(values) {
  if (!values.length) return [0, 1];
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function format(value, unit = "number") {
  if (typeof value !== "number") return String(value).replace("nan", "NaN");
  if (unit === "share") {
    const percent = value * 100;
    if (percent && Math.abs(percent) < 0.01) return "<0.01%";
    return `${Number(percent.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 3 })}%`;
  }
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

// Ticks at 1, 2 or 5 times a power of ten.
function niceTicks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((each) => each * power >= raw * 0.999) * power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) {
    ticks.push(Number((k * step).toPrecision(12)));
  }
  return ticks;
}

// One label every few powers, between the ends of the data.
function powerTicks(low, high, base, most) {
  const log = (x) => Math.log(x) / Math.log(base);
  const first = Math.ceil(log(low) - 1e-9);
  const last = Math.floor(log(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / most));
  const ticks = [];
  for (let k = first; k <= last; k += every) ticks.push(base ** k);
  return ticks;
}

// Powers of ten; if there are few, also 2 and 5 times these powers.
function logTicks(low, high) {
  const powers = powerTicks(low, high, 10, 5);
  if (powers.length > 2) return powers;
  const first = Math.floor(Math.log10(low));
  const ticks = [0, 1, 2, 3].flatMap((k) => [1, 2, 5].map((digit) => digit * 10 ** (first + k)));
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 1 ? inside : niceTicks(low, high, 4);
}

function stepTicks(first, last, width) {
  return niceTicks(first, last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
}

function formatStep(step) {
  if (step >= 1e6) return `${Number((step / 1e6).toPrecision(3))}M`;
  return step.toLocaleString("en", { maximumFractionDigits: 6 });
}

// Index of the last of sorted numbers that is at most a value; 0 if all are larger.
function lastUpTo(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return Math.max(low - 1, 0);
}

// Calls a function now, and again whenever the element's width or the color scheme changes.
function redrawn(element, paint) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth && element.clientWidth !== width) {
      width = element.clientWidth;
      paint(width);
    }
  }).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => width && paint(width));
}
