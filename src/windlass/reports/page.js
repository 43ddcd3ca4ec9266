// The report's page: what each chart shows, and the controls. #data has the charts as JSON (`payload` in page.py).
// Text goes through textContent only, so generated text or a recipe cannot become a part of the page.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const several = data.runs.length > 1;
const find = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

const state = { axis: "step", logX: false, logY: data.charts.some((chart) => chart.id === "loss" && chart.y.log), smoothing: 0, skip: 0, hidden: new Set(), zoom: null };

// Smoothing reaches 1/80 of the longest curve, so it evens out noise and keeps the shape.
const longest = Math.max(80, ...data.charts.flatMap((chart) => chart.series).filter((one) => one.smooth).map((one) => one.y.length));
state.smoothing = Math.min(0.98, Number((1 - 80 / longest).toFixed(2)));

// ---------------------------------------------------------------- axes

/** Colour, pattern and shape of a line. */
const look = (one) => ({ color: one.grey ? "var(--grey)" : `var(--c${one.colour})`, dash: DASHES[one.dash], shape: one.dash, grey: one.grey });

const labelLook = (run) => look({ colour: run % 8, dash: run % 5, grey: false });

const TIMES = [[3 / 60, 3600, "seconds"], [3, 60, "minutes"], [96, 1, "hours"], [Infinity, 1 / 24, "days"]];
const timeUnit = (high) => TIMES.find(([limit]) => high < limit);

const AXES = {
  step: { label: () => "steps", text: (v) => `step ${valueText(v)}` },
  tokens: { label: () => "tokens", text: (v) => `${valueText(v)} tokens` },
  hours: {
    label: (high) => `${timeUnit(high)[2]} of training`,
    text: (v) => `${Number((v * timeUnit(v)[1]).toPrecision(4))} ${timeUnit(v)[2]}`,
  },
};

/** Whether the chart has its own axis, as in a study, instead of the axis that all runs share. */
const ownAxis = (chart) => chart.x.values.length > 0;

function xAxis(chart) {
  const { label, values, names, log } = chart.x;
  if (ownAxis(chart)) {
    const ticks = () => values.map((value, i) => ({ value, text: names[i] }));
    const text = (v) => `${label} ${names[nearest(values, v)]}`;
    const [low, high] = [values[0], values.at(-1)];
    const extent = log ? [low / (high / low) ** 0.06, high * (high / low) ** 0.06] : [1.08 * low - 0.08 * high, 1.08 * high - 0.08 * low];
    return { log, label: () => "", text, ticks, extent };
  }
  const ticks = (low, high, count) => {
    const factor = state.axis === "hours" ? timeUnit(high)[1] : 1;
    return (state.logX ? logTicks : linearTicks)(low * factor, high * factor, count).map((t) => ({ value: t.value / factor, text: t.text }));
  };
  return { log: state.logX, ...AXES[state.axis], ticks, domain: state.zoom, extent: extent() };
}

/** From the first to the last point of all charts, which share one axis. */
function extent() {
  let [low, high] = [Infinity, -Infinity];
  for (const one of data.charts.filter((chart) => !ownAxis(chart)).flatMap((chart) => chart.series)) {
    if (state.hidden.has(one.run)) continue;
    const track = data.points[one.at];
    track[state.axis].forEach((x, place) => {
      if (x === null || track.step[place] < state.skip || (state.logX && x <= 0)) return;
      [low, high] = [Math.min(low, x), Math.max(high, x)];
    });
  }
  if (low === high) [low, high] = [0.9 * low, 1.1 * low || 1];
  return low < high ? [low, high] : null;
}

// ---------------------------------------------------------------- curves

function decayed(values, weight) {
  let [total, norm] = [0, 0];
  return values.map((value) => {
    [total, norm] = [weight * total + (value ?? 0), weight * norm + (value === null ? 0 : 1)];
    return [total, norm];
  });
}

/** Each value as the mean of all, the one n places away weighted by weight^n. */
function smooth(values, weight) {
  const ahead = decayed(values, weight);
  const back = decayed([...values].reverse(), weight).reverse();
  return values.map((value, i) => (value === null ? null : (ahead[i][0] + back[i][0] - value) / (ahead[i][1] + back[i][1] - 1)));
}

/** The lines of a chart now: without hidden runs and omitted steps, and smoothed if they are noisy. */
function seriesOf(chart) {
  return chart.series.filter((one) => !state.hidden.has(one.run)).flatMap((one) => {
    const track = data.points[one.at];
    const xs = ownAxis(chart) ? track.x : track[state.axis];
    const places = xs.flatMap((x, i) => (x !== null && (ownAxis(chart) || track.step[i] >= state.skip) ? [i] : []));
    const [x, y] = [xs, one.y].map((values) => places.map((i) => values[i]));
    const drawn = {
      x, y, name: one.name, quiet: !one.name, points: one.points, pointsOnly: one.points === "only",
      ...look(one), width: one.grey ? 1.1 : one.minor ? 1.3 : null,
      band: one.band && one.band.map((values) => places.map((i) => values[i])), bad: one.bad ? x.filter((_, i) => y[i] === null) : [],
    };
    if (!one.smooth || state.smoothing === 0 || !x.length) return x.length ? [drawn] : [];
    const smoothed = { ...drawn, y: smooth(y, state.smoothing) };
    return [{ ...drawn, faint: true, quiet: true, dash: null, bad: [] }, smoothed];
  });
}

function restartsOf(chart) {
  if (ownAxis(chart)) return [];
  return data.runs.flatMap((run, i) => (state.hidden.has(i) ? [] : run.restarts.map((restart) => ({
    x: restart[state.axis], text: restart.text, what: several ? "" : restart.what,
  })))).filter((restart) => restart.x !== null);
}

