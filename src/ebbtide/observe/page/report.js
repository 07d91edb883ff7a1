"use strict";
// The numbers under the pointer. Charts are drawn without this script; it only reads what stands beside them.
const tip = document.getElementById("tip");

const units = {
  bytes: v => scaled(v, [[2 ** 40, " TiB"], [2 ** 30, " GiB"], [2 ** 20, " MiB"], [1024, " KiB"]], " B"),
  s: v => v >= 1 ? v.toFixed(2) + " s" : (v * 1000).toPrecision(3) + " ms",
  ratio: v => (100 * v).toFixed(1) + " %",
  tokens: v => plain(v),
  "tokens/s": v => scaled(v, [[1e6, "M"], [1e3, "k"]], "") + "/s",
};
const scaled = (v, sizes, rest) => {
  const [size, name] = sizes.find(([size]) => Math.abs(v) >= size) || [1, rest];
  return (v / size).toFixed(size === 1 ? 0 : 1) + name;
};
const plain = v => {
  const size = Math.abs(v);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? v.toExponential(2) : String(+v.toPrecision(4));
};

const nearest = (steps, x) => {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - x) <= Math.abs(steps[high] - x) ? low : high;
};

for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart), [left, right] = chart.plot, [first, last] = chart.x;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", 10);
  cursor.setAttribute("y2", 206);
  const hide = () => { tip.hidden = true; cursor.remove(); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / box.width * width;
    if (x < left - 6 || x > right + 6) return hide();
    const wanted = first + (x - left) / (right - left) * (last - first);
    const reach = (last - first) / 40;
    const longest = chart.series.reduce((a, b) => b.steps.length > a.steps.length ? b : a);
    const step = longest.steps[nearest(longest.steps, wanted)];
    const rows = chart.series.flatMap(series => {
      const at = nearest(series.steps, step);
      const near = Math.abs(series.steps[at] - step) <= reach && series.values[at] !== null;
      return near ? [[series, series.values[at]]] : [];
    });
    tip.replaceChildren(Object.assign(document.createElement("b"), {textContent: "step " + plain(step)}));
    for (const [series, value] of rows) {
      const row = document.createElement("span");
      row.className = "c" + series.colour;
      row.append(document.createElement("i"), series.name);
      row.append(Object.assign(document.createElement("em"), {textContent: (units[chart.unit] || plain)(value)}));
      tip.append(row);
    }
    const at = left + (step - first) / (last - first) * (right - left);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    svg.append(cursor);
    tip.hidden = false;
    const room = event.clientX + 18 + tip.offsetWidth > innerWidth;
    tip.style.left = (room ? event.clientX - tip.offsetWidth - 14 : event.clientX + 16) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
}
