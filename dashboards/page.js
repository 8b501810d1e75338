// The page: unpack and show the documents of its panels, switch pages and theme, keep one rank selected.
// Whoever serves pages live calls dtprof.update(documents); see dtprof/report/pages/page_panels.py.
(() => {
  "use strict";
  const root = document.documentElement;
  const pages = [...document.querySelectorAll(".page")]; // in the order of their tabs
  let drawings = {}; // by anchor of the panel

  // ---- theme

  const themes = ["system", "light", "dark"];
  const themeButton = document.getElementById("theme");

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
    themeButton.textContent = `Theme: ${theme}`;
    refresh();
  }

  themeButton.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
    try {
      localStorage.setItem("dtprof-theme", next);
    } catch {
      // the choice holds for this visit only
    }
    setTheme(next);
  });

  // ---- one rank, selected everywhere

  const selectedButton = document.getElementById("selected");

  function select(rank) {
    dtprof.selected = rank;
    selectedButton.hidden = rank === null;
    selectedButton.textContent = `Rank ${rank} \u00d7`;
    selectedButton.setAttribute("aria-label", `Rank ${rank} is selected. Select none`);
    const { anchor } = readAddress();
    const address = `${anchor}${rank === null ? "" : `:rank=${rank}`}`;
    history.replaceState(null, "", address ? `#${address}` : location.pathname + location.search);
    dtprof.grid.mark();
    dtprof.tables.mark();
    requestAnimationFrame(refresh);
  }

  selectedButton.addEventListener("click", () => select(null));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && dtprof.selected !== null) select(null);
  });

  function refresh() {
    if (globalThis.Plotly) dtprof.plots.refresh();
    dtprof.grid.refresh();
    dtprof.tracks.refresh();
  }

  // ---- pages and addresses: #ANCHOR, or #ANCHOR:rank=3

  function readAddress() {
    const [anchor, rest = ""] = decodeURIComponent(location.hash.slice(1)).split(":");
    const rank = /^rank=(\d+)$/.exec(rest)?.[1];
    return { anchor, rank: rank === undefined ? null : Number(rank) };
  }

  async function follow() {
    const { anchor, rank } = readAddress();
    const target = document.getElementById(anchor);
    const page = target?.closest(".page") ?? pages[0];
    for (const other of pages) other.hidden = other !== page;
    markTab(page);
    if (rank !== null && rank !== dtprof.selected) select(rank);
    document.dispatchEvent(new Event("dtprof-page"));
    await drawPage(page);
    if (target === page) window.scrollTo({ top: 0, behavior: "instant" });
    else target?.scrollIntoView({ behavior: "instant" });
  }

  function markTab(page) {
    for (const link of document.querySelectorAll(".tabs a")) {
      if (link.hash === `#${page.id}`) {
        link.setAttribute("aria-current", "page");
        const tabs = link.closest("ol"); // which scrolls where not all tabs fit
        tabs.scrollLeft = link.offsetLeft - (tabs.clientWidth - link.offsetWidth) / 2;
      } else link.removeAttribute("aria-current");
    }
  }

  // Takes over the tabs of a newer state of this document, and the pages that this one lacks; all others stay as they
  // are, with what is zoomed and selected in them.
  function adopt(text) {
    const newer = new DOMParser().parseFromString(text, "text/html");
    let position = 0;
    for (const page of newer.querySelectorAll(".page")) {
      const known = pages.findIndex((one) => one.id === page.id);
      if (known >= 0) {
        position = known + 1;
        continue;
      }
      page.hidden = true;
      if (position < pages.length) pages[position].before(page);
      else pages.at(-1).after(page);
      pages.splice(position++, 0, page);
    }
    document.querySelector(".tabs").replaceWith(newer.querySelector(".tabs"));
    markTab(pages.find((page) => !page.hidden));
  }

  // A link that leads where the address is already, or keeps the selection, changes no hash by itself.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    const anchor = link.hash.slice(1);
    if (!document.getElementById(anchor)?.closest(".page")) return;
    event.preventDefault();
    const rank = dtprof.selected === null ? "" : `:rank=${dtprof.selected}`;
    history.pushState(null, "", `#${anchor}${rank}`);
    follow().catch(explainFailure);
  });
  window.addEventListener("popstate", () => follow().catch(explainFailure));

  // ---- documents

  async function unpack(id) {
    const packed = document.getElementById(id).textContent.trim();
    const letters = atob(packed);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  let plotly; // the promise that it is loaded

  function loadPlotly() {
    plotly ??= (async () => {
      const url = URL.createObjectURL(new Blob([await (await unpack("plotly")).blob()], { type: "text/javascript" }));
      await new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = () => reject(new Error("plotly.js could not be started"));
        document.head.append(script);
      });
      URL.revokeObjectURL(url);
    })();
    return plotly;
  }

  let drawn = Promise.resolve(); // pages are drawn one after the other

  function drawPage(page) {
    delete root.dataset.drawn;
    drawn = drawn.catch(() => undefined).then(() => drawNow(page));
    return drawn;
  }

  async function drawNow(page) {
    if (page.hidden) return;
    for (const panel of page.querySelectorAll(".panel")) {
      const drawing = drawings[panel.id];
      if (drawing?.grid) dtprof.grid.show(panel.id, drawing.grid);
      if (drawing?.tracks) dtprof.tracks.show(panel.id, drawing.tracks);
    }
    for (const panel of page.querySelectorAll(".panel")) {
      const drawing = drawings[panel.id];
      if (!drawing?.plotly) continue;
      await loadPlotly();
      await dtprof.plots.show(panel.id, drawing.plotly);
      await new Promise((resolve) => setTimeout(resolve)); // let the page answer between two figures
      if (page.hidden) return;
    }
    refresh();
    dtprof.tables.mark(page);
    root.dataset.drawn = page.id;
  }

  // Replaces what panels show. What is drawn stays where it is, so that zoom and selection stay, too.
  async function update(documents) {
    for (const [anchor, { markup, drawing }] of Object.entries(documents)) {
      const place = document.getElementById(`content-${anchor}`);
      if (!place) continue;
      if (drawing) drawings[anchor] = drawing;
      else delete drawings[anchor];
      const fresh = document.createElement("template");
      fresh.innerHTML = markup;
      const open = [...place.querySelectorAll("details")].map((one) => one.open);
      [...fresh.content.querySelectorAll("details")].forEach((one, position) => (one.open = open[position] ?? false));
      const sortAgain = dtprof.tables.note(place);
      const kept = place.querySelector(".frame, .grid-place, .tracks-place");
      const slot = fresh.content.querySelector(".frame, .grid-place, .tracks-place");
      if (kept && slot && kept.className === slot.className) replaceAround(kept, slot);
      else place.replaceChildren(fresh.content);
      sortAgain();
    }
    await drawPage(pages.find((page) => !page.hidden));
  }

  // Replaces what stands beside a drawing; the drawing itself is not touched, for it would lose what is scrolled.
  function replaceAround(kept, slot) {
    for (const old of [...kept.parentElement.childNodes]) if (old !== kept) old.remove();
    const beside = [...slot.parentElement.childNodes];
    kept.before(...beside.slice(0, beside.indexOf(slot)));
    kept.after(...beside.slice(beside.indexOf(slot) + 1));
  }

  // ---- start

  function explain(sentence) {
    const notice = document.getElementById("notice");
    notice.textContent = sentence;
    notice.hidden = false;
    for (const plot of document.querySelectorAll(".plot")) plot.hidden = true;
    for (const numbers of document.querySelectorAll("details.numbers")) numbers.open = true;
  }

  function explainFailure(error) {
    explain(`The figures could not be drawn (${error.message}). The tables hold the same numbers.`);
    throw error;
  }

  async function start() {
    if (document.getElementById("figures").textContent.trim()) drawings = await (await unpack("figures")).json();
    await follow();
  }

  Object.assign(dtprof, { select, update, refresh, adopt });
  for (const page of pages) page.hidden = page !== pages[0];
  setTheme(readTheme());
  if (typeof DecompressionStream === "undefined") {
    for (const page of pages) page.hidden = false;
    explain(
      "This browser cannot unpack the figures (it lacks DecompressionStream: Chrome and Edge have it from 80, " +
        "Safari from 16.4, Firefox from 113). The tables hold the same numbers.",
    );
  } else {
    start().catch(explainFailure);
  }
})();
