// Ranks: where their time goes, what they do when, and what they send each other.

function balancePicture(section) {
  const { time, ranks, bound } = section.data;
  const kinds = ["attention", "exposed", "linear"];
  const total = (r) => kinds.reduce((sum, kind) => sum + time[kind][r], 0);
  const most = Math.max(...Array.from({ length: ranks }, (_, r) => total(r)), 1);
  const lane = Math.max(4, Math.min(20, 420 / ranks));
  return {
    zoomable: false,
    margins: { left: 40, top: 4, right: 8, bottom: 24 },
    size: () => [most * 1.02, ranks],
    pixels: () => lane * ranks + 28,
    stepY: 1,
    draw(view) {
      const c = view.context, high = view.height / ranks;
      for (let r = 0; r < ranks; r++) {
        let x = 0;
        for (const kind of kinds) {
          c.globalAlpha = section.lit(r) ? 1 : 0.2;
          c.fillStyle = css(`--${kind}`);
          c.fillRect(view.px(x), view.py(r), view.px(x + time[kind][r]) - view.px(x), Math.max(1.5, high - (high > 6 ? 2 : 0.5)));
          x += time[kind][r];
        }
        c.globalAlpha = 1;
      }
      c.strokeStyle = css("--ink");
      c.setLineDash([4, 3]);
      c.beginPath(); c.moveTo(view.px(bound), view.py(0)); c.lineTo(view.px(bound), view.py(ranks)); c.stroke();
      c.setLineDash([]);
      rowLabels(view, ranks, (r) => `${r}`);
      axisX(view, timeTick);
    },
    at(x, y) {
      const r = Math.floor(y);
      if (r < 0 || r >= ranks) return null;
      return `rank ${r}: ${timeText(total(r))}\nattention ${timeText(time.attention[r])}, waiting ${timeText(time.exposed[r])}, the rest ${timeText(time.linear[r])}`;
    },
  };
}

function timelinePicture(section) {
  const { spans, labels, lanes, end } = section.data.timeline;
  const ranks = section.data.ranks;
  const row = Math.max(9, Math.min(34, 560 / ranks));
  const by = Array.from({ length: ranks }, () => []);
  spans.rank.forEach((r, i) => by[r].push(i));
  const colour = (lane) => css(`--${lanes[lane].colour}`);
  // Compute fills the upper half of a rank's row, what comes in the next quarter, what goes out the last.
  const place = (lane) => [[0.06, 0.48], [0.57, 0.17], [0.77, 0.17]][lanes[lane].row];
  return {
    margins: { left: 40, top: 4, right: 8, bottom: 24 },
    size: () => [end, ranks],
    pixels: () => row * ranks + 28,
    stepY: 1,
    draw(view) {
      const c = view.context, high = view.height / (view.y1 - view.y0);
      view.inside(() => {
        c.fillStyle = css("--faint");
        for (let r = 0; r < ranks; r += 2) c.fillRect(view.margins.left, view.py(r), view.width, high);
        for (let r = 0; r < ranks; r++) {
          c.globalAlpha = section.lit(r) ? 1 : 0.2;
          for (const i of by[r]) {
            if (spans.start[i] > view.x1 || spans.stop[i] < view.x0) continue;
            const x = view.px(spans.start[i]), wide = view.px(spans.stop[i]) - x, [top, tall] = place(spans.lane[i]);
            c.fillStyle = colour(spans.lane[i]);
            c.fillRect(x, view.py(r) + top * high, Math.max(0.5, wide - (wide > 4 ? 0.7 : 0)), Math.max(1, tall * high));
            const text = labels[spans.label[i]];
            if (high > 18 && lanes[spans.lane[i]].row === 0 && wide > 7 * text.length) {
              c.fillStyle = css("--card");
              c.fillText(text, Math.max(x, view.margins.left) + 4, view.py(r) + (top + tall / 2) * high);
            }
          }
        }
        c.globalAlpha = 1;
      });
      rowLabels(view, ranks, (r) => `${r}`);
      axisX(view, timeTick);
    },
    at(x, y) {
      const r = Math.floor(y);
      if (r < 0 || r >= ranks) return null;
      const here = by[r].filter((i) => spans.start[i] <= x && x < spans.stop[i]);
      if (!here.length) return `rank ${r} at ${timeText(x)}: idle`;
      return `rank ${r} at ${timeText(x)}\n` + here.slice(0, 6).map((i) =>
        `${lanes[spans.lane[i]].name}: ${labels[spans.label[i]]}, ${timeText(spans.stop[i] - spans.start[i])}`).join("\n");
    },
  };
}

