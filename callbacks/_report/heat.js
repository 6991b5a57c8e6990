// Heat maps: one row per tensor, steps to the right. Worse values differ more from the background.
// Lightness alone shows the order, so that the map is readable with any color vision.
const RAMPS = {
  light: [[250, 244, 228], [246, 214, 158], [233, 165, 92], [205, 104, 68], [152, 48, 72], [84, 18, 70], [30, 4, 46]],
  dark: [[33, 33, 56], [66, 44, 98], [122, 56, 116], [184, 76, 104], [232, 120, 84], [250, 180, 104], [255, 240, 190]],
};
const ROW = 18;
const FIRST_ROWS = 30;
const clamp = (x) => Math.min(Math.max(x, 0), 1);

// The severity of a value, from 0 to 1, and the labels of the scale.
function meaningOf(map) {
  if (map.name.includes("zero_share")) {
    return { unit: "share", bad: (v) => Math.sqrt(clamp(v)), ticks: [[0, "0%"], [0.05, "5%"], [0.25, "25%"], [1, "100% zero"]] };
  }
  if (map.name.includes("headroom")) {
    return { unit: "number", suffix: " bits", bad: (v) => clamp(1 - v / 16), ticks: [[16, "16 bits and more"], [8, "8"], [4, "4"], [0, "0"]] };
  }
  if (map.name.startsWith("update_rms")) {
    return { unit: "number", bad: (v) => clamp(Math.log10(Math.max(v, 1e-9))), ticks: [[1, "≤1"], [2.3, "2.3"], [5, "5"], [10, "≥10"]] };
  }
  if (map.name.startsWith("update_to_weight")) {
    return { unit: "number", bad: (v) => clamp(1 + Math.log10(Math.max(v, 1e-9)) / 6), ticks: [[1e-6, "≤1e-6"], [1e-4, "1e-4"], [1e-2, "0.01"], [1, "≥1"]] };
  }
  const [low, high] = rangeOf(map.cells.flat().filter((v) => typeof v === "number"));
  return { unit: "number", bad: (v) => clamp((v - low) / (high - low || 1)), ticks: [[low, format(low)], [high, format(high)]] };
}

function colorOf(bad, isDark) {
  const ramp = RAMPS[isDark ? "dark" : "light"];
  const at = bad * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2);
  return `rgb(${ramp[low].map((each, i) => Math.round(each + (ramp[low + 1][i] - each) * (at - low)))})`;
}

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

function scaleOf(meaning, hasEmpty, hasZero, hasInfinite) {
  const canvas = make("canvas", { role: "img", "aria-label": `Color scale: ${meaning.ticks.map((t) => t[1]).join(", ")}` });
  const ticks = make("div", { class: "ticks" });
  for (const [value, label] of meaning.ticks) {
    const tick = make("span", {}, label);
    tick.style.left = `${meaning.bad(value) * 100}%`;
    ticks.append(tick);
  }
  const swatches = make("div", { class: "swatches" });
  const add = (name, text) => {
    const box = make("i");
    box.style.background = `var(${name})`;
    swatches.append(make("span", {}, box, text));
  };
  if (hasEmpty) add("--none", "no value");
  if (hasZero) add("--zero", "all values zero");
  if (hasInfinite) add("--infinite", "not finite");
  redrawn(canvas, (width) => {
    const context = fitCanvas(canvas, width, 12);
    for (let x = 0; x < width; x += 1) {
      context.fillStyle = colorOf(x / (width - 1), isDark());
      context.fillRect(x, 0, 1.5, 12);
    }
  });
  return make("div", { class: "scale" }, canvas, ticks, swatches);
}

// The number of parts with which all dotted names begin.
function sharedParts(names) {
  const [first, ...others] = names.map((name) => name.split(".").slice(0, -1));
  const end = first.findIndex((part, i) => others.some((parts) => parts[i] !== part));
  return end < 0 ? first.length : end;
}

// Shorten a dotted name to a number of characters: drop parts that all rows have in common, then cut
// parts to their first letter, from the left. Numbers stay, because they distinguish layers.
function fitName(name, most, shared) {
  if (name.length <= most) return name;
  const parts = name.split(".").slice(shared);
  const text = () => (shared ? "…" : "") + parts.join(".");
  for (let i = 0; i < parts.length && text().length > most; i += 1) {
    if (!/^\d+$/.test(parts[i])) parts[i] = parts[i].slice(0, 1);
  }
  return text();
}

// The worst column of each pixel, so that a narrow screen hides nothing.
function paintRow(context, map, meaning, row, y, width, edges, colors) {
  let x = 0;
  let column = 0;
  while (column < edges.length) {
    let end = column + 1;
    while (end < edges.length && edges[end] - x < 1) end += 1;
    let bad = -1;
    let special = null;
    for (let i = column; i < end; i += 1) {
      const value = map.cells[row][i];
      if (typeof value === "number") bad = Math.max(bad, meaning.bad(value));
      else if (value !== null) special = map.name.includes("headroom") && value === "inf" ? "zero" : "bad";
    }
    const right = end < edges.length ? edges[end] : width;
    if (special === "bad") context.fillStyle = colors.bad;
    else if (bad >= 0) context.fillStyle = colorOf(bad, colors.isDark);
    else context.fillStyle = special ? colors.zero : colors.none;
    context.fillRect(x, y, right - x + 0.3, ROW - 1);
    x = right;
    column = end;
  }
}

