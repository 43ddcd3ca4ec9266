// The report's page: what each chart shows, and the controls. The numbers stand in #data as JSON; text goes through
// textContent only, so that nothing that a model generated or a recipe says can become a part of the page.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const several = data.runs.length > 1;
const find = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

const state = { axis: "step", logX: false, logY: false, smoothing: data.smoothing, skip: 0, hidden: new Set(), zoom: null };

const DASHES = [null, "7 4", "2 3"];

// ---------------------------------------------------------------- colours and axes

function runColor(i) {
  const tone = data.runs[i].tone;
  if (tone === null || tone === undefined) return `var(--c${i % 8})`;
  const [from, to, share] = tone < 0.5 ? ["low", "middle", tone * 2] : ["middle", "high", tone * 2 - 1];
  return `color-mix(in oklab, var(--ramp-${to}) ${Math.round(share * 100)}%, var(--ramp-${from}))`;
}

function runDash(i) {
  return DASHES[(data.runs[i].dash ?? Math.floor(i / 8)) % 3];
}

const TIMES = [[3 / 60, 3600, "seconds"], [3, 60, "minutes"], [96, 1, "hours"], [Infinity, 1 / 24, "days"]];

function timeUnit(high) {
  return TIMES.find(([limit]) => high < limit);
}

const AXES = {
  step: { label: () => "steps", text: (v) => `step ${valueText(v)}` },
  tokens: { label: () => "tokens", text: (v) => `${valueText(v)} tokens` },
  hours: {
    label: (high) => `${timeUnit(high)[2]} of training`,
    text: (v) => {
      const [, factor, unit] = timeUnit(v);
      return `${Number((v * factor).toPrecision(4))} ${unit}`;
    },
  },
};

function xAxis(free) {
  if (free) {
    const named = (at) => free.names[nearest(free.values, at)];
    const ticks = () => free.values.map((value, i) => ({ value, text: free.names[i] }));
    return { log: free.log, label: () => "", text: (v) => `${free.label} ${named(v)}`, ticks, pad: true };
  }
  const axis = AXES[state.axis];
  const ticks = (low, high, count) => {
    const factor = state.axis === "hours" ? timeUnit(high)[1] : 1;
    return (state.logX ? logTicks : linearTicks)(low * factor, high * factor, count).map((t) => ({ value: t.value / factor, text: t.text }));
  };
  return { log: state.logX, label: axis.label, text: axis.text, ticks, domain: state.zoom, extent: extent() };
}

