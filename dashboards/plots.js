// Plotly figures: drawn in the colours of the theme, with a legend and keys of their own, and a rank that is marked.
// Texts of the run are only ever set as text; Plotly gets them escaped.
globalThis.dtprof = { selected: null };
(() => {
  "use strict";
  const root = document.documentElement;
  const plots = new Map(); // anchor of the panel -> {figure as it came, look it was drawn in}
  const hues = JSON.parse(document.getElementById("hues").textContent);
  const printing = window.matchMedia("print");
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW_PX = 480;
  const LEAST_CELL_PX = 46;
  const BESIDE_CELLS_PX = 130;
  const lines = new Map(Object.entries({ ink: "--text", rank: "--faint", band: "--band", edge: "--band" }));

  function isDark() {
    if (printing.matches) return false;
    return root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches;
  }

  function colourOf(name) {
    const style = getComputedStyle(root);
    if (lines.has(name)) return style.getPropertyValue(lines.get(name)).trim();
    return (Object.hasOwn(hues, name) ? hues[name] : ["#b9bdc4", "#5d636c"])[isDark() ? 1 : 0];
  }

  function ranksOf(trace) {
    return Array.isArray(trace?.customdata) ? trace.customdata : trace?.customdata?._inputArray;
  }

  const points = new WeakMap(); // a trace as it is drawn -> its bars by rank

  function barsOf(drawn, ranks) {
    let byRank = points.get(drawn);
    if (!byRank) {
      byRank = new Map();
      for (const bar of drawn.querySelectorAll(".point")) {
        const rank = ranks[bar.__data__.i];
        if (!byRank.has(rank)) byRank.set(rank, []);
        byRank.get(rank).push(bar);
      }
      points.set(drawn, byRank);
    }
    return byRank;
  }

  // Marks the selected rank in what is drawn: other bars fade, its line stands out. Plotly would draw all bars anew; to
  // fade bars one by one takes long to style where there are thousands. So all of them fade, under copies of its own.
  function mark(plot) {
    const rank = dtprof.selected;
    const accent = getComputedStyle(root).getPropertyValue("--accent").trim();
    for (const copies of plot.querySelectorAll(".chosen-bars")) copies.remove();
    for (const drawn of plot.querySelectorAll(".barlayer .trace, .scatterlayer .trace")) {
      const trace = drawn.__data__?.[0]?.trace;
      const ranks = ranksOf(trace);
      if (!ranks) continue;
      if (trace.type === "bar") {
        drawn.classList.toggle("faded", rank !== null);
        if (rank === null) continue;
        const bars = barsOf(drawn, ranks).get(rank) ?? [];
        placeForCopies(drawn.parentElement).append(...bars.map((bar) => bar.cloneNode(true)));
      } else if (trace.meta === "rank") {
        const line = drawn.querySelector(".js-line");
        const chosen = ranks[0] === rank;
        drawn.classList.toggle("chosen", chosen);
        if (line) line.style.stroke = chosen ? accent : trace.line.color;
      }
    }
  }

  function placeForCopies(layer) {
    if (layer.lastElementChild.classList.contains("chosen-bars")) return layer.lastElementChild;
    const place = document.createElementNS(layer.namespaceURI, "g");
    place.setAttribute("class", "chosen-bars");
    layer.append(place);
    return place;
  }

  // What is zoomed or drawn anew bears no marks, and has other bars.
  function markAnew(plot) {
    for (const drawn of plot.querySelectorAll(".barlayer .trace")) points.delete(drawn);
    mark(plot);
  }

  // Returns the figure in the colours of the present theme; the visibility chosen in the legend stays.
  function themed(figure, plot) {
    const zooms = Boolean(plot.dataset.zooms);
    const style = getComputedStyle(root);
    const get = (name) => style.getPropertyValue(name).trim();
    const data = figure.data.map((trace, position) => {
      const colour = colourOf(trace.meta);
      const marker = trace.marker && { ...trace.marker, color: colour };
      if (marker?.pattern) marker.pattern = { ...marker.pattern, fgcolor: get("--surface") };
      if (marker?.line?.color) marker.line = { ...marker.line, color: get("--surface") };
      if (typeof marker?.symbol === "string" && marker.symbol.startsWith("line-")) marker.line = { ...marker.line, color: colour };
      return {
        ...trace,
        visible: plot.data?.[position]?.visible ?? true,
        ...(marker && { marker }),
        ...(trace.line && { line: { ...trace.line, color: colour } }),
        ...(trace.fill && { fillcolor: colour }),
        ...(trace.meta === "scale" && {
          colorscale: [[0, get("--surface")], [0.0001, get("--scale-low")], [1, get("--scale-high")]],
          textfont: { color: get("--text"), size: 11 },
          // Values of narrow cells would lie over each other; hovering and the table have them.
          ...(plot.clientWidth < trace.x.length * LEAST_CELL_PX + BESIDE_CELLS_PX && { texttemplate: null }),
          colorbar: { ...trace.colorbar, tickfont: { color: get("--muted") }, tickcolor: get("--line") },
        }),
      };
    });
    const axis = {
      gridcolor: get("--line"),
      linecolor: get("--line"),
      tickcolor: get("--line"),
      zerolinecolor: get("--line"),
      tickfont: { color: get("--muted") },
    };
    const { title, ...rest } = figure.layout;
    const isNarrow = plot.clientWidth < NARROW_PX;
    // In two lines where one would be cut on a phone.
    const titleOf = (name) => {
      const given = figure.layout[name].title;
      const middle = given?.text && name.startsWith("x") && isNarrow && given.text.length > 24
        ? given.text.indexOf(" ", given.text.length / 2 - 3) : -1;
      return middle < 0 ? given : { ...given, text: `${given.text.slice(0, middle)}<br>${given.text.slice(middle + 1)}` };
    };
    const axes = Object.keys(figure.layout).filter((name) => /^[xy]axis\d*$/.test(name));
    const layout = {
      ...rest,
      showlegend: false,
      autosize: true,
      uirevision: "keep",
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { ...figure.layout.margin, t: zooms || figure.layout.annotations ? 34 : 8 },
      font: { ...figure.layout.font, color: get("--text") },
      ...Object.fromEntries(axes.map((name) => [name, { ...figure.layout[name], ...axis, title: titleOf(name) }])),
      hoverlabel: {
        ...figure.layout.hoverlabel,
        bgcolor: get("--raised"),
        bordercolor: get("--line"),
        font: { family: figure.layout.font.family, color: get("--text"), size: 13 },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: get("--faint"), activecolor: get("--accent") },
    };
    return { data, layout };
  }

  function settings(plot) {
    return {
      responsive: true,
      displaylogo: false,
      displayModeBar: Boolean(plot.dataset.zooms),
      modeBarButtons: [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "autoScale2d", homeButton(plot)], ["toImage"]],
      ...(plot.dataset.zooms && { doubleClick: false }), // it goes home, which Plotly takes to be where it was first
      toImageButtonOptions: { filename: plot.id, scale: 2 },
      typesetMath: false,
      scrollZoom: false,
    };
  }

  // Marks the rank in what is on the page in view, and draws again what has the colours of another theme; what is hidden
  // waits until it is shown.
  function refresh() {
    for (const [anchor, known] of plots) {
      const plot = document.getElementById(`plot-${anchor}`);
      if (!plot?.offsetParent) continue;
      if (known.isDark !== isDark()) react(anchor, plot, known.figure);
      else if (known.rank !== dtprof.selected) {
        known.rank = dtprof.selected;
        mark(plot);
      }
    }
  }

  async function react(anchor, plot, figure) {
    const { data, layout } = themed(figure, plot);
    plot.style.height = `${figure.layout.height}px`;
    if (plot.dataset.zooms && plot.dataset.moved) {
      layout.xaxis.range = plot.layout.xaxis.range.slice();
      if (!layout.yaxis.fixedrange) layout.yaxis.range = plot.layout.yaxis.range.slice();
    }
    plots.set(anchor, { figure, isDark: isDark(), rank: dtprof.selected });
    await Plotly.react(plot, data, layout, settings(plot));
    if (plot.dataset.legend !== legendOf(figure)) addLegend(plot, figure);
  }

  function legendOf(figure) {
    return JSON.stringify(figure.data.map((trace) => trace.name ?? null));
  }

  async function show(anchor, figure) {
    const plot = document.getElementById(`plot-${anchor}`);
    if (!plot) return;
    if (plots.has(anchor) && plot.data) {
      // A redraw waits while the pointer is on the chart: the hover text would vanish.
      plot.onmouseleave = plot.matches(":hover") ? () => show(anchor, figure) : null;
      if (!plot.onmouseleave && plots.get(anchor).figure !== figure) await react(anchor, plot, figure);
      return;
    }
    const { data, layout } = themed(figure, plot);
    await Plotly.newPlot(plot, data, layout, settings(plot));
    plots.set(anchor, { figure, isDark: isDark(), rank: dtprof.selected });
    markAnew(plot);
    plot.on("plotly_afterplot", () => markAnew(plot));
    plot.style.height = `${figure.layout.height}px`; // what Plotly fills when the window changes
    plot.style.minHeight = "";
    addLegend(plot, figure);
    if (plot.dataset.zooms) addZoom(plot);
    plot.on("plotly_relayout", () => {
      if (isHome(plot)) delete plot.dataset.moved;
      else plot.dataset.moved = "yes";
    });
    plot.on("plotly_click", (event) => {
      const rank = event.points[0]?.customdata;
      if (typeof rank === "number") dtprof.select(rank === dtprof.selected ? null : rank);
    });
  }

  // A legend of buttons, for Plotly's own cannot be reached by keyboard.
  function addLegend(plot, figure) {
    const entries = new Map(); // group -> positions of its traces
    figure.data.forEach((trace, position) => {
      const group = trace.legendgroup ?? `trace ${position} ${trace.name}`;
      const named = [...entries.keys()].find((key) => entries.get(key).name === decode(trace.name ?? "") && trace.name);
      const key = entries.has(group) ? group : (named ?? group);
      if (!entries.has(key)) entries.set(key, { positions: [], name: "", meta: trace.meta, pattern: "" });
      const entry = entries.get(key);
      entry.positions.push(position);
      if (trace.showlegend !== false && trace.name) {
        entry.name = decode(trace.name);
        entry.meta = trace.meta;
        entry.pattern = trace.marker?.pattern?.shape ?? "";
      }
    });
    const list = document.createElement("ul");
    list.className = "legend";
    list.setAttribute("aria-label", "Show or hide");
    for (const entry of entries.values()) {
      if (!entry.name) continue;
      const toggle = document.createElement("button");
      const swatch = document.createElement("span");
      swatch.className = `swatch ${entry.pattern ? "striped" : ""} ${lines.has(entry.meta) ? `swatch-${entry.meta}` : ""}`;
      swatch.style.setProperty("--hue", swatchColour(entry.meta));
      toggle.type = "button";
      toggle.setAttribute("aria-pressed", String(plot.data?.[entry.positions[0]]?.visible !== false));
      toggle.append(swatch, entry.name);
      toggle.addEventListener("click", () => {
        const shown = toggle.getAttribute("aria-pressed") !== "true";
        toggle.setAttribute("aria-pressed", String(shown));
        Plotly.restyle(plot, { visible: shown }, entry.positions);
      });
      const item = document.createElement("li");
      item.append(toggle);
      list.append(item);
    }
    plot.dataset.legend = legendOf(figure);
    plot.parentElement.querySelector(":scope > .legend")?.remove();
    if (list.children.length) plot.before(list);
  }

  function swatchColour(name) {
    if (lines.has(name)) return `var(${lines.get(name)})`;
    return Object.hasOwn(hues, name) ? `var(--hue-${name.replaceAll(" ", "-")})` : "var(--faint)";
  }

  // Undoes the escaping that Plotly needs.
  function decode(label) {
    return label.replaceAll("<br>", " ").replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  }

  // ---- moving along the horizontal axis

  function moveTo(plot, begin, end) {
    Plotly.relayout(plot, { "xaxis.range": [begin, end] });
  }

  function scale(plot, factor, share) {
    const [begin, end] = plot.layout.xaxis.range;
    const middle = begin + (end - begin) * share;
    moveTo(plot, middle - (middle - begin) * factor, middle + (end - middle) * factor);
  }

  // Returns, for each axis, the range that its figure has by now, or that Plotly is to find one.
  function homeOf(plot) {
    const { layout } = plots.get(plot.id.slice("plot-".length)).figure;
    return Object.fromEntries(["xaxis", "yaxis"].map((name) => [name, layout[name].range?.slice()]));
  }

  function isHome(plot) {
    return Object.entries(homeOf(plot)).every(([name, range]) => {
      const { autorange, range: present } = plot.layout[name];
      return range ? range.every((end, i) => end === present?.[i]) : autorange;
    });
  }

  function goHome(plot) {
    const home = Object.entries(homeOf(plot));
    Plotly.relayout(
      plot,
      Object.fromEntries(home.map(([name, range]) => (range ? [`${name}.range`, range] : [`${name}.autorange`, true]))),
    );
  }

  function homeButton(plot) {
    return { name: "home", title: "Go back", icon: Plotly.Icons.home, click: () => goHome(plot) };
  }

  function addZoom(plot) {
    plot.on("plotly_doubleclick", () => goHome(plot));
    plot.addEventListener("keydown", (event) => {
      if (event.target !== plot || event.ctrlKey || event.metaKey || event.altKey) return;
      const [begin, end] = plot.layout.xaxis.range;
      const stride = (end - begin) / 5;
      if (event.key === "ArrowLeft") moveTo(plot, begin - stride, end - stride);
      else if (event.key === "ArrowRight") moveTo(plot, begin + stride, end + stride);
      else if (event.key === "+" || event.key === "=") scale(plot, 0.6, 0.5);
      else if (event.key === "-") scale(plot, 1 / 0.6, 0.5);
      else if (event.key === "0" || event.key === "Home") goHome(plot);
      else return;
      event.preventDefault();
    });
    plot.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        const box = plot.querySelector(".nsewdrag").getBoundingClientRect();
        const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
        scale(plot, event.deltaY < 0 ? 0.75 : 1 / 0.75, share);
      },
      { passive: false },
    );
    const hint = document.createElement("p");
    hint.className = "hint";
    hint.textContent = "Drag to zoom, double-click to go back. Ctrl + wheel zooms; in focus, arrow keys move, + and - zoom, 0 goes back.";
    plot.after(hint);
  }

  systemDark.addEventListener("change", () => dtprof.refresh());
  printing.addEventListener("change", () => dtprof.refresh());
  Object.assign(dtprof, { plots: { show, refresh }, colourOf, isDark, isPrinted: () => printing.matches, swatchColour });
})();
