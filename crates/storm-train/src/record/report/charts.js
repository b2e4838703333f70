// Adds to the charts of a run: values of the nearest step under the pointer, smoothed lines, and keys that
// highlight their lines.

const packed = JSON.parse(document.getElementById("charts").textContent);
const HEIGHT = 200;
const WIDTH = 1000;

// ---- values -----------------------------------------------------------------------------------

const large = (show) => (value) => (Math.abs(value) >= 1e7 ? value.toExponential(2) : show(value));

function showBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit + 1 < units.length) {
    bytes /= 1024;
    unit += 1;
  }
  return `${bytes.toFixed(unit === 0 || bytes >= 100 ? 0 : 2)} ${units[unit]}`;
}

const SHOW = {
  loss: large((value) => value.toFixed(4)),
  speed: large((value) => Math.round(value).toLocaleString("en")),
  rate: (value) => value.toExponential(3),
  norm: large((value) => value.toFixed(3)),
  bytes: showBytes,
  share: (value) => `${(100 * value).toFixed(1)} %`,
};

/** The position of the value of a sorted array that is nearest to `wanted`. */
function nearest(sorted, wanted) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] <= sorted[low] - wanted ? low - 1 : low;
}

/**
 * A mean over the steps around each, with weights that fall by e over `span` steps: to both sides, so that the
 * line is not behind what it shows.
 */
function smoothed(steps, values, span) {
  const sums = values.map(() => [0, 0]);
  const pass = (from, to, by) => {
    let [sum, weight, before] = [0, 0, null];
    for (let i = from; i !== to; i += by) {
      if (values[i] === null) continue;
      const fade = before === null ? 0 : Math.exp(-Math.abs(steps[i] - before) / span);
      // Both passes reach a point; it counts once.
      sums[i][0] += sum * fade;
      sums[i][1] += weight * fade;
      sum = sum * fade + values[i];
      weight = weight * fade + 1;
      before = steps[i];
    }
  };
  pass(0, values.length, 1);
  pass(values.length - 1, -1, -1);
  return values.map((value, i) =>
    (value === null ? null : (sums[i][0] + value) / (sums[i][1] + 1)));
}

// ---- charts -----------------------------------------------------------------------------------

const charts = [...document.querySelectorAll(".chart")].map((figure, at) => {
  const { unit, frame, series } = packed.charts[at];
  const plot = figure.querySelector(".plot");
  const groups = [...figure.querySelectorAll(".series")];
  const chart = { figure, plot, groups, frame, show: SHOW[unit] };
  chart.series = series.map((line) => ({ ...line, steps: packed.steps[line.steps], smooth: null, isNoisy: line.smooth }));
  if (plot) {
    chart.cross = add(plot, "cross");
    chart.points = series.map((line) => {
      const point = add(plot, "point");
      point.style.background = `var(--${line.colour})`;
      return point;
    });
    chart.tip = add(plot, "tip");
    chart.tip.setAttribute("role", "tooltip");
  }
  return chart;
});

function add(parent, name) {
  const element = document.createElement("div");
  element.className = name;
  element.hidden = true;
  parent.append(element);
  return element;
}

const xOf = ({ frame: [x0, x1] }, step) => (step - x0) / (x1 - x0);
const yOf = ({ frame: [, , low, high] }, value) => 1 - (value - low) / (high - low);

// ---- smoothing --------------------------------------------------------------------------------

const controls = document.getElementById("smoothing");
const slider = controls.querySelector("input");

/** Steps over which weights fall by e: up to a tenth of the run. */
function smoothingSpan() {
  const { steps } = packed.steps;
  const range = steps[steps.length - 1] - steps[0];
  return slider.value === "0" ? 0 : 0.1 * range * 2 ** (-0.75 * (slider.max - slider.value));
}

function smooth() {
  const span = smoothingSpan();
  for (const chart of charts) {
    chart.series.forEach((line, at) => {
      if (!line.isNoisy || !chart.plot) return;
      line.smooth = span > 0 ? smoothed(line.steps, line.values, span) : null;
      const path = [];
      let pen = "M";
      (line.smooth ?? []).forEach((value, i) => {
        if (value === null) {
          pen = "M";
          return;
        }
        const [x, y] = [WIDTH * xOf(chart, line.steps[i]), HEIGHT * yOf(chart, value)];
        path.push(`${pen}${x.toFixed(1)} ${y.toFixed(1)}`);
        pen = "L";
      });
      chart.groups[at].querySelector(".smooth").setAttribute("d", path.join(""));
      chart.groups[at].classList.toggle("has-smooth", path.length > 0);
    });
  }
  const over = Math.max(1, Math.round(2 * span));
  controls.querySelector("output").textContent =
    span === 0 ? "off" : `over about ${over.toLocaleString("en")} ${over === 1 ? "step" : "steps"}`;
}

