// Show the values under the pointer. They are read from the lines that are drawn, so no data is in the page twice.
"use strict";
const WIDTH = 2000, HEIGHT = 1000;  // of the viewport that holds the data
for (const svg of document.querySelectorAll("svg[data-y]")) {
  const [y0, y1, isLog, top, bottom] = svg.dataset.y.split(" ").map(Number);
  const figure = svg.closest("figure");
  let guide, readout;
  const format = (value) => { const size = Math.abs(value);
    return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(3)
      : size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))); };
  const formatY = (y) => { const fraction = 1 - y / HEIGHT;
    return format(isLog ? y0 * Math.pow(y1 / y0, fraction) : y0 + fraction * (y1 - y0)); };
  const formatX = (x, view) => { const [x0, x1] = view.dataset.range.split(" ").map(Number);
    const value = x0 + x / WIDTH * (x1 - x0);
    return format("integer" in view.dataset ? Math.round(value) : value); };
  const readLines = (view) => { const lines = new Map();
    for (const line of view.querySelectorAll("polyline.line")) {
      const name = line.dataset.name || "";
      const points = line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));
      if (!lines.has(name)) lines.set(name, { name, color: line.getAttribute("class").match(/c[0-9]/)[0], points: [] });
      lines.get(name).points.push(...points);
    }
    return [...lines.values()]; };
  const nearest = (points, x) => { let a = 0, b = points.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (points[m][0] < x) a = m; else b = m; }
    return Math.abs(points[a][0] - x) < Math.abs(points[b][0] - x) ? points[a] : points[b]; };
  const leave = () => { if (readout) { readout.remove(); guide.remove(); readout = guide = undefined; } };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const view = [...svg.querySelectorAll("g[data-range]")].find((group) => getComputedStyle(group).display !== "none");
    view.lines = view.lines || readLines(view);
    const frame = svg.getBoundingClientRect();
    const at = (event.clientX - frame.left) / frame.width * WIDTH, y = event.clientY - frame.top;
    if (!view.lines.length || at < -10 || at > WIDTH + 10 || y < top - 5 || y > bottom + 5) { leave(); return; }
    if (!readout) {
      readout = document.createElement("div"); readout.className = "readout"; figure.append(readout);
      guide = document.createElementNS(svg.namespaceURI, "line"); guide.setAttribute("class", "guide"); svg.append(guide);
    }
    const shown = view.lines.map((line) => [line, nearest(line.points, at)]);
    const x = shown.reduce((best, [, point]) => Math.abs(point[0] - at) < Math.abs(best - at) ? point[0] : best, Infinity);
    const percent = x / WIDTH * 100 + "%";
    for (const [name, value] of [["x1", percent], ["x2", percent], ["y1", top], ["y2", bottom]]) guide.setAttribute(name, value);
    const head = document.createElement("div"); head.textContent = view.dataset.x + " " + formatX(x, view);
    readout.replaceChildren(head);
    for (const [line, point] of shown) {
      const row = document.createElement("div"), chip = document.createElement("span");
      chip.className = "chip " + line.color;
      row.append(chip, (line.name ? line.name + ": " : "") + formatY(point[1])); readout.append(row);
    }
    const card = figure.getBoundingClientRect();
    const left = event.clientX - card.left, isRight = left > card.width / 2;
    readout.style.left = isRight ? "" : (left + 14) + "px";
    readout.style.right = isRight ? (card.width - left + 14) + "px" : "";
    readout.style.top = Math.max(4, event.clientY - card.top - 20) + "px";
  });
}