function trafficPicture(section) {
  const { masks, perNode, ranks } = section.data;
  let mask = 0, backward = 0;
  const found = () => masks[mask].bytes[backward];
  const size = () => (found().unit === "rank" ? ranks : Math.ceil(ranks / perNode));
  return {
    zoomY: true,
    margins: { left: 40, top: 6, right: 8, bottom: 24 },
    size: () => [size(), size()],
    pixels: (width) => Math.min(width - 18, 640),
    stepX: 1,
    stepY: 1,
    choose(name, value) {
      if (name === "mask") mask = +value;
      if (name === "direction") backward = +value;
    },
    draw(view) {
      const c = view.context, { source, target, bytes, unit } = found(), n = size();
      const most = bytes.reduce((a, b) => Math.max(a, b), 1);
      view.inside(() => {
        c.fillStyle = css("--faint");
        c.fillRect(view.px(0), view.py(0), view.px(n) - view.px(0), view.py(n) - view.py(0));
        const ink = css("--attention");
        bytes.forEach((b, i) => {
          const x = view.px(target[i]), y = view.py(source[i]);
          const dim = unit === "rank" && !section.lit(source[i]) && !section.lit(target[i]) ? 0.15 : 1;
          c.globalAlpha = (0.12 + 0.88 * Math.sqrt(b / most)) * dim;
          c.fillStyle = ink;
          const wide = view.px(target[i] + 1) - x, high = view.py(source[i] + 1) - y, strong = c.globalAlpha > 0.55;
          c.fillRect(x, y, Math.max(0.7, wide - 0.5), Math.max(0.7, high - 0.5));
          if (wide > 52 && high > 14) {
            c.globalAlpha = dim;
            c.fillStyle = css(strong ? "--card" : "--ink");
            c.textAlign = "center";
            c.fillText(bytesText(b), x + wide / 2, y + high / 2);
          }
        });
        c.textAlign = "start";
        c.globalAlpha = 1;
        c.strokeStyle = css("--soft");
        const each = unit === "rank" ? perNode : 1;
        for (let v = 0; v <= n && n / each > 1 && n / each < 80; v += each) {
          c.beginPath();
          c.moveTo(view.px(v), view.py(0)); c.lineTo(view.px(v), view.py(n));
          c.moveTo(view.px(0), view.py(v)); c.lineTo(view.px(n), view.py(v));
          c.stroke();
        }
      });
      rowLabels(view, n, (r) => `${r}`);
      c.fillStyle = css("--soft");
      c.textAlign = "center";
      const wide = view.width / (view.x1 - view.x0), every = Math.max(1, Math.ceil(20 / wide));
      for (let v = Math.ceil(view.x0); v < Math.min(n, view.x1); v++) {
        if (v % every === 0) c.fillText(`${v}`, view.px(v + 0.5), view.margins.top + view.height + 12);
      }
      c.textAlign = "start";
    },
    at(x, y) {
      const to = Math.floor(x), from = Math.floor(y), { source, target, bytes, unit } = found();
      if (to < 0 || from < 0 || to >= size() || from >= size()) return null;
      const i = source.findIndex((s, n) => s === from && target[n] === to);
      const crosses = unit === "node" || Math.floor(from / perNode) !== Math.floor(to / perNode);
      return `${unit} ${from} to ${unit} ${to}${from === to && unit === "rank" ? " (itself)" : crosses ? ", between nodes" : ", inside a node"}\n${i < 0 ? "nothing" : bytesText(bytes[i])}`;
    },
  };
}
