// The names of Google Charts that torch-tb-profiler uses, drawn with Plotly.
(function () {
  "use strict";

  const valueOf = (cell) => (cell !== null && typeof cell === "object" && "v" in cell ? cell.v : cell);
  const textOf = (cell) => {
    if (cell !== null && typeof cell === "object" && "f" in cell) return cell.f;
    const value = valueOf(cell);
    return value === null || value === undefined ? "" : String(value);
  };
  // Tooltips come as HTML: their lines are kept, their tags are not.
  const plainTip = (html) =>
    String(html === null || html === undefined ? "" : html)
      .replace(/<br\s*\/?>/gi, "\n")
      .replace(/<[^>]*>/g, "")
      .replace(/&/g, "&amp;")
      .replace(/</g, "&lt;")
      .replace(/\n/g, "<br>");

  class DataTable {
    constructor() {
      this.columns = [];
      this.rows = [];
      this.styles = new Map();
    }
    addColumn(column, label) {
      this.columns.push(typeof column === "string" ? { type: column, label: label } : column);
      return this.columns.length - 1;
    }
    addRow(row) {
      this.rows.push(row);
    }
    addRows(rows) {
      rows.forEach((row) => this.addRow(row));
    }
    setProperty(row, column, name, value) {
      if (name === "style") this.styles.set(row + "," + column, value);
    }
    getNumberOfRows() {
      return this.rows.length;
    }
    getNumberOfColumns() {
      return this.columns.length;
    }
    getValue(row, column) {
      return valueOf(this.rows[row][column]);
    }
    column(index) {
      return this.rows.map((row) => valueOf(row[index]));
    }
    // The columns that are drawn, each with the column of its tooltips.
    series() {
      const found = [];
      this.columns.forEach((column, index) => {
        if (index === 0) return;
        if (column.role === "tooltip") {
          if (found.length) found[found.length - 1].tip = index;
        } else if (!column.role || column.role === "data") {
          found.push({ label: column.label || "", index: index });
        }
      });
      return found;
    }
  }

  class Chart {
    constructor(element) {
      this.element = element;
      this.listeners = {};
      this.selection = [];
    }
    listen(event, callback) {
      (this.listeners[event] = this.listeners[event] || []).push(callback);
    }
    tell(event, details) {
      (this.listeners[event] || []).forEach((callback) => callback(details));
    }
    get zooms() {
      return true;
    }
    getSelection() {
      return this.selection;
    }
    setSelection(selection) {
      this.selection = selection || [];
    }
    clearChart() {
      Plotly.purge(this.element);
    }
    getChartLayoutInterface() {
      const axis = () => (this.element._fullLayout ? this.element._fullLayout.xaxis : null);
      const width = () => (axis() ? axis()._length : this.element.clientWidth);
      return {
        getChartAreaBoundingBox: () => ({ left: 0, top: 0, width: width(), height: this.element.clientHeight }),
        getHAxisValue: (x) => {
          const range = axis() ? axis().range : [0, 0];
          return range[0] + ((range[1] - range[0]) * x) / Math.max(1, width());
        },
      };
    }
    trace(table, series, more) {
      const tips = series.tip === undefined ? {} : { hovertext: table.column(series.tip).map(plainTip), hoverinfo: "text" };
      return Object.assign({ name: series.label, x: table.column(0), y: table.column(series.index) }, tips, more);
    }
    bars(table) {
      const names = table.column(0).map(String);
      return table.series().map((series) => this.trace(table, series, { type: "bar", x: names }));
    }
    layout(options) {
      const axis = (given) => ({ title: { text: (given || {}).title || "" }, automargin: true });
      const layout = {
        margin: { l: 60, r: 20, t: options.title ? 40 : 16, b: 48 },
        xaxis: axis(options.hAxis),
        yaxis: axis(options.vAxis),
        showlegend: options.legend !== "none",
        legend: { orientation: "h", y: -0.2 },
        barmode: options.isStacked ? "stack" : "group",
      };
      if (typeof options.height === "number") layout.height = options.height;
      if (options.title) layout.title = { text: options.title, font: { size: 13 } };
      if (options.colors) layout.colorway = options.colors;
      return layout;
    }
    draw(table, options) {
      const given = options || {};
      const settings = { displaylogo: false, responsive: true, displayModeBar: this.zooms };
      Plotly.newPlot(this.element, this.traces(table, given), this.layout(given), settings).then(() => {
        this.element.on("plotly_click", (event) => {
          const point = event.points[0];
          this.selection = [{ row: point.pointNumber, column: point.curveNumber + 1 }];
          this.tell("select");
        });
        this.element.on("plotly_hover", (event) => this.tell("onmouseover", { row: event.points[0].pointNumber }));
        this.element.on("plotly_unhover", () => this.tell("onmouseout", {}));
        this.tell("ready");
      });
    }
  }

  class ColumnChart extends Chart {
    traces(table) {
      return this.bars(table);
    }
  }

  class SteppedAreaChart extends Chart {
    traces(table) {
      return this.bars(table);
    }
    layout(options) {
      const layout = super.layout(Object.assign({ isStacked: true }, options));
      layout.bargap = 0.05;
      layout.xaxis.type = "category";
      return layout;
    }
  }

  class LineChart extends Chart {
    traces(table) {
      return table.series().map((series) => this.trace(table, series, { type: "scatter", mode: "lines" }));
    }
  }

  class ComboChart extends Chart {
    traces(table, options) {
      return table.series().map((series, position) => {
        const kind = (options.series || {})[position] || {};
        return this.trace(table, series, {
          type: kind.type === "line" ? "scatter" : "bar",
          yaxis: kind.targetAxisIndex ? "y2" : "y",
        });
      });
    }
    layout(options) {
      const layout = super.layout(options);
      layout.yaxis2 = { overlaying: "y", side: "right", automargin: true };
      return layout;
    }
  }

  class PieChart extends Chart {
    get zooms() {
      return false;
    }
    traces(table, options) {
      return [
        {
          type: "pie",
          labels: table.column(0).map(String),
          values: table.column(1),
          hole: options.pieHole || 0,
          sort: false,
          textinfo: "percent",
          textposition: "inside",
          hoverinfo: "label+value+percent",
        },
      ];
    }
    layout(options) {
      const layout = super.layout(options);
      layout.margin = { l: 10, r: 10, t: options.title ? 40 : 10, b: 10 };
      layout.legend = { orientation: "v", x: 1.02, y: 1, font: { size: 10 } };
      return layout;
    }
  }

  class Timeline extends Chart {
    traces(table) {
      const begin = table.column(3);
      const end = table.column(4);
      return [
        {
          type: "bar",
          orientation: "h",
          base: begin,
          x: end.map((value, row) => value - begin[row]),
          y: table.column(0).map(String),
          text: table.column(1),
          hovertext: table.column(2).map(plainTip),
          hoverinfo: "text",
        },
      ];
    }
    layout(options) {
      const layout = super.layout(options);
      layout.showlegend = false;
      layout.barmode = "overlay";
      layout.yaxis = { autorange: "reversed", type: "category", automargin: true };
      return layout;
    }
  }

  class Table extends Chart {
    clearChart() {
      this.element.textContent = "";
    }
    draw(table, options) {
      this.table = table;
      this.options = options || {};
      this.order = table.rows.map((_, row) => row);
      this.sortedBy = typeof this.options.sortColumn === "number" ? this.options.sortColumn : -1;
      this.ascending = this.options.sortAscending !== false;
      this.page = 0;
      this.sort();
      this.render();
      this.tell("ready");
    }
    sort() {
      if (this.sortedBy < 0) return;
      const values = this.table.column(this.sortedBy);
      const sign = this.ascending ? 1 : -1;
      this.order.sort((a, b) => sign * (values[a] < values[b] ? -1 : values[a] > values[b] ? 1 : 0));
    }
    render() {
      const size = this.options.pageSize || 30;
      const pages = Math.max(1, Math.ceil(this.order.length / size));
      this.page = Math.min(Math.max(0, this.page), pages - 1);
      const shown = document.createElement("table");
      shown.style.cssText = "border-collapse:collapse;width:100%;font:12px Roboto,Arial,sans-serif";
      const head = shown.createTHead().insertRow();
      const visible = this.table.columns.map((column, index) => index).filter((index) => !this.table.columns[index].role);
      visible.forEach((index) => head.appendChild(this.heading(index)));
      const body = shown.createTBody();
      this.order.slice(this.page * size, (this.page + 1) * size).forEach((row) => this.addTo(body, row, visible));
      this.element.textContent = "";
      this.element.appendChild(shown);
      if (pages > 1) this.element.appendChild(this.pager(pages));
    }
    heading(index) {
      const column = this.table.columns[index];
      const cell = document.createElement("th");
      const arrow = index === this.sortedBy ? (this.ascending ? " \u25b2" : " \u25bc") : "";
      cell.textContent = (column.label || "") + arrow;
      cell.title = column.tooltip || "";
      cell.style.cssText = "border:1px solid #ddd;padding:4px 6px;background:#eee;cursor:pointer;text-align:left";
      cell.onclick = () => {
        this.ascending = index === this.sortedBy ? !this.ascending : true;
        this.sortedBy = index;
        this.sort();
        this.render();
      };
      return cell;
    }
    addTo(body, row, visible) {
      const line = body.insertRow();
      visible.forEach((index) => {
        const cell = line.insertCell();
        const align = this.table.columns[index].type === "number" ? "text-align:right;" : "";
        cell.style.cssText = "border:1px solid #eee;padding:3px 6px;" + align + (this.table.styles.get(row + "," + index) || "");
        cell.textContent = textOf(this.table.rows[row][index]).replace(/<br\s*\/?>/gi, " ").replace(/<[^>]*>/g, "");
      });
      line.onclick = () => {
        this.selection = [{ row: row }];
        this.tell("select");
      };
    }
    pager(pages) {
      const bar = document.createElement("div");
      const turn = (text, by) => {
        const button = document.createElement("button");
        button.textContent = text;
        button.onclick = () => {
          this.page += by;
          this.render();
        };
        return button;
      };
      bar.append(turn("\u2039", -1), " " + (this.page + 1) + " of " + pages + " ", turn("\u203a", 1));
      return bar;
    }
  }

  function arrayToDataTable(rows) {
    const table = new DataTable();
    rows[0].forEach((column, index) => {
      const isObject = column !== null && typeof column === "object";
      table.addColumn(isObject ? column : { type: index ? "number" : "string", label: String(column) });
    });
    table.addRows(rows.slice(1));
    return table;
  }

  window.google = {
    charts: { load: () => Promise.resolve(), setOnLoadCallback: (callback) => callback() },
    visualization: {
      DataTable,
      arrayToDataTable,
      events: { addListener: (chart, event, callback) => chart.listen(event, callback) },
      ColumnChart,
      SteppedAreaChart,
      LineChart,
      ComboChart,
      PieChart,
      Timeline,
      Table,
    },
  };
})();
