// ---- places -----------------------------------------------------------------------------------

const RULER = { y: 0, height: 22 };
const SEGMENTS = { y: 24, height: 18 };
/** CSS pixels: narrower pictures have names above the plots, not beside them. */
const BESIDE_MIN = 560;
/** Spans at least this wide are drawn one by one. */
const SINGLE_WIDTH = 3;

const canvas = document.getElementById("picture");
const context = canvas.getContext("2d");
/** The part of the step that is shown. */
const view = { from: 0, to: total };
/** Where things are, in CSS pixels, and device pixels for each of these; see `layOut`. */
const plot = { gutter: 0, width: 1, height: 1, ratio: 1, lanes: [], tiers: [] };
/** What the pointer is on; see pointer.js. */
let hovered = null;
/** The key of the legend whose kind stands out. */
let highlighted = null;

function layOut(width, ratio) {
  const isBeside = width >= BESIDE_MIN;
  const head = isBeside ? 0 : 20;
  plot.gutter = isBeside ? 132 : 0;
  plot.width = Math.max(width - plot.gutter, 10);
  plot.ratio = ratio;
  let y = SEGMENTS.y + SEGMENTS.height;
  const below = (gap, height) => {
    const place = { y: y + gap + head, height };
    y = place.y + height;
    return place;
  };
  plot.lanes = lanes.map((_, at) => below(6, at === 0 ? 64 : 46));
  plot.tiers = tiers.map((_, at) => below(at === 0 ? 20 : 16, at === 0 ? 132 : 112));
  plot.height = y + 8;
}

/** How strongly a key of the legend is drawn. */
const strength = (key) => (highlighted === null || highlighted === key ? 1 : 0.12);

const xOf = (ns) => plot.gutter + ((ns - view.from) / (view.to - view.from)) * plot.width;
const nsOf = (x) => view.from + ((x - plot.gutter) / plot.width) * (view.to - view.from);

/** The first position of a sorted array whose value is above `limit`. */
function firstAbove(sorted, limit) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// ---- colours ----------------------------------------------------------------------------------

let colours;
let fontFamily;

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const of = (key) => style.getPropertyValue(`--${key}`).trim();
  const names = ["card", "ink", "quiet", "line", "track", "memory", "memory-edge", "besides", "budget"];
  colours = Object.fromEntries(names.map((name) => [name, of(name)]));
  colours.kinds = KINDS.map((kind) => of(kind.key));
  colours.onKind = colours.kinds.map(textOn);
  colours.hatch = hatch(colours.kinds[WAITING]);
  fontFamily = getComputedStyle(document.body).fontFamily;
}

/** Black or white, whichever is easier to read on a colour. */
function textOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10141a" : "#ffffff";
}

