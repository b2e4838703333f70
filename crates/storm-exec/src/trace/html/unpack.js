// The trace, unpacked: times in nanoseconds since the step began, memory in bytes.

const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = data.kinds.map(([key, name]) => ({ key, name }));
const WAITING = KINDS.findIndex((kind) => kind.key === "waiting");
const BETWEEN = KINDS.findIndex((kind) => kind.key === "between-kernels");
const NOTHING = -1;
const HOST = -2;
const total = Math.max(data.total, 1);
const { strings } = data.instructions;

/** Adds starts and ends to something that has them as distances. */
function unpackTimes(packed) {
  const count = packed.gap.length;
  const [start, end] = [new Float64Array(count), new Float64Array(count)];
  let now = 0;
  for (let i = 0; i < count; i++) {
    start[i] = now += packed.gap[i];
    end[i] = now += packed.length[i];
  }
  return { ...packed, start, end, count };
}

/** Adds up memory in use; `time[i]` is since when there are `bytes[i]`. */
function unpackTier(packed) {
  const count = packed.gap.length;
  const [time, bytes] = [new Float64Array(count), new Float64Array(count)];
  let [now, used] = [0, 0];
  for (let i = 0; i < count; i++) {
    time[i] = now += packed.gap[i];
    bytes[i] = used += packed.change[i];
  }
  const peak = bytes.reduce((most, value) => Math.max(most, value), 0);
  return { ...packed, time, bytes, count, peak };
}

const lanes = data.lanes.map(unpackTimes);
for (const lane of lanes) lane.kind = lane.instruction.map((id) => data.instructions.kind[id]);
const stalls = unpackTimes(data.stalls);
const tiers = data.memory.map(unpackTier);

/** By instruction: its runs in order, as lane and position. */
const runs = data.instructions.name.map(() => []);
lanes.forEach((lane, at) => lane.instruction.forEach((id, i) => runs[id].push([at, i])));

// ---- units ------------------------------------------------------------------------------------

/** In the first unit in which a value has three digits before the point at most. */
function inUnits(value, units, step) {
  let unit = 0;
  // What would be rounded to four digits goes to the next unit too.
  while (value >= 999.5 && unit + 1 < units.length) {
    value /= step;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

const showTime = (ns) => inUnits(ns, ["ns", "µs", "ms", "s"], 1000);
const showBytes = (bytes) => inUnits(bytes, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const showShare = (share) => `${(100 * share).toFixed(1)} %`;
