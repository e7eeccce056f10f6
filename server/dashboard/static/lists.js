/** Writes the requests and the prefix tree as HTML, changing only what changed, so that focus stays where it is. */

import { count, plural } from "./look.js";

const DEEPEST = 8; // levels of indentation; a tree may have more

export class Requests {
  /** `onPick(number or null)` is called when a request is picked, or let go. */
  constructor(body, onPick) {
    this.body = body;
    this.onPick = onPick;
    this.rows = new Map();
    this.picked = null;
  }

  draw(picture, colours, lit) {
    const all = [...picture.running, ...picture.waiting];
    const present = new Set(all.map((request) => request.number));
    for (const [number, row] of this.rows) {
      if (present.has(number)) continue;
      row.element.remove();
      this.rows.delete(number);
      if (this.picked === number) this.pick(null);
    }
    all.forEach((request, index) => {
      const row = this.row(request.number);
      const isMine = lit.has(request.number);
      row.swatch.style.background = isMine ? colours.mine : colours.request(request.number);
      row.element.classList.toggle("mine", isMine);
      row.button.setAttribute("aria-pressed", String(this.picked === request.number));
      row.write([doing(request), `${count(request.tokens)} / ${count(request.limit)}`, count(request.pages), count(request.cached)]);
      if (this.body.children[index] !== row.element) this.body.insertBefore(row.element, this.body.children[index] ?? null);
    });
  }

  pick(number) {
    this.picked = number;
    this.onPick(number);
  }

  row(number) {
    if (!this.rows.has(number)) this.rows.set(number, this.make(number));
    return this.rows.get(number);
  }

  make(number) {
    const element = document.createElement("tr");
    const swatch = document.createElement("i");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "pick";
    button.title = "Light up its pages and its lane";
    button.append(swatch, `#${number}`);
    button.addEventListener("click", () => this.pick(this.picked === number ? null : number));
    const cells = ["", "number", "number", "number"].map((name) => Object.assign(document.createElement("td"), { className: name }));
    const head = document.createElement("td");
    head.append(button);
    element.append(head, ...cells);
    const write = (texts) => texts.forEach((text, i) => cells[i].textContent !== text && (cells[i].textContent = text));
    return { element, swatch, button, write };
  }
}

function doing(request) {
  const again = request.preemptions ? `, preempted ${request.preemptions === 1 ? "once" : `${request.preemptions} times`}` : "";
  if (request.slot === null) return `waiting${again}`;
  const part = `prefill, ${count(request.computed)} of ${count(request.tokens)}`;
  return (request.prefilling ? part : "decode") + again;
}

/** Lines are `[depth, pages, holders, hidden branches, private, in host memory]`. */
export function drawTree(list, picture) {
  while (list.children.length > picture.tree.length) list.lastChild.remove();
  picture.tree.forEach(([depth, pages, holders, hidden, isPrivate, isOnHost], index) => {
    const line = list.children[index] ?? list.appendChild(treeLine());
    const [bar, text, small] = line.children;
    line.className = holders > 1 ? "shared" : holders === 1 ? "held" : isOnHost ? "host" : "";
    line.style.paddingLeft = `${Math.min(depth, DEEPEST) * 18}px`;
    line.setAttribute("aria-level", String(depth + 1));
    bar.style.width = `${Math.round(12 + 14 * Math.log2(pages))}px`;
    text.textContent = `${plural(pages * picture.page_size, "token")}`;
    const used = holders ? `held by ${count(holders)}` : isOnHost ? "in host memory" : "cached";
    small.textContent = [plural(pages, "page"), used, isPrivate && "private", hidden && `${count(hidden)} more below`]
      .filter(Boolean)
      .join(", ");
  });
}

function treeLine() {
  const line = document.createElement("li");
  const bar = document.createElement("i");
  bar.className = "bar";
  line.append(bar, document.createElement("span"), document.createElement("small"));
  return line;
}
