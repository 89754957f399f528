// One chart, which draws one panel. All charts share a `view`.
//
// A panel has a title, a unit and series. A series has a label, a colour and points. Point i covers the steps `first[i]`
// to `last[i]`, has their `mean`, and also `low` and `high` if it covers several. `ends` are its ends on the other axes.

const HEIGHT = 184,
  LEFT = 46,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 34;

class Chart {
  constructor(panel, view) {
    this.panel = panel;
    this.view = view;
    this.at = el("span", { class: "at" });
    this.legend = el("div", { class: "legend" });
    this.svg = svg("svg", {
      role: "img",
      "aria-label": panel.title,
      pointermove: (e) => this.move(e),
      pointerleave: () => view.point(null),
      pointerdown: (e) => this.press(e),
      pointerup: (e) => this.release(e),
      dblclick: () => view.zoom(null),
    });
    this.node = el(
      "figure",
      { class: "card chart", "data-metrics": panel.series.map((s) => s.metric).join(" ") },
      el(
        "figcaption",
        {},
        el("span", { class: "title", title: panel.meaning || "" }, panel.title),
        el("span", { class: "unit" }, panel.unit || ""),
        this.at,
      ),
      this.legend,
      this.svg,
    );
    view.charts.push(this);
  }

  get series() {
    return this.panel.series.filter((s) => !this.view.hidden.has(s.run));
  }

  draw() {
    this.width = this.svg.clientWidth || 360;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.lines = this.series.map((s) => ({
      ...s,
      x: positionsOn(this.view.axis, s),
      ends: endsOn(this.view.axis, s),
      extent: extentOn(this.view.axis, s),
      smooth: smoothed(s.mean, s.last, this.panel.stacked || s.sparse ? 0 : this.view.smoothing),
    }));
    if (this.panel.stacked) stack(this.lines);
    this.scale();
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.dots = svg("g");
    this.drag = svg("rect", { class: "drag", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0 });
    const clip = `clip${this.view.charts.indexOf(this)}`;
    const inside = svg("g", { "clip-path": `url(#${clip})` }, this.lines.map((line) => this.marks(line)).flat());
    this.svg.replaceChildren(
      svg(
        "clipPath",
        { id: clip },
        svg("rect", { x: LEFT, y: TOP - 2, width: this.width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 4 }),
      ),
      ...this.axes(),
      inside,
      this.drag,
      this.cross,
      this.dots,
    );
    this.point();
  }

  scale() {
    const [a, b] =
      this.view.range || (this.lines.length ? span(this.lines.flatMap((line) => line.extent)) : [0, 1]);
    [this.a, this.b] = a === b ? [a - 1, b + 1] : [a, b];
    const values = this.lines.flatMap((line) =>
      this.panel.stacked
        ? line.top.filter((_, i) => line === this.lines.at(-1) && this.isVisible(line.x[i]))
        : [line.mean, line.low || [], line.high || []].flatMap((ys) =>
            ys.filter((v, i) => v !== null && this.isVisible(line.x[i])),
          ),
    );
    let [low, high] = values.length ? (this.panel.whole ? span : spanWithoutOutliers)(values) : [0, 1];
    this.beyond = values.length && span(values)[1] > high ? span(values)[1] : null;
    if (this.panel.from_zero) low = Math.min(low, 0);
    if (this.panel.share && low >= 0 && high <= 1 && high > 0.5) [low, high] = [0, 1];
    else if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    else [low, high] = [this.panel.from_zero && low === 0 ? low : low - (high - low) * 0.06, high + (high - low) * 0.06];
    [this.low, this.high] = [low, high];
    this.x = (at) => LEFT + ((at - this.a) / (this.b - this.a)) * (this.width - LEFT - RIGHT);
    this.y = (value) => TOP + (1 - (value - this.low) / (this.high - this.low)) * (HEIGHT - TOP - BOTTOM);
  }

  isVisible(at) {
    return this.a <= at && at <= this.b;
  }

