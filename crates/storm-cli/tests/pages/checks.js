// Checks pages in frames of several widths, and records what is wrong with each.

const near = (a, b) => Math.abs(a - b) <= 1;
const shortOf = (element) => {
  const name = element.className?.baseVal ?? element.className ?? "";
  return `<${element.tagName.toLowerCase()} class="${name}"> ${element.textContent.trim().slice(0, 40)}`;
};

const later = () => new Promise((done) => { setTimeout(done, 50); });

/** What extends past the frame, or is cut off within it. */
function overflows(view, page) {
  const problems = [];
  const { scrollWidth } = page.scrollingElement;
  if (scrollWidth > view.innerWidth) problems.push(`the page is ${scrollWidth} wide`);
  for (const element of page.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    if (box.width === 0 || box.height === 0) continue;
    if (box.right > view.innerWidth + 1 || box.left < -1) {
      problems.push(`from ${box.left} to ${box.right}: ${shortOf(element)}`);
    }
    const isSvg = element.namespaceURI.includes("svg");
    const cuts = !isSvg && view.getComputedStyle(element).overflowX !== "visible";
    if (cuts && element.scrollWidth > element.clientWidth + 1) {
      problems.push(`cut at ${element.clientWidth} of ${element.scrollWidth}: ${shortOf(element)}`);
    }
  }
  return problems;
}

/** Does something, and again in another state; says which of the conditions do not hold. */
class Checks {
  constructor(view) {
    Object.assign(this, { view, problems: [], count: 0 });
  }

  that(holds, what) {
    this.count += 1;
    if (!holds) this.problems.push(what);
  }

  /** A pointer at a share of an element's width, in the middle of its height. */
  point(element, type, share = 0.5, pointerType = "mouse") {
    const box = element.getBoundingClientRect();
    const [clientX, clientY] = [box.left + share * box.width, box.top + box.height / 2];
    const bubbles = !["pointerenter", "pointerleave"].includes(type);
    element.dispatchEvent(new this.view.PointerEvent(type, {
      bubbles, clientX, clientY, pointerType, pointerId: 7, button: 0, cancelable: true,
    }));
  }

  isWithin(element, outer, what) {
    const [box, around] = [element.getBoundingClientRect(), outer.getBoundingClientRect()];
    this.that(box.width > 0 && box.left >= around.left - 1 && box.right <= around.right + 1,
      `${what}: from ${box.left} to ${box.right}, outside of ${around.left} to ${around.right}`);
  }
}

function checkChart(checks, page, figure, at) {
  const packed = JSON.parse(page.getElementById("charts").textContent);
  const { steps } = packed.steps;
  const { series } = packed.charts[at];
  const name = figure.querySelector("figcaption > b").textContent;
  const plot = figure.querySelector(".plot");
  const tip = plot.querySelector(".tip");
  for (const share of [0, 0.31, 0.5, 0.77, 1]) {
    checks.point(plot, "pointermove", share);
    checks.that(!tip.hidden, `${name}: no values at ${share}`);
    checks.isWithin(tip, figure, `${name}: the values at ${share}`);
    const wanted = steps[0] + share * (steps[steps.length - 1] - steps[0]);
    const said = Number(tip.querySelector("b").textContent.replace(/[^0-9]/g, ""));
    const distance = (step) => Math.abs(step - wanted);
    const nearest = Math.min(...steps.map(distance));
    // Pointers are at whole pixels.
    const pixel = (steps[steps.length - 1] - steps[0]) / plot.clientWidth;
    checks.that(distance(said) <= nearest + pixel, `${name}: step ${said} at ${share}`);
    if (name === "Loss") {
      const value = series[0].values[steps.indexOf(said)];
      const text = `training: ${value.toFixed(4)}`;
      checks.that(tip.textContent.includes(text), `${name}: no "${text}" in "${tip.textContent}"`);
    }
    const crosses = [...page.querySelectorAll(".plot .cross")];
    checks.that(crosses.every((cross) => !cross.hidden), `${name}: a chart without the step`);
  }
  checks.point(plot, "pointerleave");
  checks.that(tip.hidden, `${name}: values stay without a pointer`);
  checks.point(plot, "pointerdown", 0.4, "touch");
  checks.point(plot, "pointerleave", 0.4, "touch");
  checks.that(!tip.hidden, `${name}: no values after a tap`);
  checks.point(page.querySelector("h1"), "pointerdown", 0.5, "touch");
  checks.that(tip.hidden, `${name}: values stay after a tap elsewhere`);

  const groups = [...figure.querySelectorAll(".series")];
  const keys = [...figure.querySelectorAll(".key")];
  checks.that(keys.length === groups.length, `${name}: ${keys.length} keys`);
  const opacity = (group) => Number(checks.view.getComputedStyle(group).opacity);
  keys.forEach((key, of) => {
    const only = (what) => groups.forEach((group, other) => {
      checks.that((opacity(group) === 1) === (other === of), `${name}: key ${of} ${what}`);
    });
    checks.point(key, "pointerenter");
    only("is pointed at");
    checks.point(key, "pointerleave");
    checks.that(groups.every((group) => opacity(group) === 1), `${name}: key ${of} stays`);
    key.click();
    only("is pressed");
    key.click();
    checks.that(groups.every((group) => opacity(group) === 1), `${name}: key ${of} stays pressed`);
  });
}

