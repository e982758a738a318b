// Keyboard shortcuts, theme and live updates. Every page works without this script.
"use strict";
(() => {
  const root = document.documentElement;
  const remembered = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;

  const toggleTheme = () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* an exported file may have no storage */ }
  };
  const keys = document.getElementById("keys");
  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.getElementById("help").addEventListener("click", () => keys.showModal());

  const stops = () => [...document.querySelectorAll("tbody tr[data-href], th[data-href], article.turn")];
  const move = (by) => {
    const all = stops();
    if (!all.length) return;
    const now = all.findIndex((one) => one.classList.contains("here"));
    const next = all[Math.min(all.length - 1, Math.max(0, now < 0 ? (by > 0 ? 0 : all.length - 1) : now + by))];
    if (now >= 0) all[now].classList.remove("here");
    next.classList.add("here");
    next.scrollIntoView({ block: next.matches("article") ? "start" : "nearest" });
  };
  const follow = (selector) => { const found = document.querySelector(selector); if (found) found.click(); };
  const go = (index) => { const found = document.querySelectorAll(".bar nav a.own")[index]; if (found) found.click(); };
  const actions = {
    j: () => move(1), k: () => move(-1),
    o: () => go(0), t: () => go(1), l: () => go(2),
    "]": () => follow("a[rel=next]"), "[": () => follow("a[rel=prev]"), u: () => follow("a.up"),
    c: () => follow("#colour"), r: () => location.reload(), d: toggleTheme, "?": () => keys.showModal(),
    "/": () => { const found = document.querySelector(".filters input, .filters select"); if (found) found.focus(); },
    Enter: () => { const here = document.querySelector(".here[data-href]"); if (here) location.href = here.dataset.href; },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
    if (event.target.closest("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
    const action = actions[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  document.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-href]");
    if (row && !event.target.closest("a") && !String(getSelection())) location.href = row.dataset.href;
  });

  // Live pages: poll the progress, and replace the content when the data changed. Nothing is replaced under the user's hands.
  const { live } = document.body.dataset;
  const fresh = document.getElementById("fresh");
  const parse = (text) => new DOMParser().parseFromString(text, "text/html");
  const busy = () => document.hidden || keys.open || String(getSelection())
    || (document.activeElement && document.activeElement.matches("main input, main select"));
  const swap = (selector, page) => {
    const [was, now] = [document.querySelector(selector), page.querySelector(selector)];
    if (!was || !now || was.outerHTML === now.outerHTML) return;
    const opened = [...was.querySelectorAll("details[id]")].map((one) => [one.id, one.open]);
    const scrolled = [...was.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    const checked = [...was.querySelectorAll("input:checked")].map((one) => one.value);
    const row = was.querySelector(".here[data-href]");
    was.replaceWith(document.adoptNode(now));
    for (const [id, open] of opened) { const found = document.getElementById(id); if (found) found.open = open; }
    now.querySelectorAll("input[type=checkbox]").forEach((one) => { one.checked = checked.includes(one.value); });
    now.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = scrolled[index] || 0; });
    const same = row && [...now.querySelectorAll("[data-href]")].find((one) => one.dataset.href === row.dataset.href);
    if (same) same.classList.add("here");
  };
  const update = async () => {
    const answer = await fetch(live);
    if (!answer.ok) throw new Error(String(answer.status));
    const stamp = answer.headers.get("X-Stamp");
    if (stamp === document.body.dataset.stamp) swap("#progress", parse(await answer.text()));
    else {
      const page = parse(await (await fetch(location.href)).text());
      for (const selector of ["main", "#status"]) swap(selector, page);
      document.body.dataset.stamp = page.body.dataset.stamp;
    }
    fresh.textContent = document.querySelector(".s-running") ? `updated ${new Date().toLocaleTimeString()}` : "";
  };
  const poll = async () => {
    try { if (!busy()) await update(); } catch { fresh.textContent = "not updated: the dashboard does not answer"; }
    setTimeout(poll, document.querySelector(".s-running") ? 2000 : 10000);
  };
  if (live) setTimeout(poll, 2000);
})();