/** From the first to the last point that any chart shows: all share one axis, so that one lies under the other. */
function extent() {
  let [low, high] = [Infinity, -Infinity];
  data.runs.forEach((run, i) => {
    if (state.hidden.has(i)) return;
    for (const track of [run.train, ...Object.values(run.evals)]) {
      track[state.axis].forEach((x, place) => {
        if (x === null || track.step[place] < state.skip || (state.logX && x <= 0)) return;
        low = Math.min(low, x);
        high = Math.max(high, x);
      });
    }
  });
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

/** Each value as the mean of all, the one n places away weighted by weight^n: smooth, and without a lag. */
function smooth(values, weight) {
  const ahead = decayed(values, weight);
  const back = decayed([...values].reverse(), weight).reverse();
  return values.map((value, i) => (value === null ? null : (ahead[i][0] + back[i][0] - value) / (ahead[i][1] + back[i][1] - 1)));
}

/** The points of a track from the first step that is not left out; `columns` are arrays as long as the track. */
function cut(track, columns, scale = 1) {
  const xs = track[state.axis];
  const from = lowerBound(track.step, state.skip);
  const places = [];
  for (let i = from; i < xs.length; i++) if (xs[i] !== null) places.push(i);
  const pick = (values) => places.map((i) => (values[i] === null ? null : values[i] * scale));
  return { x: places.map((i) => xs[i]), ys: columns.map(pick) };
}

function noisy(track, column, chart, look) {
  const { x, ys: [y] } = cut(track, [track[column]], chart.scale);
  if (!chart.smooth || state.smoothing === 0) return [{ x, y, ...look }];
  return [
    { x, y, ...look, faint: true, quiet: true, bad: null },
    { x, y: smooth(y, state.smoothing), ...look },
  ];
}

function lossSeries(run, i) {
  const found = [];
  const name = (what) => (several ? `${run.label}, ${what}` : what);
  const color = several ? runColor(i) : "var(--c0)";
  const bad = run.bad.map((at) => at[state.axis]).filter((at) => at !== null);
  if (run.train.loss) found.push(...noisy(run.train, "loss", { smooth: true, scale: 1 }, { name: name("training"), color, dash: several ? runDash(i) : null, bad }));
  const track = run.evals.loss;
  if (track && track.loss) {
    const { x, ys: [y] } = cut(track, [track.loss]);
    found.push({ x, y, name: name("validation"), color: several ? color : "var(--c1)", points: true, pointsOnly: several });
  }
  for (const one of found) one.wild = run.wild;
  return found;
}

function rankSeries(run, i, chart) {
  const found = [];
  chart.curves.slice(0, several ? 1 : undefined).forEach((curve, place) => {
    const track = run.ranks[curve.column];
    if (!track) return;
    const dash = place ? "6 4" : null;
    const suffix = chart.curves.length > 1 && !several ? `, ${curve.name}` : "";
    if (several || track.many) {
      const { x, ys: [y, low, high] } = cut(track, [track.mean, track.low, track.high], chart.scale);
      const color = several ? runColor(i) : "var(--c0)";
      found.push({ x, y, band: place ? null : [low, high], name: several ? run.label : `mean${suffix}`, color, dash });
      if (several) return;
    }
    track.lines.forEach((line, number) => {
      const { x, ys: [y] } = cut(track, [line.values], chart.scale);
      found.push({ x, y, name: line.name + suffix, color: `var(--c${(number + (track.many ? 1 : 0)) % 8})`, dash, width: 1.3 });
    });
  });
  return found;
}

function seriesOf(chart) {
  if (chart.free) return chart.free.series;
  return data.runs.flatMap((run, i) => {
    if (state.hidden.has(i)) return [];
    if (chart.id === "loss") return lossSeries(run, i);
    if (chart.source === "ranks") return rankSeries(run, i, chart);
    const track = chart.source === "train" ? run.train : run.evals[chart.source.slice(5)];
    if (!track) return [];
    return chart.curves.slice(0, several ? 1 : undefined).flatMap((curve, place) => {
      if (!track[curve.column]) return [];
      const look = several
        ? { name: run.label, color: runColor(i), dash: runDash(i) }
        : { name: curve.name, color: `var(--c${place})`, width: curve.minor ? 1.3 : null };
      return noisy(track, curve.column, chart, { ...look, points: chart.source !== "train" });
    });
  });
}

function seamsOf(chart) {
  if (chart.free) return [];
  return data.runs.flatMap((run, i) => (state.hidden.has(i) ? [] : run.seams.map((seam) => ({
    x: seam[state.axis], label: seam.label, what: seam.what, color: several ? runColor(i) : null,
  })))).filter((seam) => seam.x !== null);
}

// ---------------------------------------------------------------- drawing

const tip = html("div", "tip", null, document.body);
tip.hidden = true;

function hover(x, source) {
  for (const one of drawn) if (one.chart !== source && !one.spec.free && !source.free) one.chart.point(x);
  const found = source.point(x);
  if (!found) {
    tip.hidden = true;
    return;
  }
  tip.replaceChildren();
  html("div", "tip-x", source.model.x.text(found.x), tip);
  for (const row of found.rows.slice(0, 14)) {
    const line = html("div", "tip-row", null, tip);
    html("i", "", null, line).style.background = row.color;
    html("span", "", row.name, line);
    html("b", "", valueText(row.value), line);
  }
  if (found.rows.length > 14) html("div", "tip-x", `and ${found.rows.length - 14} more`, tip);
  tip.hidden = false;
  const box = source.host.getBoundingClientRect();
  const left = box.left + found.at;
  const flip = left + tip.offsetWidth + 24 > root.clientWidth;
  tip.style.left = `${Math.max(4, window.scrollX + (flip ? left - tip.offsetWidth - 14 : left + 14))}px`;
  tip.style.top = `${window.scrollY + box.top + 8}px`;
}

function zoom(range) {
  state.zoom = range;
  update();
}

function legend(figure, series, spec) {
  const host = find(".legend", figure);
  if (!host) return;
  host.replaceChildren();
  const names = series.filter((s) => !s.quiet);
  if ((several && !spec.free) || names.length < 2) return;
  for (const one of names) {
    const item = html("span", "key", null, host);
    const mark = html("i", one.dash ? "dashed" : "", null, item);
    mark.style.color = one.color;
    html("span", "", one.name, item);
  }
}

const drawn = all("figure[data-chart]").map((figure) => {
  const spec = data.charts.find((chart) => chart.id === figure.dataset.chart);
  const host = find(".plot", figure);
  const chart = new Chart(host, { hover, zoom: spec.free ? () => {} : zoom });
  chart.free = Boolean(spec.free);
  return { figure, spec, host, chart };
});

function update() {
  for (const { figure, spec, chart } of drawn) {
    const series = seriesOf(spec).filter((s) => s.x.length);
    const tall = spec.id === "loss";
    const height = tall ? (root.clientWidth < 600 ? 270 : 390) : root.clientWidth < 600 ? 180 : 210;
    const log = tall ? state.logY : Boolean(spec.free && spec.free.logY);
    chart.set({ series, seams: seamsOf(spec), x: xAxis(spec.free), y: { log, zero: spec.zero }, height });
    legend(figure, series, spec);
    figure.classList.toggle("empty", series.length === 0);
  }
  if (!find("#skip")) return; // a run without a step has no controls
  for (const button of all("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === state.axis));
  for (const button of all("[data-toggle]")) button.setAttribute("aria-pressed", String(state[button.dataset.toggle]));
  for (const chip of all(".chip")) chip.setAttribute("aria-pressed", String(!state.hidden.has(Number(chip.dataset.run))));
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
  all(".chip").forEach((chip) => {
    const run = Number(chip.dataset.run);
    find("i", chip).style.background = runColor(run);
    chip.addEventListener("click", (event) => {
      if (event.altKey) data.runs.forEach((_, i) => (i === run ? state.hidden.delete(i) : state.hidden.add(i)));
      else if (!state.hidden.delete(run)) state.hidden.add(run);
      update();
    });
    chip.addEventListener("dblclick", () => {
      const alone = state.hidden.size === data.runs.length - 1 && !state.hidden.has(run);
      data.runs.forEach((_, i) => (alone || i === run ? state.hidden.delete(i) : state.hidden.add(i)));
      update();
    });
  });
  find("#show-all")?.addEventListener("click", () => {
    state.hidden.clear();
    update();
  });
}

function bindTheme() {
  const key = "windlass-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const now = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const say = () => find("#theme").setAttribute("aria-label", `Switch to ${now() === "dark" ? "light" : "dark"} colours`);
  try {
    const kept = localStorage.getItem(key);
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* a page from disk may have no storage */ }
  find("#theme").addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(key, root.dataset.theme);
    } catch { /* as above */ }
    say();
  });
  say();
}

