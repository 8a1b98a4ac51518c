// Keeps the live part of a page up to date: asks the server for it again every few seconds, while the page is seen.
"use strict";

(() => {
  const live = document.getElementById("live");
  const pause = document.getElementById("pause");
  const trouble = document.getElementById("trouble");
  const every = Number(live?.dataset.every ?? 0) * 1000;
  if (!live || !every) return;

  const PENDING_MS = 400;
  const LONGEST_MS = 30000;
  let isPaused = false;
  let failures = 0;
  let timer = 0;
  let underWay = null;

  // Nothing moves under the hands of somebody who is reading, marking or filling in a part of it.
  const isInUse = () => {
    const active = document.activeElement;
    const selection = document.getSelection();
    const isMarked = selection && !selection.isCollapsed && live.contains(selection.anchorNode);
    return isMarked || (live.contains(active) && active.matches("input, select, textarea"));
  };

  const keyOf = (element) => (element && live.contains(element) ? element.id || element.getAttribute("href") : null);

  const find = (key) => {
    if (!key) return null;
    return [...live.querySelectorAll("a, button, summary, [tabindex]")].find(
      (one) => one.id === key || one.getAttribute("href") === key,
    );
  };

  const replace = (html) => {
    const focused = keyOf(document.activeElement);
    const opened = [...live.querySelectorAll("details[open]")].map((one) => one.id);
    const scrolled = [...live.querySelectorAll(".scroll, pre")].map((one) => [one.scrollLeft, one.scrollTop]);
    const parsed = new DOMParser().parseFromString(html, "text/html");
    live.replaceChildren(...parsed.body.childNodes);
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
    [...live.querySelectorAll(".scroll, pre")].forEach((one, place) => {
      [one.scrollLeft, one.scrollTop] = scrolled[place] ?? [0, 0];
    });
    find(focused)?.focus({ preventScroll: true });
  };

  const say = (text) => {
    if (trouble.textContent === text) return; // a screen reader would say it again
    trouble.textContent = text;
    trouble.className = text ? "banner bad" : "";
  };

  const update = async () => {
    underWay = new AbortController();
    const giveUp = setTimeout(() => underWay?.abort(), 20000);
    try {
      const answer = await fetch(location.href, {
        headers: { "X-Semel-Part": "live" },
        signal: underWay.signal,
        cache: "no-store",
        redirect: "follow",
      });
      if (answer.redirected && new URL(answer.url).pathname === "/login") {
        location.assign(answer.url);
        return;
      }
      if (!answer.headers.has("X-Semel-Part")) throw new Error("no part of a page");
      const html = await answer.text();
      failures = 0;
      say("");
      if (!isPaused && !isInUse()) replace(html);
    } catch {
      failures += 1;
      if (failures > 1) say("semel ui does not answer. What is below is old; it goes on by itself.");
    } finally {
      clearTimeout(giveUp);
      underWay = null;
      plan();
    }
  };

  const plan = () => {
    clearTimeout(timer);
    if (isPaused || document.hidden || underWay) return;
    const isPending = live.querySelector("[data-pending]") !== null;
    const wait = failures ? Math.min(every * 2 ** (failures - 1), LONGEST_MS) : isPending ? PENDING_MS : every;
    timer = setTimeout(update, wait);
  };

  pause.hidden = false;
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    pause.textContent = isPaused ? "Updates are paused" : "Pause updates";
    plan();
  });
  document.addEventListener("visibilitychange", plan);
  plan();
})();