// ---------------------------------------------------------------- drawing

const tip = html("div", "tip", null, document.body);
tip.setAttribute("aria-hidden", "true"); // the slider of the chart says the same
tip.hidden = true;

function hover(x, source) {
  for (const { chart, spec } of drawn) if (chart !== source && !ownAxis(spec) && !ownAxis(source.spec)) chart.point(x);
  const read = source.point(x);
  tip.hidden = !read;
  if (!read) return;
  tip.replaceChildren();
  html("div", "tip-x", source.model.x.text(read.x), tip);
  for (const row of read.rows.slice(0, 14)) {
    const line = html("div", "tip-row", null, tip);
    key(row.one, line);
    html("span", "", row.name, line);
    html("b", "", valueText(row.value), line);
  }
  if (read.rows.length > 14) html("div", "tip-x", `and ${read.rows.length - 14} more`, tip);
  const box = source.host.getBoundingClientRect();
  const left = box.left + read.at;
  const flip = left + tip.offsetWidth + 24 > root.clientWidth;
  tip.style.left = `${Math.max(4, window.scrollX + (flip ? left - tip.offsetWidth - 14 : left + 14))}px`;
  tip.style.top = `${window.scrollY + box.top + 8}px`;
}

function zoom(range) {
  state.zoom = range;
  update();
}

function legend(figure, series, spec) {
  const shared = several && !ownAxis(spec); // then a run's points have its look, and a legend names the run once
  const names = series.filter((s) => !s.quiet && !(shared && s.pointsOnly));
  const host = find(".legend", figure);
  host.replaceChildren();
  if (names.length < 2) return;
  for (const one of names) {
    const item = html("span", "key", null, host);
    key(one, item);
    html("span", "", one.name, item);
  }
}

/** What scrolls sideways can be scrolled with the keyboard. */
function reachable() {
  for (const box of all(".scroll")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

const drawn = all("figure[data-chart]").map((figure) => {
  const spec = data.charts.find((chart) => chart.id === figure.dataset.chart);
  const title = find("h3", figure).textContent;
  const chart = new Chart(find(".plot", figure), { hover, zoom: ownAxis(spec) ? () => {} : zoom, title });
  chart.spec = spec;
  return { figure, spec, chart };
});

function update() {
  const narrow = root.clientWidth < 600;
  for (const { figure, spec, chart } of drawn) {
    const series = seriesOf(spec);
    const tall = spec.id === "loss";
    const height = tall ? (narrow ? 270 : 390) : narrow ? 180 : 210;
    chart.draw({ series, restarts: restartsOf(spec), x: xAxis(spec), y: { log: tall ? state.logY : spec.y.log, zero: spec.y.zero }, height });
    legend(figure, series, spec);
  }
  all(".chip").forEach((chip, run) => {
    chip.setAttribute("aria-pressed", String(!state.hidden.has(run)));
    find("i", chip).replaceChildren();
    key(labelLook(run), find("i", chip));
  });
  reachable();
  if (!find("#skip")) return; // a run without a step has no controls
  for (const button of all("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === state.axis));
  for (const button of all("[data-toggle]")) button.setAttribute("aria-pressed", String(state[button.dataset.toggle]));
  find("#reset").disabled = state.zoom === null;
  if (find("#show-all")) find("#show-all").disabled = state.hidden.size === 0;
  find("#smoothing-value").textContent = state.smoothing === 0 ? "off" : state.smoothing.toFixed(2);
}

// ---------------------------------------------------------------- controls

function bindControls() {
  if (!find("#skip")) return;
  for (const button of all("[data-axis]")) button.addEventListener("click", () => {
    state.axis = button.dataset.axis;
    zoom(null);
  });
  for (const button of all("[data-toggle]")) button.addEventListener("click", () => {
    state[button.dataset.toggle] = !state[button.dataset.toggle];
    zoom(button.dataset.toggle === "logX" ? null : state.zoom);
  });
  find("#smoothing").value = state.smoothing;
  find("#smoothing").addEventListener("input", (event) => {
    state.smoothing = Number(event.target.value);
    update();
  });
  find("#skip").addEventListener("input", (event) => {
    state.skip = Math.max(0, Math.floor(Number(event.target.value) || 0));
    zoom(null);
  });
  find("#reset").addEventListener("click", () => zoom(null));
  all(".chip").forEach((chip, run) => {
    chip.addEventListener("click", () => {
      if (!state.hidden.delete(run)) state.hidden.add(run);
      update();
    });
  });
  find("#show-all")?.addEventListener("click", () => {
    state.hidden.clear();
    update();
  });
}

function bindTables() {
  for (const head of all("table.sortable th button")) head.addEventListener("click", () => {
    const column = head.parentElement.cellIndex;
    const rising = head.parentElement.getAttribute("aria-sort") !== "ascending";
    for (const other of all("th", head.closest("tr"))) other.removeAttribute("aria-sort");
    head.parentElement.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const body = find("tbody", head.closest("table"));
    const order = (a, b) => {
      const [x, y] = [a, b].map((row) => row.cells[column].dataset.value);
      if (x === "" || y === "") return x === y ? 0 : x === "" ? 1 : -1; // what is missing comes last, either way
      const difference = Number.isNaN(Number(x) + Number(y)) ? x.localeCompare(y, "en") : Number(x) - Number(y);
      return difference * (rising ? 1 : -1);
    };
    body.append(...[...body.rows].sort(order));
  });
}

bindControls();
bindTables();
update();
let width = root.clientWidth;
addEventListener("resize", () => {
  if (width === root.clientWidth) return;
  width = root.clientWidth;
  update();
});
root.dataset.ready = "true";