function hatch(colour) {
  const size = 8;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.fillStyle = colours.card;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = colour;
  pen.lineWidth = 2.6;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

// ---- drawing ----------------------------------------------------------------------------------

/** The name of a lane or a tier, and more about it: beside its place, or above it. */
function title(name, more, { y, height }) {
  const lines = [name, ...more];
  if (plot.gutter > 0) {
    const top = y + height / 2 - ((lines.length - 1) * 15) / 2;
    lines.forEach((line, at) => {
      text(line, 0, top + 15 * at, at === 0 ? colours.ink : colours.quiet, { bold: at === 0 });
    });
    return;
  }
  text(name, 0, y - 10, colours.ink, { bold: true });
  const width = context.measureText(name).width;
  text(more.join(" "), width + 8, y - 10, colours.quiet);
}

function text(content, x, y, colour, { align = "left", bold = false, size = 12 } = {}) {
  context.font = `${bold ? "600 " : ""}${size}px ${fontFamily}`;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillStyle = colour;
  context.fillText(content, x, y);
}

/** Text in a box, cut to fit; nothing if hardly any of it would. */
function textWithin(content, x, y, width, colour, size) {
  const letters = Math.floor((width - 8) / (size * 0.56));
  if (letters < Math.min(content.length, 8)) return;
  const cut = content.length > letters ? `${content.slice(0, letters - 1)}…` : content;
  text(cut, x + 4, y, colour, { size });
}

/** How much of each column of device pixels each kind takes, 0 to 1: `[column][kind]`, flat. */
function coverage(columns, parts) {
  const covered = new Float32Array(columns * KINDS.length);
  const scale = columns / (view.to - view.from);
  for (const part of parts) {
    for (let i = firstAbove(part.end, view.from); i < part.count && part.start[i] < view.to; i++) {
      const from = Math.max(0, (part.start[i] - view.from) * scale);
      const to = Math.min(columns, (part.end[i] - view.from) * scale);
      const last = Math.min(Math.floor(to), columns - 1);
      for (let column = Math.floor(from); column <= last; column++) {
        const within = Math.min(to, column + 1) - Math.max(from, column);
        covered[column * KINDS.length + part.kind[i]] += within;
      }
    }
  }
  return covered;
}

/** Columns as stacks of colours, the kinds in their order from the bottom. */
function drawColumns(covered, columns, { y, height }) {
  const level = new Float32Array(columns);
  const width = 1 / plot.ratio;
  KINDS.forEach(({ key }, kind) => {
    context.fillStyle = colours.kinds[kind];
    context.globalAlpha = strength(key);
    for (let column = 0; column < columns; column++) {
      const share = covered[column * KINDS.length + kind];
      if (share <= 0) continue;
      const tall = Math.min(share, 1 - level[column]) * height;
      const top = y + height - level[column] * height - tall;
      context.fillRect(plot.gutter + column * width, top, width, tall);
      level[column] += share;
    }
  });
  context.globalAlpha = 1;
}

/** What is wide enough to be told apart, with its name. */
function drawSingles(part, { y, height }, fillOf, nameOf) {
  const narrowest = (SINGLE_WIDTH / plot.width) * (view.to - view.from);
  for (let i = firstAbove(part.end, view.from); i < part.count && part.start[i] < view.to; i++) {
    if (part.end[i] - part.start[i] < narrowest) continue;
    const left = Math.max(plot.gutter, xOf(part.start[i]));
    const right = Math.min(plot.gutter + plot.width, xOf(part.end[i]));
    // What is behind it is not to shine through.
    context.fillStyle = colours.track;
    context.fillRect(left, y, right - left, height);
    context.globalAlpha = strength(KINDS[part.kind[i]].key);
    context.fillStyle = fillOf(i);
    context.fillRect(left, y, right - left, height);
    context.fillStyle = colours.card;
    context.fillRect(right - 0.5, y, 0.5, height);
    textWithin(nameOf(i), left, y + height / 2, right - left, colours.onKind[part.kind[i]], 11);
    context.globalAlpha = 1;
  }
}

function drawLane(lane, place, columns) {
  context.fillStyle = colours.track;
  context.fillRect(plot.gutter, place.y, plot.width, place.height);
  const isCompute = lane === lanes[0];
  const covered = coverage(columns, isCompute ? [lane, stalls] : [lane]);
  drawColumns(covered, columns, place);
  drawSingles(lane, place, (i) => colours.kinds[lane.kind[i]], (i) => shortName(lane.instruction[i]));
  if (isCompute) {
    const fill = (i) => (stalls.kind[i] === WAITING ? colours.hatch : colours.kinds[BETWEEN]);
    drawSingles(stalls, place, fill, () => "");
  }
  let busy = 0;
  covered.forEach((share, at) => { if (at % KINDS.length < WAITING) busy += share; });
  title(lane.name, [`${showShare(busy / columns)} busy`], place);
}

/** A kernel's op and node without quotes and layer, or what is copied. */
function shortName(instruction) {
  const name = strings[data.instructions.name[instruction]];
  return name.replace(/^copy of /, "").replace(/`/g, "").replace(/ to the (device|host)$/, "");
}

function drawRuler() {
  const span = view.to - view.from;
  const rough = (span / plot.width) * 110;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(
    ([size]) => view.to >= size) ?? [1, "ns"];
  const digits = Math.min(9, Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)));
  for (let ns = Math.ceil(view.from / step) * step; ns <= view.to; ns += step) {
    const x = xOf(ns);
    context.fillStyle = colours.line;
    context.fillRect(x, RULER.height - 6, 1, plot.height - RULER.height);
    const label = `${(ns / size).toFixed(digits)} ${unit}`;
    const room = plot.gutter + plot.width - x;
    text(label, room < 40 ? x - 3 : x + 3, 9, colours.quiet, { align: room < 40 ? "right" : "left", size: 11 });
  }
}

function drawSegments() {
  const { name, start } = data.segments;
  const { y, height } = SEGMENTS;
  name.forEach((label, i) => {
    const left = Math.max(plot.gutter, xOf(start[i]));
    const right = Math.min(plot.gutter + plot.width, xOf(start[i + 1] ?? total));
    if (right <= left) return;
    context.fillStyle = colours.track;
    context.fillRect(left, y, Math.max(right - left - 1, 0.5), height);
    textWithin(label, left, y + height / 2, right - left, colours.quiet, 11);
  });
  if (plot.gutter > 0) text("segment", 0, y + height / 2, colours.quiet);
}

/** A tier's scale reaches to its budget, unless nearly all of the picture would then be empty. */
function tierScale(tier) {
  const taken = tier.plan + tier.besides;
  const showsBudget = tier.budget <= 3 * Math.max(taken, 1);
  return { top: 1.16 * Math.max(taken, showsBudget ? tier.budget : 0, 1), showsBudget };
}

function drawTier(tier, place, columns) {
  const { y, height } = place;
  const { top, showsBudget } = tierScale(tier);
  const yOf = (bytes) => y + height - (bytes / top) * height;
  context.fillStyle = colours.track;
  context.fillRect(plot.gutter, y, plot.width, height);

  // A column shows the most of its time.
  const width = plot.width / columns;
  let at = Math.max(0, firstAbove(tier.time, view.from) - 1);
  for (let column = 0; column < columns; column++) {
    const until = view.from + ((column + 1) / columns) * (view.to - view.from);
    let most = tier.bytes[at] ?? 0;
    while (at + 1 < tier.count && tier.time[at + 1] < until) most = Math.max(most, tier.bytes[++at]);
    const upper = yOf(tier.besides + most);
    context.globalAlpha = strength("memory");
    context.fillStyle = colours.memory;
    context.fillRect(plot.gutter + column * width, upper, width, yOf(tier.besides) - upper);
    context.fillStyle = colours["memory-edge"];
    context.fillRect(plot.gutter + column * width, upper, width, 1.5);
  }
  context.globalAlpha = strength("besides");
  context.fillStyle = colours.besides;
  context.fillRect(plot.gutter, yOf(tier.besides), plot.width, y + height - yOf(tier.besides));
  context.globalAlpha = 1;

  const right = plot.gutter + plot.width;
  const taken = tier.plan + tier.besides;
  line(yOf(taken), colours.ink, [5, 4]);
  chip(`taken ${showBytes(taken)}`, right - 4, yOf(taken) + 10, colours.ink);
  const budget = `budget ${showBytes(tier.budget)}`;
  if (showsBudget) {
    line(yOf(tier.budget), colours.budget, []);
    chip(budget, right - 4, yOf(tier.budget) - 9, colours.budget);
  } else {
    chip(`${budget}, above this scale ↑`, right - 4, y + 9, colours.budget);
  }
  title(tier.name, [`${showBytes(tier.peak)} in`, "use at most"], place);
}

function line(y, colour, dashes) {
  context.strokeStyle = colour;
  context.lineWidth = 1.25;
  context.setLineDash(dashes);
  context.beginPath();
  context.moveTo(plot.gutter, y);
  context.lineTo(plot.gutter + plot.width, y);
  context.stroke();
  context.setLineDash([]);
}

/** Text at the right end of a line, on a ground of its own. */
function chip(content, right, y, colour) {
  context.font = `11px ${fontFamily}`;
  const width = context.measureText(content).width;
  context.globalAlpha = 0.8;
  context.fillStyle = colours.card;
  context.fillRect(right - width - 4, y - 7, width + 8, 14);
  context.globalAlpha = 1;
  text(content, right, y, colour, { align: "right", size: 11 });
}

/** The span under the pointer, and an arrow from what it waited for. */
function drawHovered() {
  if (!hovered) return;
  context.fillStyle = colours.quiet;
  context.fillRect(hovered.x, SEGMENTS.y, 1, plot.height - SEGMENTS.y);
  if (!hovered.part) return;
  const here = outline(hovered.part, hovered.index, plot.lanes[hovered.lane]);
  if (!hovered.awaited) return;
  const [lane, index] = hovered.awaited;
  const there = outline(lanes[lane], index, plot.lanes[lane]);
  context.beginPath();
  context.moveTo(there.right, there.middle);
  context.lineTo(hovered.part === stalls ? here.right : here.left, here.middle);
  context.stroke();
}

function outline(part, index, { y, height }) {
  const [left, right] = [xOf(part.start[index]), xOf(part.end[index])];
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  context.strokeRect(left, y, Math.max(right - left, 1.5), height);
  return { left, right, middle: y + height / 2 };
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  layOut(width, ratio);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(plot.height * ratio);
  canvas.style.height = `${plot.height}px`;
  const columns = Math.max(1, Math.round(plot.width * ratio));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, plot.height);
  drawRuler();
  context.save();
  drawSegments();
  lanes.forEach((lane, at) => drawLane(lane, plot.lanes[at], columns));
  tiers.forEach((tier, at) => drawTier(tier, plot.tiers[at], columns));
  context.beginPath();
  context.rect(plot.gutter, 0, plot.width, plot.height);
  context.clip();
  drawHovered();
  context.restore();
}

let drawing = 0;
function redraw() {
  if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; draw(); });
}
