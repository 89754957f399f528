// The spans of every process within one step: one row a depth, lanes grouped by process.

const GUTTER = 168,
  ROW = 20,
  GAP = 7,
  AXIS = 22;
const SPAN_COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c5", "--c6", "--c7"];

class Timeline {
  constructor(timeline) {
    this.names = timeline.names;
    this.canvas = el("canvas", {
      role: "img",
      "aria-label": "timeline of a step",
      pointermove: (e) => this.move(e),
      pointerleave: () => this.leave(),
      pointerdown: (e) => {
        this.pressed = this.time(e);
        this.canvas.setPointerCapture(e.pointerId);
      },
      pointerup: (e) => this.release(e),
      dblclick: () => this.zoom(null),
    });
    this.tip = el("div", { class: "tip", hidden: "" });
    this.node = el("div", { class: "card timeline" }, this.canvas, this.tip);
  }

  show(step) {
    this.step = step;
    this.zoom(null);
  }

  zoom(range) {
    [this.from, this.to] = range || [0, this.step.length_us];
    this.draw();
  }

  draw() {
    const width = Math.max(480, this.node.clientWidth - 14),
      ratio = window.devicePixelRatio || 1;
    const height = AXIS + this.step.lanes.reduce((sum, lane) => sum + lane.num_rows * ROW + GAP, 0) + 4;
    this.width = width;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    this.colours = Object.fromEntries(
      ["--ink", "--soft", "--grid", "--card", "--rest", ...SPAN_COLOURS, "--c4"].map((name) => [name, colour(name)]),
    );
    this.boxes = [];
    this.drawAxis(height);
    let y = AXIS,
      process = null;
    for (const lane of this.step.lanes) {
      this.drawLane(lane, y, lane.process !== process);
      process = lane.process;
      y += lane.num_rows * ROW + GAP;
    }
  }

  x(us) {
    return GUTTER + ((us - this.from) / (this.to - this.from)) * (this.width - GUTTER - 10);
  }
  time(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    const share = Math.min(1, Math.max(0, (x - GUTTER) / (this.width - GUTTER - 10)));
    return this.from + share * (this.to - this.from);
  }

  drawAxis(height) {
    this.pen.textAlign = "center";
    for (const tick of ticks(this.from, this.to, 8)) {
      this.pen.fillStyle = this.colours["--grid"];
      this.pen.fillRect(this.x(tick), AXIS - 4, 1, height);
      this.pen.fillStyle = this.colours["--soft"];
      this.pen.fillText(microseconds(tick), Math.min(this.x(tick), this.width - 28), 12);
    }
  }

