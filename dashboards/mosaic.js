// The grid of many ranks: one canvas, for an element a rank takes long to style, lay out and paint. One element lies over
// the cell in focus and tells it to screen readers, another frames the rank that is selected.
(() => {
  "use strict";
  const GAP = 2; // between cells, as all sizes here in CSS pixels
  const HEIGHT = 32;
  const NARROWEST = 25.6;
  const FRAME = 3; // room around the cells for the frame of one
  const SHADES = 64;

  class Mosaic {
    constructor(grid) {
      this.grid = grid;
      const { cells, columns, axes } = grid.data;
      this.columns = columns;
      this.rows = cells.reduce((most, cell) => Math.max(most, cell.row + 1), 0);
      this.positions = new Map(cells.map((cell, position) => [cell.row * columns + cell.column, position]));
      this.byRank = new Map(cells.map((cell, position) => [cell.rank, position]));
      this.here = 0; // position of the cell in focus
      this.build(axes.length > 1 ? `Ranks by ${axes.join(", ")}` : "Ranks");
    }

    build(label) {
      const make = (tag, name, parent) => {
        const node = document.createElement(tag);
        node.className = name;
        parent?.append(node);
        return node;
      };
      this.element = make("div", "mosaic-place");
      this.list = make("div", "mosaic", this.element);
      this.list.tabIndex = 0;
      this.list.setAttribute("role", "listbox");
      this.list.setAttribute("aria-label", label);
      this.canvas = make("canvas", "", this.list);
      this.canvas.setAttribute("aria-hidden", "true");
      this.chosen = make("div", "mosaic-chosen", this.list);
      this.chosen.setAttribute("aria-hidden", "true");
      this.option = make("div", "mosaic-here", this.list);
      this.option.id = `here-${this.grid.anchor}`;
      this.option.setAttribute("role", "option");
      this.option.setAttribute("aria-setsize", this.grid.data.cells.length);
      this.list.setAttribute("aria-activedescendant", this.option.id);
      this.tip = make("div", "tip", this.element);
      this.tip.hidden = true;
      this.list.addEventListener("click", (event) => this.choose(this.positionAt(event)));
      this.list.addEventListener("pointermove", (event) => this.tell(this.positionAt(event)));
      for (const gone of ["pointerleave", "blur", "scroll"]) this.list.addEventListener(gone, () => this.tell(undefined));
      this.list.addEventListener("focus", () => this.list.matches(":focus-visible") && this.go(this.here));
      this.list.addEventListener("keydown", (event) => this.press(event));
      new ResizeObserver(() => this.refresh()).observe(this.list);
    }

    // ---- choosing

    choose(position) {
      if (position === undefined) return;
      const { rank } = this.grid.data.cells[position];
      this.here = position;
      this.placeOption();
      dtprof.select(dtprof.selected === rank ? null : rank);
    }

    press(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { row, column } = this.grid.data.cells[this.here];
      const next = {
        ArrowLeft: [row, column - 1],
        ArrowRight: [row, column + 1],
        ArrowUp: [row - 1, column],
        ArrowDown: [row + 1, column],
      };
      if (event.key === "Enter" || event.key === " ") this.choose(this.here);
      else if (event.key === "Home") this.go(0);
      else if (event.key === "End") this.go(this.grid.data.cells.length - 1);
      else if (Object.hasOwn(next, event.key)) this.go(this.positionOf(...next[event.key]));
      else return;
      event.preventDefault();
    }

    go(position) {
      if (position === undefined) return;
      this.here = position;
      this.placeOption();
      this.option.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
      this.tell(position);
    }

    positionOf(row, column) {
      return column < 0 || column >= this.columns ? undefined : this.positions.get(row * this.columns + column);
    }

    positionAt(event) {
      const box = this.canvas.getBoundingClientRect();
      const row = Math.floor(((event.clientY - box.top) / box.height) * this.rows);
      const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
      return this.positionOf(row, column);
    }

    // ---- saying what a cell shows

    textOf(position) {
      const cell = this.grid.data.cells[position];
      return `rank ${cell.rank}${cell.where ? ` (${cell.where})` : ""}: ${this.metric.name} ${this.metric.texts[position]}`;
    }

    tell(position) {
      this.tip.hidden = position === undefined;
      this.announced = position;
      if (position === undefined) return;
      this.tip.textContent = this.textOf(position);
      const [x, y, width] = this.boxOf(position);
      const left = Math.min(x + width / 2 - this.list.scrollLeft, this.element.clientWidth - this.tip.offsetWidth);
      this.tip.style.left = `${Math.max(0, left)}px`;
      this.tip.style.top = `${y + HEIGHT + 2 * FRAME}px`;
    }

    boxOf(position) {
      const { row, column } = this.grid.data.cells[position];
      const width = ((this.width ?? 0) + GAP) / this.columns;
      return [column * width, row * (HEIGHT + GAP), width - GAP];
    }

    cover(element, position) {
      const [x, y, width] = this.boxOf(position);
      element.style.width = `${width}px`;
      element.style.transform = `translate(${x}px, ${y}px)`;
    }

    placeOption() {
      this.cover(this.option, this.here);
      this.option.setAttribute("aria-label", this.textOf(this.here));
      this.option.setAttribute("aria-posinset", this.here + 1);
      this.option.setAttribute("aria-selected", String(this.grid.data.cells[this.here].rank === dtprof.selected));
    }

    mark() {
      const position = this.byRank.get(dtprof.selected);
      this.chosen.hidden = position === undefined;
      if (position !== undefined) this.cover(this.chosen, position);
      this.placeOption();
    }

    // ---- painting

    colour(metric) {
      this.metric = metric;
      this.painted = "";
      this.refresh();
      this.mark();
      if (this.announced !== undefined) this.tell(this.announced);
    }

    // Paints the cells, unless they are as they should be or on a page that is not shown.
    refresh() {
      const room = this.list.clientWidth - 2 * FRAME;
      if (room <= 0 || !this.metric) return;
      const style = getComputedStyle(document.documentElement);
      const [low, high, text] = ["--scale-low", "--scale-high", "--text"].map((name) => style.getPropertyValue(name).trim());
      const width = Math.max(room, this.columns * (NARROWEST + GAP) - GAP);
      const ratio = dtprof.isPrinted() ? 3 : Math.min(2, window.devicePixelRatio || 1);
      const look = [width, ratio, low, high, text].join();
      if (look === this.painted) return;
      this.painted = look;
      const isResized = this.width !== width;
      this.width = width;
      const tall = this.rows * (HEIGHT + GAP) - GAP;
      Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(tall * ratio) });
      this.canvas.style.width = `${width}px`;
      const context = this.canvas.getContext("2d");
      context.scale(ratio, ratio);
      this.paintCells(context, low, high);
      this.paintTexts(context, text);
      if (isResized) this.mark();
    }

    paintCells(context, low, high) {
      const { values, top } = this.metric;
      const byShade = Array.from({ length: SHADES + 1 }, () => []);
      for (let position = 0; position < values.length; position++) {
        byShade[Math.round(SHADES * Math.min(1, (values[position] ?? 0) / top))].push(position);
      }
      byShade.forEach((positions, shade) => {
        if (!positions.length) return;
        context.fillStyle = `color-mix(in oklab, ${high} ${(100 * shade) / SHADES}%, ${low})`;
        for (const position of positions) {
          const [x, y, width] = this.boxOf(position);
          context.fillRect(x, y, width, HEIGHT);
        }
      });
    }

    paintTexts(context, colour) {
      const { short, texts } = this.metric;
      const family = getComputedStyle(document.body).fontFamily;
      const { cells } = this.grid.data;
      const numbers = short ?? texts;
      context.fillStyle = colour;
      context.font = `9.6px ${family}`;
      for (let position = 0; position < cells.length; position++) {
        const [x, y, width] = this.boxOf(position);
        context.fillText(cells[position].rank, x + 2, y + 12.5, width - 2);
      }
      context.font = `600 9.6px ${family}`;
      for (let position = 0; position < cells.length; position++) {
        const [x, y, width] = this.boxOf(position);
        context.fillText(numbers[position], x + 2, y + 25.5, width - 2);
      }
    }
  }

  dtprof.makeMosaic = (grid) => new Mosaic(grid);
})();