  axes() {
    const across = ticks(this.low, this.high, 4).map((v) => [
      svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(v), y2: this.y(v) }),
      svg("text", { x: LEFT - 6, y: this.y(v) + 3.5, "text-anchor": "end" }, short(v)),
    ]);
    const down = ticks(this.a, this.b, this.width / 80)
      .filter((v) => this.view.axis !== "steps" || Number.isInteger(v))
      .map((v) =>
        svg(
          "text",
          { class: "tick", x: Math.min(this.x(v), this.width - RIGHT - 8), y: HEIGHT - 20, "text-anchor": "middle" },
          short(v),
        ),
      );
    const middle = LEFT + (this.width - LEFT - RIGHT) / 2,
      label = AXES[this.view.axis].label(this.a, this.b);
    return [...across.flat(), ...down, svg("text", { class: "xlabel", x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, label)];
  }

  marks(line) {
    const alone = line.mean.every((v, i) => v === null || (line.mean[i + 1] ?? null) === null);
    const paint = {
      stroke: `var(${line.colour})`,
      fill: "none",
      strokeWidth: alone ? "5" : "1.7",
      strokeLinejoin: "round",
      strokeLinecap: "round",
    };
    if (line.top) {
      return [
        svg("path", {
          d: this.area(line.x, line.top, line.bottom),
          paint: { fill: `var(${line.colour})`, opacity: ".85" },
        }),
      ];
    }
    const found = [];
    if (line.low)
      found.push(
        svg("path", {
          d: this.area(line.x, line.high, line.low),
          paint: { fill: `var(${line.colour})`, opacity: ".13" },
        }),
      );
    if (this.view.smoothing && !line.sparse)
      found.push(
        svg("path", { d: this.path(line.x, line.mean), paint: { ...paint, strokeWidth: "1", opacity: ".3" } }),
      );
    found.push(svg("path", { class: "curve", d: this.path(line.x, line.smooth), paint }));
    return found;
  }

  // A value between two missing ones is drawn as a dot.
  path(xs, ys) {
    const known = (i) => i >= 0 && i < ys.length && ys[i] !== null;
    let d = "",
      pen = "M";
    for (let i = 0; i < xs.length; i++) {
      if (ys[i] === null) {
        pen = "M";
        continue;
      }
      d += `${pen}${this.x(xs[i]).toFixed(1)} ${this.y(ys[i]).toFixed(1)}`;
      if (pen === "M" && !known(i + 1)) d += "h0";
      pen = "L";
    }
    return d;
  }

  area(xs, tops, bottoms) {
    const known = xs.map((_, i) => i).filter((i) => tops[i] !== null && bottoms[i] !== null);
    if (!known.length) return "";
    const at = (i, ys) => `${this.x(xs[i]).toFixed(1)} ${this.y(ys[i]).toFixed(1)}`;
    return `M${known.map((i) => at(i, tops)).join("L")}L${known
      .reverse()
      .map((i) => at(i, bottoms))
      .join("L")}Z`;
  }

  // Show the values at the position of the pointer, which may be over another chart, or else the last values.
  point() {
    const at = this.view.at,
      keys = [];
    let covered = null,
      isLatest = false;
    this.dots.replaceChildren();
    for (const line of this.lines) {
      const i = at === null ? lastKnown(line.mean) : at < line.extent[0] ? -1 : line.ends.findIndex((end) => at <= end);
      const latest = at === null && line.latest !== null && !line.sparse;
      const value = latest ? line.latest : i < 0 ? null : line.mean[i];
      isLatest = isLatest || latest;
      const extent =
        !latest && i >= 0 && line.low && line.low[i] !== line.high[i] && this.lines.length < 3
          ? ` ${number(line.low[i])} … ${number(line.high[i])}`
          : "";
      keys.push(
        el(
          "span",
          { class: "key", "--key": `var(${line.colour})` },
          el("span", {}, line.label),
          el("b", {}, number(value, this.lines.length > 2 ? 3 : 4)),
          el("i", {}, extent),
        ),
      );
      if (at !== null && i >= 0 && value !== null) {
        covered = covered || [line.first[i], line.last[i], this.x(line.x[i]), line.ends[i]];
        if (!line.top)
          this.dots.append(
            svg("circle", { cx: this.x(line.x[i]), cy: this.y(value), r: 3, paint: { fill: `var(${line.colour})` } }),
          );
      }
    }
    this.legend.replaceChildren(...keys);
    this.at.textContent = covered
      ? [
          covered[0] === covered[1] ? `step ${covered[0]}` : `steps ${covered[0]}–${covered[1]}`,
          AXES[this.view.axis].text(covered[3]),
        ]
          .filter(Boolean)
          .join(" · ")
      : [this.beyond === null ? "" : `▲ up to ${number(this.beyond)}`, isLatest ? this.latestText() : ""]
          .filter(Boolean)
          .join(" · ");
    this.cross.setAttribute("visibility", covered ? "visible" : "hidden");
    if (covered) {
      this.cross.setAttribute("x1", covered[2]);
      this.cross.setAttribute("x2", covered[2]);
    }
  }

  // Which steps the values of the legend are the mean of.
  latestText() {
    const counts = new Set(this.lines.map((line) => this.view.latest[line.run]));
    if (counts.size > 1) return "last fifth";
    const [count] = counts;
    return count > 1 ? `last ${number(count)} steps` : "last step";
  }

  positionOf(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const share = Math.min(1, Math.max(0, (x - LEFT) / (this.width - LEFT - RIGHT)));
    const at = this.a + share * (this.b - this.a);
    return this.view.axis === "steps" ? Math.round(at) : at;
  }

  // The step at a position on the axis.
  stepAt(at) {
    if (this.view.axis === "steps" || !this.lines.length) return at;
    const { ends, last } = this.lines[0],
      i = ends.findIndex((end) => at <= end);
    return i < 0 ? last.at(-1) : last[i];
  }

  move(event) {
    const at = this.positionOf(event);
    this.view.point(at);
    if (this.pressed === undefined) return;
    const [left, right] = span([this.x(this.pressed), this.x(at)]);
    this.drag.setAttribute("x", left);
    this.drag.setAttribute("width", right - left);
  }
  press(event) {
    this.pressed = this.positionOf(event);
    this.svg.setPointerCapture(event.pointerId);
  }
  release(event) {
    const [a, b] = span([this.pressed, this.positionOf(event)]);
    this.pressed = undefined;
    this.drag.setAttribute("width", 0);
    if ((b - a) / (this.b - this.a) > 0.02 && b > a) this.view.zoom([a, b]);
    else this.view.onPick(this.stepAt(b));
  }
}
