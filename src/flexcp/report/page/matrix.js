// The attention matrix: rows down, keys right, each part in the colour of the rank that computes it. A region is drawn as its rectangle cut
// by the mask's bands, so shapes are exact at any zoom.

function matrixPicture(section, figure) {
  const { lengths, drawn, masks } = section.data;
  const starts = [0];
  for (const length of lengths) starts.push(starts.at(-1) + length);
  let mask = 0, document_ = drawn.reduce((best, d) => (lengths[d] > lengths[best] ? d : best), drawn[0]), head = 0;
  const tables = masks.map((m) => ({ regions: byDocument(m.regions), slices: byDocument(m.slices) }));
  const whole = () => document_ === -1;
  const shown = () => (whole() ? drawn : [document_]);
  const origin = (d) => (whole() ? starts[d] : 0);

  function headChoice() {
    const select = figure.querySelector("select[data-choice=head]");
    const regions = tables[mask].regions.table, firsts = new Set();
    for (const d of shown()) for (const i of tables[mask].regions.of(d)) firsts.add(regions.h0[i]);
    const options = [...firsts].sort((a, b) => a - b);
    select.replaceChildren(...options.map((h) => new Option(`${h}`, h)));
    select.disabled = options.length < 2;
    head = options[0] ?? 0;
  }
  headChoice();

  function* parts(d) {
    const { regions, slices } = tables[mask], r = regions.table, s = slices.table;
    for (const i of regions.of(d)) {
      if (r.h0[i] > head || r.h1[i] <= head) continue;
      for (const j of slices.of(d)) {
        const q0 = Math.max(r.q0[i], s.q0[j]), q1 = Math.min(r.q1[i], s.q1[j]);
        const k0 = Math.max(r.k0[i], s.k0[j]), k1 = Math.min(r.k1[i], s.k1[j]);
        if (q0 < q1 && k0 < k1) yield { i, j, q0, q1, k0, k1, lo: s.lo[j], hi: s.hi[j], rank: r.rank[i] };
      }
    }
  }

  return {
    zoomY: true,
    margins: { left: 58, top: 6, right: 8, bottom: 24 },
    size() { const n = whole() ? starts.at(-1) : lengths[document_]; return [n, n]; },
    pixels: (width) => Math.min(width - 36, 640),
    choose(name, value) {
      if (name === "document") document_ = +value;
      if (name === "mask") mask = +value;
      if (name === "head") head = +value;
      else headChoice();
    },
    draw(view) {
      const c = view.context;
      view.inside(() => {
        c.fillStyle = css("--faint");
        c.fillRect(0, 0, view.canvas.clientWidth, view.canvas.clientHeight);
        for (const d of shown()) {
          const o = origin(d);
          if (o > view.x1 || o + lengths[d] < view.x0 || o > view.y1 || o + lengths[d] < view.y0) continue;
          if (view.px(o + lengths[d]) - view.px(o) < 0.4) continue;
          for (const p of parts(d)) {
            const shape = cutByBand(p);
            if (shape.length < 3) continue;
            c.fillStyle = section.fill(p.rank);
            c.beginPath();
            for (const [x, y] of shape) c.lineTo(view.px(o + x), view.py(o + y));
            c.closePath();
            c.fill();
            label(view, p, o);
          }
          c.strokeStyle = css("--hatch");
          c.strokeRect(view.px(o), view.py(o), view.px(o + lengths[d]) - view.px(o), view.py(o + lengths[d]) - view.py(o));
        }
      });
      c.fillStyle = css("--soft");
      c.textAlign = "right";
      for (const v of ticks(view.y0, view.y1, view.height / 60)) c.fillText(tokensText(v), view.margins.left - 6, Math.max(view.py(v), view.margins.top + 6));
      c.textAlign = "start";
      axisX(view, tokensText);
    },
    at(x, y) {
      const row = Math.floor(y), key = Math.floor(x);
      const d = whole() ? upper(starts, row) - 1 : document_;
      if (d >= lengths.length || row < 0 || key < 0) return null;
      const q = row - origin(d), k = key - origin(d);
      if (k < 0 || k >= lengths[d]) return `row of document ${d}, a key of another document\nnothing to compute`;
      const place = `document ${d}: row ${count(q)}, key ${count(k)}`;
      if (!tables[mask].slices.of(d).length && !tables[mask].regions.of(d).length) return `${place}\nnot drawn: too many parts`;
      for (const p of parts(d)) {
        if (q >= p.q0 && q < p.q1 && k >= p.k0 && k < p.k1 && k - q >= p.lo && k - q <= p.hi) {
          const r = tables[mask].regions.table;
          return `${place}\ncomputed by rank ${p.rank}, query heads ${r.h0[p.i]} to ${r.h1[p.i] - 1}\nin rows ${count(r.q0[p.i])} to ${count(r.q1[p.i])}, keys ${count(r.k0[p.i])} to ${count(r.k1[p.i])}`;
        }
      }
      return `${place}\nmasked: nothing to compute`;
    },
  };

  function label(view, p, o) {
    const high = view.py(p.q1) - view.py(p.q0), c = view.context;
    // The middle of the keys that the middle row sees.
    const row = (p.q0 + p.q1) / 2, from = Math.max(p.k0, row + p.lo), to = Math.min(p.k1, row + p.hi);
    if (high < 13 || view.px(to) - view.px(from) < 16 || !section.lit(p.rank)) return;
    c.fillStyle = section.colours[p.rank].ink;
    c.textAlign = "center";
    c.fillText(`${p.rank}`, view.px(o + (from + to) / 2), view.py(o + row));
    c.textAlign = "start";
  }
}

// The corners of a rectangle of keys x rows cut by lo <= k - q <= hi.
function cutByBand({ q0, q1, k0, k1, lo, hi }) {
  const corners = [[k0, q0], [k1, q0], [k1, q1], [k0, q1]];
  return below(below(corners, ([x, y]) => hi + 0.5 - (x - y)), ([x, y]) => x - y - (lo - 0.5));
}

// A convex shape cut to where `room` is not negative.
function below(shape, room) {
  const found = [];
  shape.forEach((here, i) => {
    const next = shape[(i + 1) % shape.length], a = room(here), b = room(next);
    if (a >= 0) found.push(here);
    if ((a < 0) !== (b < 0)) {
      const t = a / (a - b);
      found.push([here[0] + t * (next[0] - here[0]), here[1] + t * (next[1] - here[1])]);
    }
  });
  return found;
}

function byDocument(table) {
  const rows = new Map();
  table.document.forEach((d, i) => { if (rows.has(d)) rows.get(d).push(i); else rows.set(d, [i]); });
  return { table, of: (d) => rows.get(d) ?? [] };
}
