// Draws the figures of the page when they come into view, in the colours of the page, and again when those change.
"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const figures = [...document.querySelectorAll(".figure")];
  const config = { responsive: true, displaylogo: false, scrollZoom: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], toImageButtonOptions: { format: "svg" } };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // A string that starts with "--" names a colour of the style sheet.
  const inColor = (value) => {
    if (typeof value === "string") return value.startsWith("--") ? color(value) : value;
    if (Array.isArray(value)) return typeof value[0] === "number" && typeof value[1] !== "string" ? value : value.map(inColor);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, inColor(v)]));
    return value;
  };
  const merge = (low, high) => {
    const out = { ...low };
    for (const [key, value] of Object.entries(high)) {
      const both = value && low[key] && typeof value === "object" && typeof low[key] === "object" && !Array.isArray(value);
      out[key] = both ? merge(low[key], value) : value;
    }
    return out;
  };
  const axis = { gridcolor: "--grid", linecolor: "--line", zerolinecolor: "--line", automargin: true, fixedrange: false,
    title: { font: { size: 13, color: "--soft" }, standoff: 8 } };
  const base = () => ({ paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 8, t: 8, b: 8 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "--ink" }, hovermode: "closest",
    hoverlabel: { align: "left", bgcolor: "--panel", bordercolor: "--line", font: { color: "--ink", size: 13 } },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", xanchor: "left", traceorder: "normal", font: { color: "--soft" } },
    dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom", xaxis: axis, yaxis: axis });

  // As tracekern/formatting.py says it.
  const duration = (ns) => {
    const [unit, size] = [["s", 1e9], ["ms", 1e6], ["us", 1e3], ["ns", 1]].find(([, s]) => Math.abs(ns) >= 0.9995 * s) || ["ns", 1];
    const digits = unit === "ns" || Math.abs(ns / size) >= 99.95 ? 0 : Math.abs(ns / size) >= 9.995 ? 1 : 2;
    return `${(ns / size).toFixed(digits)} ${unit}`;
  };

  // One filled path for each class: thousands of rectangles stay fast. Points without a mark carry the hover texts.
  const gantt = (spec, width) => {
    const { row, kind, start, duration: length, detail } = spec.columns;
    const end = start.reduce((most, value, i) => Math.max(most, value + length[i]), 1);
    const [unit, size] = [["ms", 1e6], ["us", 1e3], ["ns", 1]].find(([, s]) => end >= 2 * s) || ["ns", 1];
    const paths = new Map();
    const points = { x: [], y: [], text: [] };
    row.forEach((r, i) => {
      const group = spec.kinds[kind[i]][1];
      if (!paths.has(group)) paths.set(group, { x: [], y: [] });
      const half = group === "launch" ? 0.46 : 0.38;
      const [a, b] = [start[i] / size, (start[i] + length[i]) / size];
      paths.get(group).x.push(a, b, b, a, a, null);
      paths.get(group).y.push(r - half, r - half, r + half, r + half, r - half, null);
      points.x.push((a + b) / 2);
      points.y.push(r);
      points.text.push(`<b>${spec.kinds[kind[i]][0]}</b>  ${duration(length[i])}<br>${detail[i] ? detail[i] + "<br>" : ""}` +
        `${group === "launch" ? "" : `rank ${spec.ranks[r]} `}${spec.rows[r]}<br>at ${duration(start[i])}`);
    });
    const order = ["launch", "work", "signal", "sync", "wait"].filter((name) => paths.has(name));
    const data = order.map((name) => ({ ...paths.get(name), type: "scatter", mode: "lines", fill: "toself", hoverinfo: "skip",
      name: name === "launch" ? "kernel" : name, fillcolor: `--${name}`, line: { width: 0.5, color: `--${name}` } }));
    data.push({ ...points, type: "scatter", mode: "markers", hoverinfo: "text", showlegend: false, marker: { size: 8, opacity: 0 } });
    const labels = width < 600 ? spec.shortRows : spec.rows;
    const room = Math.max(...labels.map((label) => label.length)) * 6.6 + 12;
    return { data, layout: { margin: { l: room, b: 40, t: 30 }, hoverdistance: 12,
      xaxis: { title: { text: `${unit} from the start of the iteration` }, zeroline: false },
      yaxis: { automargin: false, range: [labels.length - 0.4, -0.6], tickvals: labels.map((_, i) => i), ticktext: labels,
        tickfont: { size: 11 }, showgrid: false, zeroline: false } } };
  };

  const draw = (element) => {
    const spec = specs[Number(element.dataset.figure)];
    const { data, layout } = spec.kind === "gantt" ? gantt(spec, element.clientWidth) : spec;
    const narrow = element.clientWidth < 600 ? { font: { size: 11 }, ...(layout.narrow || {}) } : {};
    const { bare, square, taller, ...changes } = narrow;
    element.dataset.height ||= parseInt(element.style.height, 10);
    element.style.height = `${square ? element.clientWidth + 40 : Number(element.dataset.height) + (taller || 0)}px`;
    const shown = bare ? data.map(({ texttemplate, ...trace }) => trace) : data;
    const whole = merge(merge(base(), layout), changes);
    delete whole.narrow;
    for (const key of Object.keys(whole)) if (/^[xy]axis/.test(key)) whole[key] = merge(axis, whole[key]);
    element.dataset.drawn = "yes";
    return Plotly.react(element, inColor(shown), inColor(whole), config);
  };
  const redraw = () => figures.filter((element) => element.dataset.drawn && element.clientWidth).forEach(draw);
  const seen = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
    seen.unobserve(entry.target);
    draw(entry.target);
  }), { rootMargin: "600px" });
  figures.forEach((element) => seen.observe(element));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => figures.filter((element) => element.clientWidth).forEach(draw));

  document.querySelectorAll(".choice").forEach((choice) => {
    const buttons = [...choice.querySelectorAll(".buttons button")];
    const panes = [...choice.querySelectorAll(".pane")];
    buttons.forEach((button, place) => button.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      panes.forEach((pane, i) => { pane.hidden = i !== place; });
    }));
  });
  document.querySelectorAll(".command button").forEach((button) => button.addEventListener("click", () => {
    const text = button.parentElement.querySelector("code").textContent;
    navigator.clipboard.writeText(text).then(() => { button.textContent = "copied"; }, () => { button.textContent = "select it"; });
  }));
})();
