/** Draws the page pool as a grid, a cell a page (or several, where there are many), and tells of one cell. */

import { count, fit, plural } from "./look.js";

const FREE = 0;
const CACHED = 1;
const SHARED = 2;
const FIRST_OWNER = 3;
const [SMALLEST, LARGEST] = [5, 26]; // a cell's side, its gap included
const TALLEST = 260;

export class Pool {
  constructor(canvas, readout) {
    this.canvas = canvas;
    this.readout = readout;
    this.codes = new Uint16Array();
    this.cursor = null;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.moveTo(null));
    canvas.addEventListener("blur", () => this.moveTo(null));
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  /** `lit`: the numbers of requests to show brightly; `picked`: the one that all others step back for, or null. */
  draw(picture, colours, lit, picked) {
    this.picture = picture;
    const bytes = Uint8Array.from(atob(picture.pages.cells), (char) => char.charCodeAt(0));
    this.codes = new Uint16Array(bytes.buffer);
    const width = this.canvas.clientWidth;
    this.columns = Math.max(1, Math.floor(width / cellSide(this.codes.length, width)));
    this.side = (width + 2) / this.columns; // the last one's gap lies outside
    const rows = Math.ceil(this.codes.length / this.columns);
    const context = fit(this.canvas, Math.ceil(rows * this.side));
    const gap = this.side >= 10 ? 2 : 1;
    const [inner, radius] = [Math.floor(this.side) - gap, this.side >= 10 ? 3 : 1];
    const mine = cellsOf(picture, this.codes, (request) => lit.has(request.number));
    const shown = picked === null ? null : cellsOf(picture, this.codes, (request) => request.number === picked);
    this.codes.forEach((code, cell) => {
      const x = Math.round((cell % this.columns) * this.side);
      const y = Math.round(Math.floor(cell / this.columns) * this.side);
      context.globalAlpha = shown && !shown.has(cell) ? 0.25 : 1;
      if (mine.has(cell)) {
        context.fillStyle = colours.mine;
        box(context, x, y, inner, radius);
        if (code === SHARED) dot(context, x, y, inner, inner / 5, colours["on-mine"]);
      } else if (code === FREE) {
        dot(context, x, y, inner, 1.5, colours["cached-edge"]);
      } else if (code === CACHED) {
        context.fillStyle = colours.cached;
        box(context, x, y, inner, radius);
        context.strokeStyle = colours["cached-edge"];
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
      } else if (code === SHARED) {
        dot(context, x, y, inner, inner / 2, colours.shared);
      } else {
        context.fillStyle = colours.request(picture.running[code - FIRST_OWNER].number);
        box(context, x, y, inner, radius);
      }
      if (cell === this.cursor) {
        context.globalAlpha = 1;
        context.strokeStyle = colours.ink;
        context.lineWidth = 2;
        context.strokeRect(x, y, inner, inner);
      }
    });
    context.globalAlpha = 1;
    if (this.cursor !== null) this.tell();
  }

  point(event) {
    const column = Math.floor(event.offsetX / this.side);
    const cell = column + Math.floor(event.offsetY / this.side) * this.columns;
    this.moveTo(column < this.columns && cell < this.codes.length ? cell : null);
  }

  press(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (step === undefined || !this.codes.length) return;
    event.preventDefault();
    const next = this.cursor === null ? 0 : this.cursor + step;
    this.moveTo(Math.max(0, Math.min(this.codes.length - 1, next)));
  }

  moveTo(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    if (cell === null) this.readout.textContent = "Point at a page, tap it, or use the arrow keys.";
    this.canvas.dispatchEvent(new Event("change"));
  }

  tell() {
    const { per_cell: perCell, total } = this.picture.pages;
    const first = this.cursor * perCell + 1;
    const last = Math.min(first + perCell - 1, total);
    const name = perCell === 1 ? `Page ${count(first)}` : `Pages ${count(first)} to ${count(last)}, the busiest`;
    const text = `${name}: ${this.describe(this.codes[this.cursor])}`;
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }

  describe(code) {
    if (code === FREE) return "free";
    if (code === CACHED) return "cached, held by nobody";
    if (code >= FIRST_OWNER) return `request #${this.picture.running[code - FIRST_OWNER].number}`;
    const holders = this.picture.running.filter((request) => inRanges(request.cells, this.cursor));
    if (!holders.length) return "shared";
    return `shared by ${holders.map((request) => `#${request.number}`).join(", ")}`;
  }
}

/** For screen readers: what the grid shows, in words. */
export function poolInWords(stats) {
  return (
    `Page pool: of ${plural(stats.pages_total, "page")} ${count(stats.pages_active)} are held by requests, ` +
    `${count(stats.pages_shared)} of them by several; ${count(stats.pages_cached)} are cached, ${count(stats.pages_free)} free.`
  );
}

/** The largest side with which all cells fit the height. */
function cellSide(cells, width) {
  for (let side = LARGEST; side > SMALLEST; side -= 1) {
    if (Math.ceil(cells / Math.max(1, Math.floor(width / side))) * side <= TALLEST) return side;
  }
  return SMALLEST;
}

function cellsOf(picture, codes, isWanted) {
  const cells = new Set();
  picture.running.forEach((request, index) => {
    if (!isWanted(request)) return;
    if (request.cells) {
      for (let i = 0; i < request.cells.length; i += 2) {
        for (let k = 0; k < request.cells[i + 1]; k += 1) cells.add(request.cells[i] + k);
      }
    } else {
      codes.forEach((code, cell) => code === FIRST_OWNER + index && cells.add(cell));
    }
  });
  return cells;
}

function inRanges(ranges, cell) {
  for (let i = 0; ranges && i < ranges.length; i += 2) {
    if (cell >= ranges[i] && cell < ranges[i] + ranges[i + 1]) return true;
  }
  return false;
}

function box(context, x, y, side, radius) {
  context.beginPath();
  context.roundRect(x, y, side, side, radius);
  context.fill();
}

function dot(context, x, y, side, radius, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x + side / 2, y + side / 2, radius, 0, 2 * Math.PI);
  context.fill();
}
