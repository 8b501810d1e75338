// The grid of ranks: one button a rank, coloured by the metric chosen, on a scale that is fixed for the run.
(() => {
  "use strict";
  const AT_ONCE = 256;
  const grids = new Map(); // anchor -> {anchor, place, data, metric, cells}

  function show(anchor, data) {
    const place = document.getElementById(`grid-${anchor}`);
    if (!place) return;
    const known = grids.get(anchor);
    if (known?.data === data && known.place === place) return;
    const metric = known?.metric ?? data.metrics.find((one) => one.key === "exposed")?.key ?? data.metrics[0].key;
    const grid = { anchor, place, data, metric, cells: [] };
    grids.set(anchor, grid);
    place.replaceChildren(makePicker(grid), makeCells(grid), makeScale());
    colour(grid);
    mark();
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

  function makeCells(grid) {
    const cells = document.createElement("div");
    const { columns, axes } = grid.data;
    cells.className = `cells ${grid.data.metrics[0].short ? "dense" : ""}`;
    cells.style.setProperty("--columns", columns);
    cells.setAttribute("role", "group");
    cells.setAttribute("aria-label", axes.length > 1 ? `Ranks by ${axes.join(", ")}` : "Ranks");
    for (const [position, cell] of grid.data.cells.entries()) {
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
      cells.append(button);
      grid.cells.push({ button, value, cell });
    }
    cells.addEventListener("keydown", (event) => move(grid, event));
    return cells;
  }

  // Arrow keys go from rank to rank, so that Tab passes the grid in one stop.
  function move(grid, event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!Object.hasOwn(steps, event.key)) return;
    event.preventDefault();
    const own = grid.cells.find((one) => one.button === document.activeElement)?.cell;
    if (!own) return;
    const [down, right] = steps[event.key];
    const next = grid.cells.find(({ cell }) => cell.row === own.row + down && cell.column === own.column + right);
    if (!next) return;
    for (const { button } of grid.cells) button.tabIndex = -1;
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
    colourFrom(grid, metric, 0);
  }

  // Some cells a frame: of a thousand, all at once would hold the page up.
  function colourFrom(grid, metric, begin) {
    const end = Math.min(begin + AT_ONCE, grid.cells.length);
    for (let position = begin; position < end; position++) {
      const { button, value, cell } = grid.cells[position];
      const share = metric.values[position] === null ? 0 : metric.values[position] / metric.top;
      const text = metric.texts[position];
      button.style.setProperty("--share", `${(100 * Math.min(1, share)).toFixed(1)}%`);
      value.textContent = metric.short?.[position] ?? text;
      button.title = `rank ${cell.rank}${cell.where ? ` (${cell.where})` : ""}: ${metric.name} ${text}`;
    }
    if (end === grid.cells.length) return;
    requestAnimationFrame(() => {
      if (grids.get(grid.anchor) === grid && grid.metric === metric.key) colourFrom(grid, metric, end);
    });
  }

  function mark() {
    for (const grid of grids.values()) {
      for (const { button, cell } of grid.cells) {
        const pressed = String(cell.rank === dtprof.selected);
        if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
      }
    }
  }

  dtprof.grid = { show, mark };
})();