  drawLane(lane, top, isFirst) {
    const pen = this.pen;
    pen.textAlign = "left";
    if (isFirst) {
      pen.fillStyle = this.colours["--grid"];
      pen.fillRect(0, top - GAP / 2, this.width, 1);
      pen.fillStyle = this.colours["--ink"];
      pen.fillText(shortened(pen, lane.process, 84), 8, top + 14);
    }
    pen.fillStyle = this.colours["--soft"];
    pen.fillText(shortened(pen, lane.lane === "MainThread" ? "main" : lane.lane, 66), 98, top + 14);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.width - GUTTER - 8, 1e5);
    pen.clip();
    for (const item of lane.spans) this.drawSpan(lane, item, top);
    pen.restore();
  }

  drawSpan(lane, item, top) {
    const [row, start, length, nameIndex, args] = item;
    const left = Math.max(this.x(start), GUTTER - 2),
      right = Math.min(this.x(start + length), this.width),
      y = top + row * ROW;
    if (right < GUTTER || left > this.width) return;
    const width = Math.max(0.6, right - left - 0.6),
      name = this.names[nameIndex];
    this.pen.fillStyle = this.colours[spanColour(name, args)];
    this.pen.fillRect(left, y, width, ROW - 2);
    this.boxes.push({ left, right: left + Math.max(3, width), top: y, name, lane, start, length, args });
    if (width < 30) return;
    this.pen.fillStyle = this.colours["--card"];
    this.pen.fillText(shortened(this.pen, name, width - 9), left + 5, y + 13);
  }

  move(event) {
    if (this.pressed !== undefined) {
      this.draw();
      this.pen.fillStyle = this.colours["--soft"];
      this.pen.globalAlpha = 0.2;
      const [left, right] = span([this.x(this.pressed), this.x(this.time(event))]);
      this.pen.fillRect(left, 0, right - left, 1e5);
      return;
    }
    const frame = this.canvas.getBoundingClientRect(),
      x = event.clientX - frame.left,
      y = event.clientY - frame.top;
    const box = this.boxes.findLast((b) => b.left <= x && x <= b.right && b.top <= y && y <= b.top + ROW - 2);
    this.tip.hidden = !box;
    if (!box) return;
    const args = Object.entries(box.args).map(
      ([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`,
    );
    const where = [box.lane.process, box.lane.host && `on ${box.lane.host}`, box.lane.lane].filter(Boolean).join(" ");
    this.tip.replaceChildren(
      el("b", {}, `${box.name}  ${microseconds(box.length)}`),
      el("span", {}, [`${where}, ${microseconds(box.start)} after the start of the step`, ...args].join("\n")),
    );
    this.tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - this.tip.offsetWidth - 8)}px`;
    this.tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - this.tip.offsetHeight - 8)}px`;
  }

  leave() {
    this.tip.hidden = true;
  }

  release(event) {
    const [a, b] = span([this.pressed, this.time(event)]);
    this.pressed = undefined;
    if (b - a > (this.to - this.from) * 0.01) this.zoom([a, b]);
    else this.draw();
  }
}

function spanColour(name, args) {
  const phase = [name, args.phase].find((word) => data.phase_colours[word]);
  if (phase) return data.phase_colours[phase];
  if (name === "step") return "--rest";
  let hash = 7;
  for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) % 65521;
  return SPAN_COLOURS[hash % SPAN_COLOURS.length];
}

function shortened(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return length > 1 ? `${text.slice(0, length)}…` : "";
}

function timelineSection(data) {
  const runs = data.runs.map((run, i) => [i, run.name]).filter(([i]) => data.runs[i].timeline.steps.length);
  if (!runs.length) {
    const words = "This run has no trace. With run.trace = true, this section shows what each rank did in a step.";
    return { node: section("timeline", "Timeline", "", [], empty(words)) };
  }
  const tools = el("span"),
    note = el("span"),
    body = el("div");
  let recorded, drawn;

  function showRun(index) {
    recorded = data.runs[index].timeline;
    drawn = new Timeline(recorded);
    body.replaceChildren(drawn.node);
    showStep(recorded.steps.at(-1).order);
  }
  function showStep(order) {
    const step = recorded.steps.find((s) => s.order === order);
    const choices = recorded.steps.map((s) => [s.order, s.step === null ? "all" : `${s.step}`]);
    const whole = el("button", { click: () => drawn.zoom(null) }, "whole step");
    tools.replaceChildren(picker("step", choices, order, showStep), " ", whole);
    note.textContent = [
      microseconds(step.length_us),
      step.num_left_out ? `without its ${number(step.num_left_out)} shortest spans` : null,
      choices.length < recorded.num_steps ? `${choices.length} of ${number(recorded.num_steps)} steps are shown` : null,
      "drag to zoom",
    ]
      .filter(Boolean)
      .join("; ");
    drawn.show(step);
  }
  return {
    node: section(
      "timeline",
      "Timeline",
      note,
      [runs.length > 1 ? picker("run", runs, runs[0][0], showRun) : null, tools],
      body,
    ),
    start: () => showRun(runs[0][0]),
    redraw: () => drawn.draw(),
    go: (step) => showStep(nearest(recorded.steps, step).order),
  };
}

function nearest(items, step) {
  return items.reduce(
    (best, item) => (best === null || Math.abs(item.step - step) < Math.abs(best.step - step) ? item : best),
    null,
  );
}
