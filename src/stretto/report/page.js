// Point at a chart and it says what is there. It reads the lines that are drawn: nothing is in the page twice.
"use strict";
for (const svg of document.querySelectorAll("svg.lines")) {
  const [left, top, right, bottom, x0, x1, y0, y1, isLog] = svg.dataset.plot.split(" ").map(Number);
  const isWhole = "whole" in svg.dataset;
  const figure = svg.closest("figure");
  let lines, guide, box;
  const xOf = (px) => x0 + (px - left) / (right - left) * (x1 - x0);
  const yOf = (py) => { const part = (bottom - py) / (bottom - top);
    return isLog ? y0 * Math.pow(y1 / y0, part) : y0 + part * (y1 - y0); };
  const short = (v) => { const a = Math.abs(v);
    return a && (a < 1e-3 || a >= 1e7) ? v.toExponential(3) : a >= 1000 ? Math.round(v).toLocaleString("en")
      : String(Number(v.toPrecision(4))); };
  const read = () => { const found = new Map();
    for (const line of svg.querySelectorAll("polyline.line")) {
      const name = line.dataset.name || "";
      const points = line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));
      if (!found.has(name)) found.set(name, { name, color: line.getAttribute("class").match(/c[0-9]/)[0], points: [] });
      found.get(name).points.push(...points);
    }
    return [...found.values()]; };
  const nearest = (points, x) => { let a = 0, b = points.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (points[m][0] < x) a = m; else b = m; }
    return Math.abs(points[a][0] - x) < Math.abs(points[b][0] - x) ? points[a] : points[b]; };
  const leave = () => { if (box) { box.remove(); guide.remove(); box = guide = undefined; } };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    lines = lines || read();
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    if (!lines.length || at.x < left - 5 || at.x > right + 5 || at.y < top - 5 || at.y > bottom + 5) { leave(); return; }
    if (!box) {
      box = document.createElement("div"); box.className = "readout"; figure.append(box);
      guide = document.createElementNS(svg.namespaceURI, "line"); guide.setAttribute("class", "guide"); svg.append(guide);
    }
    const found = lines.map((line) => [line, nearest(line.points, at.x)]);
    const px = found.reduce((best, [, point]) => Math.abs(point[0] - at.x) < Math.abs(best - at.x) ? point[0] : best, Infinity);
    for (const [name, value] of [["x1", px], ["x2", px], ["y1", top], ["y2", bottom]]) guide.setAttribute(name, value);
    box.replaceChildren();
    const head = document.createElement("div"); head.textContent = svg.dataset.x + " " + short(isWhole ? Math.round(xOf(px)) : xOf(px)); box.append(head);
    for (const [line, point] of found) {
      const row = document.createElement("div"), chip = document.createElement("span");
      chip.className = "chip " + line.color;
      row.append(chip, (line.name ? line.name + "  " : "") + short(yOf(point[1]))); box.append(row);
    }
    const room = figure.getBoundingClientRect();
    const x = event.clientX - room.left, isRight = x > room.width / 2;
    box.style.left = isRight ? "" : (x + 14) + "px";
    box.style.right = isRight ? (room.width - x + 14) + "px" : "";
    box.style.top = Math.max(4, event.clientY - room.top - 20) + "px";
  });
}