function checkSmoothing(checks, page) {
  const slider = page.querySelector("#smoothing input");
  const lines = () => [...page.querySelectorAll(".smooth")].map((path) => path.getAttribute("d"));
  const set = (value) => {
    slider.value = value;
    slider.dispatchEvent(new checks.view.Event("input"));
    return lines();
  };
  const [before, none, most] = [lines(), set("0"), set(slider.max)];
  checks.that(none.every((line) => line === ""), "smoothed lines while smoothing is off");
  checks.that(most.every((line) => line.startsWith("M")), "no smoothed lines");
  checks.that(!most.join().includes("NaN"), "smoothed lines are not numbers");
  // A smoother line goes up and down less.
  const travel = (line) => {
    const heights = [...line.matchAll(/[ML][-\d.]+ ([-\d.]+)/g)].map((match) => Number(match[1]));
    return heights.reduce((sum, y, i) => sum + (i > 0 ? Math.abs(y - heights[i - 1]) : 0), 0);
  };
  const raw = page.querySelector(".series .line").getAttribute("d").replaceAll("h0", "");
  checks.that(travel(most[0]) < travel(before[0]) && travel(before[0]) < travel(raw),
    `smoothing: ${[raw, before[0], most[0]].map(travel)}`);
  slider.value = slider.defaultValue;
  slider.dispatchEvent(new checks.view.Event("input"));
}

async function checkTimeline(checks, page) {
  const canvas = page.getElementById("picture");
  const tip = page.getElementById("tip");
  const frame = page.getElementById("frame");
  const painted = async () => {
    await later();
    return canvas.toDataURL();
  };
  const before = await painted();
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4) colours.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]);
  checks.that(colours.size > 8, `the timeline has ${colours.size} colours`);
  checks.that(near(canvas.width, canvas.clientWidth * checks.view.devicePixelRatio), "the timeline is stretched");
  for (const share of [0.45, 0.7, 0.99]) {
    checks.point(canvas, "pointermove", share);
    checks.that(!tip.hidden && tip.textContent !== "", `timeline: nothing at ${share}`);
    checks.isWithin(tip, frame, `timeline: what is said at ${share}`);
  }
  checks.point(canvas, "pointerleave");
  checks.that(tip.hidden, "timeline: what is said stays without a pointer");
  checks.point(canvas, "pointerdown", 0.6, "touch");
  checks.point(canvas, "pointerup", 0.6, "touch");
  checks.point(canvas, "pointerleave", 0.6, "touch");
  checks.that(!tip.hidden, "timeline: nothing is said after a tap");
  checks.point(canvas, "pointerleave");
  const key = page.querySelector(".key[data-kind=forward]");
  checks.point(key, "pointerenter");
  checks.that((await painted()) !== before, "timeline: a key highlights nothing");
  checks.point(key, "pointerleave");
  checks.that((await painted()) === before, "timeline: a key that is left still highlights");
}

/** Pictures are decoded and as large as they can be seen; what is wrong is marked, and says what would be right. */
function checkPictures(checks, items) {
  items.forEach((item, at) => {
    const [image, named] = [item.querySelector("img, .thumb"), item.querySelector("b")];
    // Those of earlier evaluations are backgrounds, so that their bytes are on the page once.
    const isEarlier = image.localName !== "img";
    const isThere = isEarlier
      ? getComputedStyle(image).backgroundImage.startsWith('url("data:image/png')
      : image.complete && image.naturalWidth > 1;
    checks.that(isThere, `picture ${at} is not decoded`);
    const box = image.getBoundingClientRect();
    checks.that(box.width >= 60 && near(box.width, box.height), `picture ${at} is ${box.width} by ${box.height}`);
    checks.isWithin(image, item, `picture ${at}`);
    checks.isWithin(named, item, `the name of picture ${at}`);
    const isWrong = item.classList.contains("wrong");
    checks.that((isWrong && !isEarlier) === (item.querySelector("i") !== null), `picture ${at}: what it is`);
    checks.that(isWrong === named.textContent.startsWith("✗ "), `picture ${at}: its mark`);
    checks.that(/^\d+\.\d %$/.test(item.querySelector("span:not(.thumb)").textContent), `picture ${at}: its probability`);
  });
}

async function checkPage(frame) {
  const view = frame.contentWindow;
  const page = frame.contentDocument;
  const checks = new Checks(view);
  const charts = [...page.querySelectorAll(".chart")];
  for (const details of page.querySelectorAll("details")) details.open = true;
  checks.problems.push(...overflows(view, page));
  charts.forEach((figure, at) => checkChart(checks, page, figure, at));
  if (charts.length > 0) {
    checkSmoothing(checks, page);
    // Also with values shown.
    checks.point(charts[0].querySelector(".plot"), "pointermove", 0.9);
    checks.problems.push(...overflows(view, page));
    checks.point(charts[0].querySelector(".plot"), "pointerleave");
  }
  const pictures = [...page.querySelectorAll(".pictures li")];
  checkPictures(checks, pictures);
  const hasTimeline = page.getElementById("picture") !== null;
  if (hasTimeline) await checkTimeline(checks, page);
  const dots = page.querySelector(".dots")?.getAttribute("d").split("M").length ?? 1;
  return {
    page: frame.dataset.page, width: view.innerWidth, height: page.documentElement.scrollHeight,
    problems: checks.problems, errors: view.errorsOfPage, checks: checks.count, charts: charts.length,
    held_out_points: dots - 1, has_timeline: hasTimeline, sample: page.querySelector(".sample")?.textContent ?? null,
    title: page.title, pictures: pictures.length,
  };
}

async function checkAll() {
  const findings = [];
  // Violations of the content security policy are reported last.
  await later();
  for (const frame of document.querySelectorAll("iframe")) {
    try {
      findings.push(await checkPage(frame));
    } catch (error) {
      findings.push({ page: frame.dataset.page, problems: [String(error.stack)], errors: [] });
    }
  }
  document.getElementById("findings").textContent = JSON.stringify(findings);
}

addEventListener("load", checkAll);
