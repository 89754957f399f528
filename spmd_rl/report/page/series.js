// Arithmetic on the values of curves, where null is a missing value.

function span(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}

// The extent of `values` without a few outliers, which would flatten the rest.
function spanWithoutOutliers(values) {
  const sorted = [...values].sort((a, b) => a - b),
    at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [low, high] = [at(0.02), at(0.98)],
    room = high - low;
  return room ? [Math.max(sorted[0], low - room), Math.min(sorted.at(-1), high + room)] : span(values);
}

function mean(values) {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

function lastKnown(values) {
  return values.findLastIndex((v) => v !== null);
}

// Exponential moving average, with bias correction.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0,
    total = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = sum * weight + v;
    total = total * weight + 1;
    return sum / total;
  });
}

function stack(lines) {
  const base = lines.length ? lines[0].mean.map(() => 0) : [];
  for (const line of lines) {
    line.bottom = [...base];
    line.mean.forEach((v, i) => {
      base[i] += v || 0;
    });
    line.top = [...base];
  }
}
