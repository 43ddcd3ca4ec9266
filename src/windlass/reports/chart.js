// One line chart in SVG: axes, curves, bands, restarts, a cross-hair for pointer and keyboard, zoom.
// page.js decides what it draws. Text reaches the page through textContent only.

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  return parent.appendChild(node);
}

function html(name, className, text, parent) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.textContent = text; // null: no text
  return parent.appendChild(node);
}

// ---------------------------------------------------------------- looks

const DASHES = [null, "7 4", "2 3", "8 3 2 3", "13 4"];

/** The shape of a series' points, as a path around the origin: circle, square, diamond, triangles. */
const SHAPES = ["m-3.3 0a3.3 3.3 0 1 0 6.6 0a3.3 3.3 0 1 0-6.6 0z", "m-3-3h6v6h-6z", "m-4.2 0l4.2-4.2 4.2 4.2-4.2 4.2z", "m-3.8 3l3.8-6.6 3.8 6.6z", "m-3.8-3l3.8 6.6 3.8-6.6z"];

/** Draw the points of a series at some places of a drawing. */
function symbols(one, places, parent) {
  const d = places.map((at) => `M${at}${SHAPES[one.shape]}`).join("");
  const path = make("path", { class: "dot", d }, parent);
  Object.assign(path.style, { stroke: one.color, fill: one.points === "median" ? one.color : "" });
}

/** A line of a series with one point, for a legend. */
function key(one, parent) {
  const svg = make("svg", { class: "mark", width: 30, height: 12, "aria-hidden": "true" }, parent);
  const style = { stroke: one.color, strokeDasharray: one.dash ?? "" };
  if (!one.pointsOnly) Object.assign(make("path", { class: "curve", d: "M1 6h28" }, svg).style, style);
  if (one.points) symbols(one, ["15 6"], svg);
}

// ---------------------------------------------------------------- numbers

const ruler = document.createElement("canvas").getContext("2d");
ruler.font = `11.5px ${getComputedStyle(document.body).fontFamily}`; // as `.drawing` in page.css
const widthOf = (text) => ruler.measureText(text).width;
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 });
const signed = (text) => text.replaceAll("-", "\u2212");

/** An axis' ticks with their labels, all alike; `step` is the distance between them (0: each has the digits that it needs). */
function withTexts(values, step) {
  const largest = Math.max(...values.map(Math.abs), 0);
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step || 1) - 1e-9)));
  const text = (value) => {
    if (value === 0) return "0";
    if (largest < 1e-2 || Math.abs(value) < 1e-4) return Number(value.toPrecision(3)).toExponential();
    if (largest >= 1e4) return compact.format(value);
    return step ? value.toFixed(digits) : String(Number(value.toPrecision(3)));
  };
  return values.map((value) => ({ value, text: signed(text(value)) }));
}

/** A value for the read-out. */
function valueText(value) {
  if (value === null || !Number.isFinite(value)) return "\u2013";
  const size = Math.abs(value);
  if (size >= 1e4) return signed(Math.round(value).toLocaleString("en-US"));
  return signed(size && size < 1e-3 ? Number(value.toPrecision(4)).toExponential() : String(Number(value.toPrecision(5))));
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return withTexts(ticks, step);
}

function logTicks(low, high, count) {
  for (const mantissas of [[1], [1, 3], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const mantissa of mantissas) {
        const value = mantissa * 10 ** power;
        if (value >= low * 0.9999 && value <= high * 1.0001) ticks.push(value);
      }
    }
    if (ticks.length >= Math.min(4, count)) return withTexts(ticks.length > 2 * count ? ticks.filter((_, i) => i % 2 === 0) : ticks, 0);
  }
  return linearTicks(low, high, count);
}

function scaleOf(log, low, high, from, to) {
  const f = log ? Math.log : (v) => v;
  const [a, b] = [f(low), f(high)];
  const scale = (value) => from + ((f(value) - a) / (b - a)) * (to - from);
  scale.invert = (at) => {
    const value = a + ((at - from) / (to - from)) * (b - a);
    return log ? Math.exp(value) : value;
  };
  return scale;
}

