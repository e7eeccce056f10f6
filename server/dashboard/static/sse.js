/** Reads server-sent events from a fetch's answer, which unlike EventSource can carry a key; knows no event's meaning. */

/** Yields the data of each event. Only `data:` fields count here; comments and other fields are passed over. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const lines = pending.split(/\r\n|\n/);
    pending = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length) yield data.join("\n");
        data = [];
      } else if (line.startsWith("data:")) {
        data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  }
}
