"use strict";
// Draws each .picture from its data-* attributes: bars from data-start on, one for each data-step seconds. What is
// above data-limit has a colour of its own. The numbers stand in a table beside it, too. Sends a form once only.
(() => {
  const drawn = new WeakMap();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const label = (at, step) => {
    const iso = new Date(at * 1e3).toISOString();
    return step < 3600 ? iso.slice(11, 16) : iso.slice(5, 16).replace("T", " ");
  };

  const data = (element) => {
    const {start, step, limit} = element.dataset;
    const values = element.dataset.values.split(",").map(Number);
    const most = limit ? Number(limit) : Infinity;
    return [
      values.map((_, i) => Number(start) + i * Number(step)),
      values.map((value) => (value > most ? null : value)),
      values.map((value) => (value > most ? value : null)),
    ];
  };

  const draw = (element) => {
    const old = drawn.get(element), beyond = element.dataset.limit ? "beyond the measured rate" : "";
    if (old && old.series.length === (beyond ? 3 : 2)) {
      old.setData(data(element));
      return;
    }
    if (old) old.destroy();
    const axis = () => ({stroke: colour("--quiet"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}});
    const bars = uPlot.paths.bars({size: [0.8, 60]});
    const series = (label, name) => ({label, paths: bars, fill: colour(name), width: 0, points: {show: false}});
    const plot = new uPlot({
      width: element.clientWidth, height: 180,
      tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "Etc/UTC"),
      scales: {y: {range: (_, low, high) => [0, Math.max(high * 1.1, 1)]}},
      axes: [{...axis(), space: 90, values: (_, at) => at.map((one) => label(one, element.dataset.step))}, {...axis(), size: 64}],
      series: [{value: "{YYYY}-{MM}-{DD} {HH}:{mm}Z"}, series(element.dataset.unit, "--link"), series(beyond, "--bad")],
      legend: {show: true},
    }, data(element), element);
    if (!beyond) plot.delSeries(2);
    drawn.set(element, plot);
    if (old) return;
    new ResizeObserver(() => drawn.get(element).setSize({width: element.clientWidth, height: 180})).observe(element);
  };

  // A square for each minute and bound: the more, the stronger; what was later than a second in another colour.
  const heat = (element) => {
    const rows = element.dataset.minutes.split(";").map((row) => row.split(",").map(Number));
    const bounds = element.dataset.bounds.split(",").map(Number);
    const left = 56, height = 12, width = element.clientWidth, scale = window.devicePixelRatio || 1;
    const canvas = element.querySelector("canvas") || element.appendChild(document.createElement("canvas"));
    const tall = (bounds.length + 1) * height + 18;
    canvas.width = width * scale;
    canvas.height = tall * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${tall}px`;
    const to = canvas.getContext("2d");
    to.scale(scale, scale);
    to.font = "11px system-ui, sans-serif";
    const most = Math.max(1, ...rows.flat());
    const wide = (width - left) / rows.length;
    rows.forEach((row, i) => row.forEach((count, n) => {
      to.globalAlpha = count ? 0.25 + 0.75 * Math.log(1 + count) / Math.log(1 + most) : 0.06;
      to.fillStyle = colour(count && n > 0 && bounds[n - 1] >= 1 ? "--bad" : "--link");
      to.fillRect(left + i * wide, (bounds.length - n) * height, Math.max(wide - 1, 1), height - 1);
    }));
    to.globalAlpha = 1;
    to.fillStyle = colour("--quiet");
    bounds.forEach((bound, n) => {
      const name = bound < 1 ? `${bound * 1e3} ms` : bound < 60 ? `${bound} s` : `${bound / 60} min`;
      to.fillText(name, 0, (bounds.length - n) * height + height - 2);
    });
    for (let i = 0; i < rows.length; i += 10) {
      to.fillText(label(Number(element.dataset.start) + i * 60, 60), left + i * wide, tall - 3);
    }
    if (!drawn.has(element)) {
      drawn.set(element, canvas);
      new ResizeObserver(() => heat(element)).observe(element);
    }
  };

  const all = () => { 
    document.querySelectorAll(".heat").forEach(heat);
    if (window.uPlot) document.querySelectorAll(".picture:not(.heat)").forEach(draw);
  };
  document.addEventListener("htmx:after:swap", all);

  // How old a page is. One that should be brought up to date, and is not, says so.
  let heard = performance.now();
  addEventListener("htmx:sse:after:message", () => { heard = performance.now(); });
  const span = (size, unit, part, below, age) =>
    `${Math.floor(age / size)} ${unit}` + (age % size >= part ? ` ${Math.floor(age % size / part)} ${below}` : "");
  setInterval(() => {
    const shown = document.querySelector("[data-age]"), silent = (performance.now() - heard) / 1e3;
    if (!shown) return;
    const age = Math.round(Number(shown.dataset.age) + silent);
    const said = age < 60 ? `${age} s` : age < 3600 ? span(60, "min", 1, "s", age) : span(3600, "h", 60, "min", age);
    const stale = silent >= 9 && document.getElementById("live");
    shown.textContent = `Read ${said} ago${stale ? ", and not brought up to date since" : ""}.`;
  }, 1000);

  // A second click would make a second task. Whoever comes back to the page may send it again.
  let sent = new WeakSet();
  document.addEventListener("submit", (event) => {
    if (sent.has(event.target)) event.preventDefault();
    sent.add(event.target);
  });
  window.addEventListener("pageshow", () => { sent = new WeakSet(); });
  all();
})();