/** The place of the first x that is not below `value`, in a rising array. */
function lowerBound(xs, value) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(xs, value) {
  const place = lowerBound(xs, value);
  if (place === 0) return 0;
  if (place === xs.length) return xs.length - 1;
  return value - xs[place - 1] <= xs[place] - value ? place - 1 : place;
}

// ---------------------------------------------------------------- the chart

let charts = 0;

class Chart {
  /** `hooks`: hover(x or null, chart), zoom([low, high] or null), and the `title`. */
  constructor(host, hooks) {
    this.host = host;
    this.hooks = hooks;
    this.id = `clip-${charts++}`;
    this.svg = make("svg", { class: "drawing", role: "img", "aria-label": hooks.title }, host);
    this.handle = html("div", "handle", null, host);
    const attributes = { tabindex: 0, role: "slider", "aria-label": `Points of ${hooks.title}`, "aria-valuemin": 0 };
    for (const name in attributes) this.handle.setAttribute(name, attributes[name]);
    this.drag = null;
    this.listen();
  }

  domains() {
    const { series, x, y } = this.model;
    let [low, high] = x.extent ?? (x.log ? [1, 10] : [0, 1]);
    if (x.domain) [low, high] = [Math.max(low, x.domain[0]), Math.min(high, x.domain[1])];
    const [bottom, top] = this.heights(series, low, high, y);
    return { low, high, bottom, top };
  }

  heights(series, low, high, y) {
    let [bottom, top] = [Infinity, -Infinity];
    for (const one of series) {
      const from = lowerBound(one.x, low);
      for (const values of one.band ? [one.y, ...one.band] : [one.y]) {
        for (let i = from; i < one.x.length && one.x[i] <= high; i++) {
          const value = values[i];
          if (value === null || (y.log && value <= 0)) continue;
          [bottom, top] = [Math.min(bottom, value), Math.max(top, value)];
        }
      }
    }
    if (!(bottom <= top)) return y.log ? [1, 10] : [0, 1];
    if (y.log) return bottom === top ? [bottom / 1.5, top * 1.5] : [bottom / (top / bottom) ** 0.04, top * (top / bottom) ** 0.04];
    if (y.zero && bottom >= 0) return [0, top > 0 ? top * 1.06 : 1];
    const margin = (top - bottom || Math.abs(top) || 1) * 0.05;
    return [bottom - margin, top + margin];
  }

