// Only in pages that are served: asks once a second what has changed on the page that is open, and says how the job
// stands.
(() => {
  "use strict";
  const EVERY_MS = 1000;
  const place = document.getElementById("live");
  const versions = {}; // by page: only the visible page is requested
  let newest = Number(place.dataset.version);
  const firstVersion = newest;
  let names = null;
  const now = document.getElementById("now");

  function say(state, text, alarms) {
    place.dataset.state = state;
    now.querySelector("summary").textContent = ["gone", "unknown"].includes(state) ? "As last seen" : "Now";
    place.querySelector(".live-text").textContent = text;
    const list = place.querySelector(".live-alarms");
    const fresh = alarms.map((alarm) => Object.assign(document.createElement("li"), { textContent: alarm }));
    if (fresh.map((one) => one.textContent).join() !== [...list.children].map((one) => one.textContent).join()) {
      list.replaceChildren(...fresh);
    }
  }

  function showNow(markup) {
    now.hidden = markup === null;
    if (markup === null || !now.open) return;
    const table = now.querySelector(".now-table");
    const fresh = document.createElement("template");
    fresh.innerHTML = markup;
    const parts = [...fresh.content.children];
    [...table.children].slice(parts.length).forEach((one) => one.remove());
    parts.forEach((one, at) => {
      // What scrolls stays: it keeps its place and the focus.
      if (table.children[at]) table.children[at].innerHTML = one.innerHTML;
      else table.append(one);
    });
  }

  // Beside every title how old its figures are, once that is worth saying.
  function showAge(age) {
    for (const title of document.querySelectorAll(".panel > h2")) {
      if (age) title.dataset.age = `as of ${age}`;
      else delete title.dataset.age;
    }
  }

  async function ask() {
    if (document.hidden) return;
    const page = document.querySelector(".page:not([hidden])").id.slice("page-".length);
    const since = versions[page] ?? firstVersion;
    let news;
    try {
      const answer = await fetch(`documents?page=${encodeURIComponent(page)}&since=${since}`);
      if (!answer.ok) {
        say("gone", `showing the last known state: ${await answer.text()}`, []);
        return;
      }
      news = await answer.json();
    } catch {
      say("gone", "showing the last known state: dtprof dashboard does not answer, it may have ended", []);
      return;
    }
    say(news.status.state, news.status.text, news.status.alarms);
    showNow(news.now);
    if (news.version < newest) {
      location.reload(); // the server was started anew
      return;
    }
    names ??= news.pages.join();
    if (news.pages.join() !== names) {
      dtprof.adopt(await (await fetch(location.pathname)).text());
      names = news.pages.join();
    }
    versions[page] = newest = news.version;
    place.dataset.version = newest;
    if (Object.keys(news.documents).length) await dtprof.update(news.documents);
    showAge(news.status.age);
  }

  function explain(error) {
    say("gone", `showing the last known state: ${error.message}`, []);
  }

  let asked = Promise.resolve(); // one after the other, so that no older answer overwrites a newer one

  function askNext() {
    asked = asked.then(ask).catch(explain);
    return asked;
  }

  async function go() {
    await askNext();
    setTimeout(go, EVERY_MS);
  }
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) askNext(); // a browser lets timers of hidden pages sleep for minutes
  });
  document.addEventListener("dtprof-page", askNext); // another page is open
  go();
})();
