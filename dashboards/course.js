// Only in pages that are served: goes on with the chart of step times by every step that ends, between two drawings.
(() => {
  "use strict";
  const MOST_MARKERS = 60;
  const { plots } = dtprof;
  const arrays = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };

  // Returns a column of a figure as an array of its own; Plotly packs columns of numbers.
  function unpacked(column) {
    if (!column?.bdata) return [...column];
    const bytes = Uint8Array.from(atob(column.bdata), (letter) => letter.charCodeAt(0));
    return Array.from(new arrays[column.dtype](bytes.buffer));
  }

  // Returns the charts on the page in view that are continued: [anchor, plot, what is known of it].
  function growing() {
    return [...plots.known]
      .map(([anchor, known]) => [anchor, document.getElementById(`plot-${anchor}`), known])
      .filter(([, plot, { figure }]) => figure.layout.meta?.continues && plot?.offsetParent);
  }

  // Returns to which step the charts on the page in view go, all of them; null where none is continued.
  function reached() {
    const steps = growing().map(([, , { figure, shown }]) => shown.last ?? figure.layout.meta.continues.after);
    return steps.length ? Math.min(...steps) : null;
  }

  // Returns to which step a figure has been continued since it was drawn; undefined where it has not.
  function stepOf(anchor) {
    return plots.known.get(anchor)?.shown.last;
  }

  // Returns the figure with more points, each {step, edge, band, ink, text, ranks} in ns; they take the place of what is
  // drawn behind the last step that all ranks had ended.
  function continued(figure, points) {
    const { unit_ns: unit, after } = figure.layout.meta.continues;
    const steps = points.map((point) => point.step);
    const data = figure.data.map((trace) => {
      const valueOf = trace.meta === "rank"
        ? ({ ranks }) => ranks.find(([rank]) => rank === plots.ranksOf(trace)[0])?.[1]
        : (point) => point[trace.meta];
      const x = unpacked(trace.x);
      const later = x.findIndex((step) => step > after);
      const kept = later < 0 ? x.length : later;
      const grow = (column, more) => [...unpacked(column).slice(0, kept), ...more];
      const grown = { ...trace, x: grow(x, steps), y: grow(trace.y, points.map((point) => valueOf(point) / unit)) };
      if (trace.hovertext) grown.hovertext = grow(trace.hovertext, points.map(({ text }) => text));
      if (trace.mode === "lines+markers" && grown.x.length > MOST_MARKERS) grown.mode = "lines";
      return grown;
    });
    const { xaxis, yaxis } = figure.layout;
    const highest = Math.max(...points.map(({ band }) => band)) / unit;
    const layout = {
      ...figure.layout,
      xaxis: { ...xaxis, range: [xaxis.range[0], steps.at(-1) + 0.5] },
      yaxis: { ...yaxis, range: [0, Math.max(yaxis.range[1], 1.12 * highest)] },
      // Steps that not all ranks had ended are marked as left out.
      shapes: figure.layout.shapes?.filter(({ x0 }) => x0 <= after),
      annotations: figure.layout.annotations?.filter(({ x }) => x <= after),
    };
    return { data, layout, last: steps.at(-1), points };
  }

  // Goes on with the charts of step times; not under the pointer, where what is told would vanish at every step.
  async function goOn(points) {
    for (const [anchor, plot, { figure, shown }] of growing()) {
      if (plot.matches(":hover")) continue;
      const known = (shown.points ?? []).filter(({ step }) => step < (points[0]?.step ?? Infinity));
      const all = [...known, ...points].filter(({ step }) => step > figure.layout.meta.continues.after);
      if (!all.length || JSON.stringify(all.at(-1)) === JSON.stringify(shown.points?.at(-1))) continue;
      await plots.react(anchor, plot, figure, continued(figure, all));
    }
  }

  dtprof.course = { reached, stepOf, goOn };
})();
