// The whole run on a canvas, two lanes a rank. Pixels are painted into an image, one pass over the bars in view: bars of
// a pixel or more as they are, of narrower ones the longest gives the colour and the time covered its strength.
(() => {
  "use strict";
  const GUTTER = 78; // left of the bars, for the names of ranks
  const AXIS = 24; // above them, for the time
  const PITCHES = [1, 2, 4, 7, 12, 20, 30, 44];
  const MAX_HEIGHT = 620;
  const STRENGTHS = 8;
  const charts = new Map(); // anchor -> Chart

  // ---- data

  function decodeRank(rank, what, lane) {
    const begins = [], ends = [], codes = [];
    let begin = 0;
    for (let i = 0; i < rank.begin.length; i++) {
      begin += rank.begin[i];
      if (what[rank.what[i]][0] !== lane) continue;
      begins.push(begin);
      ends.push(begin + rank.length[i]);
      codes.push(rank.what[i]);
    }
    const reach = new Float64Array(ends.length); // the latest end so far: where to begin to look
    let latest = 0;
    for (let i = 0; i < ends.length; i++) reach[i] = latest = Math.max(latest, ends[i]);
    return { begin: Float64Array.from(begins), end: Float64Array.from(ends), what: Uint32Array.from(codes), reach };
  }

  // Returns the first position whose value is above the limit.
  function firstAbove(values, limit) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] > limit) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function formatTime(ns) {
    if (!ns) return "0";
    const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "\u00b5s"], [1, "ns"]].find(([one]) => Math.abs(ns) >= one) ?? [1, "ns"];
    return `${Number((ns / size).toPrecision(4))}\u00a0${unit}`;
  }

  function parseColour(text) {
    const context = document.createElement("canvas").getContext("2d");
    context.fillStyle = text;
    context.fillRect(0, 0, 1, 1);
    return context.getImageData(0, 0, 1, 1).data;
  }

  class Chart {
    constructor(place, data) {
      this.place = place;
      this.build();
      this.setData(data);
      this.home();
    }

    setData(data) {
      const wasWhole = !this.data || (this.t0 === 0 && this.t1 === this.data.end);
      this.data = data;
      this.ranks = data.ranks.map((rank) => ({
        rank: rank.rank,
        lanes: [0, 1].map((lane) => decodeRank(rank, data.what, lane)),
      }));
      this.pitch ??= [...PITCHES].reverse().find((pitch) => pitch * this.ranks.length <= MAX_HEIGHT - AXIS) ?? 1;
      this.legend();
      if (wasWhole) this.home();
      else this.draw();
    }

    // ---- what is around the canvas

    build() {
      const make = (tag, name, parent = this.place) => {
        const node = document.createElement(tag);
        node.className = name;
        parent.append(node);
        return node;
      };
      this.place.replaceChildren();
      this.keys = make("ul", "legend plain");
      const tools = make("div", "tools");
      const button = (text, label, act) => {
        const one = make("button", "", tools);
        one.type = "button";
        one.textContent = text;
        one.title = label;
        one.setAttribute("aria-label", label);
        one.addEventListener("click", act);
      };
      button("\u2212", "Zoom out", () => this.zoom(2, 0.5));
      button("+", "Zoom in", () => this.zoom(0.5, 0.5));
      button("Whole run", "Show the whole run", () => this.home());
      button("Lower rows", "Lower rows: more ranks in view", () => this.setPitch(-1));
      button("Higher rows", "Higher rows: fewer ranks in view", () => this.setPitch(1));
      const label = make("label", "", tools);
      label.append("Step ");
      this.step = make("input", "", label);
      this.step.type = "number";
      this.step.min = 1;
      this.step.addEventListener("change", () => this.showStep(Number(this.step.value)));
      this.range = make("span", "range", tools);
      this.scroll = make("div", "tracks-scroll");
      this.scroll.tabIndex = 0;
      this.scroll.setAttribute("role", "group");
      this.scroll.setAttribute("aria-label", "Timeline of the whole run. Arrow keys move, plus and minus zoom, 0 shows the whole run. The sums are in the table below.");
      this.canvas = make("canvas", "", this.scroll);
      this.canvas.setAttribute("aria-hidden", "true");
      this.spacer = make("div", "", this.scroll);
      this.tip = make("div", "tip");
      this.tip.hidden = true;
      const hint = make("p", "hint");
      hint.textContent = "Drag to move, double-click for the whole run, Ctrl + wheel zooms; click a row to select its rank. In focus: arrow keys, + and -, 0.";
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.scroll);
    }

    legend() {
      this.keys.replaceChildren();
      const used = new Set(this.data.what.map(([, kind]) => kind));
      this.data.kinds.forEach(([name, label], number) => {
        if (!used.has(number)) return;
        const item = document.createElement("li");
        const swatch = document.createElement("span");
        swatch.className = "swatch";
        swatch.style.setProperty("--hue", dtprof.swatchColour(name));
        item.append(swatch, label);
        this.keys.append(item);
      });
      this.step.max = this.data.steps.length + 1;
      this.step.parentElement.hidden = this.data.steps.length < 2;
    }

    listen() {
      const { scroll } = this;
      let drag = null;
      scroll.addEventListener("scroll", () => this.draw());
      scroll.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? 0.75 : 1 / 0.75, this.shareAt(event));
      }, { passive: false });
      scroll.addEventListener("pointerdown", (event) => {
        if (event.button || event.offsetX > scroll.clientWidth) return;
        drag = { x: event.clientX, t0: this.t0, t1: this.t1, moved: false };
        scroll.setPointerCapture(event.pointerId);
      });
      scroll.addEventListener("pointermove", (event) => {
        if (!drag) return this.hover(event);
        const by = ((drag.x - event.clientX) / this.width()) * (drag.t1 - drag.t0);
        drag.moved ||= Math.abs(drag.x - event.clientX) > 3;
        if (drag.moved) this.moveTo(drag.t0 + by, drag.t1 + by);
      });
      scroll.addEventListener("pointerup", (event) => {
        if (drag && !drag.moved) {
          const row = this.rowAt(event);
          if (row) dtprof.select(row.rank === dtprof.selected ? null : row.rank);
        }
        drag = null;
      });
      scroll.addEventListener("pointercancel", () => (drag = null));
      scroll.addEventListener("pointerleave", () => (this.tip.hidden = true));
      scroll.addEventListener("dblclick", () => this.home());
      scroll.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        const stride = (this.t1 - this.t0) / 5;
        if (event.key === "ArrowLeft") this.moveTo(this.t0 - stride, this.t1 - stride);
        else if (event.key === "ArrowRight") this.moveTo(this.t0 + stride, this.t1 + stride);
        else if (event.key === "+" || event.key === "=") this.zoom(0.6, 0.5);
        else if (event.key === "-") this.zoom(1 / 0.6, 0.5);
        else if (event.key === "0" || event.key === "Home") this.home();
        else return;
        event.preventDefault();
      });
    }

    // ---- where it looks

    width() {
      return Math.max(50, this.scroll.clientWidth - GUTTER);
    }

    shareAt(event) {
      const box = this.scroll.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left - GUTTER) / this.width()));
    }

    rowAt(event) {
      const box = this.scroll.getBoundingClientRect();
      const y = event.clientY - box.top - AXIS + this.scroll.scrollTop;
      return event.clientY - box.top < AXIS ? undefined : this.ranks[Math.floor(y / this.pitch)];
    }

    home() {
      this.moveTo(0, this.data.end);
    }

    moveTo(begin, end) {
      const length = Math.min(this.data.end, Math.max(end - begin, 10));
      this.t0 = Math.min(Math.max(0, begin), this.data.end - length);
      this.t1 = this.t0 + length;
      this.draw();
    }

    zoom(factor, share) {
      const middle = this.t0 + (this.t1 - this.t0) * share;
      this.moveTo(middle - (middle - this.t0) * factor, middle + (this.t1 - middle) * factor);
    }

    showStep(number) {
      const { steps } = this.data;
      if (!(number >= 1 && number <= steps.length + 1)) return;
      this.moveTo(steps[number - 2] ?? 0, steps[number - 1] ?? this.data.end);
    }

    setPitch(by) {
      const at = PITCHES.indexOf(this.pitch) + by;
      if (at < 0 || at >= PITCHES.length) return;
      const top = this.scroll.scrollTop / this.pitch;
      this.pitch = PITCHES[at];
      this.draw();
      this.scroll.scrollTop = top * this.pitch;
    }

    // ---- drawing

    palette() {
      const ground = parseColour(getComputedStyle(document.documentElement).getPropertyValue("--surface").trim());
      const mix = (colour, strength) => {
        const part = (i) => Math.round(ground[i] + (colour[i] - ground[i]) * strength);
        return (255 << 24) | (part(2) << 16) | (part(1) << 8) | part(0);
      };
      this.ground = mix(ground, 1) >>> 0;
      this.shades = this.data.kinds.map(([name]) => {
        const colour = parseColour(dtprof.colourOf(name));
        return Array.from({ length: STRENGTHS + 1 }, (_, step) => mix(colour, 0.25 + (0.75 * step) / STRENGTHS) >>> 0);
      });
      this.inks = this.data.kinds.map(([name]) => {
        const [red, green, blue] = parseColour(dtprof.colourOf(name));
        return 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#14202e" : "#ffffff";
      });
      this.look = dtprof.isDark();
    }

    draw() {
      if (this.asked) return;
      this.asked = requestAnimationFrame(() => {
        this.asked = 0;
        if (this.place.offsetParent) this.paint();
      });
    }

    paint() {
      if (this.look !== dtprof.isDark() || this.shades?.length !== this.data.kinds.length) this.palette();
      const ratio = Math.min(2, window.devicePixelRatio || 1);
      const height = Math.min(MAX_HEIGHT, AXIS + this.pitch * this.ranks.length + 2);
      this.scroll.style.height = `${height}px`;
      this.spacer.style.height = `${Math.max(0, AXIS + this.pitch * this.ranks.length + 2 - height)}px`;
      const wide = Math.round(this.scroll.clientWidth * ratio), high = Math.round(height * ratio);
      if (!wide || !high) return;
      if (this.canvas.width !== wide || this.canvas.height !== high) {
        Object.assign(this.canvas, { width: wide, height: high });
        Object.assign(this.canvas.style, { width: `${this.scroll.clientWidth}px`, height: `${height}px` });
        this.image = new ImageData(wide, high);
        this.pixels = new Uint32Array(this.image.data.buffer);
      }
      this.pixels.fill(this.ground);
      const left = Math.round(GUTTER * ratio), across = wide - left;
      const first = Math.floor(this.scroll.scrollTop / this.pitch);
      const last = Math.min(this.ranks.length, first + Math.ceil((height - AXIS) / this.pitch) + 1);
      this.labels = [];
      for (let row = first; row < last; row++) {
        const top = Math.round((AXIS + row * this.pitch - this.scroll.scrollTop) * ratio);
        const gap = this.pitch >= 7 ? Math.max(1, Math.round(this.pitch * 0.12 * ratio)) : 0;
        const body = Math.max(1, Math.round(this.pitch * ratio) - gap);
        const lanes = this.ranks[row].lanes;
        if (this.pitch < 4) {
          this.paintLane([lanes[0], lanes[1]], top, body, left, across, high, ratio);
          continue;
        }
        const upper = Math.round(body * 0.56);
        this.paintLane([lanes[0]], top, upper, left, across, high, ratio);
        this.paintLane([lanes[1]], top + upper, body - upper, left, across, high, ratio);
      }
      const context = this.canvas.getContext("2d");
      context.putImageData(this.image, 0, 0);
      this.paintWords(context, ratio, first, last, height);
    }

    // Paints one row of pixels and copies it down.
    paintLane(lanes, top, body, left, across, high, ratio) {
      const from = Math.max(top, Math.round(AXIS * ratio)), to = Math.min(top + body, high);
      if (to <= from) return;
      const { t0, t1, pixels, shades } = this;
      const scale = across / (t1 - t0), what = this.data.what;
      const line = from * this.canvas.width + left;
      const cover = (this.cover?.length === across ? this.cover : (this.cover = new Float32Array(across))).fill(0);
      const longest = (this.longest?.length === across ? this.longest : (this.longest = new Float32Array(across))).fill(0);
      const kinds = this.kinds?.length === across ? this.kinds : (this.kinds = new Uint8Array(across));
      for (const lane of lanes) {
        const { begin, end } = lane;
        for (let i = firstAbove(lane.reach, t0); i < begin.length && begin[i] < t1; i++) {
          const x0 = (begin[i] - t0) * scale, x1 = (end[i] - t0) * scale, size = x1 - x0;
          if (x1 < 0) continue;
          if (size < 1) {
            const x = x0 < 0 ? 0 : x0 | 0;
            cover[x] += size;
            if (size >= longest[x]) {
              longest[x] = size;
              kinds[x] = what[lane.what[i]][1];
            }
            continue;
          }
          const kind = what[lane.what[i]][1];
          const a = x0 < 0 ? 0 : Math.round(x0), b = Math.min(across, Math.round(x1) - (size > 4 ? 1 : 0));
          for (let x = a; x < b; x++) {
            cover[x] = 1;
            longest[x] = size;
            kinds[x] = kind;
          }
          if (size > 30 * ratio && body > 9 * ratio) this.labels.push([lane.what[i], Math.max(a, 0), b, top, body]);
        }
      }
      for (let x = 0; x < across; x++) {
        if (cover[x] > 0) pixels[line + x] = shades[kinds[x]][Math.round(Math.min(1, cover[x]) * STRENGTHS)];
      }
      for (let y = from + 1; y < to; y++) pixels.copyWithin(y * this.canvas.width + left, line, line + across);
    }

    paintWords(context, ratio, first, last, height) {
      const style = getComputedStyle(document.documentElement);
      const get = (name) => style.getPropertyValue(name).trim();
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      context.textBaseline = "middle";
      context.fillStyle = get("--surface");
      context.fillRect(0, 0, this.scroll.clientWidth, AXIS - 1);
      this.paintAxis(context, get, height);
      const every = Math.ceil(14 / this.pitch);
      for (let row = first; row < last; row++) {
        const y = AXIS + row * this.pitch - this.scroll.scrollTop;
        const isSelected = this.ranks[row].rank === dtprof.selected;
        if (isSelected) {
          context.fillStyle = get("--accent");
          context.fillRect(GUTTER - 4, Math.max(AXIS, y), 3, Math.max(2, this.pitch - 1));
        }
        if (y < AXIS - this.pitch / 2 || (row % every && !isSelected)) continue;
        context.fillStyle = get(isSelected ? "--accent" : "--muted");
        context.textAlign = "right";
        context.fillText(`rank ${this.ranks[row].rank}`, GUTTER - 8, y + Math.min(this.pitch, 44) / 2);
      }
      context.textAlign = "left";
      for (const [code, a, b, top, body] of this.labels.slice(0, 400)) {
        const [, kind, name] = this.data.what[code];
        const room = (b - a) / ratio - 8;
        const text = this.data.names[name].split(" ")[0];
        if (context.measureText(text).width > room) continue;
        context.fillStyle = this.inks[kind];
        context.fillText(text, GUTTER + a / ratio + 4, (top + body / 2) / ratio + 0.5);
      }
      context.setTransform(1, 0, 0, 1, 0, 0);
      const tick = this.data.tick_ns;
      this.range.textContent = `${formatTime(this.t0 * tick)} to ${formatTime(this.t1 * tick)}: ${formatTime((this.t1 - this.t0) * tick)} in view`;
    }

    paintAxis(context, get, height) {
      const tick = this.data.tick_ns, length = (this.t1 - this.t0) * tick;
      const rough = length / Math.max(2, this.width() / 110);
      const power = 10 ** Math.floor(Math.log10(rough));
      const stride = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
      const x = (ns) => GUTTER + ((ns / tick - this.t0) / (this.t1 - this.t0)) * this.width();
      context.textAlign = "left";
      context.strokeStyle = get("--line");
      for (let at = Math.ceil((this.t0 * tick) / stride) * stride; at <= this.t1 * tick; at += stride) {
        context.fillStyle = get("--line");
        context.fillRect(Math.round(x(at)), AXIS - 6, 1, 6);
        context.fillStyle = get("--muted");
        if (x(at) < this.scroll.clientWidth - 50) context.fillText(formatTime(at), Math.round(x(at)) + 4, AXIS / 2);
      }
      const marks = this.data.steps.filter((one) => one > this.t0 && one < this.t1);
      if (marks.length > this.width() / 12) return;
      context.fillStyle = get("--faint");
      for (const mark of marks) context.fillRect(Math.round(x(mark * tick)), AXIS, 1, height - AXIS);
    }

    // ---- pointing

    hover(event) {
      const row = this.rowAt(event);
      const found = row && this.barAt(row, event);
      if (!found) {
        this.tip.hidden = true;
        return;
      }
      const [lane, i] = found;
      const tick = this.data.tick_ns;
      const [, kind, name] = this.data.what[lane.what[i]];
      const lines = [
        [`rank ${row.rank}: ${this.data.names[name]}`, "b"],
        [`${formatTime((lane.end[i] - lane.begin[i]) * tick)} (${this.data.kinds[kind][1]}), from ${formatTime(lane.begin[i] * tick)}`, "span"],
      ];
      this.tip.replaceChildren(...lines.map(([text, tag]) => {
        const node = document.createElement(tag);
        node.textContent = text;
        return node;
      }));
      this.tip.hidden = false;
      const box = this.place.getBoundingClientRect();
      const x = Math.min(event.clientX - box.left + 14, box.width - this.tip.offsetWidth - 4);
      this.tip.style.left = `${Math.max(0, x)}px`;
      this.tip.style.top = `${event.clientY - box.top + 16}px`;
    }

    // Returns the bar under the pointer, the last to begin there; else the longest within a pixel or two.
    barAt(row, event) {
      const box = this.scroll.getBoundingClientRect();
      const y = (event.clientY - box.top - AXIS + this.scroll.scrollTop) % this.pitch;
      const t = this.t0 + this.shareAt(event) * (this.t1 - this.t0);
      if (event.clientX - box.left < GUTTER) return undefined;
      const near = ((this.t1 - this.t0) / this.width()) * 1.5;
      const order = this.pitch < 4 ? [1, 0] : [y < this.pitch * 0.53 ? 0 : 1];
      for (const number of order) {
        const lane = row.lanes[number];
        let best = -1;
        for (let i = firstAbove(lane.reach, t - near); i < lane.begin.length && lane.begin[i] <= t + near; i++) {
          if (lane.end[i] < t - near) continue;
          const inside = lane.begin[i] <= t && t <= lane.end[i];
          const bestInside = best >= 0 && lane.begin[best] <= t && t <= lane.end[best];
          if (best < 0 || (inside && !bestInside) || (inside && lane.begin[i] >= lane.begin[best])) best = i;
          else if (!inside && !bestInside && lane.end[i] - lane.begin[i] > lane.end[best] - lane.begin[best]) best = i;
        }
        if (best >= 0) return [lane, best];
      }
      return undefined;
    }
  }

  function show(anchor, data) {
    const place = document.getElementById(`tracks-${anchor}`);
    if (!place) return;
    const known = charts.get(anchor);
    if (known?.place === place) {
      if (known.data === data) known.draw();
      else known.setData(data);
      return;
    }
    charts.set(anchor, new Chart(place, data));
  }

  function refresh() {
    for (const chart of charts.values()) chart.draw();
  }

  dtprof.tracks = { show, refresh, chartOf: (anchor) => charts.get(anchor) };
})();
