// Tables: sorted by their headers; of long ones some rows are shown, found by a text, or all; rows of the selected
// rank are marked, and shown.
(() => {
  "use strict";
  const states = new WeakMap(); // table -> {rows in order, texts by row, rows by rank}

  function stateOf(table) {
    let state = states.get(table);
    if (!state) {
      state = { rows: [...table.tBodies].flatMap((body) => [...body.rows]), texts: null, byRank: null, marked: [] };
      states.set(table, state);
    }
    return state;
  }

  function toolsOf(table) {
    return table.tBodies.length > 1 ? table.closest(".scroll").previousElementSibling : null;
  }

  function textOf(row) {
    return [...row.cells].map((cell) => cell.textContent.toLowerCase()).join("\n");
  }

  function nextOrder(header) {
    const present = header.getAttribute("aria-sort");
    const descending = present ? present === "ascending" : header.classList.contains("number");
    return descending ? "descending" : "ascending";
  }

  function sortBy(table, header, direction) {
    const headers = [...table.tHead.rows[0].cells];
    const column = headers.indexOf(header);
    const isNumber = header.classList.contains("number");
    const descending = direction === "descending";
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction);
    const keyed = stateOf(table).rows.map((row) => {
      const cell = row.cells[column];
      return { row, key: isNumber ? Number(cell.dataset.value ?? NaN) : cell.textContent };
    });
    const known = keyed.filter(({ key }) => !Number.isNaN(key)); // what is not known stays last
    const order = new Intl.Collator("en", { numeric: true });
    known.sort((a, b) => (isNumber ? a.key - b.key : order.compare(a.key, b.key)) * (descending ? -1 : 1));
    stateOf(table).rows = [...known, ...keyed.filter(({ key }) => Number.isNaN(key))].map(({ row }) => row);
    arrange(table);
  }

  // Puts the rows in order; of a long table those that are shown into the first body, the rest into the hidden one.
  function arrange(table) {
    const state = stateOf(table);
    const [shown, rest] = table.tBodies;
    if (!rest) {
      shown.append(...state.rows);
      return;
    }
    const tools = toolsOf(table);
    const wanted = tools.querySelector("input").value.trim().toLowerCase();
    const isAll = tools.querySelector("button").getAttribute("aria-pressed") === "true";
    if (wanted) state.texts ??= new Map(state.rows.map((row) => [row, textOf(row)]));
    const found = wanted ? state.rows.filter((row) => state.texts.get(row).includes(wanted)) : state.rows;
    const first = Number(tools.dataset.first);
    const front = isAll ? found : found.filter((row, i) => i < first || row.classList.contains("marked"));
    const isFront = new Set(front);
    rest.append(...[...shown.rows].filter((row) => !isFront.has(row)));
    let next = shown.firstElementChild;
    for (const row of front) {
      if (row === next) next = row.nextElementSibling; // what is moved is laid out anew
      else shown.insertBefore(row, next);
    }
    const all = state.rows.length.toLocaleString("en");
    const which = front.length < found.length ? `${front.length} of ` : "";
    const text = wanted ? `${which}${found.length} rows found, ${all} in all` : `${which}${all} rows`;
    tools.querySelector("[role=status]").textContent = text;
  }

  document.addEventListener("click", (event) => {
    const header = event.target.closest?.("table.sortable th");
    if (header && event.target.closest("button")) sortBy(header.closest("table"), header, nextOrder(header));
    const all = event.target.closest?.(".table-tools button");
    if (all) {
      all.setAttribute("aria-pressed", String(all.getAttribute("aria-pressed") !== "true"));
      arrange(all.parentElement.nextElementSibling.querySelector("table"));
    }
  });

  document.addEventListener("input", (event) => {
    const tools = event.target.closest?.(".table-tools");
    if (tools) arrange(tools.nextElementSibling.querySelector("table"));
  });

  function rowsByRank(table) {
    const state = stateOf(table);
    if (!state.byRank) {
      state.byRank = new Map();
      if (table.tHead?.rows[0]?.cells[0]?.textContent !== "rank") return state.byRank;
      for (const row of state.rows) {
        const rank = row.cells[0].textContent;
        if (!state.byRank.has(rank)) state.byRank.set(rank, []);
        state.byRank.get(rank).push(row);
      }
    }
    return state.byRank;
  }

  function mark(within = document) {
    for (const table of within.querySelectorAll("table")) {
      const state = stateOf(table);
      const rows = rowsByRank(table).get(String(dtprof.selected)) ?? [];
      if (rows.length === state.marked.length && rows.every((row, i) => row === state.marked[i])) continue;
      for (const row of state.marked) row.classList.remove("marked");
      for (const row of rows) row.classList.add("marked");
      state.marked = rows;
      if (table.tBodies.length > 1) arrange(table);
    }
  }

  // Notes how the tables of a place are sorted and what is looked for in them; returns what does the same again there.
  function note(place) {
    const noted = [...place.querySelectorAll("table.sortable")].map((table) => {
      const headers = [...table.tHead.rows[0].cells];
      const input = toolsOf(table)?.querySelector("input");
      return {
        column: headers.findIndex((header) => header.hasAttribute("aria-sort")),
        direction: table.querySelector("th[aria-sort]")?.getAttribute("aria-sort"),
        wanted: input?.value ?? "",
        isAll: toolsOf(table)?.querySelector("button").getAttribute("aria-pressed") ?? "false",
        caret: input && document.activeElement === input ? input.selectionStart : null,
      };
    });
    return () => {
      for (const [position, table] of [...place.querySelectorAll("table.sortable")].entries()) {
        const { column, direction, wanted, isAll, caret } = noted[position] ?? { column: -1 };
        const tools = toolsOf(table);
        if (tools && wanted !== undefined) {
          const input = tools.querySelector("input");
          input.value = wanted;
          tools.querySelector("button").setAttribute("aria-pressed", isAll);
          if (caret !== null) {
            input.focus({ preventScroll: true });
            input.setSelectionRange(caret, caret);
          }
        }
        const header = table.tHead.rows[0].cells[column];
        if (header) sortBy(table, header, direction);
        else arrange(table);
      }
    };
  }

  dtprof.tables = { mark, note };
})();
