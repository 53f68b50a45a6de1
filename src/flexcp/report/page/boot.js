// Start: read the data, draw every picture, and wire what belongs to the whole page: theme, legend, tables.

const PICTURES = {
  batch: batchPicture, kept: keptPicture, matrix: matrixPicture, tree: treePicture, balance: balancePicture, timeline: timelinePicture,
  traffic: trafficPicture, strategies: strategiesPicture, lines: linesPicture,
};

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const sections = data.map((entry) => {
    const colours = entry.ranks ? rankColours(entry.ranks, entry.perNode) : [];
    const section = { data: entry, colours, highlight: -1, views: [] };
    section.lit = (rank) => section.highlight < 0 || section.highlight === rank;
    section.fill = (rank) => (section.lit(rank) ? colours[rank].fill : colours[rank].faint);
    return section;
  });
  for (const figure of document.querySelectorAll("figure[data-picture]")) {
    const section = sections[figure.dataset.section];
    section.views.push(makeView(figure, PICTURES[figure.dataset.picture](section, figure)));
  }
  for (const legend of document.querySelectorAll(".legend[data-section]")) wireLegend(legend, sections[legend.dataset.section]);
  for (const button of document.querySelectorAll("th .sort")) button.addEventListener("click", () => sortBy(button.closest("th")));
  wireTheme(() => sections.forEach((section) => section.views.forEach((view) => view.redraw())));
}

function wireLegend(legend, section) {
  const buttons = [...legend.querySelectorAll("button[data-rank]")];
  buttons.forEach((button, rank) => {
    button.style.background = section.colours[rank].fill;
    button.style.color = section.colours[rank].ink;
    button.addEventListener("click", () => {
      section.highlight = section.highlight === rank ? -1 : rank;
      buttons.forEach((b, r) => b.setAttribute("aria-pressed", `${section.highlight === r}`));
      section.views.forEach((view) => view.redraw());
    });
  });
}

function sortBy(header) {
  const table = header.closest("table"), column = [...header.parentNode.children].indexOf(header);
  const down = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentNode.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
  const order = (a, b) => {
    const [x, y] = [key(a), key(b)], numbers = [Number(x), Number(y)];
    return numbers.some(Number.isNaN) ? x.localeCompare(y) : numbers[0] - numbers[1];
  };
  const rows = [...table.tBodies[0].rows].sort(order);
  if (down) rows.reverse();
  table.tBodies[0].append(...rows);
}

function wireTheme(redraw) {
  const button = document.getElementById("theme"), system = window.matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
    redraw();
  };
  show(system.matches ? "dark" : "light");
  system.addEventListener("change", () => show(system.matches ? "dark" : "light"));
  button.addEventListener("click", () => show(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

start();
