// State that all charts share: axis, visible range, pointer position, smoothing, hidden runs.

class View {
  constructor(latest) {
    this.latest = latest; // how many steps of each run are its latest
    this.axis = "steps";
    this.range = null;
    this.at = null;
    this.smoothing = 0; // points on each side that a smoothed line takes the mean of
    this.hidden = new Set();
    this.charts = [];
    this.onPick = () => {};
  }
  redraw() {
    this.charts.forEach((chart) => chart.draw());
  }
  point(at) {
    this.at = at;
    if (this.queued) return;
    this.queued = requestAnimationFrame(() => {
      this.queued = null;
      this.charts.forEach((chart) => chart.point());
    });
  }
  setAxis(axis) {
    this.axis = axis;
    this.at = null;
    this.zoom(null);
  }
  zoom(range) {
    this.range = range;
    this.redraw();
  }
}
