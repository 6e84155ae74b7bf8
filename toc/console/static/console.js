"use strict";
// Draws each .picture from its data-* attributes: bars from data-start on, one for each data-step seconds. What is
// above data-limit has a colour of its own. The numbers stand in a table beside it, too.
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
    if (drawn.has(element)) {
      drawn.get(element).setData(data(element));
      return;
    }
    const axis = () => ({stroke: colour("--quiet"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}});
    const bars = uPlot.paths.bars({size: [0.8, 60]});
    const series = (label, name) => ({label, paths: bars, fill: colour(name), width: 0, points: {show: false}});
    const beyond = element.dataset.limit ? "beyond the measured rate" : "";
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
    new ResizeObserver(() => plot.setSize({width: element.clientWidth, height: 180})).observe(element);
  };

  const all = () => { if (window.uPlot) document.querySelectorAll(".picture").forEach(draw); };
  document.addEventListener("htmx:after:swap", all);
  all();
})();