function bindSamples() {
  const box = find("#samples");
  if (!box) return;
  const slider = find("#sample-step");
  const pick = find("#sample-run");
  const texts = all("article", box);
  const show = (keep) => {
    const run = pick ? pick.value : "0";
    const mine = texts.filter((t) => t.dataset.run === run);
    const steps = [...new Set(mine.map((t) => Number(t.dataset.step)))];
    slider.max = String(Math.max(0, steps.length - 1));
    slider.disabled = steps.length < 2;
    if (!keep) slider.value = slider.max;
    const step = steps[Number(slider.value)];
    for (const text of texts) text.hidden = text.dataset.run !== run || Number(text.dataset.step) !== step;
    find("#sample-at").textContent = step === undefined ? "" : `step ${step.toLocaleString("en-US")}`;
  };
  slider.addEventListener("input", () => show(true));
  if (pick) pick.addEventListener("change", () => show(false));
  find("#sample-controls").hidden = false;
  show(false);
}

function bindTables() {
  for (const head of all("table.sortable th button")) head.addEventListener("click", () => {
    const column = head.parentElement.cellIndex;
    const rising = head.parentElement.getAttribute("aria-sort") !== "ascending";
    for (const other of all("th", head.closest("tr"))) other.removeAttribute("aria-sort");
    head.parentElement.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const body = find("tbody", head.closest("table"));
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      const both = x !== "" && y !== "" && !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
      if (x === "" || y === "") return x === y ? 0 : x === "" ? 1 : -1;
      return (both ? Number(x) - Number(y) : x.localeCompare(y, "en")) * (rising ? 1 : -1);
    };
    body.append(...[...body.rows].sort(order));
  });
  find("#filter")?.addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of all("#settings tbody tr")) row.hidden = !words.every((w) => row.textContent.toLowerCase().includes(w));
    if (words.length) for (const part of all("#settings details")) part.open = true;
  });
}

bindTheme();
bindControls();
bindSamples();
bindTables();
update();
let width = root.clientWidth;
addEventListener("resize", () => {
  if (width === root.clientWidth) return;
  width = root.clientWidth;
  update();
});
addEventListener("beforeprint", update);
root.dataset.ready = "true";
