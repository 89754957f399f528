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

// The mean of each value and its neighbours on both sides. A missing value, and the end of a warm-up, end a stretch.
function smoothed(values, last, width) {
  if (!width) return values;
  return values.map((v, i) => {
    if (v === null) return null;
    let sum = v,
      count = 1;
    const side = last[i] < 1;
    for (const way of [-1, 1])
      for (let j = i + way; Math.abs(j - i) <= width && (last[j] ?? NaN) < 1 === side && known(values, j); j += way) {
        sum += values[j];
        count++;
      }
    return sum / count;
  });
}

function known(values, i) {
  return i >= 0 && i < values.length && values[i] !== null;
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
