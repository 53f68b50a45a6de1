// Trees: depth to the right, sequences down, each segment in the colours of the ranks that keep it.

function treePicture(section) {
  const { trees } = section.data;
  let tree = trees[0];
  const deepest = () => tree.depth.reduce((most, depth, i) => Math.max(most, depth + tree.tokens[i]), 1);
  const lanes = () => tree.lanes.reduce((sum, n, i) => sum + (tree.parent[i] < 0 ? n : 0), 0);
  return {
    zoomY: true,
    margins: { left: 58, top: 6, right: 8, bottom: 24 },
    size: () => [deepest(), lanes()],
    pixels: () => Math.min(Math.max(18 * lanes(), 90), 420) + 30,
    choose(name, value) { if (name === "tree") tree = trees[+value]; },
    draw(view) {
      const c = view.context, { depth, lane, kept } = tree;
      view.inside(() => {
        kept.segment.forEach((s, i) => {
          const x = view.px(depth[s] + kept.first[i]), wide = view.px(depth[s] + kept.last[i]) - x;
          const y = view.py(lane[s]), high = view.py(lane[s] + tree.lanes[s]) - y;
          if (x > view.margins.left + view.width || x + wide < view.margins.left) return;
          const rank = kept.rank[i];
          c.fillStyle = section.fill(rank);
          c.fillRect(x, y, Math.max(wide, 0.6), Math.max(high - (high > 4 ? 1 : 0), 0.6));
          if (wide > 16 && high > 12 && section.lit(rank)) {
            c.fillStyle = section.colours[rank].ink;
            c.fillText(`${rank}`, Math.max(x, view.margins.left) + 4, y + high / 2);
          }
        });
        c.strokeStyle = css("--hatch");
        depth.forEach((d, s) => {
          const x = view.px(d), y = view.py(lane[s]), high = view.py(lane[s] + tree.lanes[s]) - y;
          if (high > 3 && tree.tokens[s]) c.strokeRect(x, y, view.px(d + tree.tokens[s]) - x, high);
        });
      });
      axisX(view, tokensText);
    },
    at(x, y) {
      const { depth, tokens, lane, kept } = tree;
      const s = depth.findIndex((d, i) => d <= x && x < d + tokens[i] && lane[i] <= y && y < lane[i] + tree.lanes[i]);
      if (s < 0) return null;
      const at = Math.floor(x - depth[s]), i = kept.segment.findIndex((k, n) => k === s && kept.first[n] <= at && at < kept.last[n]);
      const who = i < 0 ? "" : `\nkept by rank ${kept.rank[i]}`;
      return `document ${tree.document}, segment ${s}, its token ${count(at)} of ${count(tokens[s])}\ndepth ${count(Math.floor(x))}, in ${count(tree.sequences[s])} sequences${who}`;
    },
  };
}