controls.hidden = false;
slider.addEventListener("input", smooth);
smooth();

// ---- the nearest step -------------------------------------------------------------------------

/** What is shown, as a position in the list of steps, and the chart that says its values. */
let shown = null;

function showStep(active, index) {
  shown = index === null ? null : { active, index };
  const step = index === null ? 0 : packed.steps.steps[index];
  for (const chart of charts) {
    if (!chart.plot) continue;
    chart.cross.hidden = index === null;
    chart.cross.style.left = `${100 * xOf(chart, step)}%`;
    chart.tip.hidden = index === null || chart !== active;
    const lines = [];
    chart.series.forEach((line, at) => {
      const near = nearest(line.steps, step);
      const value = index === null ? null : line.values[near] ?? null;
      chart.points[at].hidden = value === null;
      if (value === null) return;
      chart.points[at].style.left = `${100 * xOf(chart, line.steps[near])}%`;
      chart.points[at].style.top = `${100 * yOf(chart, value)}%`;
      const where = line.steps[near] === step ? "" : ` at step ${line.steps[near].toLocaleString("en")}`;
      const mean = line.smooth ? `, smoothed ${chart.show(line.smooth[near])}` : "";
      lines.push([line.colour, `${line.name}${where}: ${chart.show(value)}${mean}`]);
    });
    if (!chart.tip.hidden) fillTip(chart, step, lines);
  }
}

/** Names are text here and never markup. */
function fillTip(chart, step, lines) {
  const title = document.createElement("b");
  title.textContent = `step ${step.toLocaleString("en")}`;
  chart.tip.replaceChildren(title, ...lines.map(([colour, content]) => {
    const line = document.createElement("div");
    const chip = document.createElement("i");
    chip.className = "chip";
    chip.style.background = `var(--${colour})`;
    line.append(chip, content);
    return line;
  }));
  // Within the figure, on the side of the line that has room.
  const [left, right] = [6 - chart.plot.offsetLeft, chart.plot.clientWidth];
  const x = xOf(chart, step) * right;
  chart.tip.style.maxWidth = `${right - left}px`;
  const width = chart.tip.offsetWidth;
  const beside = x + 12 + width <= right ? x + 12 : x - 12 - width;
  chart.tip.style.left = `${Math.max(left, Math.min(beside, right - width))}px`;
  chart.tip.style.top = "4px";
}

for (const chart of charts.filter(({ plot }) => plot)) {
  const { steps } = packed.steps;
  const point = (event) => {
    const box = chart.plot.getBoundingClientRect();
    const [x0, x1] = chart.frame;
    showStep(chart, nearest(steps, x0 + ((event.clientX - box.left) / box.width) * (x1 - x0)));
  };
  chart.plot.addEventListener("pointerdown", point);
  chart.plot.addEventListener("pointermove", point);
  chart.plot.addEventListener("pointerleave", (event) => {
    // What a finger was on stays: it is off the glass to be read.
    if (event.pointerType !== "touch") showStep(null, null);
  });
  chart.plot.addEventListener("blur", () => showStep(null, null));
  chart.plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") showStep(null, null);
    if (!by) return;
    event.preventDefault();
    const from = shown?.active === chart ? shown.index : by > 0 ? -1 : steps.length;
    showStep(chart, Math.min(Math.max(from + by, 0), steps.length - 1));
  });
}
document.addEventListener("pointerdown", (event) => {
  if (shown && !event.target.closest?.(".plot")) showStep(null, null);
});

// ---- keys -------------------------------------------------------------------------------------

/** A line stands out while its key is pointed at, or once that is pressed, until it is pressed again. */
for (const { figure, groups } of charts) {
  const keys = [...figure.querySelectorAll(".key")];
  let pressed = -1;
  const highlight = (now) => {
    figure.classList.toggle("has-highlight", now >= 0);
    groups.forEach((group, at) => group.classList.toggle("is-highlighted", at === now));
  };
  keys.forEach((key, at) => {
    key.addEventListener("pointerenter", (event) => {
      if (event.pointerType !== "touch") highlight(at);
    });
    key.addEventListener("pointerleave", () => highlight(pressed));
    key.addEventListener("click", () => {
      pressed = pressed === at ? -1 : at;
      keys.forEach((other, of) => other.setAttribute("aria-pressed", String(of === pressed)));
      highlight(pressed);
    });
  });
}
