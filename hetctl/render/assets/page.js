"use strict";
(() => {
  const every = (selector, act) => document.querySelectorAll(selector).forEach(act);
  const seconds = (s) => (s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(1)} ms` : `${(s * 1e6).toFixed(0)} µs`);

  function copyable(line) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.onclick = async () => {
      const code = line.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "selected";
      }
      setTimeout(() => (button.textContent = "copy"), 1500);
    };
    line.append(button);
  }

  function zoomable(timeline) {
    const svg = timeline.querySelector("svg"), ticks = timeline.querySelectorAll(".ticks span");
    const [, , whole, height] = svg.getAttribute("viewBox").split(" ").map(Number), whole_s = Number(svg.dataset.seconds);
    let left = 0, width = whole, held = null;
    const show = () => {
      left = Math.max(0, Math.min(left, whole - width));
      svg.setAttribute("viewBox", `${left} 0 ${width} ${height}`);
      ticks.forEach((tick, i) => (tick.textContent = seconds(((left + (width * i) / (ticks.length - 1)) / whole) * whole_s)));
    };
    const zoom = (factor, at = 0.5) => {
      const wanted = Math.min(whole, Math.max(whole / 5000, width * factor));
      left += (width - wanted) * at;
      width = wanted;
      show();
    };
    const share = (event) => event.offsetX / svg.clientWidth;
    const actions = { "zoom in": () => zoom(0.5), "zoom out": () => zoom(2), "earlier": () => ((left -= width / 2), show()),
      "later": () => ((left += width / 2), show()), "all": () => zoom(Infinity) };
    const buttons = document.createElement("p");
    for (const [word, act] of Object.entries(actions)) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = word;
      button.onclick = act;
      buttons.append(button, " ");
    }
    timeline.before(buttons);
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 || event.deltaX < 0 ? 0.7 : 1.4, share(event));
    }, { passive: false });
    svg.onpointerdown = (event) => { held = { x: event.clientX, left }; svg.setPointerCapture(event.pointerId); };
    svg.onpointermove = (event) => { if (held) { left = held.left - ((event.clientX - held.x) / svg.clientWidth) * width; show(); } };
    svg.onpointerup = svg.onpointercancel = () => (held = null);
    svg.ondblclick = (event) => zoom(0.4, share(event));
    show();
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const drawn = [];
  function chart(place, about) {
    const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1 } };
    const whole = [1, 2, 5].map((n) => [...Array(8).keys()].map((k) => n * 10 ** k)).flat().sort((a, b) => a - b);
    const series = about.series.map((s) => ({ label: s.label, stroke: () => colour(s.colour), width: s.faint ? 1 : 2,
      alpha: s.faint ? 0.45 : 1, spanGaps: s.points, points: { show: s.points, size: 8 },
      value: (_, v) => (v == null ? "–" : `${v.toLocaleString("en", { maximumFractionDigits: 4 })} ${about.unit}`) }));
    const options = { width: place.clientWidth, height: 240, scales: { x: { time: false } },
      legend: { live: true, markers: { dash: (_, i) => (about.series[i - 1]?.faint ? "dotted" : "solid") } },
      axes: [{ ...axis, label: "step", labelSize: 18, incrs: whole }, { ...axis, size: 66 }], series: [{ label: "step" }, ...series] };
    const plot = new uPlot(options, [about.x, ...about.series.map((s) => s.y)], place);
    plot.root.querySelector("canvas").setAttribute("aria-hidden", "true");
    new ResizeObserver(() => place.clientWidth && plot.setSize({ width: place.clientWidth, height: 240 })).observe(place);
    drawn.push(plot);
  }
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", () => drawn.forEach((plot) => plot.redraw(false)));

  function enliven() {
    every(".command", copyable);
    every(".timeline", zoomable);
    drawn.length = 0;
    every(".chart", (place) => chart(place, JSON.parse(place.querySelector("script").textContent)));
  }
  enliven();

  const follow = Number(document.body.dataset.follow); // seconds: the page is served, and its run may go on
  let known = null;
  async function look() {
    try {
      const text = await (await fetch(location.href, { cache: "no-store" })).text();
      if (known !== null && text !== known && !document.hidden) {
        document.querySelector("main").replaceWith(new DOMParser().parseFromString(text, "text/html").querySelector("main"));
        enliven();
      }
      known = text;
    } catch { /* the server has ended: what is shown stays */ return; }
    setTimeout(look, follow * 1000);
  }
  if (follow) look();
})();
