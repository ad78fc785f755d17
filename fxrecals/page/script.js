"use strict";
// Shows what is under the pointer, a finger or the keyboard's focus. Texts go in as text, never as HTML.
const tip = document.getElementById("tip");

function show(text, x, y) {
  if (tip.textContent !== text) tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), gap = 14;
  const left = x + gap + box.width > innerWidth - 8 ? x - gap - box.width : x + gap;
  const top = y + gap + box.height > innerHeight - 8 ? y - gap - box.height : y + gap;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, top) + "px";
}

function hide() {
  tip.hidden = true;
  for (const cursor of document.querySelectorAll(".cursor")) cursor.hidden = true;
}

function withTip(target) {
  return target instanceof Element ? target.closest("[data-tip]") : null;
}

for (const kind of ["pointermove", "pointerdown"]) {
  document.addEventListener(kind, (event) => {
    const found = withTip(event.target);
    if (found) show(found.dataset.tip, event.clientX, event.clientY);
    else if (!(event.target instanceof Element && event.target.closest(".plot"))) hide();
  });
}
document.addEventListener("focusin", (event) => {
  const found = withTip(event.target);
  if (!found) return;
  const box = found.getBoundingClientRect();
  show(found.dataset.tip, box.left + box.width / 2, box.top + box.height / 2);
});
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
document.addEventListener("scroll", hide, { passive: true });

// The chart of live bytes: `spans` has for each stretch of time the text of its run.
const memory = document.getElementById("memory");
if (memory) {
  const { texts, spans, peak } = JSON.parse(document.getElementById("memory-data").textContent);
  const plot = memory.querySelector(".plot"), cursor = memory.querySelector(".cursor");
  let now = peak;

  const at = (span, y) => {
    now = Math.min(spans.length - 1, Math.max(0, span));
    const box = plot.getBoundingClientRect(), share = (now + 0.5) / spans.length;
    cursor.style.left = 100 * share + "%";
    cursor.hidden = false;
    show(texts[spans[now]], box.left + share * box.width, y ?? box.top + box.height / 3);
  };
  for (const kind of ["pointermove", "pointerdown"]) {
    plot.addEventListener(kind, (event) => {
      const box = plot.getBoundingClientRect();
      at(Math.floor((spans.length * (event.clientX - box.left)) / box.width), event.clientY);
    });
  }
  plot.addEventListener("pointerleave", hide);
  memory.addEventListener("keydown", (event) => {
    const next = (step) => {
      let span = now + step;
      while (spans[span] !== undefined && spans[span] === spans[now]) span += step;
      return span;
    };
    const to = { ArrowLeft: () => next(-1), ArrowRight: () => next(1), Home: () => 0, End: () => spans.length - 1 }[event.key];
    if (!to) return;
    event.preventDefault();
    at(to());
  });
  memory.addEventListener("focus", () => { if (memory.matches(":focus-visible")) at(now); });
}
