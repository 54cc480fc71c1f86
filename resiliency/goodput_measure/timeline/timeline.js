// SPDX-License-Identifier: Apache-2.0
// Draws the lanes of a timeline on a canvas and zooms them.  All figures come aggregated from the page.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("lanes"), tip = document.getElementById("tip");
  const context = canvas.getContext("2d");
  const LEFT = 130, RIGHT = 12, TOP = 26, LANE = 24, BAR = 18, RANK = 9, BOTTOM = 46;
  const UNITS = [[86400e6, "d"], [3600e6, "h"], [60e6, "min"], [1e6, "s"], [1e3, "ms"], [1, "µs"]];
  const open = new Set();
  let from = 0, until = data.wall_us, rows = [], queued = false;

  // Runs of a lane as arrays that can be searched; made when they are first drawn.
  const decoded = new Map();
  function runs(level, lane) {
    const key = level.name + lane;
    if (!decoded.has(key)) {
      const flat = level.lanes[lane], count = flat.length / 2;
      const starts = new Float64Array(count + 1), causes = new Uint8Array(count);
      let cell = 0;
      for (let i = 0; i < count; i++) {
        starts[i] = cell * level.cell;
        cell += flat[2 * i];
        causes[i] = flat[2 * i + 1];
      }
      starts[count] = data.wall_us;
      decoded.set(key, {starts, causes});
    }
    return decoded.get(key);
  }
  function at(starts, time) {  // the last start that is not after `time`
    let low = 0, high = starts.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= time) low = middle; else high = middle - 1;
    }
    return low;
  }
  data.levels.forEach((level, index) => { level.name = "l" + index + "/"; });
  data.rank_levels.forEach((level, index) => { level.name = "r" + index + "/"; });
  function fitting(levels, perPixel) {
    return levels.find((level) => level.cell <= perPixel) || levels[levels.length - 1];
  }

  function text(us) {
    const [unit, name] = UNITS.find(([size]) => us >= size) || UNITS[UNITS.length - 1];
    return +(us / unit).toPrecision(4) + " " + name;
  }
  function width() { return canvas.clientWidth - LEFT - RIGHT; }
  function x(time) { return LEFT + (time - from) / (until - from) * width(); }
  function timeAt(pixel) { return from + (pixel - LEFT) / width() * (until - from); }

  function layout() {
    rows = [];
    let y = TOP;
    data.lanes.forEach((lane, index) => {
      rows.push({y, height: BAR, label: lane.label, lane: index, levels: data.levels, of: index});
      y += LANE;
      if (open.has(index)) {
        for (const place of lane.ranks) {
          const label = "rank " + data.ranks[place];
          rows.push({y, height: RANK - 1, label, rank: true, levels: data.rank_levels, of: place});
          y += RANK;
        }
        y += 6;
      }
    });
    return y;
  }

  function draw() {
    queued = false;
    const below = layout(), height = below + BOTTOM, scale = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = canvas.clientWidth * scale;
    canvas.height = height * scale;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "12px system-ui, sans-serif";
    const perPixel = (until - from) / Math.max(width(), 1);
    for (const row of rows) {
      context.fillStyle = "#1d2730";
      context.textAlign = "right";
      if (!row.rank) {
        const mark = data.lanes[row.lane].ranks.length > 1 ? (open.has(row.lane) ? "▾ " : "▸ ") : "";
        context.fillText(mark + row.label, LEFT - 8, row.y + 13, LEFT - 10);
      }
      const {starts, causes} = runs(fitting(row.levels, perPixel), row.of);
      for (let i = at(starts, from); i < causes.length && starts[i] < until; i++) {
        const left = Math.max(x(starts[i]), LEFT), right = Math.min(x(starts[i + 1]), LEFT + width());
        context.fillStyle = data.causes[causes[i]].color;
        context.fillRect(left, row.y, right - left, row.height);
      }
    }
    marks(below);
    axis(below);
    document.documentElement.dataset.drawnMs ||= performance.now().toFixed(0);
  }

  function marks(below) {
    context.fillStyle = "#1f4fa8";
    let previous = -9;
    for (const [time] of data.saves) {
      const place = x(time);
      if (time < from || time > until || place - previous < 1) continue;
      previous = place;
      context.beginPath();
      context.moveTo(place, below);
      context.lineTo(place + 4, below + 8);
      context.lineTo(place - 4, below + 8);
      context.fill();
    }
    context.fillStyle = "#66727e";
    context.fillText("saved", LEFT - 8, below + 9);
    context.strokeStyle = context.fillStyle = "#a3142f";
    for (const [time, lane] of data.faults) {
      if (time < from || time > until) continue;
      const place = x(time);
      context.beginPath();
      context.moveTo(place - 4, TOP - 14);
      context.lineTo(place + 4, TOP - 14);
      context.lineTo(place, TOP - 6);
      context.fill();
      const row = rows.find((each) => each.lane === lane);
      if (row === undefined) continue;
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(place - 4, row.y + 5); context.lineTo(place + 4, row.y + 13);
      context.moveTo(place + 4, row.y + 5); context.lineTo(place - 4, row.y + 13);
      context.stroke();
    }
  }

  function axis(below) {
    const y = below + 14, span = until - from;
    const [unit, name] = UNITS.find(([size]) => span >= 2 * size) || UNITS[UNITS.length - 1];
    const base = 10 ** Math.floor(Math.log10(span / unit / 5));
    const distance = [1, 2, 5, 10].map((factor) => factor * base).find((each) => span / unit / each <= 10);
    context.strokeStyle = "#c3cad1";
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(LEFT, y); context.lineTo(LEFT + width(), y);
    context.stroke();
    context.fillStyle = "#66727e";
    context.textAlign = "center";
    for (let tick = Math.ceil(from / unit / distance) * distance; tick * unit <= until; tick += distance) {
      context.fillText(+tick.toPrecision(10) + "", x(tick * unit), y + 14);
    }
    context.fillText(name + " since the first event", LEFT + width() / 2, y + 29);
  }

  function redraw() {
    if (!queued) { queued = true; requestAnimationFrame(draw); }
  }
  function show(low, high) {
    const least = Math.min(1000, data.wall_us), span = Math.min(Math.max(high - low, least), data.wall_us);
    from = Math.min(Math.max(low, 0), data.wall_us - span);
    until = from + span;
    redraw();
  }
  function zoom(factor, around) { show(around - (around - from) * factor, around + (until - around) * factor); }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey) show(from + event.deltaY / 800 * (until - from), until + event.deltaY / 800 * (until - from));
    else zoom(Math.exp(event.deltaY / 400), timeAt(event.offsetX));
  }, {passive: false});
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = {x: event.offsetX, from, until, moved: false};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    const row = rows.find((each) => event.offsetY >= each.y && event.offsetY < each.y + LANE);
    if (drag !== null && !drag.moved && event.offsetX < LEFT && row !== undefined && !row.rank) toggle(row.lane);
    drag = null;
  });
  function toggle(lane) {
    if (data.lanes[lane].ranks.length < 2) return;
    if (!open.delete(lane)) open.add(lane);
    redraw();
  }
  canvas.addEventListener("pointermove", (event) => {
    if (drag !== null) {
      const moved = (drag.x - event.offsetX) / width() * (drag.until - drag.from);
      drag.moved ||= Math.abs(drag.x - event.offsetX) > 3;
      if (drag.moved) show(drag.from + moved, drag.until + moved);
      return;
    }
    hover(event);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", () => show(0, data.wall_us));
  function hover(event) {
    const row = rows.find((each) => event.offsetY >= each.y && event.offsetY < each.y + each.height);
    const time = timeAt(event.offsetX);
    tip.hidden = row === undefined || time < from || time > until;
    if (tip.hidden) return;
    const {starts, causes} = runs(fitting(row.levels, (until - from) / width()), row.of);
    const index = at(starts, time), begin = starts[index];
    const clock = new Date((data.start_us + begin) / 1000).toISOString().replace("T", " ").slice(0, 19);
    tip.textContent = row.label + ": " + data.causes[causes[index]].label + " for " +
      text(starts[index + 1] - begin) + ", from " + text(begin) + " (" + clock + " UTC)";
    tip.style.left = Math.min(event.pageX + 14, window.innerWidth - 340) + "px";
    tip.style.top = event.pageY + 14 + "px";
  }
  for (const [id, action] of [
    ["in", () => zoom(0.5, (from + until) / 2)],
    ["out", () => zoom(2, (from + until) / 2)],
    ["all", () => show(0, data.wall_us)],
  ]) document.getElementById(id).addEventListener("click", action);
  document.addEventListener("keydown", (event) => {
    const step = (until - from) / 5, middle = (from + until) / 2;
    if (event.key === "+") zoom(0.5, middle);
    else if (event.key === "-") zoom(2, middle);
    else if (event.key === "0") show(0, data.wall_us);
    else if (event.key === "ArrowLeft") show(from - step, until - step);
    else if (event.key === "ArrowRight") show(from + step, until + step);
  });
  // A row of the table of incidents shows its incident.
  for (const row of document.querySelectorAll("tr[data-from]")) {
    row.addEventListener("click", () => {
      const low = +row.dataset.from, high = +row.dataset.until, margin = (high - low) / 4 + 1;
      show(low - margin, high + margin);
      canvas.scrollIntoView({block: "nearest"});
    });
  }
  window.addEventListener("resize", redraw);
  draw();
  window.timelinePage = {show, toggle, draw};  // for tests and the console
})();
