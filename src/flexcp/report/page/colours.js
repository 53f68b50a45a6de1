// Colours of ranks. A node has a range of hues and its ranks lie inside it, so what crosses nodes is seen at a glance; neighbours
// differ in lightness too. Colours are mixed in OKLCH, where equal steps look equal.

function rgbOf(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180), b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((v) => {
    const c = Math.min(1, Math.max(0, v));
    return Math.round(255 * (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055));
  });
}

function rankColours(ranks, perNode) {
  const nodes = Math.ceil(ranks / perNode), found = [];
  for (let rank = 0; rank < ranks; rank++) {
    const node = Math.floor(rank / perNode), local = rank % perNode;
    const inside = nodes === 1 ? local / perNode : (0.8 * local) / perNode;
    const step = ranks > 6 ? [0, -0.11, 0.08][local % 3] : 0;
    const lightness = 0.7 + step;
    const [r, g, b] = rgbOf(lightness, 0.125, 25 + (360 * (node + inside)) / nodes);
    found.push({ fill: `rgb(${r} ${g} ${b})`, faint: `rgb(${r} ${g} ${b} / 0.13)`, ink: lightness > 0.62 ? "#111" : "#fff" });
  }
  return found;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The ground of what is not drawn in detail: stripes in the theme's colour.
function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const c = tile.getContext("2d");
  c.fillStyle = css("--empty");
  c.fillRect(0, 0, 8, 8);
  c.strokeStyle = css("--hatch");
  c.beginPath();
  for (const shift of [-8, 0, 8]) { c.moveTo(shift, 8); c.lineTo(shift + 8, 0); }
  c.stroke();
  return context.createPattern(tile, "repeat");
}