  /** `model`: `series`, `restarts`, `x` {log, label, text, ticks, extent, domain?}, `y` {log, zero}, `height`. */
  draw(model) {
    this.model = model;
    const { x, y, height } = model;
    const width = Math.max(200, this.host.clientWidth);
    const d = this.domains();
    const yTicks = (y.log ? logTicks : linearTicks)(d.bottom, d.top, height > 260 ? 7 : 5);
    const left = Math.max(28, 12 + Math.max(...yTicks.map((t) => widthOf(t.text))));
    const box = { left, right: width - 10, top: 10, bottom: height - 24 };
    this.box = box;
    this.sx = scaleOf(x.log, d.low, d.high, box.left, box.right);
    this.sy = scaleOf(y.log, d.bottom, d.top, box.bottom, box.top);
    this.svg.replaceChildren();
    for (const [key, value] of [["width", width], ["height", height], ["viewBox", `0 0 ${width} ${height}`]]) this.svg.setAttribute(key, value);
    Object.assign(this.svg.dataset, { x: x.log ? "log" : "linear", y: y.log ? "log" : "linear" });
    this.svg.dataset.domain = [d.low, d.high, d.bottom, d.top].map((v) => Number(v.toPrecision(6))).join(" ");
    this.axes(yTicks, d, width, height);
    const clip = make("clipPath", { id: this.id }, this.svg);
    make("rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 }, clip);
    const plot = make("g", { "clip-path": `url(#${this.id})` }, this.svg);
    this.restarts(plot, d);
    for (const one of [...model.series].sort((a, b) => b.grey - a.grey)) this.curve(one, plot, d); // grey lines behind
    this.read(null);
    this.cross = make("g", { class: "cross", visibility: "hidden" }, this.svg);
    this.selection = make("rect", { class: "selection", visibility: "hidden", y: box.top, height: box.bottom - box.top }, this.svg);
  }

  axes(yTicks, d, width, height) {
    const { x } = this.model;
    const { left, right, bottom } = this.box;
    const group = make("g", { class: "axes" }, this.svg);
    let last = Infinity;
    for (const { value, text } of yTicks) {
      const at = Math.round(this.sy(value)) + 0.5;
      if (last - at < 15) continue; // the labels would touch: large values of a logarithmic scale
      last = at;
      make("line", { class: "rule", x1: left, x2: right, y1: at, y2: at }, group);
      make("text", { x: left - 7, y: at + 3.5, "text-anchor": "end" }, group).textContent = text;
    }
    make("line", { class: "base", x1: left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 }, group);
    const ticks = x.ticks(d.low, d.high, Math.max(2, Math.floor((right - left) / 90)));
    let taken = Infinity;
    ticks.reverse().forEach(({ value, text }, place) => {
      const at = this.sx(value);
      if (at < left - 1 || at > right + 1) return;
      const words = place === 0 ? `${text} ${x.label(d.high)}` : text;
      const half = widthOf(text) / 2;
      const overhang = Math.max(0, at - half + widthOf(words) - right - 8);
      if (at + half > taken - 10 && place > 0) return;
      make("line", { class: "base", x1: at, x2: at, y1: bottom, y2: bottom + 4 }, group);
      taken = at - half - overhang;
      make("text", { x: taken, y: height - 5, "text-anchor": "start" }, group).textContent = words;
    });
  }

  restarts(plot, d) {
    const { top, bottom } = this.box;
    let free = -Infinity;
    for (const restart of this.model.restarts) {
      if (restart.x < d.low || restart.x > d.high || (this.model.x.log && restart.x <= 0)) continue;
      const at = this.sx(restart.x);
      const line = make("line", { class: "restart", x1: at, x2: at, y1: top, y2: bottom }, plot);
      make("title", {}, line).textContent = restart.text;
      const wide = widthOf(restart.what) + 12;
      const [from, anchor] = at + wide > this.box.right ? [at - wide, "end"] : [at, "start"];
      if (!restart.what || this.model.height <= 260 || from < free) continue;
      free = from + wide;
      make("text", { class: "restart-label", x: at + (anchor === "end" ? -5 : 5), y: top + 9, "text-anchor": anchor }, plot).textContent = restart.what;
    }
  }

  curve(one, plot, d) {
    const from = Math.max(0, lowerBound(one.x, d.low) - 1);
    const to = Math.min(one.x.length, lowerBound(one.x, d.high) + 2);
    const { x, y } = this.model;
    const good = (i, values) => i >= from && i < to && values[i] !== null && !(y.log && values[i] <= 0) && !(x.log && one.x[i] <= 0);
    const places = one.x.map((_, i) => i).filter((i) => good(i, one.y));
    const at = (i, values) => `${this.sx(one.x[i]).toFixed(1)} ${this.sy(values[i]).toFixed(1)}`;
    if (one.band && places.length) {
      const [back, forth] = one.band.map((values) => places.filter((i) => good(i, values)).map((i) => at(i, values)));
      make("path", { class: "band", d: `M${[...forth, ...back.reverse()].join("L")}Z` }, plot).style.fill = one.color;
    }
    if (!one.pointsOnly) {
      const step = (i) => (good(i - 1, one.y) ? "L" : "M") + at(i, one.y) + (good(i - 1, one.y) || good(i + 1, one.y) ? "" : "h.01"); // a lone point is a dot
      const path = make("path", { class: one.faint ? "curve faint" : "curve", d: places.map(step).join("") }, plot);
      Object.assign(path.style, { stroke: one.color, strokeWidth: one.width ?? "", strokeDasharray: one.dash ?? "" });
    }
    if (one.points && places.length <= 200) symbols(one, places.map((i) => at(i, one.y)), plot);
    for (const bad of one.bad.filter((value) => value >= d.low && value <= d.high)) {
      make("path", { class: "bad", d: `M${this.sx(bad) - 4} ${this.box.top}l8 8m0 -8l-8 8` }, plot);
    }
  }

  // -------------------------------------------------------------- pointer and keys

  listen() {
    const host = this.host;
    const place = (event) => Math.min(this.box.right, Math.max(this.box.left, event.clientX - this.svg.getBoundingClientRect().left));
    host.addEventListener("pointermove", (event) => {
      const [low, high] = [place(event), this.drag ?? place(event)].sort((a, b) => a - b);
      for (const [key, value] of [["x", low], ["width", high - low], ["visibility", high - low > 4 ? "visible" : "hidden"]]) this.selection.setAttribute(key, value);
      this.hooks.hover(this.sx.invert(place(event)), this);
    });
    host.addEventListener("pointerleave", () => this.hooks.hover(null, this));
    host.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      this.drag = place(event);
      host.setPointerCapture(event.pointerId);
    });
    host.addEventListener("pointerup", (event) => {
      const [low, high] = [place(event), this.drag ?? place(event)].sort((a, b) => a - b);
      this.drag = null;
      this.selection.setAttribute("visibility", "hidden");
      if (high - low >= 8) this.hooks.zoom([this.sx.invert(low), this.sx.invert(high)]);
    });
    host.addEventListener("dblclick", () => this.hooks.zoom(null));
    this.handle.addEventListener("keydown", (event) => this.press(event));
    this.handle.addEventListener("focus", () => this.handle.matches(":focus-visible") && this.go(this.at));
    this.handle.addEventListener("blur", () => this.hooks.hover(null, this));
  }

  /** Put the cross-hair at a point, or at the first one. */
  go(x) {
    const xs = this.lead()?.x ?? [];
    if (xs.length) this.hooks.hover(xs[nearest(xs, x ?? this.sx.invert(this.box.left))], this);
  }

  press(event) {
    const xs = this.lead()?.x;
    if (!xs || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = [lowerBound(xs, this.sx.invert(this.box.left)), lowerBound(xs, this.sx.invert(this.box.right + 1)) - 1];
    const now = this.at === null ? low : nearest(xs, this.at);
    const page = Math.max(1, Math.round((high - low) / 10));
    const moves = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, PageDown: now - page, PageUp: now + page, Home: low, End: high };
    if (event.key in moves) this.go(xs[Math.max(low, Math.min(high, moves[event.key]))]);
    else if (event.key === "Escape") this.hooks.zoom(null);
    else return;
    event.preventDefault();
  }

  /** The series that the cross-hair snaps to: the one with the most points. */
  lead() {
    const open = this.model.series.filter((s) => !s.quiet);
    return open.reduce((best, s) => (!best || s.x.length > best.x.length ? s : best), null);
  }

  /** Put the cross-hair at x (null: remove it); returns the values there, for the read-out. */
  point(x) {
    this.at = x;
    const read = this.crossHair(x);
    this.read(read);
    return read;
  }

  /** Tell the handle, for screen readers, what the cross-hair shows. */
  read(read) {
    const xs = this.lead()?.x ?? [];
    const rows = (read?.rows ?? []).slice(0, 8).map((row) => `${row.name} ${valueText(row.value)}`);
    const values = { max: Math.max(0, xs.length - 1), now: read ? nearest(xs, read.x) : 0, text: read ? [this.model.x.text(read.x), ...rows].join(", ") : "no point" };
    for (const name in values) this.handle.setAttribute(`aria-value${name}`, values[name]);
  }

  crossHair(x) {
    this.cross.replaceChildren();
    const lead = this.lead();
    const outside = x === null || !lead || this.sx(x) < this.box.left - 1 || this.sx(x) > this.box.right + 1;
    this.cross.setAttribute("visibility", outside ? "hidden" : "visible");
    if (outside) return null;
    const snapped = lead.x[nearest(lead.x, x)];
    const at = this.sx(snapped);
    make("line", { x1: at, x2: at, y1: this.box.top, y2: this.box.bottom }, this.cross);
    const reach = Math.max(12, (this.box.right - this.box.left) / Math.max(2, lead.x.length));
    const rows = [];
    for (const one of this.model.series) {
      if (one.quiet) continue;
      const i = nearest(one.x, snapped);
      if (one.y[i] === null || Math.abs(this.sx(one.x[i]) - at) > reach) continue;
      rows.push({ one, name: one.name, value: one.y[i] });
      const [cx, cy] = [this.sx(one.x[i]), this.sy(one.y[i])];
      if (Number.isFinite(cy)) make("circle", { cx, cy, r: 3.4, class: "at" }, this.cross).style.fill = one.color;
    }
    return { x: snapped, at, rows: rows.sort((a, b) => b.value - a.value) };
  }
}
