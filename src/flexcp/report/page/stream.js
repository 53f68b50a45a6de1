// The batch (documents by length) and the stream (who keeps what).

function batchPicture(section) {
  const lengths = section.data.lengths;
  const order = lengths.map((_, d) => d).sort((a, b) => lengths[b] - lengths[a] || a - b);
  const decades = Math.max(1, Math.ceil(Math.log10(lengths[order[0]] + 1)));
  const height = (length) => Math.log10(length + 1) / decades;
  return {
    margins: { left: 58, top: 8, right: 8, bottom: 24 },
    size: () => [order.length, 1],
    pixels: () => 170,
    stepX: 1,
    draw(view) {
      const c = view.context, bottom = view.py(1);
      c.strokeStyle = css("--line");
      c.fillStyle = css("--soft");
      c.textAlign = "right";
      for (let power = 0; power <= decades; power++) {
        const y = view.py(1 - height(10 ** power - (power === 0 ? 0 : 1)));
        if (power === 0) continue;
        c.beginPath(); c.moveTo(view.margins.left, y); c.lineTo(view.margins.left + view.width, y); c.stroke();
        c.fillText(tokensText(10 ** power), view.margins.left - 6, y);
      }
      c.textAlign = "start";
      view.inside(() => {
        c.fillStyle = css("--attention");
        const first = Math.floor(view.x0), last = Math.min(order.length, Math.ceil(view.x1));
        const gap = view.width / (view.x1 - view.x0) > 4 ? 1 : 0;
        for (let i = first; i < last; i++) {
          const y = view.py(1 - height(lengths[order[i]]));
          c.fillRect(view.px(i), y, Math.max(0.6, view.px(i + 1) - view.px(i) - gap), bottom - y);
        }
      });
      axisX(view, (v) => (Number.isInteger(v) ? count(v) : ""));
    },
    at(x) {
      const d = order[Math.floor(x)];
      return d === undefined ? null : `document ${d}\n${count(lengths[d])} tokens\n${Math.floor(x) + 1}. longest of ${count(order.length)}`;
    },
  };
}

function keptPicture(section) {
  const { ranks, runs, lengths, pads, drawn } = section.data;
  const starts = [0];
  for (const length of lengths) starts.push(starts.at(-1) + length);
  const tokens = starts.at(-1) + pads;
  const lane = Math.max(3, Math.min(13, 340 / ranks)), top = 46;
  const order = runs.start.map((_, i) => i).sort((a, b) => runs.start[a] - runs.start[b]);
  const known = new Set(drawn);
  return {
    margins: { left: 64, top: 0, right: 8, bottom: 24 },
    size: () => [tokens, top + lane * ranks],
    pixels: () => top + lane * ranks + 24,
    stepY: lane,
    draw(view) {
      const c = view.context;
      view.inside(() => {
        for (let d = 0; d < lengths.length; d++) {
          if (starts[d] > view.x1 || starts[d + 1] < view.x0) continue;
          const x = view.px(starts[d]), wide = view.px(starts[d + 1]) - x;
          c.fillStyle = css(d % 2 ? "--faint" : "--empty");
          c.fillRect(x, 0, Math.max(wide, 0.5), 14);
          if (wide > 3) { c.fillStyle = css("--hatch"); c.fillRect(x, 0, 1, 14); }
          if (wide > 34) { c.fillStyle = css("--soft"); c.fillText(`${d}`, Math.max(x, view.margins.left) + 4, 7.5); }
        }
        c.fillStyle = hatch(c);
        c.fillRect(view.px(0), 18, view.px(starts.at(-1)) - view.px(0), 22);
        c.fillStyle = css("--faint");
        for (let r = 0; r < ranks; r += 2) c.fillRect(view.margins.left, top + lane * r, view.width, lane);
        for (const i of order) {
          if (runs.start[i] > view.x1 || runs.stop[i] < view.x0) continue;
          const rank = runs.rank[i], x = view.px(runs.start[i]), wide = Math.max(view.px(runs.stop[i]) - x, 0.7);
          c.fillStyle = section.fill(rank);
          c.fillRect(x, 18, wide, 22);
          c.fillRect(x, top + lane * rank, wide, Math.max(lane - 0.5, 2));
          if (wide > 16 && section.lit(rank)) { c.fillStyle = section.colours[rank].ink; c.fillText(`${rank}`, Math.max(x, view.margins.left) + 4, 29.5); }
        }
      });
      c.fillStyle = css("--soft");
      c.textAlign = "right";
      c.fillText("document", view.margins.left - 6, 7.5);
      c.fillText("kept by", view.margins.left - 6, 29.5);
      const every = Math.max(1, Math.ceil(11 / lane));
      for (let r = 0; r < ranks; r += every) c.fillText(`${r}`, view.margins.left - 6, top + lane * (r + 0.5));
      c.textAlign = "start";
      axisX(view, tokensText);
    },
    at(x) {
      const token = Math.floor(x);
      if (token < 0 || token >= tokens) return null;
      const d = upper(starts, token) - 1;
      const i = order.find((n) => runs.start[n] <= token && token < runs.stop[n]);
      const where = d >= lengths.length ? "pads" : `document ${d}, its token ${count(token - starts[d])} of ${count(lengths[d])}`;
      if (i === undefined) return `${where}\n${known.has(d) ? "kept by nobody" : "spread over ranks in too many parts to draw"}`;
      return `${where}\nkept by rank ${runs.rank[i]}, stream ${count(runs.start[i])} to ${count(runs.stop[i])}`;
    },
  };
}

// How many entries of an ascending list are at most `value`.
function upper(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
