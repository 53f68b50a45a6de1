// Charts beside plans: strategies side by side, and lines over steps.

function strategiesPicture(section) {
  const { names, time, marks } = section.data;
  const kinds = ["attention", "exposed", "linear"].filter((kind) => kind in time);
  const total = (i) => kinds.reduce((sum, kind) => sum + time[kind][i], 0);
  const most = Math.max(...names.map((_, i) => total(i)), 1);
  const ruler = document.createElement("canvas").getContext("2d");
  ruler.font = "600 12px system-ui, sans-serif";
  const left = Math.max(130, ...names.map((name) => Math.ceil(ruler.measureText(name).width) + 16));
  return {
    zoomable: false,
    margins: { left, top: 4, right: 70, bottom: 24 },
    size: () => [most, names.length],
    pixels: () => 26 * names.length + 28,
    stepY: 1,
    draw(view) {
      const c = view.context;
      names.forEach((name, i) => {
        let x = 0;
        for (const kind of kinds) {
          c.fillStyle = css(`--${kind}`);
          c.fillRect(view.px(x), view.py(i) + 4, view.px(x + time[kind][i]) - view.px(x), 18);
          x += time[kind][i];
        }
        c.fillStyle = css("--ink");
        c.textAlign = "right";
        c.font = `${marks[i] ? "600 " : ""}12px system-ui, sans-serif`;
        c.fillText(name, view.margins.left - 8, view.py(i + 0.5));
        c.textAlign = "start";
        c.font = "11px system-ui, sans-serif";
        c.fillText(timeText(total(i)), view.px(total(i)) + 6, view.py(i + 0.5));
      });
      axisX(view, timeTick);
    },
    at(x, y) {
      const i = Math.floor(y);
      if (i < 0 || i >= names.length) return null;
      const words = { attention: "attention", exposed: "waiting", linear: "the rest" };
      return `${names[i]}: ${timeText(total(i))}${marks[i] ? ` (${marks[i]})` : ""}\n` + kinds.map((kind) => `${words[kind]} ${timeText(time[kind][i])}`).join(", ");
    },
  };
}

function linesPicture(section) {
  const { series, x: steps, unit } = section.data;
  const values = series.flatMap((s) => s.values).filter(Number.isFinite);
  const low = Math.min(...values), high = Math.max(...values), room = (high - low || 1) * 0.06;
  const colours = rankColours(series.length, series.length);
  const first = steps[0], last = Math.max(steps.at(-1), first + 1);
  return {
    margins: { left: 58, top: 8, right: 12, bottom: 24 },
    size: () => [last - first, 1],
    pixels: () => 240,
    draw(view) {
      const c = view.context, y = (v) => view.py(1 - (v - low + room) / (high - low + 2 * room || 1));
      c.strokeStyle = css("--line");
      c.fillStyle = css("--soft");
      c.textAlign = "right";
      for (const v of ticks(low, high, 5)) {
        c.beginPath(); c.moveTo(view.margins.left, y(v)); c.lineTo(view.margins.left + view.width, y(v)); c.stroke();
        c.fillText(`${+v.toPrecision(4)}`, view.margins.left - 6, y(v));
      }
      c.textAlign = "start";
      view.inside(() => {
        c.lineWidth = 2;
        series.forEach((s, i) => {
          c.strokeStyle = colours[i].fill;
          c.setLineDash(i % 2 ? [6, 4] : []);
          c.beginPath();
          s.values.forEach((v, n) => c.lineTo(view.px(steps[n] - first), y(v)));
          c.stroke();
        });
        c.setLineDash([]);
        c.lineWidth = 1;
      });
      axisX(view, (v) => count(v + first));
    },
    at(x) {
      const n = steps.reduce((best, s, i) => (Math.abs(s - first - x) < Math.abs(steps[best] - first - x) ? i : best), 0);
      return `${unit} ${count(steps[n])}\n` + series.map((s) => `${s.name}: ${(+s.values[n]).toPrecision(6)}`).join("\n");
    },
  };
}
