// Time lines: curves over steps with alarms and non-finite values, and one cursor for all curves.
const SIGNS = { error: "◆", warning: "▲", info: "●" };
const RANKS = ["info", "warning", "error"];
const crosses = [];
const lastStep = Math.max(
  data.steps, 1, ...data.alarms.map((alarm) => alarm[0]),
  ...[...data.lines, ...data.more].map((line) => (line.curve ? line.curve.steps.at(-1) || 0 : 0)),
);
let crossStep = null;

function moveCross(step) {
  crossStep = Math.min(Math.max(Math.round(step), 0), lastStep);
  for (const cross of crosses) cross();
}

function axisOf(line) {
  const [least, high] = rangeOf(line.curve.values);
  const low = line.axis === "count" ? 0 : least;
  const isPositive = low > 0;
  const kind = line.axis === "auto" ? (isPositive && high / low > 50 && line.unit !== "share" ? "log" : "linear") : line.axis;
  if (kind === "log2" && isPositive) {
    const base = (x, round) => 2 ** round(Math.log2(x));
    const bottom = base(low, Math.floor) / 2;
    const top = base(high, Math.ceil) * 2;
    return { log: true, low: bottom, high: top, ticks: powerTicks(bottom, top, 2, 6) };
  }
  if (kind === "log" && isPositive) {
    const pad = Math.max((high / low) ** 0.05, 1.1);
    const [bottom, top] = [low / pad, high * pad];
    return { log: true, low: bottom, high: top, ticks: logTicks(bottom, top) };
  }
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.1 || 0.5;
  const bottom = low >= 0 && low - pad < 0 ? 0 : low - pad;
  return { log: false, low: bottom, high: high + pad, ticks: niceTicks(bottom, high + pad, 4) };
}

// Alarms that are too close for a finger share one sign, that of the worst, with their number.
function clustersOf(toX) {
  const clusters = [];
  data.alarms.forEach(([step, level, text], index) => {
    const last = clusters.at(-1);
    if (last && toX(step) - last.x < 32) {
      last.count += 1;
      if (RANKS.indexOf(level) > RANKS.indexOf(last.level)) Object.assign(last, { level, index, text });
    } else clusters.push({ x: toX(step), step, level, index, text, count: 1 });
  });
  return clusters;
}

function drawAlarms(svg, toX, width, bottom, isTabbed) {
  for (const { x, step, level, index, text, count: number } of clustersOf(toX)) {
    draw(svg, "line", { class: "drop", x1: x, x2: x, y1: 18, y2: bottom });
    const link = draw(svg, "a", { href: `#alarm-${index}`, tabindex: isTabbed ? 0 : -1 });
    const more = number > 1 ? `${number} alarms from step ${step}; the worst: ` : `step ${step}: `;
    link.setAttribute("aria-label", more + text);
    draw(link, "title", {}, more + text);
    draw(link, "rect", { x: x - 9, y: 0, width: 18, height: 18, fill: "transparent" });
    draw(link, "text", { class: level, x, y: 13, "text-anchor": "middle" }, SIGNS[level]);
    const [side, anchor] = x + 36 > width ? [-8, "end"] : [8, "start"];
    if (number > 1) draw(link, "text", { class: `${level} count`, x: x + side, y: 13, "text-anchor": anchor }, String(number));
  }
}

function pathOf(curve, toX, toY, isCount) {
  const points = curve.steps.map((step, i) => [toX(step), toY(curve.values[i])]);
  if (!isCount) return `M${points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`;
  const start = `M${toX(0).toFixed(1)},${toY(0).toFixed(1)}`;
  const steps = points.map(([x, y]) => `H${x.toFixed(1)}V${y.toFixed(1)}`).join("");
  return `${start}${steps}H${toX(lastStep).toFixed(1)}`;
}

