// Draws the figures of the page. Their data are in the page as JSON; colours are names of the style sheet's.
"use strict";
(async () => {
  // Base 85 of what zlib compressed: see _packed in frame.py.
  const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;[=]?@^_.{|}~";
  const VALUES = Object.fromEntries([...ALPHABET].map((character, value) => [character.charCodeAt(0), value]));

  async function unpacked(id) {
    const text = document.getElementById(id).textContent;
    const padding = (5 - (text.length % 5)) % 5;
    const bytes = new DataView(new ArrayBuffer(((text.length + padding) / 5) * 4));
    for (let at = 0; at < text.length; at += 5) {
      let number = 0;
      for (let place = at; place < at + 5; place += 1)
        number = number * 85 + (place < text.length ? VALUES[text.charCodeAt(place)] : 84);
      bytes.setUint32((at / 5) * 4, number);
    }
    const packed = new Blob([bytes.buffer.slice(0, bytes.byteLength - padding)]);
    return new Response(packed.stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }

  const figures = JSON.parse(await unpacked("figures"));
  (0, eval)(await unpacked("plotly")); // indirect: it runs as a script of the page, not inside this function
  const narrow = () => window.innerWidth < 760;

  function coloured(value) {
    if (typeof value === "string" && value.startsWith("@"))
      return getComputedStyle(document.documentElement).getPropertyValue("--" + value.slice(1)).trim();
    if (Array.isArray(value)) return value.every((item) => typeof item === "number") ? value : value.map(coloured);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item)]));
    return value;
  }

  function layoutOf(figure) {
    const small = narrow();
    const axis = { gridcolor: "@grid", zeroline: false, linecolor: "@line", tickcolor: "@line", automargin: true };
    const own = figure.layout;
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size: small ? 11 : 13, color: "@muted" },
      hoverlabel: { bgcolor: "@panel", bordercolor: "@line", font: { color: "@ink", size: 13 }, align: "left" },
      hovermode: "closest", dragmode: small ? false : "zoom",
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", font: { color: "@ink" } },
      ...own, margin: { l: 8, r: small ? 8 : 16, t: 24, b: 8, ...own.margin }, xaxis: { ...axis, ...own.xaxis }, yaxis: { ...axis, ...own.yaxis },
    };
    for (const [path, value] of small ? Object.entries(figure.narrow || {}) : []) {
      const keys = path.split(".");
      let place = layout;
      for (const key of keys.slice(0, -1)) place = place[key] = { ...place[key] };
      place[keys.at(-1)] = value;
    }
    return coloured(layout);
  }

  function draw(element) {
    const stage = document.getElementById("stage");
    const choice = figures[element.dataset.figure];
    const figure = Array.isArray(choice) ? choice[stage ? stage.selectedIndex : Number(element.dataset.stage || 0)] : choice;
    const config = { displayModeBar: false, responsive: true, scrollZoom: false };
    const replaced = (narrow() && figure.narrow_data) || {};
    const data = figure.data.map((trace) => ({ ...trace, ...replaced[trace.name] }));
    return Plotly.react(element, coloured(data), layoutOf(figure), config);
  }

  const charts = [...document.querySelectorAll(".chart")];
  const drawAll = () => charts.forEach(draw);
  Promise.all(charts.map(draw)).then(() => {
    // The memory and the lanes below it are one picture: what is zoomed in one is zoomed in the other.
    const timed = charts.filter((element) => ["memory", "lanes"].includes(element.dataset.figure));
    let passing = false;
    for (const element of timed)
      element.on("plotly_relayout", (change) => {
        const known = change["xaxis.range[0]"] !== undefined || change["xaxis.autorange"];
        if (passing || !known) return;
        passing = true;
        const range = element.layout.xaxis.range.slice();
        const others = timed.filter((other) => other !== element);
        Promise.all(others.map((other) => Plotly.relayout(other, { "xaxis.range": range }))).then(() => (passing = false));
      });
    document.body.dataset.drawn = "yes";
  });

  document.getElementById("stage")?.addEventListener("change", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("(max-width: 759px)").addEventListener("change", drawAll);
})();
