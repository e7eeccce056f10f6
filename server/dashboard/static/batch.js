/** Draws the running batch as swim lanes: a lane a slot, a column a step, the newest on the right. */

import { count, fit, plural } from "./look.js";

const [DECODE, PREFILL, PREEMPTED] = [0, 1, 2];
export const MAX_LANES = 32;
const [MAX_STEPS, NARROWEST] = [120, 6]; // steps, and the pixels of one
const MARGIN = 24; // for the lanes' numbers
const AXIS = 18;

export function drawBatch(canvas, picture, colours, lit, picked) {
  const lanes = Math.min(picture.max_num_seqs, MAX_LANES);
  const height = lanes <= 10 ? 20 : lanes <= 20 ? 14 : 10;
  const context = fit(canvas, lanes * height + AXIS);
  const width = canvas.clientWidth;
  const columns = Math.min(MAX_STEPS, Math.floor((width - MARGIN) / NARROWEST));
  const step = (width - MARGIN) / columns;
  const end = picture.steps.first + picture.steps.count;
  const oldest = Math.max(picture.steps.first, end - columns);
  const left = (index) => MARGIN + (columns - end + index) * step;
  context.font = `11px ${colours.sans}`;
  context.textBaseline = "middle";
  for (let lane = 0; lane < lanes; lane += 1) {
    const y = lane * height + height / 2;
    context.fillStyle = colours.line;
    context.fillRect(MARGIN, Math.round(y), width - MARGIN, 1);
    if (height >= 14 || lane % 4 === 0) {
      context.fillStyle = colours.soft;
      context.textAlign = "right";
      context.fillText(String(lane), MARGIN - 8, y);
    }
  }
  context.textAlign = "left";
  for (const [lane, number, kind, start, length] of picture.steps.spans) {
    if (start + length <= oldest) continue;
    const isMine = lit.has(number);
    const x = left(Math.max(start, oldest));
    const [y, w] = [lane * height, left(start + length) - x];
    context.globalAlpha = picked !== null && picked !== number ? 0.25 : 1;
    context.fillStyle = isMine ? colours.mine : colours.request(number);
    if (kind === DECODE) {
      context.fillRect(x, y + height / 2 - 2, w, 4);
      label(context, `#${number}`, x, y + height / 2, w, height, isMine ? colours.mine : colours.soft, colours.panel);
    } else if (kind === PREFILL) {
      context.fillRect(x, y + 1, w - 1, height - 2);
    } else if (kind === PREEMPTED) {
      context.strokeStyle = colours.bad;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 2, w - 3, height - 4);
    }
  }
  context.globalAlpha = 1;
  context.fillStyle = colours.soft;
  const axis = lanes * height + AXIS / 2 + 2;
  if (end > oldest) {
    context.fillText(`step ${count(oldest)}`, Math.min(left(oldest), width - 170), axis);
    context.textAlign = "right";
    context.fillText(count(end - 1), width, axis);
  }
}

/** A request's number beside its line, where there is room for it. */
function label(context, text, x, y, room, height, colour, ground) {
  if (height < 14 || room < context.measureText(text).width + 6) return;
  const width = context.measureText(text).width + 6;
  context.fillStyle = ground;
  context.fillRect(x, y - 6, width, 12);
  context.fillStyle = colour;
  context.fillText(text, x + 3, y + 0.5);
}

/** For screen readers, and for those who would rather read. */
export function batchInWords(picture) {
  const last = picture.steps.first + picture.steps.count - 1;
  const now = picture.steps.spans.filter(([, , , start, length]) => start + length - 1 === last);
  const of = (kind) => now.filter((span) => span[2] === kind);
  const prompt = of(PREFILL).reduce((sum, span) => sum + span[5], 0);
  return (
    `Running batch, the last step: ${plural(of(DECODE).length, "request")} decoding, ` +
    `${plural(prompt, "prompt token")} of ${plural(of(PREFILL).length, "request")}, ${count(of(PREEMPTED).length)} preempted.`
  );
}
