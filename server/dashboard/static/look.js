/** Colours, numbers and canvases: how things look; knows none of the things. */

export const REDUCED_MOTION = matchMedia("(prefers-reduced-motion: reduce)");

/** The palette of style.css, as it is now. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["ink", "soft", "line", "panel", "mine", "on-mine", "bad", "shared", "cached", "cached-edge", "free"];
  const colours = Object.fromEntries(names.map((name) => [name, read(name)]));
  const [lightness, chroma] = [Number(read("lightness")), Number(read("chroma"))];
  // Green over blue to violet; orange is kept for the viewer's own. Golden steps and three shades keep neighbours apart.
  colours.request = (number) => {
    const [shade, hue] = [[0, -0.13, 0.1][number % 3], 145 + ((number * 0.618034) % 1) * 190];
    return `oklch(${lightness + shade} ${chroma} ${hue.toFixed(1)})`;
  };
  colours.sans = style.getPropertyValue("--sans");
  return colours;
}

/** Fits a canvas to its width in the page and the height it is to have; returns a context in CSS pixels. */
export function fit(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.style.height = `${height}px`;
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const ms = value * 1000;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  return ms < 999.5 ? `${Math.round(ms)} ms` : `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
}

export const count = (value) => value.toLocaleString("en");

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export function write(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}
