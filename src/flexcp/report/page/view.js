// A picture on a canvas that can be zoomed, moved and read: by wheel, drag, buttons and keys.
//
// A picture is {size() -> [width, height] of its world, pixels(width) -> height of the canvas, draw(view), at(x, y, view) -> text or null,
// zoomY, margins}. The view maps world to pixels inside the margins. A cursor moved by the arrow keys says what lies under it, to the eye
// in the tip and to a screen reader in the live region.

const MOST_ZOOM = 1e5;

function makeView(figure, picture) {
  const canvas = figure.querySelector("canvas");
  const view = { figure, canvas, picture, context: canvas.getContext("2d"), cursor: null, highlight: -1 };
  const margins = { left: 0, top: 0, right: 0, bottom: 0, ...picture.margins };
  let dragged = null;

  view.showAll = () => {
    const [width, height] = picture.size();
    Object.assign(view, { x0: 0, x1: Math.max(width, 1e-9), y0: 0, y1: Math.max(height, 1e-9) });
    view.redraw();
  };
  view.px = (x) => margins.left + ((x - view.x0) / (view.x1 - view.x0)) * view.width;
  view.py = (y) => margins.top + ((y - view.y0) / (view.y1 - view.y0)) * view.height;
  view.wx = (px) => view.x0 + ((px - margins.left) / view.width) * (view.x1 - view.x0);
  view.wy = (py) => view.y0 + ((py - margins.top) / view.height) * (view.y1 - view.y0);
  view.margins = margins;

  view.redraw = () => {
    const across = canvas.clientWidth;
    if (!across) return;
    const down = picture.pixels(across), dense = window.devicePixelRatio || 1;
    canvas.style.height = `${down}px`;
    canvas.width = Math.round(across * dense);
    canvas.height = Math.round(down * dense);
    view.width = across - margins.left - margins.right;
    view.height = down - margins.top - margins.bottom;
    const c = view.context;
    c.setTransform(dense, 0, 0, dense, 0, 0);
    c.clearRect(0, 0, across, down);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    picture.draw(view);
    if (view.cursor) drawCursor();
  };

  // Run `body` with drawing limited to the inside of the margins.
  view.inside = (body) => {
    const c = view.context;
    c.save();
    c.beginPath();
    c.rect(margins.left, margins.top, view.width, view.height);
    c.clip();
    body(c);
    c.restore();
  };

  function drawCursor() {
    const c = view.context, [x, y] = [view.px(view.cursor[0]), view.py(view.cursor[1])];
    c.strokeStyle = css("--focus");
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(x - 9, y); c.lineTo(x + 9, y); c.moveTo(x, y - 9); c.lineTo(x, y + 9);
    c.stroke();
    c.lineWidth = 1;
  }

  function clampSpan(low, high, size) {
    const span = Math.min(high - low, size);
    const start = Math.min(Math.max(low, 0), size - span);
    return [start, start + span];
  }

  view.zoom = (factor, x, y) => {
    const [width, height] = picture.size();
    const cx = x ?? (view.x0 + view.x1) / 2, cy = y ?? (view.y0 + view.y1) / 2;
    const span = Math.max((view.x1 - view.x0) / factor, width / MOST_ZOOM);
    const scale = span / (view.x1 - view.x0);
    [view.x0, view.x1] = clampSpan(cx - (cx - view.x0) * scale, cx + (view.x1 - cx) * scale, width);
    if (picture.zoomY) [view.y0, view.y1] = clampSpan(cy - (cy - view.y0) * scale, cy + (view.y1 - cy) * scale, height);
    view.redraw();
  };

  view.move = (dx, dy) => {
    const [width, height] = picture.size();
    [view.x0, view.x1] = clampSpan(view.x0 + dx, view.x1 + dx, width);
    if (picture.zoomY) [view.y0, view.y1] = clampSpan(view.y0 + dy, view.y1 + dy, height);
    view.redraw();
  };

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const inFrame = (px, py) =>
    px >= margins.left && px <= margins.left + view.width && py >= margins.top && py <= margins.top + view.height;

  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = place(event);
    if (dragged) {
      view.move(view.wx(dragged[0]) - view.wx(px), view.wy(dragged[1]) - view.wy(py));
      dragged = [px, py];
      return hideTip();
    }
    const text = inFrame(px, py) ? picture.at(view.wx(px), view.wy(py), view) : null;
    if (text) showTip(text, event.clientX, event.clientY);
    else hideTip();
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (picture.zoomable === false) return;
    dragged = place(event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointercancel", () => { dragged = null; });
  canvas.addEventListener("pointerleave", hideTip);
  // Plain scrolling belongs to the page until the picture has the focus.
  canvas.addEventListener("wheel", (event) => {
    if (picture.zoomable === false || !(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
    event.preventDefault();
    const [px, py] = place(event);
    view.zoom(event.deltaY < 0 ? 1.25 : 0.8, view.wx(px), view.wy(py));
  }, { passive: false });

  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in steps) {
      const [dx, dy] = steps[event.key], wide = view.x1 - view.x0, high = view.y1 - view.y0;
      const [width, height] = picture.size();
      const stepX = picture.stepX ?? wide / 40, stepY = picture.stepY ?? high / 40;
      const [x, y] = view.cursor ?? [view.x0 + stepX / 2, view.y0 + stepY / 2];
      const first = view.cursor === null;
      view.cursor = [
        Math.min(Math.max(first ? x : x + dx * stepX, 0), width * 0.999999),
        Math.min(Math.max(first ? y : y + dy * stepY, 0), height * 0.999999),
      ];
      const over = (at, low, high2) => (at < low ? at - low : at > high2 ? at - high2 : 0);
      view.move(over(view.cursor[0], view.x0, view.x1), over(view.cursor[1], view.y0, view.y1));
      tell();
    } else if (event.key === "+" || event.key === "=") view.zoom(1.5, ...(view.cursor ?? []));
    else if (event.key === "-") view.zoom(1 / 1.5, ...(view.cursor ?? []));
    else if (event.key === "0") view.showAll();
    else if (event.key === "Escape") { view.cursor = null; view.redraw(); hideTip(); }
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => { view.cursor = null; view.redraw(); hideTip(); });

  function tell() {
    const text = picture.at(view.cursor[0], view.cursor[1], view) ?? "nothing here";
    const box = canvas.getBoundingClientRect();
    showTip(text, box.left + view.px(view.cursor[0]), box.top + view.py(view.cursor[1]));
    document.getElementById("live").textContent = text.replaceAll("\n", ", ");
  }

  for (const button of figure.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      if (button.dataset.zoom === "all") view.showAll();
      else view.zoom(button.dataset.zoom === "in" ? 1.5 : 1 / 1.5);
    });
  }
  for (const select of figure.querySelectorAll("select[data-choice]")) {
    select.addEventListener("change", () => { picture.choose?.(select.dataset.choice, select.value); view.showAll(); });
  }
  new ResizeObserver(view.redraw).observe(canvas);
  view.showAll();
  return view;
}

function showTip(text, x, y) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > window.innerHeight ? y - box.height - 10 : y + 18}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

// Ticks below a picture, with a text each.
function axisX(view, text) {
  const c = view.context, y = view.margins.top + view.height;
  c.fillStyle = css("--soft");
  c.strokeStyle = css("--line");
  c.textAlign = "center";
  for (const value of ticks(view.x0, view.x1, view.width / 90)) {
    const x = view.px(value);
    c.beginPath(); c.moveTo(x, y); c.lineTo(x, y + 4); c.stroke();
    if (x < view.margins.left + view.width - 12) c.fillText(text(value), Math.max(x, view.margins.left + 8), y + 12);
  }
  c.textAlign = "start";
}

// The number of a row at its left, as many as fit.
function rowLabels(view, rows, text) {
  const c = view.context, high = view.height / (view.y1 - view.y0);
  const every = Math.max(1, Math.ceil(11 / Math.max(high, 0.01)));
  c.fillStyle = css("--soft");
  c.textAlign = "right";
  for (let r = Math.max(0, Math.floor(view.y0)); r < Math.min(rows, view.y1); r++) {
    if (r % every === 0) c.fillText(text(r), view.margins.left - 6, view.py(r + 0.5));
  }
  c.textAlign = "start";
}
