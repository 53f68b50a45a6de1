// Numbers for people.

function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

function bytesText(value) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB") return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
}

function timeText(ns) {
  if (ns < 1e3) return `${Math.round(ns)} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toFixed(1)} \u00b5s`;
  if (ns < 1e9) return `${(ns / 1e6).toFixed(ns < 1e8 ? 2 : 1)} ms`;
  return `${(ns / 1e9).toFixed(2)} s`;
}

// Times on an axis: no more digits than they need.
function timeTick(ns) {
  if (ns === 0) return "0";
  const [unit, size] = ns < 1e3 ? ["ns", 1] : ns < 1e6 ? ["\u00b5s", 1e3] : ns < 1e9 ? ["ms", 1e6] : ["s", 1e9];
  return `${+(ns / size).toFixed(3)} ${unit}`;
}

// Round steps for an axis: about `wanted` ticks between two values.
function ticks(from, to, wanted) {
  const raw = (to - from) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || power;
  const found = [];
  for (let v = Math.ceil(from / step) * step; v <= to; v += step) found.push(v);
  return found;
}

function tokensText(value) {
  return value >= 1e6 ? `${+(value / 1e6).toFixed(3)}M` : value >= 1e4 ? `${+(value / 1e3).toFixed(2)}K` : count(value);
}
