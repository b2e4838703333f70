// Moving about in the picture, and what the pointer is on.

const tip = document.getElementById("tip");
/** Nanoseconds: closer than this there is nothing to see. */
const NARROWEST = Math.min(total, 500);

function show(from, to) {
  const span = Math.min(Math.max(to - from, NARROWEST), total);
  view.from = Math.min(Math.max(from, 0), total - span);
  view.to = view.from + span;
  redraw();
}

/** Makes the part that is shown `factor` times as long, with `ns` where it is. */
function zoom(factor, ns = (view.from + view.to) / 2) {
  const span = Math.min(Math.max((view.to - view.from) * factor, NARROWEST), total);
  const share = (ns - view.from) / (view.to - view.from);
  show(ns - share * span, ns + (1 - share) * span);
}

const move = (share) => {
  const by = share * (view.to - view.from);
  show(view.from + by, view.to + by);
};

// ---- what is where ----------------------------------------------------------------------------

const isIn = (y, place) => y >= place.y && y < place.y + place.height;

/** The longest of what lies within a pixel of `ns`, and how many there are. */
function longestNear(parts, ns) {
  const near = (1.5 / plot.width) * (view.to - view.from);
  let [best, count] = [null, 0];
  for (const part of parts) {
    for (let i = firstAbove(part.end, ns - near); i < part.count && part.start[i] < ns + near; i++) {
      // What the pointer is in goes before its neighbours.
      const within = part.start[i] <= ns && ns <= part.end[i];
      const wide = part.end[i] - part.start[i] > 4 * near;
      const rank = [within && wide ? 1 : 0, part.end[i] - part.start[i]];
      count += 1;
      if (!best || rank[0] > best.rank[0] || (rank[0] === best.rank[0] && rank[1] > best.rank[1])) {
        best = { part, index: i, rank };
      }
    }
  }
  return best && { ...best, others: best.rank[0] ? 0 : count - 1 };
}

/** The last run of an instruction that was done by `ns`, as lane and position. */
function lastRun(instruction, ns) {
  let found = null;
  for (const run of runs[instruction]) {
    if (lanes[run[0]].end[run[1]] <= ns) found = run;
  }
  return found;
}

function awaitedBy(lane, index) {
  const awaited = lanes[lane].waited_for[index];
  return awaited >= 0 ? lastRun(awaited, lanes[lane].start[index]) : null;
}

/** What the pointer is on: a place of the picture, and lines for the tip. */
function find(x, y) {
  if (x < plot.gutter) return null;
  const ns = nsOf(x);
  const lane = plot.lanes.findIndex((place) => isIn(y, place));
  if (lane >= 0) {
    const found = longestNear(lane === 0 ? [lanes[0], stalls] : [lanes[lane]], ns);
    if (!found) return { x, lines: idleLines(lane, ns) };
    const isStall = found.part === stalls;
    const lines = isStall ? stallLines(found.index) : spanLines(lane, found.index);
    if (found.others > 0) lines.push(["quiet", `and ${found.others} more here: zoom in`]);
    const waiting = isStall ? stalls.before[found.index] : found.index;
    const awaited = waiting === NOTHING ? null : awaitedBy(lane, waiting);
    return { x, lane, part: found.part, index: found.index, awaited, lines };
  }
  const tier = plot.tiers.findIndex((place) => isIn(y, place));
  return { x, lines: tier >= 0 ? tierLines(tiers[tier], ns) : [["", `at ${showTime(ns)}`]] };
}

// ---- the tip ----------------------------------------------------------------------------------

const nameOf = (instruction) => strings[data.instructions.name[instruction]];

function spanLines(at, index) {
  const lane = lanes[at];
  const id = lane.instruction[index];
  const length = lane.end[index] - lane.start[index];
  const bytes = data.instructions.bytes[id];
  const lines = [["title", nameOf(id)]];
  const kind = KINDS[lane.kind[index]].name;
  lines.push(["", `${kind}: ${showTime(length)}, from ${showTime(lane.start[index])}`]);
  if (at === 0) {
    const first = data.instructions.writes[id];
    if (first !== NOTHING) lines.push(["", `writes ${showBytes(bytes)}: ${strings[first]}`]);
  } else {
    lines.push(["", `${showBytes(bytes)}, ${(bytes / length).toFixed(2)} GB/s`]);
  }
  const awaited = lane.waited_for[index];
  if (awaited !== NOTHING) {
    const whom = awaited === HOST ? "the host" : nameOf(awaited);
    lines.push([at === 0 ? "warning" : "", `waited ${showTime(lane.held[index])} for ${whom}`]);
  }
  return lines;
}

