// The grid of ranks: one button a rank, coloured by the metric chosen, on a scale that is fixed for the run.
(() => {
  "use strict";
  const MOST_BUTTONS = 256; // more ranks are painted: mosaic.js
  const grids = new Map(); // anchor -> {anchor, place, data, metric, cells}

  function show(anchor, data) {
    const place = document.getElementById(`grid-${anchor}`);
    if (!place) return;
    const known = grids.get(anchor);
    if (known?.data === data && known.place === place) return;
    if (known?.place === place && layoutOf(known.data) === layoutOf(data)) {
      known.data = data; // what has the focus keeps it
      colour(known);
      return;
    }
    const metric = known?.metric ?? data.metrics.find((one) => one.key === "exposed")?.key ?? data.metrics[0].key;
    const grid = { anchor, place, data, metric };
    grids.set(anchor, grid);
    grid.cells = data.cells.length > MOST_BUTTONS ? dtprof.makeMosaic(grid) : makeButtons(grid);
    place.replaceChildren(makePicker(grid), grid.cells.element, makeScale());
    colour(grid);
    mark();
  }

  function layoutOf({ axes, columns, cells, metrics }) {
    return JSON.stringify([axes, columns, cells, metrics.map(({ key, name }) => [key, name])]);
  }

  function makePicker(grid) {
    const picker = document.createElement("div");
    picker.className = "picker";
    picker.setAttribute("role", "group");
    picker.setAttribute("aria-label", "Metric of the grid");
    for (const metric of grid.data.metrics) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = metric.name;
      button.dataset.metric = metric.key;
      button.addEventListener("click", () => {
        grid.metric = metric.key;
        colour(grid);
      });
      picker.append(button);
    }
    return picker;
  }

  // Returns the cells as buttons: their element, what colours them, and what marks the selected rank.
  function makeButtons(grid) {
    const element = document.createElement("div");
    const { columns, axes } = grid.data;
    element.className = `cells ${grid.data.metrics[0].short ? "dense" : ""}`;
    element.style.setProperty("--columns", columns);
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", axes.length > 1 ? `Ranks by ${axes.join(", ")}` : "Ranks");
    const buttons = grid.data.cells.map((cell, position) => {
      const button = document.createElement("button");
      const name = document.createElement("span");
      const value = document.createElement("span");
      button.type = "button";
      button.tabIndex = position ? -1 : 0;
      button.style.gridRow = cell.row + 1;
      button.style.gridColumn = cell.column + 1;
      name.textContent = cell.rank;
      name.className = "cell-rank";
      value.className = "cell-value";
      button.append(name, value);
      button.addEventListener("click", () => dtprof.select(dtprof.selected === cell.rank ? null : cell.rank));
      return { button, value, cell };
    });
    element.append(...buttons.map(({ button }) => button));
    element.addEventListener("keydown", (event) => move(buttons, event));
    return {
      element,
      colour: (metric) => colourButtons(buttons, metric),
      mark: () => markButtons(buttons),
      refresh: () => {}, // colours follow the style
    };
  }

  // Arrow keys go from rank to rank, so that Tab passes the grid in one stop.
  function move(buttons, event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!Object.hasOwn(steps, event.key)) return;
    event.preventDefault();
    const own = buttons.find((one) => one.button === document.activeElement)?.cell;
    if (!own) return;
    const [down, right] = steps[event.key];
    const next = buttons.find(({ cell }) => cell.row === own.row + down && cell.column === own.column + right);
    if (!next) return;
    for (const { button } of buttons) button.tabIndex = -1;
    next.button.tabIndex = 0;
    next.button.focus();
  }

  function makeScale() {
    const scale = document.createElement("p");
    scale.className = "scale";
    for (const name of ["", "ramp", "top", "unit"]) {
      scale.append(Object.assign(document.createElement("span"), { className: name }));
    }
    scale.children[0].textContent = "0";
    return scale;
  }

  function colour(grid) {
    const metric = grid.data.metrics.find((one) => one.key === grid.metric) ?? grid.data.metrics[0];
    grid.metric = metric.key;
    for (const button of grid.place.querySelectorAll(".picker button")) {
      button.setAttribute("aria-pressed", String(button.dataset.metric === metric.key));
    }
    grid.place.querySelector(".scale .top").textContent = metric.scale;
    const unit = grid.place.querySelector(".scale .unit");
    unit.hidden = !metric.unit;
    unit.textContent = metric.unit ? `numbers in ${metric.unit}` : "";
    grid.cells.colour(metric);
  }

  function colourButtons(buttons, metric) {
    for (const [position, { button, value, cell }] of buttons.entries()) {
      const share = metric.values[position] === null ? 0 : metric.values[position] / metric.top;
      const text = metric.texts[position];
      button.style.setProperty("--share", `${(100 * Math.min(1, share)).toFixed(1)}%`);
      value.textContent = metric.short?.[position] ?? text;
      button.title = `rank ${cell.rank}${cell.where ? ` (${cell.where})` : ""}: ${metric.name} ${text}`;
    }
  }

  function markButtons(buttons) {
    for (const { button, cell } of buttons) {
      const pressed = String(cell.rank === dtprof.selected);
      if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
    }
  }

  function mark() {
    for (const { cells } of grids.values()) cells.mark();
  }

  function refresh() {
    for (const { cells } of grids.values()) cells.refresh();
  }

  dtprof.grid = { show, mark, refresh };
})();
