// Only in pages that are served: asks once a second what has changed, and says how the job stands.
(() => {
  "use strict";
  const EVERY_MS = 1000;
  const place = document.getElementById("live");
  let version = Number(place.dataset.version);
  let names = null;

  function say(state, text, alarms) {
    place.dataset.state = state;
    place.querySelector(".live-text").textContent = text;
    const list = place.querySelector(".live-alarms");
    const fresh = alarms.map((alarm) => Object.assign(document.createElement("li"), { textContent: alarm }));
    if (fresh.map((one) => one.textContent).join() !== [...list.children].map((one) => one.textContent).join()) {
      list.replaceChildren(...fresh);
    }
  }

  async function ask() {
    if (document.hidden) return;
    let news;
    try {
      const answer = await fetch(`documents?since=${version}`);
      if (!answer.ok) {
        say("gone", `what was seen last stays: ${await answer.text()}`, []);
        return;
      }
      news = await answer.json();
    } catch {
      say("gone", "what was seen last stays: dtprof dashboard does not answer, it may have been ended", []);
      return;
    }
    say(news.status.state, news.status.text, news.status.alarms);
    names ??= news.pages.join();
    if (news.pages.join() !== names || news.version < version) {
      location.reload(); // there is a page more, or the server was started anew
      return;
    }
    version = news.version;
    place.dataset.version = version;
    if (Object.keys(news.documents).length) await dtprof.update(news.documents);
  }

  async function go() {
    await ask().catch((error) => say("gone", `what was seen last stays: ${error.message}`, []));
    setTimeout(go, EVERY_MS);
  }
  go();
})();