function stallLines(index) {
  const length = showTime(stalls.end[index] - stalls.start[index]);
  const lines = [["title", `The compute queue stands still for ${length}`]];
  const cause = data.stalls.causes[stalls.cause[index]];
  const isWait = stalls.kind[index] === WAITING;
  lines.push([isWait ? "warning" : "", isWait ? `waits for ${cause}` : cause]);
  const before = stalls.before[index];
  if (before === NOTHING) return lines;
  const awaited = lanes[0].waited_for[before];
  if (isWait && awaited >= 0) lines.push(["", nameOf(awaited)]);
  lines.push(["quiet", `next: ${nameOf(lanes[0].instruction[before])}`]);
  return lines;
}

function idleLines(at, ns) {
  return [["", `${lanes[at].name}: nothing at ${showTime(ns)}`]];
}

function tierLines(tier, ns) {
  const used = tier.bytes[Math.max(0, firstAbove(tier.time, ns) - 1)] ?? 0;
  const lines = [["title", `${tier.name} at ${showTime(ns)}`]];
  lines.push(["", `${showBytes(used)} in use, of the plan's ${showBytes(tier.plan)}`]);
  if (tier.besides > 0) lines.push(["", `${showBytes(tier.besides)} held besides the plan`]);
  const share = (used + tier.besides) / Math.max(tier.budget, 1);
  lines.push(["", `${showShare(share)} of the budget of ${showBytes(tier.budget)}`]);
  return lines;
}

/** Names are text here and never markup. */
function showTip(x, y) {
  tip.hidden = !hovered;
  if (!hovered) return;
  tip.replaceChildren(...hovered.lines.map(([style, content]) => {
    const element = document.createElement(style === "title" ? "b" : "div");
    if (style !== "title") element.className = style;
    element.textContent = content;
    return element;
  }));
  const { clientWidth: width, clientHeight: height } = document.getElementById("frame");
  const left = x + 22 + tip.offsetWidth > width ? x - tip.offsetWidth - 6 : x + 22;
  const top = Math.min(y + 20, height - tip.offsetHeight - 4);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

// ---- events -----------------------------------------------------------------------------------

let drag = null;

function hover(event) {
  hovered = find(event.offsetX, event.offsetY);
  showTip(event.offsetX, event.offsetY);
  redraw();
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  try {
    canvas.setPointerCapture(event.pointerId);
  } catch {
    // The pointer is gone already.
  }
  hover(event);
  drag = { x: event.offsetX, from: view.from, to: view.to };
  canvas.classList.add("moving");
});
canvas.addEventListener("pointermove", (event) => {
  if (drag) {
    const by = ((drag.x - event.offsetX) / plot.width) * (drag.to - drag.from);
    show(drag.from + by, drag.to + by);
  }
  hover(event);
});
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, () => {
    drag = null;
    canvas.classList.remove("moving");
  });
}
canvas.addEventListener("pointerleave", (event) => {
  // What a finger was on stays: it is off the glass to be read.
  if (event.pointerType === "touch") return;
  hovered = null;
  showTip();
  redraw();
});
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const pixels = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 30 : 1;
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    move((sideways * pixels) / plot.width);
  } else {
    zoom(Math.exp(event.deltaY * pixels * 0.0018), nsOf(Math.max(event.offsetX, plot.gutter)));
  }
  hover(event);
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const actions = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), 0: () => show(0, total),
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
/** Kinds stand out while their key is pointed at, or once it is pressed, until it is pressed again. */
let pressed = null;
for (const key of document.querySelectorAll(".key[data-kind]")) {
  const { kind } = key.dataset;
  const highlight = (now) => { highlighted = now; redraw(); };
  key.addEventListener("pointerenter", (event) => {
    if (event.pointerType !== "touch") highlight(kind);
  });
  key.addEventListener("pointerleave", () => highlight(pressed));
  key.addEventListener("click", () => {
    pressed = pressed === kind ? null : kind;
    for (const other of document.querySelectorAll(".key[data-kind]")) {
      other.setAttribute("aria-pressed", String(other.dataset.kind === pressed));
    }
    highlight(pressed);
  });
}

document.getElementById("in").addEventListener("click", () => zoom(0.6));
document.getElementById("out").addEventListener("click", () => zoom(1 / 0.6));
document.getElementById("reset").addEventListener("click", () => show(0, total));

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  redraw();
});
new ResizeObserver(redraw).observe(canvas);
readColours();
draw();
