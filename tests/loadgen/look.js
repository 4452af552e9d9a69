// Measures the layout of a page at several widths, each in an iframe of that width.
//
// A view is {width, print}. If `print` is set, print style rules apply and the dark colour scheme
// does not.

async function look(page, views) {
  const seen = [];
  for (const view of views) seen.push(await lookAt(page, view));
  return JSON.stringify(seen);
}

function lookAt(page, view) {
  return new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${view.width}px; height: 900px; border: 0`;
    frame.srcdoc = page;
    frame.onload = () => {
      if (view.print) asOnPaper(frame.contentDocument);
      for (const folded of frame.contentDocument.querySelectorAll("details")) folded.open = true;
      frame.contentWindow.getComputedStyle(frame.contentDocument.body).width;
      done(laidOut(frame.contentDocument, view));
      frame.remove();
    };
    document.body.appendChild(frame);
  });
}

function asOnPaper(page) {
  for (const rule of Array.from(page.styleSheets[0].cssRules)) {
    if (!(rule instanceof page.defaultView.CSSMediaRule)) continue;
    const media = rule.media.mediaText;
    if (media.includes("print")) rule.media.mediaText = "all";
    if (media.includes("color-scheme")) rule.media.mediaText = "not all";
  }
}

function laidOut(page, view) {
  const drawings = Array.from(page.querySelectorAll("svg[role]")).filter((one) => one.clientWidth);
  const texts = drawings.map((one) => Array.from(one.querySelectorAll("text")));
  return {
    ...view,
    wide: page.documentElement.scrollWidth,
    drawings: drawings.length,
    texts: texts.flat().length,
    overlapping: texts.flatMap(overlapping),
    outside: drawings.flatMap((one, number) => outside(one.closest(".card"), texts[number])),
    smallest: Math.min(...texts.flat().map((text) => text.getBoundingClientRect().height)),
    scripts: page.querySelectorAll("script, iframe, object, embed").length,
    images: page.querySelectorAll("img").length,
  };
}

function overlapping(texts) {
  const found = [];
  const boxes = texts.map((text) => text.getBoundingClientRect());
  for (let i = 0; i < boxes.length; i++) {
    for (let j = 0; j < i; j++) {
      const across = Math.min(boxes[i].right, boxes[j].right) - Math.max(boxes[i].left, boxes[j].left);
      const down = Math.min(boxes[i].bottom, boxes[j].bottom) - Math.max(boxes[i].top, boxes[j].top);
      if (across > 0.5 && down > 0.5) found.push(`${texts[i].textContent} / ${texts[j].textContent}`);
    }
  }
  return found;
}

function outside(card, texts) {
  const within = card.getBoundingClientRect();
  const is = (box) => box.left < within.left || box.right > within.right || box.bottom > within.bottom;
  return texts.filter((text) => is(text.getBoundingClientRect())).map((text) => text.textContent);
}