function paintLine(svg, line, width, isFirst) {
  const left = 58, right = 10, top = 24, height = 188, bottom = height - 24;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const axis = axisOf(line);
  const scaled = (value) => (axis.log ? Math.log(value) : value);
  const [low, high] = [scaled(axis.low), scaled(axis.high)];
  const toX = (step) => left + (step / lastStep) * (width - left - right);
  const toY = (value) => bottom - ((scaled(value) - low) / (high - low)) * (bottom - top);
  for (const tick of axis.ticks) {
    draw(svg, "line", { class: "grid", x1: left, x2: width - right, y1: toY(tick), y2: toY(tick) });
    draw(svg, "text", { x: left - 6, y: toY(tick) + 4, "text-anchor": "end" }, line.axis === "log2" && tick >= 1 ? formatStep(tick) : format(tick, line.unit));
  }
  draw(svg, "line", { class: "axis", x1: left, x2: width - right, y1: bottom, y2: bottom });
  for (const tick of stepTicks(0, lastStep, width - left)) {
    const x = toX(tick);
    const label = formatStep(tick);
    const anchor = x + label.length * 3.5 > width ? "end" : "middle";
    draw(svg, "text", { x: anchor === "end" ? width : x, y: height - 6, "text-anchor": anchor }, label);
  }
  drawAlarms(svg, toX, width, bottom, isFirst);
  if (line.curve.steps.length) draw(svg, "path", { class: "curve", d: pathOf(line.curve, toX, toY, line.axis === "count") });
  if (line.curve.steps.length === 1) draw(svg, "circle", { class: "dot", cx: toX(line.curve.steps[0]), cy: toY(line.curve.values[0]), r: 3 });
  for (const [step, value] of line.curve.bad) {
    const x = toX(step), y = top + 5;
    const mark = draw(svg, "path", { class: "bad", d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8` });
    draw(mark, "title", {}, `step ${step}: ${format(value)}`);
  }
  const cross = draw(svg, "line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  return { cross, toX, toStep: (x) => ((x - left) / (width - left - right)) * lastStep };
}

// The text of a curve at a step: the last value up to the step, or a non-finite value.
function readAt(line, step) {
  const bad = line.curve.bad.find(([at]) => at === step);
  if (bad) return [step, format(bad[1])];
  const { steps, values } = line.curve;
  if (!steps.length || (line.axis === "count" && step < steps[0])) return [step, line.axis === "count" ? "0" : "no value"];
  const index = lastUpTo(steps, step);
  return [line.axis === "count" ? step : steps[index], format(values[index], line.unit)];
}

function showLine(parent, line, isFirst) {
  const output = make("output");
  const figure = make("figure", {}, make("figcaption", {}, make("span", {}, line.title), output));
  parent.append(figure);
  if (!line.curve || !(line.curve.steps.length || line.curve.bad.length)) {
    figure.append(make("p", { class: "none" }, data.absent[line.name] || "No value has been recorded."));
    return;
  }
  const fixed = { class: "chart", tabindex: 0, role: "slider", "aria-label": `${line.title}; arrow keys move through the steps`, "aria-valuemin": 0, "aria-valuemax": lastStep };
  const svg = draw(figure, "svg", fixed);
  const key = make("p", { class: "key" }, make("span", {}, "over training steps"));
  if (line.curve.bad_count) key.append(make("span", {}, make("span", { class: "x" }, "× "), `${count(line.curve.bad_count, "value")} not finite`));
  figure.append(key);
  let painted = null;
  const showCross = () => {
    const step = crossStep === null ? lastStep : crossStep;
    const [at, text] = readAt(line, step);
    output.textContent = `step ${formatStep(at)}: ${text}`;
    svg.setAttribute("aria-valuenow", step);
    svg.setAttribute("aria-valuetext", output.textContent);
    if (!painted || crossStep === null) return;
    const x = painted.toX(crossStep);
    for (const [name, value] of Object.entries({ x1: x, x2: x, visibility: "visible" })) painted.cross.setAttribute(name, value);
  };
  crosses.push(showCross);
  redrawn(svg, (width) => { painted = paintLine(svg, line, width, isFirst); showCross(); });
  const follow = (event) => painted && moveCross(painted.toStep(event.clientX - svg.getBoundingClientRect().left));
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 }[event.key];
    const jump = { Home: 0, End: lastStep }[event.key];
    if (way === undefined && jump === undefined) return;
    event.preventDefault();
    const start = crossStep === null ? lastStep : crossStep;
    moveCross(jump !== undefined ? jump : start + way * Math.max(1, Math.round(lastStep / 100)));
  });
}

function showLines() {
  const parent = document.getElementById("charts");
  let isFirst = true;
  for (const line of data.lines) {
    showLine(parent, line, isFirst);
    if (line.curve) isFirst = false;
  }
  if (data.more.length) {
    const grid = make("div");
    parent.append(make("details", { class: "more" }, make("summary", {}, `More curves (${data.more.length})`), grid));
    for (const line of data.more) showLine(grid, line, false);
  }
}

// The list of alarms: folded if it is long, filtered by level, and opened by links to an alarm.
function showAlarms() {
  const list = document.querySelector("ol.alarms");
  if (!list) return;
  const unfold = document.getElementById("unfold");
  const open = () => { list.classList.remove("is-folded"); if (unfold) unfold.hidden = true; };
  if (unfold) { list.classList.add("is-folded"); unfold.addEventListener("click", open); }
  const buttons = [...document.querySelectorAll(".filters button")];
  const filter = () => {
    const levels = buttons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.level);
    for (const item of list.children) item.hidden = !levels.includes(item.dataset.level);
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      filter();
    });
  }
  const goTo = () => {
    const item = location.hash.startsWith("#alarm-") && document.getElementById(location.hash.slice(1));
    if (!item) return;
    if (item.classList.contains("later")) open();
    item.hidden = false;
    item.scrollIntoView({ block: "center" });
  };
  addEventListener("hashchange", goTo);
  // A second click on the same sign does not change the hash.
  document.getElementById("charts").addEventListener("click", (event) => event.target.closest("a") && setTimeout(goTo));
  goTo();
  list.addEventListener("click", (event) => {
    const link = event.target.closest("[data-step]");
    if (link) moveCross(Number(link.dataset.step));
  });
}

showLines();
showAlarms();
