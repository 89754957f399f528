// What all charts share: the steps in sight, the step under the pointer, the smoothing, the runs left out.

class View {
  constructor(numSteps) {
    this.range = null;
    this.step = null;
    this.smoothing = numSteps > 60 ? 0.6 : 0;
    this.hidden = new Set();
    this.charts = [];
    this.onPick = () => {};
  }
  redraw() {
    this.charts.forEach((chart) => chart.draw());
  }
  point(step) {
    this.step = step;
    if (this.queued) return;
    this.queued = requestAnimationFrame(() => {
      this.queued = null;
      this.charts.forEach((chart) => chart.point());
    });
  }
  zoom(range) {
    this.range = range;
    this.redraw();
  }
}