function showMap(parent, map) {
  const meaning = meaningOf(map);
  const cells = map.cells.flat();
  const isHeadroom = map.name.includes("headroom");
  const order = make("select", {}, make("option", { value: "worst" }, "most notable first"), make("option", { value: "model" }, "order of the model"));
  const hasZero = isHeadroom && cells.includes("inf");
  const hasInfinite = cells.some((v) => typeof v === "string" && !(isHeadroom && v === "inf"));
  const head = make("div", { class: "heat-head" }, scaleOf(meaning, cells.includes(null), hasZero, hasInfinite), make("label", {}, "Rows: ", order));
  const names = make("div", { class: "names" });
  const canvas = make("canvas", { tabindex: 0, role: "slider", "aria-valuemin": 1, "aria-label": `${map.title}; arrow keys move through tensors and steps` });
  const picture = make("div", {}, canvas);
  const axis = draw(picture, "svg", { class: "chart", height: 20 });
  const readout = make("p", { class: "readout", "aria-live": "polite" }, "Point at a cell, or use the arrow keys, to read it.");
  const of = map.of > map.rows.length ? `${map.rows.length} of ${map.of} tensors` : count(map.rows.length, "tensor");
  const area = make("div", {}, make("div", { class: "heat" }, names, picture), readout);
  const figure = make("figure", {}, make("figcaption", {}, make("span", {}, map.title), make("output", {}, of)), head, area);
  parent.append(figure);

  let rows = map.rows.map((_, i) => i);
  let shown = Math.min(FIRST_ROWS, rows.length);
  let selected = null; // [place among rows, column]
  let edges = [];
  let width = 0;
  const first = map.steps[0] || 0;
  const last = Math.max(map.steps.at(-1) || 0, first + 1);
  const span = (last - first) * (1 + 1 / Math.max(map.steps.length, 1)); // room for the last column
  const paint = () => {
    if (!width) return;
    edges = map.steps.map((step) => ((step - first) / span) * width);
    const context = fitCanvas(canvas, width, shown * ROW);
    const colors = { isDark: isDark(), none: themed("--none"), zero: themed("--zero"), bad: themed("--infinite") };
    for (let place = 0; place < shown; place += 1) paintRow(context, map, meaning, rows[place], place * ROW, width, edges, colors);
    if (selected) {
      const [place, column] = selected;
      const right = column + 1 < edges.length ? edges[column + 1] : width;
      context.lineWidth = 2;
      context.strokeStyle = themed("--accent");
      context.strokeRect(edges[column] - 1, place * ROW, Math.max(right - edges[column], 3) + 1, ROW - 1);
    }
    axis.replaceChildren();
    axis.setAttribute("viewBox", `0 0 ${width} 20`);
    for (const tick of stepTicks(first, last, width)) {
      const x = ((tick - first) / span) * width;
      const label = formatStep(tick);
      const anchor = x < label.length * 3.5 ? "start" : x + label.length * 3.5 > width ? "end" : "middle";
      draw(axis, "text", { x, y: 14, "text-anchor": anchor }, label);
    }
  };
  const list = () => {
    names.replaceChildren();
    for (let place = 0; place < shown; place += 1) {
      const name = map.rows[rows[place]];
      const label = make("div", { title: name }, make("bdi", {}));
      label.addEventListener("click", () => select(place, selected ? selected[1] : map.steps.length - 1));
      names.append(label);
    }
    fit();
    paint();
  };
  const shared = sharedParts(map.rows);
  const fit = () => {
    const context = canvas.getContext("2d");
    context.font = getComputedStyle(names).font;
    const most = Math.floor(names.clientWidth / context.measureText("0").width);
    [...names.children].forEach((label, place) => { label.firstChild.textContent = fitName(map.rows[rows[place]], most, shared); });
  };
  const select = (place, column) => {
    selected = [Math.min(Math.max(place, 0), shown - 1), Math.min(Math.max(column, 0), map.steps.length - 1)];
    const [at, step] = [rows[selected[0]], map.steps[selected[1]]];
    const value = map.cells[at][selected[1]];
    let text = value === null ? "no value" : format(value, meaning.unit) + (typeof value === "number" ? meaning.suffix || "" : "");
    if (isHeadroom && value === "inf") text = "all values are zero";
    readout.replaceChildren(make("b", {}, text), ` at step ${step.toLocaleString("en")} in `, make("code", {}, map.rows[at]));
    canvas.setAttribute("aria-valuemax", shown);
    canvas.setAttribute("aria-valuenow", selected[0] + 1);
    canvas.setAttribute("aria-valuetext", readout.textContent);
    [...names.children].forEach((label, i) => label.classList.toggle("is-selected", i === selected[0]));
    paint();
  };
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    select(Math.floor((event.clientY - box.top) / ROW), lastUpTo(edges, event.clientX - box.left));
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!way) return;
    event.preventDefault();
    const [place, column] = selected || [0, map.steps.length - 1];
    select(place + way[0], column + way[1]);
  });
  order.addEventListener("change", () => {
    rows = map.rows.map((_, i) => i);
    if (order.value === "model") rows.sort((a, b) => map.positions[a] - map.positions[b]);
    selected = null;
    list();
  });
  if (shown < rows.length) {
    const more = make("button", { type: "button" }, `Show all ${rows.length} rows`);
    more.addEventListener("click", () => { shown = rows.length; more.remove(); list(); });
    figure.append(more);
  }
  redrawn(canvas, (now) => { width = now; fit(); paint(); });
  list();
}

for (const map of data.maps) if (map.steps.length && map.rows.length) showMap(document.getElementById("heatmaps"), map);
