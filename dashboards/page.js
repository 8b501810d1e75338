"use strict";
// What the page does in the browser: unpack and draw the figures, switch the theme, sort tables, move with keys.
// Texts of the run are only ever set as text; Plotly gets them escaped.
(() => {
  const root = document.documentElement;
  const plots = new Map(); // anchor of the panel -> the figure as it came from the file
  const hues = JSON.parse(document.getElementById("hues").textContent);
  const printing = window.matchMedia("print");
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

  // ---- theme

  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");

  function readTheme() {
    try {
      const kept = localStorage.getItem("dtprof-theme");
      return themes.includes(kept) ? kept : "system";
    } catch {
      return "system"; // the browser keeps nothing for files
    }
  }

  function setTheme(theme) {
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    recolour();
  }

  function isDark() {
    if (printing.matches) return false;
    return root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches;
  }

  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
    try {
      localStorage.setItem("dtprof-theme", next);
    } catch {
      // the choice holds for this visit only
    }
    setTheme(next);
  });
  systemDark.addEventListener("change", recolour);
  printing.addEventListener("change", recolour);

  // ---- figures

  const lines = new Map(Object.entries({ ink: "--text", rank: "--faint", band: "--band", edge: "--band" }));

  function colourOf(name) {
    const style = getComputedStyle(root);
    if (lines.has(name)) return style.getPropertyValue(lines.get(name)).trim();
    return (Object.hasOwn(hues, name) ? hues[name] : ["#b9bdc4", "#5d636c"])[isDark() ? 1 : 0];
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
      return {
        ...trace,
        visible: plot.data?.[position]?.visible ?? true,
        ...(marker && { marker }),
        ...(trace.line && { line: { ...trace.line, color: colour } }),
        ...(trace.fill && { fillcolor: colour }),
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
    const layout = {
      ...rest,
      showlegend: false,
      autosize: true,
      uirevision: "keep",
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { ...figure.layout.margin, t: zooms ? 34 : 8 },
      font: { ...figure.layout.font, color: get("--text") },
      xaxis: { ...figure.layout.xaxis, ...axis },
      yaxis: { ...figure.layout.yaxis, ...axis },
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
      modeBarButtons: [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"], ["toImage"]],
      toImageButtonOptions: { filename: plot.id, scale: 2 },
      typesetMath: false,
      scrollZoom: false,
    };
  }

  function recolour() {
    for (const [anchor, figure] of plots) {
      const plot = document.getElementById(`plot-${anchor}`);
      const { data, layout } = themed(figure, plot);
      if (plot.dataset.zooms) {
        layout.xaxis.range = plot.layout.xaxis.range.slice();
        if (!layout.yaxis.fixedrange) layout.yaxis.range = plot.layout.yaxis.range.slice();
      }
      Plotly.react(plot, data, layout, settings(plot));
    }
  }

  async function unpack(id) {
    const packed = document.getElementById(id).textContent.trim();
    const letters = atob(packed);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  async function loadPlotly() {
    const url = URL.createObjectURL(new Blob([await (await unpack("plotly")).blob()], { type: "text/javascript" }));
    await new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error("plotly.js could not be started"));
      document.head.append(script);
    });
    URL.revokeObjectURL(url);
  }

  async function draw() {
    const figures = await (await unpack("figures")).json();
    if (!Object.keys(figures).length) return;
    await loadPlotly();
    for (const [anchor, figure] of Object.entries(figures)) {
      const plot = document.getElementById(`plot-${anchor}`);
      const { data, layout } = themed(figure, plot);
      await Plotly.newPlot(plot, data, layout, settings(plot));
      plots.set(anchor, figure);
      plot.style.minHeight = "";
      addLegend(plot, figure);
      if (plot.dataset.zooms) addZoom(plot);
      await new Promise((resolve) => setTimeout(resolve)); // let the page answer between two figures
    }
  }

  // A legend of buttons, for Plotly's own cannot be reached by keyboard.
  function addLegend(plot, figure) {
    const entries = new Map(); // group -> positions of its traces
    figure.data.forEach((trace, position) => {
      const group = trace.legendgroup ?? `trace ${position}`;
      if (!entries.has(group)) entries.set(group, { positions: [], name: "", meta: trace.meta, pattern: "" });
      const entry = entries.get(group);
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
      toggle.setAttribute("aria-pressed", "true");
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

  // ---- moving along the time axis

  function moveTo(plot, begin, end) {
    Plotly.relayout(plot, { "xaxis.range": [begin, end] });
  }

  function scale(plot, factor, share) {
    const [begin, end] = plot.layout.xaxis.range;
    const middle = begin + (end - begin) * share;
    moveTo(plot, middle - (middle - begin) * factor, middle + (end - middle) * factor);
  }

  function addZoom(plot) {
    const home = plot.layout.xaxis.range.slice();
    plot.addEventListener("keydown", (event) => {
      if (event.target !== plot || event.ctrlKey || event.metaKey || event.altKey) return;
      const [begin, end] = plot.layout.xaxis.range;
      const stride = (end - begin) / 5;
      if (event.key === "ArrowLeft") moveTo(plot, begin - stride, end - stride);
      else if (event.key === "ArrowRight") moveTo(plot, begin + stride, end + stride);
      else if (event.key === "+" || event.key === "=") scale(plot, 0.6, 0.5);
      else if (event.key === "-") scale(plot, 1 / 0.6, 0.5);
      else if (event.key === "0" || event.key === "Home") moveTo(plot, home[0], home[1]);
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
    plot.nextElementSibling.after(hint);
  }

  // ---- tables

  function compare(a, b) {
    const one = a?.dataset.value;
    const other = b?.dataset.value;
    if (one !== undefined || other !== undefined) {
      return (one === undefined ? Infinity : Number(one)) - (other === undefined ? Infinity : Number(other));
    }
    return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, column) => {
      header.querySelector("button").addEventListener("click", () => {
        const isNumber = header.classList.contains("number");
        const present = header.getAttribute("aria-sort");
        const descending = present ? present === "ascending" : isNumber;
        for (const other of headers) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => compare(a.cells[column], b.cells[column]) * (descending ? -1 : 1) || 0);
        const isKnown = (row) => !isNumber || row.cells[column].dataset.value !== undefined;
        table.tBodies[0].append(...rows.filter(isKnown), ...rows.filter((row) => !isKnown(row)));
      });
    });
  }

  // ---- start

  function explain(sentence) {
    const notice = document.getElementById("notice");
    notice.textContent = sentence;
    notice.hidden = false;
    for (const plot of document.querySelectorAll(".plot")) plot.hidden = true;
    for (const numbers of document.querySelectorAll("details.numbers")) numbers.open = true;
  }

  setTheme(readTheme());
  if (typeof DecompressionStream === "undefined") {
    explain(
      "This browser cannot unpack the figures (it lacks DecompressionStream: Chrome and Edge have it from 80, " +
        "Safari from 16.4, Firefox from 113). The tables hold the same numbers.",
    );
  } else {
    draw().then(
      () => (root.dataset.drawn = "yes"),
      (error) => {
        explain(`The figures could not be drawn (${error.message}). The tables hold the same numbers.`);
        throw error;
      },
    );
  }
})();
