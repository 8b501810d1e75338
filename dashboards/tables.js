// Tables: sorted by their headers; rows of the selected rank are marked.
(() => {
  "use strict";

  function compare(a, b) {
    const one = a?.dataset.value;
    const other = b?.dataset.value;
    if (one !== undefined || other !== undefined) {
      return (one === undefined ? Infinity : Number(one)) - (other === undefined ? Infinity : Number(other));
    }
    return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  }

  function sortBy(table, header) {
    const headers = [...table.tHead.rows[0].cells];
    const column = headers.indexOf(header);
    const isNumber = header.classList.contains("number");
    const present = header.getAttribute("aria-sort");
    const descending = present ? present === "ascending" : isNumber;
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => compare(a.cells[column], b.cells[column]) * (descending ? -1 : 1) || 0);
    const isKnown = (row) => !isNumber || row.cells[column].dataset.value !== undefined;
    table.tBodies[0].append(...rows.filter(isKnown), ...rows.filter((row) => !isKnown(row)));
  }

  document.addEventListener("click", (event) => {
    const header = event.target.closest?.("table.sortable th");
    if (header && event.target.closest("button")) sortBy(header.closest("table"), header);
  });

  function mark(within = document) {
    const rank = dtprof.selected === null ? null : String(dtprof.selected);
    for (const table of within.querySelectorAll("table")) {
      const header = table.tHead?.rows[0]?.cells[0];
      if (header?.textContent !== "rank") continue;
      for (const row of table.tBodies[0].rows) row.classList.toggle("marked", row.cells[0].textContent === rank);
    }
  }

  dtprof.tables = { mark };
})();
