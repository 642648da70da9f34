// Small charts without axes: the current number is shown beside each.

import { svg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;

function frame(...children) {
  const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true", class: "chart" };
  return svg("svg", box, ...children);
}

// A line over time, newest at the right. draw(values): null is a gap; `most` fixes the top.
export function sparkline(slots) {
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  const draw = (values, most) => {
    const top = Math.max(most ?? 0, ...values.filter((v) => v !== null)) || 1;
    const x = (i) => WIDTH - ((values.length - 1 - i) * WIDTH) / (slots - 1);
    const y = (v) => HEIGHT - 1.5 - (v / top) * (HEIGHT - 4);
    const points = values.flatMap((v, i) => (v === null ? [] : [[x(i), y(v)]]));
    const path = points.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L");
    line.setAttribute("d", points.length > 1 ? `M${path}` : "");
    const ends = points.length > 1 ? [points[0][0], points.at(-1)[0]].map((a) => a.toFixed(1)) : null;
    area.setAttribute("d", ends ? `M${ends[0]} ${HEIGHT}L${path}L${ends[1]} ${HEIGHT}Z` : "");
  };
  return { element: frame(area, line), draw };
}

// Bars side by side. draw(values, names, strong): the index `strong` is highlighted; names are shown on hover.
export function bars() {
  const element = frame();
  const draw = (values, names, strong) => {
    const top = Math.max(...values, 0) || 1;
    const step = WIDTH / Math.max(values.length, 1);
    element.replaceChildren(
      ...values.map((v, i) => {
        const height = v ? Math.max((v / top) * (HEIGHT - 2), 1.5) : 0.75;
        const kind = !v ? "none" : i === strong ? "strong" : "bar";
        const place = { x: (i + 0.14) * step, y: HEIGHT - height, width: step * 0.72, height };
        return svg("rect", { class: kind, ...place }, svg("title", {}, names[i]));
      }),
    );
  };
  return { element, draw };
}
